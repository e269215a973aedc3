"""Messages become tokens by a chat template, and a model's tokens become messages.

Sampled tokens are never encoded again. A later turn's context consists of the tokens that the engine already
has and of `Renderer.bridge`: the tokens that the template puts after the assistant's stop token.

    … <|im_start|>assistant ⟨sampled … <|im_end|>⟩ ⟨bridge \\n<|im_start|>user … <|im_start|>assistant⟩
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from colocate.data.encoding import encoded_up_to, without_continuing
from colocate.episodes.argument_types import with_typed_arguments
from colocate.episodes.response_template import templated_message
from colocate.episodes.tool_syntax import (
    CALL_MARKS,
    REASONING,
    harmony,
    message_of,
    reasoning_end_of,
    syntax_of,
)

Message = dict[str, Any]

FAMILIES = (
    "Qwen 2.5, 3 and 3.5, Llama 3.1 and 3.2, GLM 4.5, Gemma 4, GPT-OSS, LFM 2 and 2.5, Nemotron 3 and Mistral"
)
"""The families whose templates carry tools, and whose calls are read."""

MAX_PARSED_CHARS = 1_000_000
"""Text that is longer is plain content: no call is so long."""

_MARK = "c0loc4te"
"""Stands for the text of dummy messages: where it is rendered, the text would be."""
_TOOL = "probe_tool"
_SCHEMA = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "Text."}}},
    },
}


class Marks(NamedTuple):
    """The marks that divide the text of a turn."""

    reasoning: tuple[str, str] | None
    """The beginning and the end of the reasoning before the answer; None: the template knows of none."""
    calls: tuple[str, ...]
    """The beginnings that the first call of a tool may have; none, if no call can be read."""


class Renderer:
    """Renders conversations with a tokenizer's chat template, and parses the model's text.

    Args:
        chat_template_kwargs: the run's arguments for the template.
        stop_token_ids: the tokens that end an assistant's turn when they are sampled.
        remedy: how to set another chat template, for messages about the present one.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
        remedy: str = "pass a `processing_class` with such a template, or set `tokenizer.chat_template`",
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template, and turns are messages of a "
                f"chat. To set one, {remedy}."
            )
        self._remedy = remedy
        self._tokenizer = tokenizer
        self._kwargs = without_continuing(chat_template_kwargs or {})
        self.stop_token_ids = tuple(stop_token_ids)
        self._stops = {
            self._decoded(token) for token in stop_token_ids if token in tokenizer.added_tokens_decoder
        }
        self._shows_lists = True
        self._reads_mappings = True
        self._reads_mappings = self._try_text([_user(), _call(_TOOL)]) is not None
        """Whether the arguments of calls may be mappings. DeepSeek's templates want their JSON."""
        rows = [[_MARK]]
        listed = self._try_text([_user(), _call(_TOOL), {**_tool(_TOOL), "content": rows}]) or ""
        self._shows_lists = any(written in listed for written in (str(rows), json.dumps(rows)))
        """Whether the template shows any list that is a tool's answer. Qwen 3's leaves it out, Qwen 3.5's
        refuses it, GLM's takes it for several answers."""
        self._syntax = syntax_of(self._try_text([_user(), _call(_TOOL)]) or "")
        reasoning = {"reasoning_content": "r" + _MARK}
        texts = [self._try_text([_user(), {**turn, **reasoning}]) for turn in (_assistant(), _call(_TOOL))]
        reasoned = next((text for text in texts if text is not None and "r" + _MARK in text), "")
        self._has_reasoning = bool(reasoned)
        """Whether the template knows `reasoning_content`."""
        self._reasoning_end = reasoning_end_of(reasoned)
        self._answer_end = (self._try_text([_user(), _assistant()]) or "").rpartition(_MARK)[2]
        """The text that the template puts behind an answer's."""
        self._keeps_turns = self._has_reasoning and self._keeps(_tool(_TOOL))
        """Whether the turn before a tool's message stays as it was sampled, its reasoning too."""

    @property
    def marks(self) -> Marks | None:
        """The marks that divide a turn while it is still being written; None: it is only read whole."""
        if self._has_response_template or self._syntax is harmony:
            return None
        end = self._reasoning_end
        calls = () if self._syntax is None else CALL_MARKS[self._syntax]
        return Marks(None if end is None else (REASONING[end], end), calls)

    @property
    def _has_response_template(self) -> bool:
        return getattr(self._tokenizer, "response_template", None) is not None

    @property
    def _name(self) -> str:
        return repr(self._tokenizer.name_or_path) if self._tokenizer.name_or_path else "this tokenizer"

    def check_tools(self) -> None:
        """Raises ValueError if the template cannot carry tools: their schemas, calls and answers."""
        shown = self._try_text([_user()], [_SCHEMA])
        called = self._try_text([_user(), _call(_TOOL)], [_SCHEMA])
        answered = self._try_text([_user(), _call(_TOOL), _tool(_TOOL)], [_SCHEMA])
        for what, found in (
            ("the tools' schemas", shown is not None and _TOOL in shown),
            ("calls of tools", called is not None and called.count(_MARK) >= 2),
            ("what tools have answered", answered is not None and answered.count(_MARK) >= 3),
        ):
            if not found:
                raise ValueError(
                    f"The chat template of {self._name} does not carry {what}. Those of {FAMILIES} do: "
                    f"{self._remedy}. `colocate.episodes.tool_template.add_tool_template` wraps the one that "
                    "there is."
                )
        text, stop, prefix = self._written_call()
        why = ""
        try:
            calls = self._message_of(text, stop, prefix, None).get("tool_calls", [])
            if [call["function"]["name"] for call in calls] == [_TOOL]:
                return
        except ValueError as error:
            why = f" ({error})"
        if self._has_response_template:
            raise ValueError(
                f"The `response_template` of {self._name} does not read the calls of tools that its chat "
                f"template writes{why}. Set one that does, or set it to None to have them read without one."
            )
        raise ValueError(
            f"The calls of tools that the chat template of {self._name} writes cannot be read. Those of "
            f"{FAMILIES} can. Set `tokenizer.response_template`: it declares to transformers how the "
            "model writes calls."
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """The token ids of a conversation.

        Args:
            most: tokens that can be used; None: any number.

        Raises:
            TooManyTokens: it has clearly more tokens than `most`.
            ValueError: the template refuses it.
        """
        return self._ids(self._text(messages, tools, add_generation_prompt=add_generation_prompt), most)

    def bridge(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        last_id: int | None = None,
        most: int | None = None,
    ) -> list[int] | None:
        """The tokens between a sampled assistant's turn and the next one.

        Args:
            messages: the conversation; the last message is the sampled turn, as `parse` has read it.
            new_messages: the messages since then, by tools or the user.
            last_id: the last sampled token; None: the one by which the template ends a turn.
            most: tokens that can be used; None: any number.

        Returns:
            The end of the sampled turn, the new messages and the next generation prompt. None: the template
            rewrites earlier text, and the conversation must be rendered anew.

        Raises:
            TooManyTokens: the new messages have clearly more tokens than `most`.
            ValueError: the template refuses the conversation.
        """
        are_tools = all(message["role"] == "tool" for message in new_messages)
        if not (are_tools and self._keeps_turns) and self._is_rewritten(messages, new_messages, tools):
            return None
        # Dummy messages: a turn is not always rendered as it was sampled, but what follows it is the same.
        calls = _numbered(messages)[-1].get("tool_calls") or []
        named = [(call["function"]["name"], call["id"]) for call in calls] or [(_TOOL, "call00000")]
        opening = [_user(), _calls(named) if are_tools else _assistant()]
        shown = None if are_tools else tools  # some templates put them before the last user's message
        turn = self._text(opening, shown, add_generation_prompt=False)
        whole = self._text([*opening, *new_messages], shown, add_generation_prompt=True)
        end = turn[turn.rindex(_MARK) + len(_MARK) :]  # what the template puts behind the turn's text
        start = whole.index(_MARK, whole.index(_MARK) + 1) + len(_MARK)
        sampled = self._sampled_end(end, whole[start:], last_id)
        if not whole.startswith(sampled, start):
            return None  # the template ends an earlier turn in another way than the last
        return self._ids_from(whole, start + len(sampled), most)

    def parse(
        self,
        token_ids: Sequence[int],
        given_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Message:
        """Parse a sampled turn into an assistant message.

        Args:
            given_ids: the tokens before the turn; their end, the generation prompt, may open the reasoning.
            tools: JSON schemas of the tools; they say which arguments are no text.

        Returns:
            A message with `content` and, where the model has written them, `reasoning_content` and
            `tool_calls`. Text that cannot be read as a call stays plain content, and so do calls that the
            chat template refuses: Mistral's want ids of nine characters. If the tokenizer carries a response
            template, that parses the turn.
        """
        ids = list(token_ids)
        stop = self._decoded(ids.pop()) if ids and ids[-1] in self.stop_token_ids else ""
        prefix = str(self._tokenizer.decode(list(given_ids))) if self._has_response_template else ""
        text = str(self._tokenizer.decode(ids))
        plain: Message = {"role": "assistant", "content": text}
        try:
            message = plain if len(text) > MAX_PARSED_CHARS else self._message_of(text, stop, prefix, tools)
        except ValueError:
            return plain
        calls = {"role": "assistant", "content": "", "tool_calls": message.get("tool_calls")}
        is_refused = bool(calls["tool_calls"]) and self._try_text([_user(), calls]) is None
        return plain if is_refused else message

    def _message_of(
        self, text: str, stop: str, prefix: str, tools: Sequence[dict[str, Any]] | None
    ) -> Message:
        """Parse a text into a message.

        Raises:
            ValueError: the response template cannot read it.
        """
        if self._has_response_template:
            message = templated_message(self._tokenizer, text + stop, prefix, tools)
            return {**message, "content": message["content"].removesuffix(stop)}
        message = message_of(text, self._syntax, self._reasoning_end)
        if tools and "tool_calls" in message:
            message["tool_calls"] = with_typed_arguments(message["tool_calls"], tools)
        return message

    def _written_call(self) -> tuple[str, str, str]:
        """The template's text of a call, the stop token behind it, and the text before it."""
        prefix = self._text([_user()], add_generation_prompt=True)
        whole = self._text([_user(), _call(_TOOL)], add_generation_prompt=False)
        num_shared = sum(takewhile(bool, map(str.__eq__, prefix, whole)))
        text = whole[len(re.sub(r"<[^<>]*$", "", whole[:num_shared])) :]  # no token is cut
        stop = min((stop for stop in self._stops if stop in text), key=text.index, default=self._answer_end)
        return text.partition(stop)[0] if stop else text, stop, prefix

    def _sampled_end(self, end: str, after: str, last_id: int | None) -> str:
        """The sampled part of the text that follows a turn's: it ends with the stop token.

        Args:
            end: text that the template puts after a turn that is the last.
            after: text that it puts after the turn otherwise, and the messages that follow.
        """
        known = self._tokenizer.added_tokens_decoder  # only such a token stands for the same text everywhere
        stops = self._stops if last_id is None else {self._decoded(last_id)} if last_id in known else set()
        # The stop token may be that which begins the next message.
        ends = [end[: end.index(stop)] + stop for stop in stops if stop in end]
        ends = ends or [end + stop for stop in stops if after.startswith(end + stop)]
        if ends:
            return min(ends, key=len)
        # A turn cut short, or ended by a token that the template does not use: the template's stop token is
        # still to come; what closes a call before it, the model has written by itself.
        ends = [end[: end.index(stop)] for stop in self._stops if stop in end]
        return min(ends, key=len, default=end.removesuffix(self._answer_end))

    def _decoded(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))

    def _is_rewritten(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
    ) -> bool:
        """Whether the template changes or drops a part of the text before the last turn."""
        before = self._text(messages[:-1], tools, add_generation_prompt=False)
        after = self._text([*messages, *new_messages], tools, add_generation_prompt=True)
        written = (str(messages[-1].get(part) or "").strip() for part in ("reasoning_content", "content"))
        return not after.startswith(before) or any(text not in after[len(before) :] for text in written)

    def _keeps(self, new_message: Message) -> bool:
        messages: list[Message] = [_user(), {**_call(_TOOL), "reasoning_content": "r" + _MARK}]
        try:
            return not self._is_rewritten(messages, [new_message], None)
        except ValueError:
            return False

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [self._readable(message) for message in _numbered(messages)],
                    tools=list(tools) if tools else None,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **self._kwargs,
                )
            )
        except Exception as error:  # templates are programs that refuse what they like, and fail as they like
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"The chat template of {self._name} refuses a conversation of {roles}: {error}"
            ) from error

    def _readable(self, message: Message) -> Message:
        """A message that the template can render: if it needs that, arguments and lists that are no content
        blocks become text."""
        if not self._shows_lists and _has_plain_list(message):
            message = {**message, "content": str(message["content"])}
        if not self._reads_mappings and message.get("tool_calls"):
            message = {**message, "tool_calls": [_with_json(call) for call in message["tool_calls"]]}
        return message

    def _try_text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> str | None:
        try:
            return self._text(messages, tools, add_generation_prompt=False)
        except ValueError:
            return None

    def _ids(self, text: str, most: int | None = None) -> list[int]:
        def encode(part: str) -> list[int]:
            return list(self._tokenizer(part, add_special_tokens=False)["input_ids"])

        return encode(text) if most is None else encoded_up_to(encode, text, most)

    def _ids_from(self, text: str, start: int, most: int | None) -> list[int]:
        """The tokens of `text[start:]`, without a token that marks a text's beginning."""
        head = self._ids(text[:start])
        ids = self._ids(text, None if most is None else len(head) + most)
        return ids[len(head) :] if ids[: len(head)] == head else self._ids(text[start:])


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """The conversation with an id for each call, and for its answer. Mistral's templates refuse calls without
    one, and Gemma's find by it the tool that answers. Answers stand in the order of their calls."""
    numbered: list[Message] = []
    open_ids: list[str] = []
    num_calls = 0
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, Sequence) and all(isinstance(call, Mapping) for call in calls):
            first, num_calls = num_calls, num_calls + len(calls)
            calls = [{"id": f"call{first + i:05d}", **call} for i, call in enumerate(calls)]
            open_ids = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and open_ids:
            message = {"tool_call_id": open_ids.pop(0), **message}
        numbered.append(message)
    return numbered


