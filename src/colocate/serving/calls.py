"""`Call`: the bodies of /v1/completions and /v1/chat/completions, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colocate.options.requirements import LEAST_TEMPERATURE
from colocate.serving.fields import Fields, check_json
from colocate.serving.refusal import Refusal, too_long

Message = dict[str, Any]

MAX_CHOICES = 128
"""Largest number of completions that a request may ask for, over all its prompts."""
MAX_STOPS, MAX_STOP_CHARS = 16, 256
_MOST_TOKENS = 2**31 - 1

_DRAWS = "tokens are drawn by temperature, top_p, top_k, min_p and repetition_penalty"
_OTHERS = "the engine tells the log-prob of each token that it has drawn, and of no other"
_FREELY = "the engine draws freely, and no grammar guides it"
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "frequency_penalty": ((0, 0.0), _DRAWS),
    "presence_penalty": ((0, 0.0), _DRAWS),
    "logit_bias": (({},), _DRAWS),
    "best_of": ((1,), "ask for n completions and choose among them"),
    "echo": ((False,), "an answer has the completion alone"),
    "suffix": (("",), "models continue a text, and do not fill a gap"),
    "store": ((False,), "nothing is stored"),
    "response_format": (({"type": "text"},), _FREELY),
    "parallel_tool_calls": ((True,), _FREELY),
    "top_logprobs": ((0,), _OTHERS),
}
"""Fields of OpenAI's that may only have a value by which they ask for nothing, and why."""
_UNREAD = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields that say who asks and what for, and change no answer."""


@dataclass(frozen=True)
class Call:
    """The fields that both kinds of requests have."""

    model: str
    sampling: Mapping[str, float]
    """The fields of `SamplingParams` that were given, but `seed` and `max_tokens`."""
    seed: int | None
    max_tokens: int | None
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    """Whether the drawn tokens' log-probs are wanted."""
    return_token_ids: bool
    """Whether the tokens of prompt and completion are wanted, as vLLM gives them."""

    @property
    def num_prompts(self) -> int:
        """The number of prompts that are completed, each `n` times."""
        return 1


@dataclass(frozen=True)
class CompletionCall(Call):
    """A request for completions of texts, or of lists of token ids."""

    prompts: tuple[str | tuple[int, ...], ...]

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class ChatCall(Call):
    """A request for the next message of a conversation."""

    messages: tuple[Message, ...]
    """The messages as chat templates read them: calls of tools have mappings as arguments."""
    tools: tuple[dict[str, Any], ...]
    """JSON schemas of the tools that the model may call."""


def prompt_field(call: Call) -> str:
    """The field of a request that its prompt stands in."""
    return "messages" if isinstance(call, ChatCall) else "prompt"


def parsed(body: bytes) -> Fields:
    """The fields of a body.

    Raises:
        Refusal: it is no JSON object, has a key twice, is nested too deeply, or has a faulty text or number.
    """
    try:
        content = _strict_json(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"The body is no JSON: {str(error)[:200]}.") from error
    if not isinstance(content, dict):
        raise Refusal(400, f"The body is no JSON object, but a {type(content).__name__}.")
    check_json(content)
    return Fields(content)


