"""The rows of a run as PyTorch data loaders, for scripts that look at them. The training loop does not read
them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeAlias

import datasets
from torch.utils.data import DataLoader, IterableDataset, Sampler

from colocate.config.grpo_config import GRPOConfig
from colocate.data.sampler import PromptBatches, rank_slice

Dataset: TypeAlias = datasets.Dataset | datasets.IterableDataset


def train_loader(dataset: Dataset, args: GRPOConfig) -> DataLoader:
    """The rows of this rank in each generation batch, one per completion, `steps_per_generation` x
    `num_iterations` times in a row, as in TRL. One iteration over the loader is one epoch of the run."""
    if isinstance(dataset, datasets.IterableDataset):
        return DataLoader(_Stream(_Shares(dataset, args)), batch_size=None)
    shares = _Shares(range(len(dataset)), args)
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=shares,
        num_workers=args.dataloader_num_workers,
        collate_fn=list,
    )


def eval_loader(dataset: Dataset, args: GRPOConfig) -> DataLoader:
    """Held-out rows in order, each repeated `num_generations_eval` times, in batches of `eval_batch_size`."""
    num_generations = args.num_generations_eval or args.num_generations
    assert num_generations is not None, "GRPOConfig derives it"
    if isinstance(dataset, datasets.IterableDataset):
        rows = _Stream(_Repeated(dataset, num_generations))
        return DataLoader(rows, batch_size=args.eval_batch_size, collate_fn=list)
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        sampler=[index for index in range(len(dataset)) for _ in range(num_generations)],
        batch_size=args.eval_batch_size,
        num_workers=args.dataloader_num_workers,
        collate_fn=list,
    )


class _Shares(Sampler):
    """The rows of each slice of an epoch, or their indices, as `source` has them."""

    def __init__(self, source: Any, args: GRPOConfig) -> None:
        self._args = args
        assert args.generation_batch_size and args.num_generations and args.steps_per_generation
        self._num_visits = args.steps_per_generation * args.num_iterations
        self._batches = PromptBatches(
            source,
            args.generation_batch_size // args.num_generations,
            shuffle=bool(args.shuffle_dataset),
            seed=args.seed if args.data_seed is None else args.data_seed,
        )
        self._position = self._batches.state_dict()

    def __len__(self) -> int:
        num_batches = self._batches.num_batches_per_epoch
        if num_batches is None:
            raise TypeError("An iterable dataset has no length: set max_steps, and count those.")
        return num_batches * self._num_visits

    def __iter__(self) -> Iterator[list[Any]]:
        args, batches = self._args, self._batches
        batches.load_state_dict(self._position)
        for batch in islice(batches, batches.num_batches_per_epoch):
            if batch.epoch != self._position["epoch"]:
                break
            share = rank_slice(len(batch.rows), args.num_generations, args.process_index, args.world_size)
            for _ in range(self._num_visits):
                yield [batch.rows[index] for index, members in share for _ in members]
        self._position = self._position | {"epoch": self._position["epoch"] + 1}


class _Repeated:
    def __init__(self, dataset: datasets.IterableDataset, times: int) -> None:
        self._dataset, self._times = dataset, times

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row for row in self._dataset for _ in range(self._times))


class _Stream(IterableDataset):
    """A stream of rows that only the process itself reads: each worker would read all of it again."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source)
