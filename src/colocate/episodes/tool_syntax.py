"""The syntaxes in which families of models call tools, and their parsers.

A chat template shows which way its model was taught: it renders a call into the history.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

Call = dict[str, Any]
"""`{"type": "function", "function": {"name", "arguments"}}`, with the `id` if the model has written one."""
Parts = dict[str, Any]
"""`content`, and where there are any `tool_calls` and `reasoning_content`."""
Syntax = Callable[[str], Parts | None]
"""The parts of a text; None: it has no call, or one that cannot be read."""

REASONING = {"</think>": "<think>", "<channel|>": "<|channel>thought"}
"""The end of a reasoning that precedes the content, and its possible beginning."""


def hermes(text: str) -> Parts | None:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen 2.5 and 3 write it."""
    return _tagged(text, "<tool_call>", "</tool_call>", lambda body: _json_call(body, "arguments"))


def xml(text: str) -> Parts | None:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen 3.5 and
    Nemotron 3. All values are texts."""
    return _tagged(text, "<tool_call>", "</tool_call>", _xml_call)


def glm(text: str) -> Parts | None:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5. All values
    are texts."""
    return _tagged(text, "<tool_call>", "</tool_call>", _glm_call)


def gemma(text: str) -> Parts | None:
    """`<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`: Gemma 4."""
    return _tagged(text, "<|tool_call>", "<tool_call|>", _gemma_call)


def pythonic(text: str) -> Parts | None:
    """`<|tool_call_start|>[name(key='text', other=1), ...]<|tool_call_end|>`: LFM 2 and 2.5."""
    content, begins, rest = text.partition("<|tool_call_start|>")
    body, is_closed, after = rest.partition("<|tool_call_end|>")
    calls: list[Call | None] = list(_python_calls(body)) if is_closed else [None] * bool(begins)
    return _unless_broken([content, after], calls)


def llama(text: str) -> Parts | None:
    """`{"name": ..., "parameters": {...}}` and nothing behind it, as Llama 3.1 and 3.2 write it."""
    begin = max(0, text.find('{"name"'))
    content, call = text[:begin], text[begin:].strip().removeprefix("<|python_tag|>")
    return _unless_broken([content.removesuffix("<|python_tag|>")], [_json_call(call, "parameters")])


def mistral(text: str) -> Parts | None:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`
    each, in some models with `[CALL_ID]id` before the arguments."""
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[Call | None] = []
    for part in parts:
        head, has_name, arguments = part.partition("[ARGS]")
        if has_name:
            name, _, number = head.partition("[CALL_ID]")
            calls.append(_call(name.strip(), _json(arguments), number.strip()))
        else:
            value = _json(part)
            calls += [_call_of(item, "arguments") for item in value] if isinstance(value, list) else [None]
    return _unless_broken([content], calls)


def deepseek(text: str) -> Parts | None:
    """Read between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>` the type, `<｜tool▁sep｜>`, the name and
    a block of JSON: DeepSeek V3; or the name, `<｜tool▁sep｜>` and JSON: V3.1."""
    content, _, rest = text.partition("<｜tool▁calls▁begin｜>")
    body, _, after = rest.partition("<｜tool▁calls▁end｜>")
    found = _tagged(body, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_call)
    return None if found is None else _unless_broken([content, after], found["tool_calls"])


def harmony(text: str) -> Parts | None:
    """`<|channel|>analysis<|message|>reasoning<|end|>`, and for a call
    `<|start|>assistant to=functions.name<|channel|>commentary json<|message|>{...}<|call|>`: GPT-OSS. The
    recipient may stand behind the channel."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[Call | None] = []
    for part in re.split(r"<\|(?:end|call|return)\|>|<\|start\|>assistant", text):
        head, has_body, body = part.partition("<|message|>")
        called = re.search(r"to=functions\.([^\s<]+)", head)
        if called is not None:
            calls.append(_call(called[1], _json(body)))
        elif has_body:
            (reasoning if "<|channel|>analysis" in head else content).append(body)
    if not (reasoning or content or calls) or None in calls:
        return None
    parts: Parts = {"reasoning_content": "\n".join(reasoning)} if reasoning else {}
    parts["content"] = "\n".join(content)
    return {**parts, "tool_calls": calls} if calls else parts


SYNTAXES: dict[str, Syntax] = {
    "<function=": xml,
    "[TOOL_CALLS]": mistral,
    "<arg_key>": glm,
    "<tool_call>": hermes,
    "<|tool_call>call:": gemma,
    "<|tool_call_start|>[": pythonic,
    "to=functions.": harmony,
    "<｜tool▁call▁begin｜>": deepseek,
}
"""Each syntax by what its calls contain, in the order in which they are looked for."""


CALL_MARKS: dict[Syntax, tuple[str, ...]] = {
    xml: ("<tool_call>",),
    mistral: ("[TOOL_CALLS]",),
    glm: ("<tool_call>",),
    hermes: ("<tool_call>",),
    gemma: ("<|tool_call>",),
    pythonic: ("<|tool_call_start|>",),
    deepseek: ("<｜tool▁calls▁begin｜>",),
    llama: ('{"name"', "<|python_tag|>"),
}
"""The beginnings of a message's first call. `harmony` is not among them: there every part has marks."""


def syntax_of(rendered_call: str) -> Syntax | None:
    """The syntax of a call that a chat template has rendered; None: none that is known."""
    for mark, syntax in SYNTAXES.items():
        if mark in rendered_call:
            return syntax
    return llama if re.search(r'\{"name": .*"parameters":', rendered_call, re.DOTALL) else None


