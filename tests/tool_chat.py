"""A chat with tools, small enough for a model of characters."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerFast

from tiny import character_tokenizer

MARKS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that appends: what was written once stays."""


def make_chat_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per character, `<|im_end|>` as the stop token."""
    tokenizer = character_tokenizer(["<pad>", "<eos>", *MARKS], CHARACTERS, additional_special_tokens=MARKS)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def call(tool: str, /, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b
