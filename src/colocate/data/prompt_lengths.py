"""Leaves out rows whose prompts have too few or too many tokens, and counts them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from colocate.data.prompts import row_name, tokenize_prompts

_CHUNK_ROWS = 1000


def within_lengths(
    dataset: datasets.Dataset | datasets.IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[datasets.Dataset, str | None]:
    """The rows whose prompts have `min_tokens` to `max_tokens` tokens, chat template included.

    Args:
        name: what messages call the dataset.

    Returns:
        The dataset, and a sentence about the rows that are left out; None: there are none.

    Raises:
        ValueError: no row is left, the bounds exclude each other, or the dataset is a stream, whose rows
            cannot be counted.
    """
    low, high = min_tokens or 0, math.inf if max_tokens is None else max_tokens
    given = {"min_prompt_tokens": min_tokens, "max_prompt_tokens": max_tokens}
    bounds = ", ".join(f"{option}={value}" for option, value in given.items() if value is not None)
    if isinstance(dataset, datasets.IterableDataset):
        raise ValueError(
            f"{bounds} leaves out rows and counts them, but {name} is a stream, whose rows are not known. "
            "Load it without streaming."
        )
    if low > high:
        raise ValueError(f"{bounds}: no prompt has at least {low} and at most {high} tokens.")
    lengths = _lengths(dataset, tokenizer, name, chat_template_kwargs)
    reasons = {
        f"fewer than {low} tokens": sum(length < low for length in lengths),
        f"more than {high} tokens": sum(length > high for length in lengths),
    }
    num_left_out = sum(reasons.values())
    if num_left_out == len(lengths):
        raise ValueError(
            f"{bounds} leaves no row of {name}: its {len(lengths):,} prompts have {min(lengths):,} to "
            f"{max(lengths):,} tokens."
        )
    if not num_left_out:
        return dataset, None
    kept = [row for row, length in enumerate(lengths) if low <= length <= high]
    words = " and ".join(f"{count:,} with {reason}" for reason, count in reasons.items() if count)
    left_out = f"{num_left_out:,} of {len(lengths):,} prompts of {name}: {words}"
    return dataset.select(kept), left_out


def _lengths(
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[int]:
    """The tokens of each row's prompt."""
    lengths: list[int] = []
    for start in range(0, len(dataset), _CHUNK_ROWS):
        numbers = range(start, min(start + _CHUNK_ROWS, len(dataset)))
        names = [f"{name}: {row_name(number)}" for number in numbers]
        rows = dataset.select(numbers).to_list()
        ids = tokenize_prompts(rows, tokenizer, chat_template_kwargs=chat_template_kwargs, names=names)
        lengths += map(len, ids)
    return lengths