def _strict_json(text: str | bytes) -> Any:
    """The value of a text in JSON, read without Python's extensions of the format."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names: set[str] = set()
            twice = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
            shown = ascii(twice[:80])[1:-1][:80]
            raise Refusal(400, f"An object of the body has {shown} twice.", param=shown)
        return found

    return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)


def completion_call(fields: Fields, max_len: int = _MOST_TOKENS) -> CompletionCall:
    """The request in a body of /v1/completions.

    Args:
        max_len: tokens that a prompt and its completion may have together.

    Raises:
        Refusal: a field is missing, has a value that cannot be used, or is not supported.
    """
    logprobs = fields.any("logprobs")
    if logprobs is not None and (type(logprobs) is not int or logprobs != 0):
        raise fields.refusal("logprobs", logprobs, f"must be 0 or absent: {_OTHERS}")
    prompts = _prompts(fields, max_len)
    common = _common(fields, has_logprobs=logprobs is not None)
    fields.end()
    if (num_choices := len(prompts) * common["n"]) > MAX_CHOICES:
        raise fields.refusal(
            "n", common["n"], f"makes {num_choices} completions, and {MAX_CHOICES} are allowed"
        )
    return CompletionCall(**{**common, "max_tokens": common["max_tokens"] or 16}, prompts=prompts)


def chat_call(fields: Fields, max_len: int = _MOST_TOKENS) -> ChatCall:
    """The request in a body of /v1/chat/completions.

    Args:
        max_len: tokens that a conversation may have; its messages and tools may not have more.

    Raises:
        Refusal: a field is missing, has a value that cannot be used, or is not supported.
    """
    logprobs = fields.flag("logprobs")
    messages = _messages(fields, max_len)
    tools = _tools(fields, max_len)
    limit = fields.whole("max_completion_tokens", 1, _MOST_TOKENS)
    common = _common(fields, has_logprobs=bool(logprobs))
    fields.end()
    if limit is not None and common["max_tokens"] not in (None, limit):
        raise fields.refusal("max_completion_tokens", limit, f"contradicts max_tokens={common['max_tokens']}")
    return ChatCall(**{**common, "max_tokens": limit or common["max_tokens"]}, messages=messages, tools=tools)


def _common(fields: Fields, *, has_logprobs: bool) -> dict[str, Any]:
    if (model := fields.text("model")) is None:
        raise fields.missing("model")
    for name, (neutral, why) in _NEUTRAL.items():
        fields.only(name, neutral, why)
    for name in _UNREAD:
        fields.any(name)
    sampling = {
        "temperature": _temperature(fields),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.whole("top_k", -1, _MOST_TOKENS),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100),
    }
    if sampling["top_k"] == -1:  # as vLLM writes "all"
        sampling["top_k"] = 0
    if sampling["top_p"] == 0:
        raise fields.refusal("top_p", 0, "keeps no token: it must be greater than 0")
    stream = bool(fields.flag("stream"))
    options = fields.any("stream_options")
    if options is not None and not (stream and isinstance(options, dict)):
        raise fields.refusal("stream_options", options, "must be an object, in a request with stream=true")
    stream_options = Fields(options or {}, "stream_options.")
    include_usage = bool(stream_options.flag("include_usage"))
    stream_options.only("include_obfuscation", (False,), "nothing is padded")
    stream_options.end()
    return {
        "model": model,
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "seed": fields.whole("seed", -(2**63), 2**63 - 1),
        "max_tokens": fields.whole("max_tokens", 1, _MOST_TOKENS),
        "n": fields.whole("n", 1, MAX_CHOICES) or 1,
        "stop": fields.texts("stop", MAX_STOPS, MAX_STOP_CHARS),
        "stream": stream,
        "include_usage": include_usage,
        "logprobs": has_logprobs,
        "return_token_ids": bool(fields.flag("return_token_ids")),
    }


def _temperature(fields: Fields) -> float | None:
    value = fields.number("temperature", 0, 2)
    if value is not None and 0 < value < LEAST_TEMPERATURE:
        why = f"is too close to 0 to divide by: 0 is greedy, and else {LEAST_TEMPERATURE:g} is the least"
        raise fields.refusal("temperature", value, why)
    return value


# ── Prompts and messages ─────────────────────────────────────────────────────────────────────────────────


def _prompts(fields: Fields, max_len: int) -> tuple[str | tuple[int, ...], ...]:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    prompt = fields.any("prompt")
    if prompt is None:
        raise fields.missing("prompt")
    for ids in [prompt, *prompt] if isinstance(prompt, list) and len(prompt) <= MAX_CHOICES else [prompt]:
        if isinstance(ids, list) and len(ids) > max(max_len, MAX_CHOICES):
            raise too_long("prompt", f"The prompt has {len(ids)} tokens, and the context has {max_len}.")
    is_one = not isinstance(prompt, list) or (bool(prompt) and all(type(token) is int for token in prompt))
    prompts = [prompt] if is_one else prompt
    if not 1 <= len(prompts) <= MAX_CHOICES:
        raise fields.refusal(
            "prompt", prompt, f"has {len(prompts)} prompts, and must have 1 to {MAX_CHOICES}"
        )
    read: list[str | tuple[int, ...]] = []
    for one in prompts:
        if isinstance(one, list) and all(type(token) is int for token in one):
            read.append(tuple(one))
        elif isinstance(one, str):
            read.append(fields.checked_text("prompt", one))
        else:
            raise fields.refusal("prompt", one, "must be a string or a list of token ids")
        if not one:
            raise fields.refusal("prompt", one, "is empty: a completion needs a token to start from")
    return tuple(read)


def _messages(fields: Fields, max_len: int) -> tuple[Message, ...]:
    messages = fields.any("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.refusal("messages", messages, "must be a list of at least one message")
    if len(messages) > max_len:
        why = f"There are {len(messages)} messages, and the context has {max_len} tokens."
        raise too_long("messages", why)
    return tuple(_message(message, f"messages[{number}].") for number, message in enumerate(messages))


def _message(content: Any, where: str) -> Message:
    if not isinstance(content, dict):
        raise Refusal(400, f"{where[:-1]} must be an object.", param=where[:-1])
    fields = Fields(content, where)
    role = fields.text("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise fields.refusal("role", role, "must be system, developer, user, assistant or tool")
    # OpenAI's newer name for it; chat templates know the older one.
    message: Message = {"role": "system" if role == "developer" else role, "content": _content(fields)}
    if (name := fields.text("name")) is not None:
        message["name"] = name
    if role == "tool" and (number := fields.text("tool_call_id")) is not None:
        message["tool_call_id"] = number
    if role == "assistant":
        reasoning = [fields.text(name) for name in ("reasoning_content", "reasoning")]
        if text := next((text for text in reasoning if text), None):
            message["reasoning_content"] = text
        if calls := _calls(fields):
            message["tool_calls"] = calls
        fields.only("annotations", ([],), "answers have none")
    fields.end()
    return message


def _content(fields: Fields) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = fields.any("content")
    if not isinstance(content, list):
        return "" if content is None else fields.checked_text("content", content)
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise fields.refusal(f"content[{number}]", part, "is no text, and the model reads nothing else")
        texts.append(fields.checked_text(f"content[{number}].text", part.get("text")))
    return "".join(texts)


def _calls(fields: Fields) -> list[dict[str, Any]]:
    calls = fields.any("tool_calls")
    if not isinstance(calls, list | None):
        raise fields.refusal("tool_calls", calls, "must be a list")
    read = []
    for call in calls or ():
        function = call.get("function") if isinstance(call, dict) else None
        name, arguments = (
            (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (0, 0)
        )
        try:
            arguments = _strict_json(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise fields.refusal(
                "tool_calls", call, "needs a function with a name and arguments, a JSON object"
            )
        check_json(arguments, "messages.tool_calls.function.arguments")
        number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        read.append({"type": "function", "function": {"name": name, "arguments": arguments}, **number})
    return read


def _tools(fields: Fields, max_len: int) -> tuple[dict[str, Any], ...]:
    """The schemas of the tools; none if they may not be called."""
    tools, choice = fields.any("tools"), fields.any("tool_choice")
    if not isinstance(tools, list | None):
        raise fields.refusal("tools", tools, "must be a list")
    if tools is not None and len(tools) > max_len:
        raise too_long("tools", f"There are {len(tools)} tools, and the context has {max_len} tokens.")
    if choice not in (None, "auto", "none"):
        raise fields.refusal("tool_choice", choice, f"is not supported, 'auto' and 'none' are: {_FREELY}")
    read = tuple(_tool(tool, f"tools[{number}].") for number, tool in enumerate(tools or ()))
    return () if choice == "none" else read


def _tool(content: Any, where: str) -> dict[str, Any]:
    function = (
        content.get("function") if isinstance(content, dict) and content.get("type") == "function" else None
    )
    if not isinstance(function, dict):
        raise Refusal(400, f'{where[:-1]} must be {{"type": "function", "function": ...}}.', param=where[:-1])
    fields = Fields(function, f"{where}function.")
    if (name := fields.text("name")) is None:
        raise fields.missing("name")
    schema: dict[str, Any] = {"name": name, "description": fields.text("description") or ""}
    parameters = fields.any("parameters")
    if not isinstance(parameters, dict | None):
        raise fields.refusal("parameters", parameters, "must be a JSON schema")
    schema["parameters"] = parameters or {"type": "object", "properties": {}}
    fields.only("strict", (False,), _FREELY)
    fields.end()
    return {"type": "function", "function": schema}
