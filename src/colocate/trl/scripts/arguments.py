"""The arguments of a script besides those of `GRPOConfig` and `ModelConfig`: which dataset to read.

Names, types and defaults are TRL's. Importing this file imports nothing slow.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import Any

from colocate.options.values import nearest, shown

logger = logging.getLogger(__name__)

_INSTEAD = "Not read where `datasets` names a mixture."


def told(text: str, **arguments: Any) -> dict[str, Any]:
    """The metadata of a field whose help the parser prints; `arguments` are further ones of `argparse`'s
    `add_argument`, such as `choices`."""
    return {"help": text, **arguments}


@dataclass
class ScriptArguments:
    """The dataset of a script, which the script itself reads."""

    dataset_name: str | None = field(default=None, metadata=told(f"Path or name of the dataset. {_INSTEAD}"))
    dataset_config: str | None = field(
        default=None, metadata=told(f"Configuration (subset) of the dataset. {_INSTEAD}")
    )
    dataset_train_split: str = field(default="train", metadata=told(f"Split to train on. {_INSTEAD}"))
    dataset_test_split: str = field(default="test", metadata=told(f"Split to evaluate on. {_INSTEAD}"))
    dataset_streaming: bool = field(
        default=False, metadata=told(f"Read the dataset while training. {_INSTEAD}")
    )
    ignore_bias_buffers: bool = field(
        default=False,
        metadata=told(
            "Not needed: gradients are reduced without DistributedDataParallel, which never sees a buffer."
        ),
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
        metadata=told(
            "Datasets of the mixture: in a file, mappings with path, name, split, columns, fraction."
        ),
    )
    streaming: bool = field(default=False, metadata=told("Read the datasets while training."))
    test_split_size: float | None = field(
        default=None,
        metadata=told(
            "Share, or number, of the mixture's rows that become the split test. None: there is none."
        ),
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
