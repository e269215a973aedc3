"""Text that is told while it grows: nothing is taken back, nothing is lost, and it stops where it should."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from colocate.serving.answers import Answer
from colocate.serving.calls import chat_call, completion_call
from colocate.serving.choice import Choice
from colocate.serving.driver import Drawn
from colocate.serving.fields import Fields
from colocate.serving.handlers import DrawRequest
from colocate.serving.text_stream import TextStream
from colocate.serving.texts import Texts
from colocate.types import Prompt, SamplingParams
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
@given(st.lists(st.integers(0, 255), max_size=12) | st.lists(st.integers(180, 255), max_size=120))
def test_bytes_that_are_no_text_are_told_at_last_as_decoding_all_at_once_would(ids):
    tokenizer = byte_level()
    stream = TextStream(tokenizer)
    parts = told(stream, ids)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=True)


def test_bytes_that_never_make_a_character_are_told_before_the_end():
    """Decoding all of them again with each further one would take longer and longer."""
    tokenizer = byte_level()
    (half, _) = tokenizer("é")["input_ids"]
    stream = TextStream(tokenizer)
    parts = [stream.feed(half) for _ in range(500)]
    assert len("".join(parts)) > 450 and set("".join(parts)) == {"\ufffd"}
    assert len("".join([*parts, stream.end()])) == 500


@settings(max_examples=50)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=12), st.data())
def test_each_token_is_told_with_its_bytes_and_its_place_in_the_text(text, data):
    """Several tokens may make one character: their bytes together are its, and it begins with the first."""
    tokenizer = byte_level()
    texts, ids = Texts(tokenizer, ()), tokenizer(text)["input_ids"]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    body: dict[str, Any] = {"model": "m", "prompt": "a", "logprobs": 0}
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "logprobs": True}
    call = completion_call(Fields(body))
    request = DrawRequest(Prompt((1,), 0, range(1)), SamplingParams(max_tokens=99))
    choice, chunks = Choice(0, call, request, texts), []
    answer = Answer(call, "m", texts)
    for start, end in itertools.pairwise([0, *cuts, len(ids)]):
        reason = "length" if end == len(ids) and not choice.is_over else None
        drawn = Drawn(0, tuple(ids[start:end]), (0.0,) * (end - start), reason)
        chunks += answer.told(choice, choice.take(drawn))
    whole = answer.whole([choice])["choices"][0]["logprobs"]
    told = [
        at
        for chunk in chunks
        for at in (chunk["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    before = [len(tokenizer.decode(ids[:n]).rstrip("\ufffd")) for n in range(len(ids))]
    assert whole["text_offset"] == told == before
    content = Answer(chat_call(Fields(chat)), "m", texts)._logprobs(ids, [0.0] * len(ids), before)["content"]
    assert bytes(b for token in content for b in token["bytes"]).decode() == text


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
