"""The order in which an epoch visits rows: as they stand, at random, or by the shares of a mixture."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import datasets
import torch
from torch import Tensor

from colocate.options.values import shown

SOURCE_COLUMN = "dataset"
"""The column of a mixture that names the dataset of each row."""
_SMALLEST_WEIGHT = 1e-6
"""The least weight: as an epoch has a row of each dataset, it has 1 / weight rows."""


class RowOrder(Protocol):
    """Which rows of a dataset an epoch visits, and in which order."""

    @property
    def num_rows(self) -> int:
        """The rows of each epoch."""
        ...

    def epoch(self, number: int) -> Tensor:
        """The indices of the rows that an epoch visits, int64 of shape [num_rows]."""
        ...


class InOrder:
    """Every epoch visits the rows as they stand."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def epoch(self, number: int) -> Tensor:
        """The numbers from 0 to `num_rows`."""
        return torch.arange(self.num_rows)


class Shuffled:
    """Every epoch visits all rows in a random order of its own: that of TRL's sampler for the same seed."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self._seed = seed
        self._generator = torch.Generator()
        self._num_drawn = 0

    def epoch(self, number: int) -> Tensor:
        """A permutation of the rows.

        One generator draws the permutations one after another, so those of earlier epochs are drawn first
        (about 10 ms per million rows); their prompts are not read.
        """
        if self._num_drawn > number or self._num_drawn == 0:
            self._generator.manual_seed(self._seed)
            self._num_drawn = 0
        while self._num_drawn <= number:
            order = torch.randperm(self.num_rows, generator=self._generator)
            self._num_drawn += 1
        return order


class Mixed:
    """Every epoch visits the rows of several datasets in fixed shares.

    The shares hold throughout and not only on average: the k-th of a dataset's c rows in an epoch stands at
    (k + 1/2) / c of it, which is the order in which Sainte-Laguë's method gives out seats. An epoch ends
    where the first dataset is used up, as with TRL's mixtures. The next epoch goes on in the others where
    this one stopped, so each row of each dataset is visited once before any of that dataset is visited again.

    Args:
        sources: the name of each row's dataset.
        weights: the share of each dataset by its name; the shares sum to 1.
        shuffle: whether each pass over a dataset has a random order of its own.

    Raises:
        ValueError: `check_weights`; or rows of a dataset without a weight, or a weight without rows.
    """

    def __init__(
        self, sources: Sequence[str], weights: Mapping[str, float], *, shuffle: bool, seed: int
    ) -> None:
        check_weights(weights)
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(sources):
            rows.setdefault(name, []).append(row)
        if rows.keys() != weights.keys():
            raise ValueError(
                f"dataset_weights={shown(dict(weights))} names {shown(sorted(weights))}, but the column "
                f"{SOURCE_COLUMN!r} of the training data has {shown(sorted(rows))}. Give each of these one "
                "weight."
            )
        self._rows = {name: torch.tensor(rows[name]) for name in weights}
        used_up = min(len(rows[name]) / weight for name, weight in weights.items())
        # However small its share, each dataset has a row in each epoch.
        total = max(used_up, 1 / min(weights.values()))
        self._counts = {name: max(1, round(weight * total)) for name, weight in weights.items()}
        self._shuffle, self._seed = shuffle, seed
        places = [(torch.arange(count) + 0.5) / count for count in map(float, self._counts.values())]
        self._sorted = torch.cat([place.double() for place in places]).argsort(stable=True)

    @property
    def num_rows(self) -> int:
        """The rows of an epoch, over all datasets."""
        return sum(self._counts.values())

    def epoch(self, number: int) -> Tensor:
        """The indices of the rows; where a small dataset is visited more than once, some occur repeatedly."""
        drawn = [self._drawn(name, number * count, count) for name, count in self._counts.items()]
        return torch.cat(drawn)[self._sorted]

    def _drawn(self, name: str, start: int, count: int) -> Tensor:
        """Rows `start` to `start + count` of the endless passes over a dataset."""
        rows = self._rows[name]
        first, last = start // len(rows), -(-(start + count) // len(rows))
        passes = torch.cat([rows[self._pass(name, number)] for number in range(first, last)])
        return passes[start - first * len(rows) :][:count]

    def _pass(self, name: str, number: int) -> Tensor:
        """The order of one pass over a dataset. It depends on the dataset's name and on no other dataset."""
        size = len(self._rows[name])
        if not self._shuffle:
            return torch.arange(size)
        digest = hashlib.blake2b(f"{self._seed} {number} {name}".encode(), digest_size=7).digest()
        return torch.randperm(size, generator=torch.Generator().manual_seed(int.from_bytes(digest)))


def check_weights(weights: Mapping[str, Any]) -> None:
    """Refuse weights that are no shares.

    Raises:
        ValueError: a weight is no number of at least 1e-6, or the weights do not sum to 1; with the sum.
    """
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight <= 0:
            raise ValueError(
                f"The dataset {name!r} has weight={shown(weight)}, but a weight is the dataset's share of "
                "the prompts: a number above 0. Leave out a dataset that is not to be trained on."
            )
        if weight < _SMALLEST_WEIGHT:
            raise ValueError(
                f"The dataset {name!r} has weight={shown(weight)}, one prompt in {1 / weight:.3g}: a "
                f"share is at least {_SMALLEST_WEIGHT:g}. Raise it, or leave the dataset out."
            )
    total = sum(weights.values())
    if abs(total - 1) > 1e-6:
        in_ratio = ", ".join(f"{name}: {weight / total:.4g}" for name, weight in weights.items())
        raise ValueError(
            "The weights of the datasets must sum to 1, but "
            f"{' + '.join(f'{w:g}' for w in weights.values())} = {total:g}. In the same ratio they are "
            f"{in_ratio}."
        )


def order_of(
    dataset: datasets.Dataset, weights: Mapping[str, float] | None, *, shuffle: bool, seed: int
) -> RowOrder:
    """The order of a dataset's rows.

    Args:
        weights: shares of the datasets that the column `SOURCE_COLUMN` names; None: the rows are one dataset.

    Raises:
        ValueError: there are weights and no such column; see `Mixed`.
    """
    if weights is None:
        return Shuffled(len(dataset), seed) if shuffle else InOrder(len(dataset))
    if SOURCE_COLUMN not in dataset.column_names:
        raise ValueError(
            f"dataset_weights={shown(dict(weights))} needs the column {SOURCE_COLUMN!r}, with the name of "
            f"each row's dataset; the training data has {', '.join(map(repr, dataset.column_names))}."
        )
    return Mixed(dataset[SOURCE_COLUMN][:], weights, shuffle=shuffle, seed=seed)
