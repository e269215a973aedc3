"""Checks the datasets that a run trains and evaluates on before the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import datasets
from transformers import TrainingArguments

from colocate.data.prompts import as_conversations, validate_columns
from colocate.data.streams import settle_stream_options

TrainDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
EvalDataset: TypeAlias = TrainDataset | dict[str, TrainDataset]


def check_datasets(
    train_dataset: TrainDataset | None,
    eval_dataset: EvalDataset | None,
    args: TrainingArguments,
    *,
    apply_chat_template: bool = False,
    kept_columns: Sequence[str] = ("prompt",),
) -> tuple[TrainDataset, EvalDataset | None]:
    """Check both datasets, and return them with only the columns that reward functions are to see.

    Args:
        apply_chat_template: whether prompts that are strings become conversations.
        kept_columns: columns that `remove_unused_columns` keeps.

    Raises:
        ValueError: no training data, an empty dataset, no prompts, images, or evaluation without data.
    """
    if train_dataset is None:
        raise ValueError("`train_dataset` is required: a datasets.Dataset with a column 'prompt'.")
    if eval_dataset is None and (args.eval_strategy != "no" or args.eval_on_start):
        raise ValueError(
            f"eval_strategy={str(args.eval_strategy)!r}, but there is no eval_dataset: pass one, or set "
            "eval_strategy='no'."
        )

    settle_stream_options(args, train_dataset, evaluation_sets(eval_dataset).values())

    def checked(dataset: TrainDataset) -> TrainDataset:
        validate_columns(dataset)
        if args.remove_unused_columns:
            names = dataset.column_names or kept_columns
            dataset = dataset.select_columns([name for name in kept_columns if name in names])
        return as_conversations(dataset) if apply_chat_template else dataset

    if isinstance(eval_dataset, dict):
        return checked(train_dataset), {name: checked(part) for name, part in eval_dataset.items()}
    return checked(train_dataset), None if eval_dataset is None else checked(eval_dataset)


def evaluation_sets(eval_dataset: EvalDataset | None) -> dict[str, TrainDataset]:
    """The evaluation datasets by name; a single dataset has the name ""."""
    if eval_dataset is None:
        return {}
    return eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
