"""A chat of random words with a tool: tokenizer, template, environment and rows, alike for every library."""

from __future__ import annotations

import asyncio
from typing import Any

from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from benchmarks.common.random_model import SPECIAL
from benchmarks.episodes.cases import Turns
from benchmarks.rollout.cases import SHAPES, TOKEN_RANGE, Case
from benchmarks.step.cases import Work

TOOL = "look_up"
CALL = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{}}}}\n</tool_call>'
"""A call of the tool, as the template writes it: one token."""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEMPLATE = (
    "{% if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<eos>\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""In the manner of Qwen 2.5's: it only ever appends, and has no place for reasoning."""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}
"""How transformers parses a turn: as TRL has it for Qwen 2.5 and 3, but for the marks."""


def make_chat_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """The benchmarks' tokenizer of words with marks for a chat, which stand in the place of a few words."""
    marks = [*ROLES, CALL]
    assert len(SPECIAL) + len(marks) <= TOKEN_RANGE[model][0], "prompts have none of these words"
    names = [*SPECIAL, *marks]
    size = SHAPES[model]["vocab_size"]
    words = {f"w{i}" if i >= len(names) else names[i]: i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    special = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL, strict=True))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    made.chat_template, made.response_template = TEMPLATE, RESPONSE_TEMPLATE
    return made


def words(token_ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in token_ids)


def make_environment(model: str, turns: Turns) -> type:
    """An environment class with an async tool, which takes `tool_s` seconds: an attribute of the class."""
    # Around an answer the template puts its role, the stop token and the next turn's role.
    answer = words(turns.answer(model, 0)[3:])

    class Library:
        tool_s = 0.0

        def reset(self, **row: Any) -> None:
            """There is nothing to forget."""

        async def look_up(self) -> str:
            """Look up what is known.

            Returns:
                What is known.
            """
            await asyncio.sleep(self.tool_s)
            return answer

    return Library


def rows(work: Work, tokenizer: PreTrainedTokenizerFast, environment: type, num_rows: int) -> Dataset:
    """Conversations of one message of random words, each as many tokens as the work says, the tool's schema
    among them.

    Raises:
        ValueError: the schema leaves no room for words.
    """
    schemas = [get_json_schema(getattr(environment(), TOOL))]

    def conversation(token_ids: list[int]) -> list[dict[str, str]]:
        return [{"role": "user", "content": words(token_ids)}]

    def num_tokens(message: list[dict[str, str]]) -> int:
        text = tokenizer.apply_chat_template(
            message, tools=schemas, add_generation_prompt=True, tokenize=False
        )
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    room = work.prompt_tokens - num_tokens(conversation([]))
    if room < 1:
        raise ValueError(f"A prompt of {work.prompt_tokens} tokens has no room beside the tool's schema.")
    prompts = [conversation(ids) for ids in Case(work.model, num_rows, 1, room, 1).prompts()]
    assert num_tokens(prompts[0]) == work.prompt_tokens
    return Dataset.from_dict({"prompt": prompts})