def _has_plain_list(message: Message) -> bool:
    """Whether a message is a tool's, and its content a list of other things than blocks."""
    content = message.get("content")
    if message["role"] != "tool" or not isinstance(content, list):
        return False
    return not content or not all(isinstance(block, dict) and "type" in block for block in content)


def _with_json(call: Message) -> Message:
    """A call whose arguments are text."""
    called = call.get("function")
    if not isinstance(called, Mapping) or not isinstance(called.get("arguments"), Mapping):
        return call
    return {**call, "function": {**called, "arguments": json.dumps(called["arguments"], ensure_ascii=False)}}


def _user() -> Message:
    return {"role": "user", "content": _MARK}


def _assistant() -> Message:
    return {"role": "assistant", "content": _MARK}


def _call(name: str) -> Message:
    return _calls([(name, "call00000")])


def _calls(named: Sequence[tuple[str, str]]) -> Message:
    """A message that calls tools, by their names and call ids; the mark stands in the last call."""
    calls: list[Message] = [
        {"type": "function", "id": number, "function": {"name": name, "arguments": {}}}
        for name, number in named
    ]
    calls[-1]["function"]["arguments"] = {"x": _MARK}
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _tool(name: str) -> Message:
    return {"role": "tool", "name": name, "content": _MARK}
