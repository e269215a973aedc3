"""A chat template for models whose own one knows nothing of tools."""

from __future__ import annotations

from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from colocate.episodes.renderer import Renderer

Tokenizer = TypeVar("Tokenizer", bound=PreTrainedTokenizerBase)

_REWRITE = r"""
{%- set asked = namespace(text="", messages=[], answers="") %}
{%- if tools %}
    {%- set asked.text = "You may call tools. Their signatures, one JSON object a line:\n<tools>" %}
    {%- for tool in tools %}{% set asked.text = asked.text + "\n" + (tool | tojson) %}{% endfor %}
    {%- set asked.text = asked.text + "\n</tools>\nTo call a tool, write its name and arguments as JSON:\n"
        + '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>' %}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content or "" %}
    {%- if message.role == "tool" %}
        {%- set asked.answers = asked.answers + ("\n" if asked.answers else "")
            + "<tool_response>\n" + (content if content is string else content | tojson)
            + "\n</tool_response>" %}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {%- set asked.messages = asked.messages + [{"role": "user", "content": asked.answers}] %}
            {%- set asked.answers = "" %}
        {%- endif %}
    {%- elif message.role == "assistant" and message.tool_calls %}
        {%- set turn = namespace(text=content) %}
        {%- for call in message.tool_calls %}
            {%- set turn.text = turn.text + ("\n" if turn.text else "") + '<tool_call>\n{"name": "'
                + call.function.name + '", "arguments": ' + (call.function.arguments | tojson)
                + "}\n</tool_call>" %}
        {%- endfor %}
        {%- set asked.messages = asked.messages + [{"role": "assistant", "content": turn.text}] %}
    {%- elif asked.text and message.role == FIRST %}
        {%- set asked.messages = asked.messages + [{"role": FIRST, "content": MERGED}] %}
        {%- set asked.text = "" %}
    {%- else %}
        {%- if asked.text and FIRST == "system" %}
            {%- set asked.messages = asked.messages + [{"role": "system", "content": asked.text}] %}
            {%- set asked.text = "" %}
        {%- endif %}
        {%- set asked.messages = asked.messages + [message] %}
    {%- endif %}
{%- endfor %}
{%- set messages = asked.messages %}
{%- set tools = none %}
"""
"""Makes plain messages of schemas, calls and answers, before the model's own template reads them."""


def add_tool_template(tokenizer: Tokenizer) -> Tokenizer:
    """Wrap a tokenizer's chat template into one that carries tools.

    Schemas become a part of the system message, or of the first user's message where the template refuses a
    system message. Calls become a part of the assistant's text, as Qwen 2.5 writes them, and answers a user's
    message. The model's own template then renders these messages with the marks that the model knows, so that
    no token is new and no embedding is resized. A model that has not been trained with tools has to learn the
    form of a call.

    Args:
        tokenizer: a tokenizer with a chat template; its template is replaced.

    Returns:
        The same tokenizer.

    Raises:
        ValueError: the tokenizer has no chat template, its template carries tools already, or it refuses a
            conversation in which user and assistant take turns.
    """
    own, refused = tokenizer.chat_template, _refusal(tokenizer)
    if refused is None:
        raise ValueError(f"The chat template of {tokenizer.name_or_path!r} carries tools already: keep it.")
    if not isinstance(own, str):  # none, or several by name
        raise refused
    merged = {"system": r'content + "\n\n" + asked.text', "user": r'asked.text + "\n\n" + content'}
    for role, text in merged.items():
        tokenizer.chat_template = _REWRITE.replace("FIRST", f'"{role}"').replace("MERGED", text).strip() + own
        refused = _refusal(tokenizer)
        if refused is None:
            return tokenizer
    tokenizer.chat_template = own
    raise refused


def _refusal(tokenizer: PreTrainedTokenizerBase) -> ValueError | None:
    """Why tools cannot be used with a tokenizer's chat template; None: they can."""
    try:
        Renderer(tokenizer).check_tools()
    except ValueError as error:
        return error
    return None
