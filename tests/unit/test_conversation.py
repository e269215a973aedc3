"""Conversations through open engines, against transformers' `generate` on the whole conversation."""

from __future__ import annotations

import pytest
import torch
from tokenizers.models import WordLevel
from transformers import GenerationConfig

from colocate.engines.native.engine import NativeEngine
from colocate.engines.transformers_engine import TransformersEngine
from colocate.episodes.renderer import Renderer
from colocate.inference.conversation import Conversation
from colocate.types import SamplingParams
from tiny import EOS, PAD, make_model, make_tokenizer

IM_END = 4
ENGINES = {"native": NativeEngine, "transformers": lambda model: TransformersEngine(model, pad_token_id=PAD)}


def make_conversation(model, engine="native", *, temperature=0.0, max_tokens=24, **options):
    tokenizer = make_tokenizer()
    made = ENGINES[engine](model)
    made.wake_up()
    renderer = Renderer(tokenizer, stop_token_ids=(EOS, IM_END)) if options.pop("has_turns", True) else None
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, stop_token_ids=(EOS, IM_END), seed=5
    )
    return Conversation(
        made, tokenizer, renderer, sampling, **{"context_length": 512, "tokens_per_piece": 5, **options}
    )


def generated(model, token_ids: list[int], max_tokens: int = 24) -> str:
    config = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=[EOS, IM_END], pad_token_id=PAD
    )
    ids = torch.tensor([token_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return make_tokenizer().decode(output[0, len(token_ids) :], skip_special_tokens=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_answers_are_those_of_generate_over_several_turns(engine, seed):
    model = make_model("qwen3", seed=seed)
    conversation = make_conversation(model, engine, system_prompt="be brief")
    for text in ("1 + 2 =", "and 3 + 4 =", "thanks."):
        pieces = list(conversation.ask(text))
        rendered = make_tokenizer().apply_chat_template(
            conversation.messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        assert "".join(pieces) == generated(model, rendered["input_ids"])
        assert len(pieces) >= len("".join(pieces)) // 5, "the answer comes in pieces"
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 3]


def test_what_was_said_is_computed_once(monkeypatch):
    """The second answer's prompt is the few tokens between the turns, and not the conversation."""
    model = make_model("qwen3")
    conversation = make_conversation(model, tokens_per_piece=24)
    "".join(conversation.ask("a long question, of forty characters or so"))
    prefilled: list[int] = []
    runner = type(conversation._engine._decoder.runner)
    prefill = runner.prefill

    def counting(self, requests, *args, **kwargs):
        prefilled.extend(len(request.token_ids) - request.num_cached for request in requests)
        return prefill(self, requests, *args, **kwargs)

    monkeypatch.setattr(runner, "prefill", counting)
    "".join(conversation.ask("ok"))
    bridge = len(
        "<|im_end|>\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n".replace("<|im_end|>", "E")
    )
    assert prefilled and sum(prefilled) <= bridge


def test_an_answer_that_is_stopped_stays_and_the_conversation_goes_on():
    model = make_model("qwen3")
    conversation = make_conversation(model)
    pieces = conversation.ask("1 + 2 =")
    said = next(pieces)
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    assert not conversation._engine.is_busy
    answer = "".join(conversation.ask("go on"))
    rendered = make_tokenizer().apply_chat_template(
        conversation.messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert answer == generated(model, rendered["input_ids"])


def test_an_error_in_the_middle_of_a_piece_leaves_nothing_behind(monkeypatch):
    conversation = make_conversation(make_model("qwen3"))
    expected = "".join(conversation.ask("1 + 2 ="))
    conversation.clear()
    polls = iter([KeyboardInterrupt()])
    real = conversation._engine.poll

    def poll():
        for error in polls:
            raise error
        return real()

    monkeypatch.setattr(conversation._engine, "poll", poll)
    with pytest.raises(KeyboardInterrupt):
        list(conversation.ask("1 + 2 ="))
    assert conversation.messages == [] and not conversation._engine.is_busy
    assert "".join(conversation.ask("1 + 2 =")) == expected


def test_a_model_without_a_template_continues_each_text_by_itself():
    model = make_model("qwen3")
    conversation = make_conversation(model, has_turns=False)
    for text in ("1 + 2 =", "3 + 4 ="):
        assert "".join(conversation.ask(text)) == generated(model, make_tokenizer()(text)["input_ids"])
    assert conversation.messages == []
    with pytest.raises(ValueError, match="messages need a chat template"):
        make_conversation(model, has_turns=False, system_prompt="be brief")


def test_a_conversation_that_fills_the_context_says_so_and_begins_anew():
    conversation = make_conversation(make_model("qwen3"), context_length=90, max_tokens=30)
    "".join(conversation.ask("1 + 2 ="))
    with pytest.raises(ValueError, match=r"tokens and the context 90.*begins anew"):
        for _ in range(4):
            "".join(conversation.ask("3 + 4 = and so on"))
    assert conversation.messages == []
    assert "".join(conversation.ask("1 + 2 ="))


def test_drawn_answers_differ_from_turn_to_turn_and_not_from_run_to_run():
    model = make_model("qwen3")
    first, again = (make_conversation(model, temperature=1.0) for _ in range(2))
    texts = [["".join(c.ask("1 + 2 =")) for _ in range(3)] for c in (first, again)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3


def test_text_that_is_no_tokens_is_refused_and_the_next_is_answered():
    """As with the quickstart's tokenizer, which has digits and signs alone, and no unknown token."""
    conversation = make_conversation(make_model("qwen3"), has_turns=False)
    backend = conversation._tokenizer.backend_tokenizer
    backend.model = WordLevel(backend.get_vocab(), unk_token="<none>")
    expected = list(conversation.ask("ab"))
    with pytest.raises(ValueError, match="The text 'à la' has characters that are no tokens of this model's"):
        list(conversation.ask("à la"))
    assert list(conversation.ask("ab")) == expected != []
