"""Reads a mixture of datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets

from colocate.data.loading import load_prompts
from colocate.options.values import shown
from colocate.trl.scripts.arguments import DatasetConfig, DatasetMixtureConfig

TEST_SEED = 42
"""The seed that the rows of the split test are drawn with: every rank must draw the same. TRL has none."""


def get_dataset(
    mixture_config: DatasetMixtureConfig,
) -> datasets.DatasetDict | datasets.IterableDatasetDict:
    """The datasets of a mixture one after the other, as the split "train", and "test" if there is to be one.

    With fractions, the first rows of each dataset are taken, as many that the shares are as asked for and one
    dataset, at least, is used up.

    Raises:
        ValueError: there are no datasets; only some have a fraction; fractions that are negative or sum to 0;
            or a stream is to be cut or split.
        FileNotFoundError, ImportError: as `load_prompts`.
    """
    entries = mixture_config.datasets
    if not entries:
        raise ValueError("The mixture has no datasets: add `datasets`, with the path of each.")
    weights = _weights(entries)
    if mixture_config.streaming:
        _refuse_for_streams(mixture_config)
    parts = [_load(entry, mixture_config.streaming) for entry in entries]
    if weights is not None:
        total = min(len(part) / weight for part, weight in zip(parts, weights, strict=True) if weight)
        parts = [
            part.select(range(round(weight * total))) for part, weight in zip(parts, weights, strict=True)
        ]
    mixture = datasets.concatenate_datasets(parts)
    if mixture_config.test_split_size is not None:
        return mixture.train_test_split(test_size=mixture_config.test_split_size, seed=TEST_SEED)
    kind: Any = datasets.IterableDatasetDict if mixture_config.streaming else datasets.DatasetDict
    return kind({"train": mixture})


def _load(entry: DatasetConfig, streaming: bool) -> Any:
    options = {name: value for name in ("data_dir", "data_files") if (value := getattr(entry, name))}
    if streaming:
        options["streaming"] = True
    dataset = load_prompts(entry.path, config=entry.name, split=entry.split, **options)
    return dataset if entry.columns is None else dataset.select_columns(entry.columns)


def _weights(entries: Sequence[DatasetConfig]) -> list[float] | None:
    """The share of each dataset in the mixture, with sum 1; None: each is taken whole."""
    fractions = [entry.fraction for entry in entries if entry.fraction is not None]
    if not fractions:
        return None
    if len(fractions) < len(entries):
        without = [entry.path for entry in entries if entry.fraction is None]
        raise ValueError(
            f"Set fraction for all datasets of a mixture or for none of them: {shown(without)} has none."
        )
    if min(fractions) < 0 or sum(fractions) <= 0:
        raise ValueError(f"The fractions {shown(fractions)} are no shares: none is negative, one is above 0.")
    return [fraction / sum(fractions) for fraction in fractions]


def _refuse_for_streams(mixture_config: DatasetMixtureConfig) -> None:
    reason = "and how many rows a stream has is not known; set streaming=False"
    if any(entry.fraction is not None for entry in mixture_config.datasets):
        raise ValueError(f"fraction needs the number of rows of each dataset, {reason}.")
    if mixture_config.test_split_size is not None:
        size = shown(mixture_config.test_split_size)
        raise ValueError(f"test_split_size={size} needs the number of rows, {reason}.")
