"""A message told in pieces is the one that is read at once, however its text was cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chat_templates import TOOL as MULTIPLY
from chat_templates import WITH_TOOLS, make_call, renderer_of, sampled
from colocate.episodes.renderer import Renderer
from colocate.serving.calls import chat_call
from colocate.serving.choice import Choice
from colocate.serving.driver import Drawn
from colocate.serving.fields import Fields
from colocate.serving.handlers import DrawRequest
from colocate.serving.message_stream import MessageStream
from colocate.serving.texts import Texts
from colocate.types import Prompt, SamplingParams
from serving_case import STOP, TOKENIZER, TOOL
from tool_chat import TEMPLATE, call, make_chat_tokenizer

REASONING = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}",
)
PLAIN, REASONED = (Renderer(make_chat_tokenizer(text), {}, [STOP]) for text in (TEMPLATE, REASONING))
PIECES = st.sampled_from(
    [
        "a",
        "\n",
        " ",
        "<",
        "<tool",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        call("add", a=1, b=2),
    ]
)
CUTS = st.lists(st.integers(0, 200), max_size=8)


def told(
    renderer: Renderer, text: str, cuts: list[int], tools: list[dict[str, Any]], opened: str = ""
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message that a text becomes which arrives in pieces, and the deltas put together."""
    stream = MessageStream(renderer, tools, opened)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    deltas = [delta for a, b in itertools.pairwise(bounds) for delta in stream.feed(text[a:b])]
    ids = [*TOKENIZER(text)["input_ids"], STOP]
    deltas += stream.end(renderer.parse(ids, TOKENIZER(opened)["input_ids"], tools))
    return stream.message, deltas


@pytest.mark.parametrize("is_read_whole", [False, True])
@pytest.mark.parametrize("before", ["", call("add", a=1, b=2)])
def test_a_stop_text_is_not_in_a_message(before, is_read_whole, monkeypatch):
    """Templates whose turns are read whole, and text behind a call, are told by what was parsed."""
    if is_read_whole:
        monkeypatch.setattr(Renderer, "marks", None)
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "stop": "XX"}
    chat, texts = chat_call(Fields(body)), Texts(TOKENIZER, [STOP])
    request = DrawRequest(Prompt((5,), 0, range(1)), SamplingParams(max_tokens=999))
    choice = Choice(0, chat, request, texts)
    choice.take(Drawn(0, tuple(TOKENIZER(before + "abXXcd")["input_ids"]), None, "length"))
    shown = choice.turn.shown
    assert choice.finish_reason == ("tool_calls" if before else "stop") and shown is not None
    assert shown["content"] == "ab" and len(shown.get("tool_calls", [])) == bool(before)
    assert "XX" in choice.turn.parsed["content"], "which is in the turn, and so in the episode"


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}


@settings(max_examples=300)
@example(PLAIN, "\na<tool_call>", [2], True, "")
@given(
    st.sampled_from([PLAIN, REASONED]), st.lists(PIECES, max_size=8).map("".join), CUTS, st.booleans(),
    st.sampled_from(["", "<think>\n"]),
)  # fmt: skip
def test_it_does_not_matter_how_the_text_is_cut(renderer, text, cuts, has_tools, opened):
    tools = [TOOL] * has_tools
    at_once, _ = told(renderer, text, [], tools, opened)
    message, deltas = told(renderer, text, cuts, tools, opened)
    assert without_ids(message) == without_ids(at_once)
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == (message.get(name) or "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [{k: v for k, v in call.items() if k != "index"} for call in calls] == message.get(
        "tool_calls", []
    )


@settings(max_examples=100)
@example("\na", 1, "", [2])
@given(st.text("ab \n", max_size=12), st.integers(0, 2), st.text("ab ", max_size=5), CUTS)
def test_content_and_calls_are_those_that_the_renderer_reads(before, num_calls, after, cuts):
    text = before + call("add", a=1, b=2) * num_calls + after
    read = PLAIN.parse([*TOKENIZER(text)["input_ids"], STOP], (), [TOOL])
    message, _ = told(PLAIN, text, cuts, [TOOL])
    assert (message["content"] or "").strip("\n") == read["content"].strip("\n")
    calls = [call["function"] for call in message.get("tool_calls", [])]
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == [
        (c["function"]["name"], c["function"]["arguments"]) for c in read.get("tool_calls", [])
    ]


def test_reasoning_is_a_part_of_its_own_and_is_told_at_once():
    stream = MessageStream(REASONED, [], "")
    assert stream.feed("<think>\nHm") == [{"reasoning_content": "Hm"}]
    assert stream.feed(", yes\n</thi") == [{"reasoning_content": ", yes"}]
    assert stream.feed("nk>\n\nSo") == [{"content": "So"}]


def test_text_before_a_call_is_told_at_once_and_the_call_when_it_is_whole():
    stream = MessageStream(PLAIN, [TOOL], "")
    assert stream.feed("One moment.\n<tool") == [{"content": "One moment."}]
    assert stream.feed('_call>{"name"') == []


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_as_each_family_writes_them(name):
    """Whatever marks a family's calls: they are found in any pieces, and content never has a part of them."""
    renderer = renderer_of(name)
    ids = sampled(renderer, make_call({"a": 12, "b": "<x>"}))
    read = renderer.parse(ids, (), [MULTIPLY])
    assert [call["function"]["name"] for call in read["tool_calls"]] == ["multiply"]
    text = renderer._tokenizer.decode(ids[:-1])
    opened = renderer._text([{"role": "user", "content": "u"}], add_generation_prompt=True)
    for size in (len(text), 1, 3):
        stream = MessageStream(renderer, [MULTIPLY], opened)
        told = [d for n in range(0, len(text), size) for d in stream.feed(text[n : n + size])]
        told += stream.end(read)
        assert [call["function"]["name"] for call in stream.message["tool_calls"]] == ["multiply"]
        content = "".join(d.get("content", "") for d in told)
        assert content.strip() == read["content"].strip()
