"""Text that is told while it grows: nothing is taken back, nothing is lost, and it stops where it should."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from colocate.serving.text_stream import TextStream
from tool_chat import make_chat_tokenizer

CHARACTERS = make_chat_tokenizer()
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Tokens of bytes, so that a character may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<eos>"]
    )
    tokenizer.train_from_iterator(["abab <a <b ababa"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def told(stream: TextStream, ids: list[int]) -> list[str]:
    """What each token tells, until the text stops, and what the end does."""
    parts = []
    for token_id in ids:
        parts.append(stream.feed(token_id))
        if stream.is_stopped:
            break
    return [*parts, stream.end()]


@settings(max_examples=150)
@given(st.text(st.characters(codec="utf-8"), max_size=20), STOPS)
def test_pieces_are_the_text_before_the_stop_that_is_complete_first(text, stops):
    tokenizer = byte_level()
    ids = tokenizer(text)["input_ids"]
    whole = tokenizer.decode(ids)
    ends = [(at + len(stop), at) for stop in stops if (at := whole.find(stop)) >= 0]
    first = min(ends)[1] if ends else None
    stream = TextStream(tokenizer, stops)
    assert "".join(told(stream, ids)) == whole[:first]
    assert stream.is_stopped == (first is not None)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 255), max_size=12))
def test_bytes_that_are_no_text_are_told_at_last_as_decoding_all_at_once_would(ids):
    tokenizer = byte_level()
    stream = TextStream(tokenizer)
    parts = told(stream, ids)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=100)
@given(st.text("ab<", max_size=30), st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop(text, stops):
    stream, seen = TextStream(CHARACTERS, stops), ""
    for number, token_id in enumerate(CHARACTERS(text)["input_ids"]):
        seen += stream.feed(token_id)
        if stream.is_stopped:
            return
        held = text[len(seen) : number + 1]
        assert seen + held == text[: number + 1]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_special_tokens_are_left_out_or_shown():
    ids = CHARACTERS("<tool_call>hi</tool_call>")["input_ids"]
    assert "".join(told(TextStream(CHARACTERS), ids)) == "hi"
    whole = TextStream(CHARACTERS, skip_special_tokens=False)
    assert "".join(told(whole, ids)) == "<tool_call>hi</tool_call>"