def reasoning_end_of(rendered: str) -> str | None:
    """The end of the reasoning of a turn that a chat template has rendered; None: nothing that is known."""
    return next((mark for mark in REASONING if mark in rendered), None)


def message_of(text: str, syntax: Syntax | None, reasoning_end: str | None) -> dict[str, Any]:
    """The assistant message that a model has written; a call that cannot be read stays in the content.

    Args:
        reasoning_end: the text before it is a part of its own, and not content.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning_end is not None and reasoning_end in text:
        reasoning, _, answer = text.partition(reasoning_end)
        # Where the generation prompt opens the reasoning, only its end is sampled.
        message["reasoning_content"] = reasoning.strip().removeprefix(REASONING[reasoning_end]).strip("\n")
        message["content"] = answer.lstrip("\n")
    found = None if syntax is None else syntax(message["content"])
    return message if found is None else {**message, **found}


def _tagged(text: str, opens: str, closes: str, call_of: Callable[[str], Call | None]) -> Parts | None:
    content, *parts = text.split(opens)
    texts = [content]
    calls: list[Call | None] = []
    for part in parts:
        body, is_closed, after = part.partition(closes)
        calls.append(call_of(body) if is_closed else None)
        texts.append(after)
    return _unless_broken(texts, calls)


def _unless_broken(texts: list[str], calls: list[Call | None]) -> Parts | None:
    """The calls, and the texts before and behind them; None: there is no call, or one that is broken."""
    if not calls or None in calls:
        return None
    return {"content": "\n".join(text.strip("\n") for text in texts if text.strip()), "tool_calls": calls}


def _call(name: Any, arguments: Any, number: Any = "") -> Call | None:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    call: Call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**call, "id": number} if number and isinstance(number, str) else call


def _json_call(text: str, arguments_key: str) -> Call | None:
    return _call_of(_json(text), arguments_key)


def _call_of(value: Any, arguments_key: str) -> Call | None:
    if not isinstance(value, dict):
        return None
    return _call(value.get("name"), value.get(arguments_key, {}), value.get("id"))


def _xml_call(text: str) -> Call | None:
    opened, _, rest = text.strip().partition(">")
    name = opened.removeprefix("<function=").strip()
    if not opened.startswith("<function=") or not name or not rest.endswith("</function>"):
        return None
    pairs = _pairs(rest.removesuffix("</function>"), "<parameter=", ">", "", "</parameter>")
    if pairs is None:
        return None
    return _call(name, {k: value.removeprefix("\n").removesuffix("\n") for k, value in pairs.items()})


def _glm_call(text: str) -> Call | None:
    name, opens, rest = text.partition("<arg_key>")
    pairs = _pairs(opens + rest, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    return _call(name.strip(), pairs) if name.strip() else None


def _pairs(text: str, opens: str, ends_key: str, begins_value: str, closes: str) -> dict[str, str] | None:
    """Keys and values one after the other, each between its marks; None: there is something else. The marks
    may stand in a value too, if it does not look like its end and another beginning."""
    text = text.strip()
    if not text:
        return {}
    if not text.startswith(opens) or not text.endswith(closes):
        return None
    pairs = {}
    for part in re.split(rf"{closes}\s*{opens}", text.removeprefix(opens).removesuffix(closes)):
        key, ends, value = part.partition(ends_key)
        value = value if not begins_value else value.lstrip()
        if not ends or not value.startswith(begins_value):
            return None
        pairs[key.strip()] = value.removeprefix(begins_value)
    return pairs


def _deepseek_call(text: str) -> Call | None:
    head, _, rest = text.partition("<｜tool▁sep｜>")
    name, has_block, block = rest.partition("\n```json\n")
    return _call(name, _json(block.strip().removesuffix("```"))) if has_block else _call(head, _json(rest))


def _gemma_call(text: str) -> Call | None:
    match = re.fullmatch(r"call:([^{\s]+)(\{.*\})\s*", text, re.DOTALL)
    if match is None:
        return None
    # Every other piece is a text; the rest is JSON, but for the keys' quotes.
    pieces = match[2].split('<|"|>')
    pieces[::2] = [_KEY.sub(lambda key: f"{key[1]}{json.dumps(key[2].strip())}:", p) for p in pieces[::2]]
    pieces[::2] = [re.sub(r"(?<=[:\[,])None\b", "null", piece) for piece in pieces[::2]]
    pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
    return _call(match[1], _json("".join(pieces)))


def _python_calls(text: str) -> Iterator[Call | None]:
    try:
        with warnings.catch_warnings(action="ignore"):  # a backslash in a text may begin no escape
            # Some templates leave line ends in texts as they are.
            calls = ast.parse(text.strip().replace("\n", "\\n"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        calls = None
    yield from map(_python_call, calls.elts) if isinstance(calls, ast.List) else [None]


def _python_call(node: ast.expr) -> Call | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    try:
        arguments = {pair.arg: ast.literal_eval(_JsonNames().visit(pair.value)) for pair in node.keywords}
        return _call(ast.unparse(node.func), json.loads(json.dumps(arguments)))
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None  # no literals, or `**arguments`


class _JsonNames(ast.NodeTransformer):
    """Gives the names of JSON their values: templates write lists and mappings as JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


_KEY = re.compile(r"([{,])(\s*[^{}\[\],:\s][^{}\[\],:]*):")
_BROKEN = object()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _BROKEN
