"""`MessageStream`: an assistant's message that is streamed while it is being written."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from colocate.episodes.renderer import Message, Renderer
from colocate.serving.text_stream import overlap

Delta = dict[str, Any]
"""The new part of a message, in the shape of OpenAI's `delta`."""


class MessageStream:
    """Divides the text of a turn into reasoning, content and calls of tools.

    The results of `feed` and `end`, put together, are the message, whether the text came at once or in
    pieces. Text from a possible call on is held back until the turn ends, as a call is read whole.

    Args:
        tools: schemas of the tools that may be called; without any, calls are plain content.
        opened: the end of the prompt's text, which may begin the reasoning.
    """

    def __init__(self, renderer: Renderer, tools: Sequence[dict[str, Any]], opened: str) -> None:
        self._renderer = renderer
        self._tools = tools
        marks = renderer.marks
        self._is_read_whole = marks is None
        self._reasoning = None if marks is None else marks.reasoning
        self._calls = marks.calls if marks is not None and tools else ()
        self._part = "opening"
        self._held = ""
        if self._reasoning is None:
            self._part = "content"
        elif opened.rfind(self._reasoning[0]) > opened.rfind(self._reasoning[1]):
            self._part = "reasoning"
        self._has_reasoned = False
        self._is_fresh = True
        """Whether the part has no text yet, whose leading line ends do not count."""
        self.message: Message = {"role": "assistant", "content": None}
        """The message so far."""

    def feed(self, text: str) -> list[Delta]:
        """Take more of the turn's text; returns the parts that are certain now."""
        self._held += text
        if self._is_read_whole:
            return []
        deltas: list[Delta] = []
        while (delta := self._next()) is not None:
            deltas += self._told(delta)
        return deltas

    def end(self, turn: Message) -> list[Delta]:
        """The rest of the message.

        Args:
            turn: the whole turn as `Renderer.parse` has read it.
        """
        if self._is_read_whole:
            reasoning, content = turn.get("reasoning_content", ""), turn["content"]
            told = self._told({"reasoning_content": reasoning}) + self._told({"content": content})
            return told + self._told_calls(turn)
        if self._part == "calls" and turn.get("tool_calls"):
            # Line ends that a turn begins with may have been told, and `parse` leaves them out.
            content = (self.message["content"] or "").lstrip("\n")
            behind = turn["content"].lstrip("\n").removeprefix(content)
            return self._told({"content": behind}) + self._told_calls(turn)
        if self._part == "reasoning":
            return self._told({"reasoning_content": self._held.rstrip()})
        return self._told({"content": self._held})

    # ── From one part to the next ────────────────────────────────────────────────────────────────────────

    def _next(self) -> Delta | None:
        """The delta that the held text begins with; None: that is not certain yet."""
        if self._part == "opening":
            return self._open()
        if self._part == "reasoning":
            return self._reason()
        return self._answer() if self._part == "content" else None

    def _open(self) -> Delta | None:
        assert self._reasoning is not None
        begins, text = self._reasoning[0], self._held.lstrip()
        if text.startswith(begins):
            self._held, self._part = text[len(begins) :], "reasoning"
        elif begins.startswith(text):
            return None
        else:
            self._part = "content"
        return {}

    def _reason(self) -> Delta | None:
        assert self._reasoning is not None
        ends = self._reasoning[1]
        text, is_over, rest = self._held.partition(ends)
        text = text.lstrip() if self._is_fresh else text
        if is_over:
            self._held, self._part, self._is_fresh, self._has_reasoned = rest, "content", True, True
            return {"reasoning_content": text.rstrip()}
        certain = text[: len(text) - overlap(text, ends)].rstrip()
        return self._take(certain, text, "reasoning_content")

    def _answer(self) -> Delta | None:
        text = self._held.lstrip("\n") if self._is_fresh and self._has_reasoned else self._held
        found = [at for mark in self._calls if (at := text.find(mark)) >= 0]
        if found:
            at = min(found)
            before = text[:at].rstrip("\n")
            self._held, self._part = text[len(before) :], "calls"
            return {"content": before if before.strip() or not self._is_fresh else ""}
        if not self._calls:
            return self._take(text, text, "content")
        certain = text[: len(text) - max(overlap(text, mark) for mark in self._calls)].rstrip("\n")
        if self._is_fresh and not certain.strip():
            return None
        return self._take(certain, text, "content")

    def _take(self, certain: str, text: str, name: str) -> Delta | None:
        self._held = text[len(certain) :]
        if not certain:
            return None
        self._is_fresh = False
        return {name: certain}

    # ── What is told ─────────────────────────────────────────────────────────────────────────────────────

    def _told(self, delta: Delta) -> list[Delta]:
        delta = {name: text for name, text in delta.items() if text}
        for name, text in delta.items():
            self.message[name] = (self.message.get(name) or "") + text
        return [delta] if delta else []

    def _told_calls(self, turn: Message) -> list[Delta]:
        if not self._tools or not turn.get("tool_calls"):
            return []
        calls = []
        for call in turn["tool_calls"]:
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            number = call.get("id") or f"call_{secrets.token_hex(12)}"
            named = {"name": function["name"], "arguments": arguments}
            calls.append({"id": number, "type": "function", "function": named})
        self.message["tool_calls"] = calls
        return [{"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}]
