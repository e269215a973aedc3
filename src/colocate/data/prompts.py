"""Rows of a dataset to prompt tokens, and completion tokens to what reward functions see.

A row's `prompt` is *standard*, a string, or *conversational*, a list of messages like
`{"role": "user", "content": "..."}`. Completions take the form of their prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

IMAGE_COLUMNS = ("image", "images")
# Keyword arguments of every reward function: a column of that name could not reach it.
RESERVED_COLUMNS = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")


def is_conversational(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return (
        isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]
    )


def validate_columns(dataset: datasets.Dataset | datasets.IterableDataset) -> None:
    """Refuse a dataset that cannot be trained on, before anything is loaded or allocated.

    Raises:
        ValueError: the dataset is empty, has no `prompt`, has images, or a column whose name is one of the
            reward functions' own arguments.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("The dataset is empty: it has no prompt to train on.")
    columns = list(first)
    if "prompt" not in columns:
        raise ValueError(
            f"The dataset has no column 'prompt'; it has {', '.join(map(repr, columns)) or 'none'}. "
            "Rename the one with the prompts: dataset.rename_column(<name>, 'prompt')."
        )
    if images := [name for name in IMAGE_COLUMNS if name in columns]:
        raise ValueError(
            f"The dataset has the column {images[0]!r}, but only text can be trained on. "
            f"If the prompts make sense without it, use dataset.remove_columns({images!r})."
        )
    if reserved := [name for name in RESERVED_COLUMNS if name in columns]:
        raise ValueError(
            f"The column {reserved[0]!r} has the name of an argument that every reward function receives. "
            f"Rename it: dataset.rename_column({reserved[0]!r}, <another name>)."
        )
    _check_prompt(first["prompt"])


def tokenize_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None,
) -> list[tuple[int, ...]]:
    """The token ids of each row's `prompt`, never padded.

    Conversational prompts go through the chat template with the generation prompt added. A row's own
    `chat_template_kwargs` column, if there is one, takes precedence over the run's.

    Args:
        max_prompt_length: Longer prompts keep their last `max_prompt_length` tokens, the generation prompt
            and the end of the question among them.

    Raises:
        ValueError: a prompt is empty or neither form, the tokenizer has no chat template for conversational
            prompts, or `max_prompt_length` is not positive.
    """
    if max_prompt_length is not None and max_prompt_length < 1:
        raise ValueError(
            f"max_prompt_length={max_prompt_length} would leave no token of the prompt; None keeps all."
        )
    token_ids = []
    for row in rows:
        prompt = row["prompt"]
        _check_prompt(prompt)
        if is_conversational(prompt):
            ids = _apply_chat_template(row, tokenizer, chat_template_kwargs or {})
        else:
            ids = tokenizer(text=prompt)["input_ids"]
        if not ids:
            raise ValueError(
                f"The prompt {prompt!r} has no tokens: a completion needs at least one to follow."
            )
        # The oldest tokens go, as with TRL's `max_prompt_length`: the question comes last.
        token_ids.append(tuple(ids if max_prompt_length is None else ids[-max_prompt_length:]))
    return token_ids


def _apply_chat_template(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]
) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError(
            "The dataset's prompts are conversations, but the tokenizer "
            f"{tokenizer.name_or_path!r} has no chat template. Pass a `processing_class` that has one, "
            "or give the prompts as strings."
        )
    # Arrow gives every row all the keys that any row has and fills in None; those were never set.
    own = {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
    encoded: Any = tokenizer.apply_chat_template(
        row["prompt"],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **{**chat_template_kwargs, **own},
    )
    return encoded["input_ids"]


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        return
    if not is_conversational(prompt):
        raise ValueError(
            "A prompt is a string or a non-empty list of messages like "
            f"{{'role': 'user', 'content': '...'}}; got {type(prompt).__name__}: {prompt!r:.200}"
        )
    for message in prompt:
        content = message.get("content")
        blocks = content if isinstance(content, list) else []
        if any(isinstance(block, Mapping) and block.get("type") not in (None, "text") for block in blocks):
            raise ValueError(
                f"A message has content other than text, which cannot be trained on: {message!r:.200}"
            )


def decode_completions(
    completion_ids: Sequence[Sequence[int]],
    prompts: Sequence[str | list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[str | list[dict[str, str]]]:
    """Completions in the form of their prompts: text, or one assistant message; special tokens left out.

    Args:
        completion_ids: N sequences of token ids, the stop token included or not.
        prompts: N prompts, one per completion.
    """
    texts = [str(tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in completion_ids]
    return [
        [{"role": "assistant", "content": text}] if is_conversational(prompt) else text
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def check_context_length(num_prompt_tokens: int, max_completion_length: int, context_length: int) -> None:
    """Raise a ValueError unless a prompt and the longest completion fit the model's context together."""
    total = num_prompt_tokens + max_completion_length
    if total <= context_length:
        return
    room = context_length - max_completion_length
    remedy = "max_completion_length" + (f", or max_prompt_length to at most {room}" if room > 0 else "")
    raise ValueError(
        f"A prompt of {num_prompt_tokens} tokens + max_completion_length={max_completion_length} = {total} "
        f"tokens, but the context holds {context_length}. Lower {remedy}."
    )
