"""Options that a dataset without a length needs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import datasets
from transformers import TrainingArguments

logger = logging.getLogger(__name__)


def settle_stream_options(args: TrainingArguments, train_dataset: Any, eval_datasets: Iterable[Any]) -> None:
    """Set in `args` the options that TRL sets for a `datasets.IterableDataset`, since scripts read them
    there.

    Raises:
        ValueError: `accelerator_config` asks for one process to read the stream for all processes.
    """
    if not any(isinstance(part, datasets.IterableDataset) for part in (train_dataset, *eval_datasets)):
        return
    config: Any = args.accelerator_config
    if config.dispatch_batches:
        raise ValueError(
            "Iterable datasets require `dispatch_batches=False`: every process reads the stream and takes "
            "its share of each group itself. Remove it from accelerator_config."
        )
    config.dispatch_batches = False
    if isinstance(train_dataset, datasets.IterableDataset) and args.dataloader_num_workers:
        logger.warning(
            f"Iterable datasets require `dataloader_num_workers=0`, not {args.dataloader_num_workers}: "
            "workers would each read the whole stream, and groups would be torn apart. It is now 0."
        )
        args.dataloader_num_workers = 0
