"""The arguments of a script besides those of `GRPOConfig` and `ModelConfig`: which datasets to read.

Names, types and defaults are TRL's. Importing this file imports nothing slow.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from colocate.options.values import nearest, shown

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

TEST_SEED = 42
"""The seed that the rows of the split test are drawn with: every rank must draw the same. TRL has none."""
_INSTEAD = "Not read where `datasets` names a mixture."


def option(default: Any, text: str, **arguments: Any) -> Any:
    """A field with the help that the parser prints; `arguments` are further ones of `add_argument`."""
    return field(default=default, metadata={"help": text, **arguments})


@dataclass
class ScriptArguments:
    """The dataset of a script, which the script itself reads."""

    dataset_name: str | None = option(None, f"Path or name of the dataset. {_INSTEAD}")
    dataset_config: str | None = option(None, f"Configuration (subset) of the dataset. {_INSTEAD}")
    dataset_train_split: str = option("train", f"Split to train on. {_INSTEAD}")
    dataset_test_split: str = option("test", f"Split to evaluate on. {_INSTEAD}")
    dataset_streaming: bool = option(False, f"Read the dataset while training. {_INSTEAD}")
    ignore_bias_buffers: bool = option(
        False, "Not needed: gradients are reduced without DistributedDataParallel, which never sees a buffer."
    )

    def __post_init__(self) -> None:
        if self.ignore_bias_buffers:
            logger.warning(
                "ignore_bias_buffers=True is not needed: gradients are reduced without "
                "DistributedDataParallel, and buffers are never sent."
            )


@dataclass
class DatasetConfig:
    """A dataset of a mixture, as `datasets.load_dataset` reads it."""

    path: str
    """A dataset on the Hub, a file, a directory, or the name of a reader such as "json" for `data_files`."""
    name: str | None = None
    """Configuration (subset) of the dataset."""
    data_dir: str | None = None
    """Directory of the dataset's files below `path`."""
    data_files: str | list[str] | dict[str, str] | None = None
    """Files of the dataset, or files by split."""
    split: str = "train"
    """Split to read."""
    columns: list[str] | None = None
    """Columns to keep. None: all."""
    fraction: float | None = None
    """Share of this dataset in the mixture, divided by the sum of all shares. None in all datasets: each is
    taken whole."""


@dataclass
class DatasetMixtureConfig:
    """A mixture of datasets, for `get_dataset`.

    Raises:
        ValueError: an entry of `datasets` is no dataset, or has a key that `DatasetConfig` does not.
    """

    datasets: list[DatasetConfig] = field(
        default_factory=list,
        metadata={
            "help": "Datasets of the mixture: in a file, mappings with path, name, split, columns, fraction."
        },
    )
    streaming: bool = option(False, "Read the datasets while training.")
    test_split_size: float | None = option(
        None, "Share, or number, of the mixture's rows that become the split test. None: there is none."
    )

    def __post_init__(self) -> None:
        self.datasets = [_dataset_config(entry) for entry in self.datasets]


def _dataset_config(entry: Any) -> DatasetConfig:
    if isinstance(entry, DatasetConfig):
        return entry
    if not isinstance(entry, dict):
        raise ValueError(f"datasets has {shown(entry)}, which is no mapping; write `- path: NAME`.")
    known = [one.name for one in fields(DatasetConfig)]
    for key in entry:
        if key not in known:
            hint = nearest(str(key), known) or f"; it may have {', '.join(known)}"
            raise ValueError(f"datasets has {shown(entry)}, where {shown(key)} is no key{hint}.")
    if "path" not in entry:
        raise ValueError(f"datasets has {shown(entry)}, which has no path: add the dataset's name or path.")
    return DatasetConfig(**entry)


def get_dataset(
    mixture_config: DatasetMixtureConfig,
) -> datasets.DatasetDict | datasets.IterableDatasetDict:
    """The datasets of a mixture one after the other, as the split "train", and "test" if there is to be one.

    With fractions, the first rows of each dataset are taken, so many that the shares are as asked for and at
    least one dataset is used up.

    Raises:
        ValueError: there are no datasets; only some have a fraction; fractions that are negative or sum to 0;
            or a stream is to be cut or split.
        FileNotFoundError, ImportError: as `load_prompts`.
    """
    import datasets

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
    from colocate.data.loading import load_prompts

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
