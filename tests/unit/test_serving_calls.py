"""Bodies of requests: whatever is in them, they are read or refused by the name of the field."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.config.grpo_config import GRPOConfig
from colocate.engines.requests import check_requests
from colocate.serving.calls import chat_call, completion_call, parsed
from colocate.serving.refusal import Refusal
from colocate.types import SamplingParams
from serving_case import TOOL

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def read(content: dict[str, Any], is_chat: bool) -> Any:
    return (chat_call if is_chat else completion_call)(parsed(json.dumps(content).encode()))


def refusal(content: dict[str, Any], is_chat: bool = True) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(content, is_chat)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0.5), ("presence_penalty", -1), ("logit_bias", {"7": 1}), ("top_logprobs", 3),
        ("response_format", {"type": "json_object"}), ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}), ("parallel_tool_calls", False),
        ("functions", []), ("modalities", ["audio"]), ("a_new_one", 1), ("store", True),
        ("temperature", 2.5), ("temperature", "1"), ("temperature", True), ("top_p", 0), ("top_p", 1.1),
        ("temperature", 10**400),
        ("seed", 1.5), ("seed", 2**64), ("n", 0), ("n", 129), ("max_tokens", 0), ("max_tokens", "5"),
        ("max_completion_tokens", -1), ("stop", ["a"] * 17), ("stop", [""]), ("stop", 5), ("stop", "x" * 300),
        ("stream", 1), ("logprobs", 1), ("stream_options", {"include_usage": True}), ("model", 7),
        ("messages", []), ("messages", "hi"), ("tools", {}), ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "function", "function": {"name": "f", "strict": True}}]),
    ],
)  # fmt: skip
def test_what_the_service_cannot_do_is_refused_by_name(field, value):
    refused = refusal({**CHAT, field: value})
    assert refused.status == 400
    assert (refused.param or "").startswith(field) and field in str(refused)
    assert set(refused.content["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
        ({"role": "user", "content": "x", "audio": {"id": "y"}}, "messages[0].audio"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
         "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
         "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": 0}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "\ud800", "arguments": "{}"}}]},
         "messages[0].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]},
         "messages.tool_calls.function.arguments.a"),
        ("hi", "messages[0]"),
    ],
)  # fmt: skip
def test_messages_that_cannot_be_read_are_refused_with_their_place(message, param):
    assert refusal({**CHAT, "messages": [message]}).param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", []), ("prompt", ""), ("prompt", [[1], []]), ("prompt", [1, "a"]), ("prompt", [1.0]),
     ("prompt", 5), ("prompt", ["a"] * 129), ("logprobs", 2), ("logprobs", True), ("echo", True),
     ("suffix", "x"), ("best_of", 2), ("prompt", [True])],
)  # fmt: skip
def test_completions_that_cannot_be_had_are_refused_by_name(field, value):
    assert refusal({**TEXT, field: value}, is_chat=False).param == field


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'{"a": NaN}', b'{"a": 1e9999', b"[" * 100_000])
def test_bodies_that_are_no_object_are_refused(body):
    with pytest.raises(Refusal, match="The body is no JSON"):
        parsed(body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"n": 1, "n": 2}', "n"),
        (b'{"messages": [{"role": "user", "role": "user"}]}', "role"),
        (b'{"\\ud800": 1}', "A field's name"),
        (b'{"metadata": {"\\ud800": 1}}', "metadata"),
        (b'{"user": "\\ud800"}', "user"),
        (b'{"metadata": ' + b"[" * 500 + b"]" * 500 + b"}", f"metadata{'[0]' * 200}"[:80]),
    ],
)
def test_what_no_field_may_have_is_refused_by_name(body, param):
    with pytest.raises(Refusal) as caught:
        parsed(body)
    assert caught.value.param == param
    json.dumps(caught.value.content, ensure_ascii=False).encode()  # the answer can be written


def many(num: int, last: str = "") -> bytes:
    return ("{" + ",".join(f'"{number:x}":0' for number in range(num)) + last + "}").encode()


NAME = "n" * 2**20
SLOW = {
    "a key twice among many": (many(60_000, ',"zz":1,"zz":2'), many(60_000, ',"zz":1,"zy":2')),
    "a long name above many texts": (
        json.dumps({NAME: ["a"] * 20_000}).encode(), json.dumps({NAME: 0, "m": ["a"] * 20_000}).encode(),
    ),
}  # fmt: skip
"""Bodies made to be slow, and ones of their size that are not."""


@pytest.mark.parametrize("kind", SLOW)
def test_a_body_made_to_be_slow_takes_about_as_long_as_another(kind):
    """In seconds of this thread alone: whatever else the machine does, a square is no constant."""

    def seconds(body: bytes) -> float:
        began_s = time.thread_time()
        with suppress(Refusal):
            parsed(body)
        return time.thread_time() - began_s

    slow, usual = SLOW[kind]
    assert min(seconds(slow) for _ in range(2)) < 15 * max(seconds(usual) for _ in range(2))


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1, "a": 2}', '{"a": Infinity}', '{"a": 1e999}'])
def test_arguments_of_calls_are_read_as_strictly_as_bodies(arguments):
    said = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    refused = refusal({**CHAT, "messages": [{"role": "assistant", "tool_calls": [said]}]})
    assert refused.status == 400
    with pytest.raises(Refusal):
        parsed(f'{{"metadata": {arguments}}}'.encode())


@pytest.mark.parametrize("temperature", [1e-40, 1e-300, 5e-324, 1e-7])
def test_a_temperature_that_makes_logits_infinite_is_refused_at_every_door(temperature):
    assert refusal({**CHAT, "temperature": temperature}).param == "temperature"
    with pytest.raises(ValueError, match="temperature"):
        GRPOConfig(output_dir="unused", temperature=temperature)
    for refused in (temperature, float("inf"), float("nan")):
        sampling = SamplingParams(max_tokens=1, temperature=refused)
        with pytest.raises(ValueError, match="temperature"):
            check_requests([], sampling, max_len=9, max_len_reason="", vocab_size=9)
    assert read({**CHAT, "temperature": 0}, is_chat=True).sampling == {"temperature": 0}


def test_values_that_ask_for_nothing_are_taken():
    call = read(
        {**CHAT, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "stop": None,
         "response_format": {"type": "text"}, "parallel_tool_calls": True, "top_logprobs": 0, "store": False,
         "tool_choice": "none", "tools": [TOOL], "top_k": -1, "user": "me", "metadata": {"a": "b"}},
        is_chat=True,
    )  # fmt: skip
    assert call.tools == () and call.sampling == {"top_k": 0} and call.max_tokens is None and call.n == 1


def test_messages_become_what_chat_templates_read():
    said = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    call = read(
        {**CHAT, "tools": [TOOL], "messages": [
            {"role": "developer",
             "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [said]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]},
        is_chat=True,
    )  # fmt: skip
    assert call.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}, "id": "c1"}]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    )  # fmt: skip
    assert call.tools == (TOOL,)


NAMES = st.sampled_from(
    ["model", "messages", "prompt", "tools", "tool_choice", "stop", "n", "seed", "temperature", "max_tokens",
     "stream", "stream_options", "logprobs", "logit_bias", "response_format", "return_token_ids", "user", "x",
     "role", "content", "type", "text", "function", "tool_calls", "name", "arguments", "parameters", "id"]
)  # fmt: skip
TEXTS = st.sampled_from(["user", "assistant", "tool", "text", "function", "m", "{}", "\ud800", ""]) | st.text(
    st.characters(), max_size=3
)
NUMBERS = (
    st.integers() | st.sampled_from([10**400, -(10**400)]) | st.floats(allow_nan=False, allow_infinity=False)
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TEXTS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.dictionaries(NAMES | TEXTS, JSON, max_size=5), st.booleans())
def test_any_body_is_read_or_refused_by_the_name_of_a_field(content, is_chat):
    try:
        call = read({**(CHAT if is_chat else TEXT), **content}, is_chat)
    except Refusal as refused:
        assert refused.status == 400 and refused.param is not None
        json.dumps(refused.content, ensure_ascii=False).encode()
    else:
        assert call.model and call.n >= 1
