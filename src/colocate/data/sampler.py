"""The order in which prompts are visited, and the ranks that complete them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import datasets

from colocate.data.order import RowOrder, order_of


@dataclass(frozen=True)
class PromptBatch:
    """The unique prompts of one generation batch."""

    rows: list[dict[str, Any]]
    keys: list[int]
    """Numbers of the prompts in the run: each is used once, and is equal on every rank and after a
    restart."""
    epoch: int
    row: int
    """Rows of its epoch that were drawn before this batch."""
    number: int
    """Number of this batch in the run."""


class PromptBatches(Iterator[PromptBatch]):
    """Generation batches in the order in which TRL visits prompts.

    A map-style dataset is permuted anew each epoch by one generator seeded once. An iterable dataset is
    shuffled in a buffer whose seed depends on the epoch. Every rank iterates over the same batches and
    completes its `rank_slice` of them.

    Args:
        dataset: A map-style or iterable dataset of prompt rows.
        num_prompts: Unique prompts per batch, generation_batch_size / num_generations.
        shuffle: Visit the rows in random order.
        seed: Seed of the order: equal seeds give equal orders.
        num_epochs: Passes over the dataset until the iteration stops; None never stops it.
        drop_last: Leave out an epoch's last batch when it is incomplete: True to train, False to evaluate.
        weights: Shares of the datasets of a mixture (`order.Mixed`); None: the rows are one dataset.

    Raises:
        ValueError: `num_prompts` is not positive, an epoch has no batch, or the weights do not fit the rows.
    """

    def __init__(
        self,
        dataset: datasets.Dataset | datasets.IterableDataset,
        num_prompts: int,
        *,
        shuffle: bool = True,
        seed: int = 42,
        num_epochs: int | None = None,
        drop_last: bool = True,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}: a batch needs at least one prompt.")
        self.num_prompts = num_prompts
        self.num_epochs = num_epochs
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._is_stream = isinstance(dataset, datasets.IterableDataset)
        self._dataset = dataset.shuffle(seed=seed) if self._is_stream and shuffle else dataset
        self._epoch = self._row = self._number = self._key = 0
        self._rows: Iterator[dict[str, Any]] | None = None  # what is left of the epoch; None: not opened
        self._ahead: deque[PromptBatch] = deque()  # drawn by `peek`, and not taken yet
        self._weights = None if weights is None else dict(weights)
        self._order: RowOrder | None = None
        if not self._is_stream:
            self._order = order_of(self._dataset, weights, shuffle=shuffle, seed=seed)
            if self.num_batches_per_epoch == 0:
                raise self._no_batch(self._order.num_rows)
        elif weights is not None:
            raise ValueError(
                f"dataset_weights={self._weights} needs datasets with a length, and the training data is a "
                "stream: load it without streaming."
            )

    @property
    def num_batches_per_epoch(self) -> int | None:
        """Batches in one pass over the dataset; None for an iterable dataset, which ends when it ends."""
        if self._order is None:
            return None
        num_full, rest = divmod(self._order.num_rows, self.num_prompts)
        return num_full + (rest > 0 and not self._drop_last)

    def __next__(self) -> PromptBatch:
        return self._ahead.popleft() if self._ahead else self.take(self.num_prompts)

    def peek(self, number: int) -> list[PromptBatch]:
        """The next `number` batches, which stay to be taken."""
        while len(self._ahead) < number:
            self._ahead.append(self.take(self.num_prompts))
        return list(self._ahead)[:number]

    def take(self, num_prompts: int, at_least: int | None = None, multiple_of: int = 1) -> PromptBatch:
        """A batch of another size. An epoch's last rows are left out if they are too few for it.

        Args:
            at_least: prompts that suffice where an epoch has no more; None: `num_prompts`.
            multiple_of: the number of prompts is a multiple of this, at an epoch's end as well.

        Raises:
            StopIteration: all epochs are over.
            ValueError: an epoch has fewer rows.
        """
        at_least = num_prompts if at_least is None else at_least
        while self.num_epochs is None or self._epoch < self.num_epochs:
            if self._rows is None:
                self._rows = self._open_epoch()
            rows = list(islice(self._rows, num_prompts))
            rows = rows[: len(rows) - len(rows) % multiple_of]
            if len(rows) >= at_least or (rows and not self._drop_last):
                keys = list(range(self._key, self._key + len(rows)))
                batch = PromptBatch(rows, keys, self._epoch, self._row, self._number)
                self._row += len(rows)
                self._key += len(rows)
                self._number += 1
                return batch
            if self._row == 0:
                raise self._no_batch(len(rows))
            self._rows = None
            self._epoch += 1
            self._row = 0
        raise StopIteration

    def state_dict(self, batch: PromptBatch | None = None) -> dict[str, Any]:
        """The position from which `batch` comes next; by default that of the first batch not yet taken."""
        batch = self._ahead[0] if batch is None and self._ahead else batch
        epoch, row, number, key = (
            (self._epoch, self._row, self._number, self._key)
            if batch is None
            else (batch.epoch, batch.row, batch.number, batch.keys[0])
        )
        return {"epoch": epoch, "row": row, "number": number, "key": key, **self._schedule()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position of `state_dict`.

        An iterable dataset is read up to that position of its epoch, and those rows are dropped.

        Raises:
            ValueError: the position belongs to another order of prompts.
        """
        for name, value in self._schedule().items():
            if state.get(name) != value:
                raise ValueError(
                    f"The checkpoint's position in the data was taken with {name}={state.get(name)}, but "
                    f"this run has {value}: the prompts already seen cannot be told. Resume with the same "
                    "dataset, weights, generation_batch_size / num_generations, shuffle_dataset and seed."
                )
        self._epoch, self._row = state["epoch"], state["row"]
        self._number, self._key = state["number"], state["key"]
        self._rows = None
        self._ahead.clear()

    def _schedule(self) -> dict[str, Any]:
        num_rows = None if self._is_stream else len(self._dataset)
        return {
            "num_prompts": self.num_prompts,
            "num_rows": num_rows,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "weights": self._weights,  # not in checkpoints from before there were mixtures
        }

    def _open_epoch(self) -> Iterator[dict[str, Any]]:
        if self._order is None:
            self._dataset.set_epoch(self._epoch)
            return islice(iter(self._dataset), self._row, None)
        return (self._dataset[int(i)] for i in self._order.epoch(self._epoch)[self._row :])

    def _no_batch(self, num_rows: int) -> ValueError:
        return ValueError(
            f"The dataset has {num_rows} prompts, but a generation batch needs {self.num_prompts} "
            "(generation_batch_size / num_generations): no epoch would have a batch. "
            "Use a larger dataset or a smaller batch."
        )


def rank_slice(num_prompts: int, num_generations: int, rank: int, world_size: int) -> list[tuple[int, range]]:
    """The members of each group that a rank completes.

    The flat list of completions, each prompt's group of G in turn, is cut into `world_size` equal consecutive
    parts, as TRL's data loader does; a group may span ranks.

    Returns:
        (index of the prompt, members of its group) for each prompt of which the rank completes some, in
        order.

    Raises:
        ValueError: the completions cannot be divided equally.
    """
    total = num_prompts * num_generations
    if total % world_size:
        raise ValueError(
            f"{num_prompts} prompts x {num_generations} generations = {total} completions cannot be divided "
            f"equally among {world_size} processes. Choose a generation_batch_size that {world_size} divides."
        )
    start, stop = total // world_size * rank, total // world_size * (rank + 1)
    return [
        (prompt, range(max(start - first, 0), min(stop - first, num_generations)))
        for prompt in range(start // num_generations, -(-stop // num_generations))
        for first in [prompt * num_generations]
    ]
