"""Response templates that tokenizers carry: TRL's, its own reading as the reference, and broken ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.chat_template_utils import add_response_schema, parse_response

from chat_templates import OWN, TOOL, WITH_TOOLS, make_call, make_tokenizer, renderer_of, sampled
from colocate.episodes.renderer import Renderer

ASKED = {"role": "user", "content": "u"}
CARRIERS: dict[str, Renderer] = {}


def carrier(name: str) -> Renderer:
    """The renderer of a tokenizer that carries TRL's response template."""
    if name not in CARRIERS:
        tokenizer = add_response_schema(make_tokenizer(name))
        CARRIERS[name] = Renderer(tokenizer, None, renderer_of(name).stop_token_ids)
    return CARRIERS[name]


words = st.text(st.sampled_from("ab 12.é漢{}"), min_size=1, max_size=12).map(lambda text: "w" + text + "w")
messages = st.builds(lambda a, b: make_call({"a": a, "b": b}), st.integers(-9, 99), words)
messages |= words.map(lambda text: {"role": "assistant", "content": text})


# Nemotron's generation prompt opens a reasoning, and its history has `<think></think>` instead.
@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name not in ("nemotron_3_nano", *OWN)])
@settings(max_examples=20)
@given(message=messages, cut=st.integers(0, 30))
def test_a_template_reads_what_trl_reads(name, message, cut):
    renderer = carrier(name)
    given_ids = renderer.render([ASKED], [TOOL])
    ids = sampled(renderer, message)
    assert renderer.parse(ids, given_ids, [TOOL]) == message
    part = ids[: max(1, len(ids) - cut)]  # TRL's cannot read an empty turn
    found = renderer.parse(part, given_ids, [TOOL])
    expected = parse_response(renderer._tokenizer, part, given_ids, [TOOL])
    assert found.get("tool_calls") == expected.get("tool_calls")
    if "tool_calls" not in message:  # from the text of a broken call TRL drops the special tokens
        assert found["content"] == expected["content"]


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name not in OWN])
def test_calls_of_the_chat_template_must_be_read(name):
    renderer = carrier(name)
    renderer.check_tools()
    other = carrier("gptoss" if name.startswith("llama") else "llama3_1")._tokenizer.response_template
    tokenizer = make_tokenizer(name)
    tokenizer.response_template = other
    with pytest.raises(ValueError, match=r"`response_template` of .* does not read the calls"):
        Renderer(tokenizer, None, renderer.stop_token_ids).check_tools()


def test_a_response_template_that_is_none_is_refused_and_says_why():
    tokenizer = add_response_schema(make_tokenizer("qwen3"))
    template = tokenizer.response_template
    fields = {
        **template["fields"],
        "tool_calls": {"open": "<tool_call>", "close_pattern": "(", "content": "json"},
    }
    for broken, why in (
        ({"no": "template"}, "Unknown keys"),
        ({**template, "fields": fields}, "regex: missing"),
    ):
        tokenizer.response_template = broken
        renderer = Renderer(tokenizer, None, [tokenizer.eos_token_id])
        assert renderer.parse(renderer._ids("<tool_call>")) == {"role": "assistant", "content": "<tool_call>"}
        with pytest.raises(ValueError, match=rf"does not read the calls of tools .*{why}.*Set one that does"):
            renderer.check_tools()


@pytest.mark.parametrize(
    "read",
    [
        None,
        [],
        {"content": ["a"]},
        {"content": "a", "tool_calls": "f"},
        {"content": "a", "tool_calls": [None]},
        {"content": "a", "tool_calls": [{"function": {"name": 3}}]},
        {"content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]},
        KeyError("transform"),
        RecursionError("deep"),
    ],
    ids=repr,
)
def test_what_cannot_be_read_is_content(monkeypatch, read):
    def parse(*_: Any, **__: Any) -> Any:
        if isinstance(read, Exception):
            raise read
        return read

    renderer = carrier("qwen3")
    monkeypatch.setattr(renderer._tokenizer, "parse_response", parse)
    ids = [*renderer._ids("<tool_call>x"), renderer.stop_token_ids[0]]
    assert renderer.parse(ids) == {"role": "assistant", "content": "<tool_call>x"}


def test_names_of_other_templates_become_those_of_messages(monkeypatch):
    renderer = carrier("qwen3")
    read = {"thinking": "why", "tool_calls": [{"name": "f", "arguments": None, "id": "number001"}]}
    monkeypatch.setattr(renderer._tokenizer, "parse_response", lambda *_, **__: read)
    call = {"type": "function", "id": "number001", "function": {"name": "f", "arguments": {}}}
    expected = {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [call]}
    assert renderer.parse([1, 2]) == expected


def test_a_prompt_that_opens_the_reasoning_is_seen():
    renderer = carrier("qwen3_5_think")
    given_ids = renderer.render([ASKED])
    assert renderer._tokenizer.decode(given_ids).endswith("<think>\n")
    message = renderer.parse(renderer._ids("why</think>\n\na<|im_end|>"), given_ids)
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "why"}


def test_a_template_that_calls_can_be_read_with_is_enough():
    """A syntax that nobody knows, rendered by a chat template and declared by a response template."""
    tokenizer = make_tokenizer("qwen2_5")
    for old, new in (("<tool_call>", "<do>"), ("</tool_call>", "</do>")):
        tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    stops = [tokenizer.eos_token_id]
    with pytest.raises(ValueError, match=r"cannot be read.*response_template"):
        Renderer(tokenizer, None, stops).check_tools()
    template = add_response_schema(make_tokenizer("qwen2_5")).response_template
    calls = {**template["fields"]["tool_calls"], "open": "<do>", "close_pattern": r"</do>\s*"}
    tokenizer.response_template = {**template, "fields": {**template["fields"], "tool_calls": calls}}
    renderer = Renderer(tokenizer, None, stops)
    renderer.check_tools()
    message = make_call({"a": 1, "b": "w"})
    assert renderer.parse(sampled(renderer, message)) == message
