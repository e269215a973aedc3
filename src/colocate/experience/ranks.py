"""The one place where the ranks of a run gather and exchange their parts of a rollout.

The completions of a rollout are numbered over all ranks, group after group: rank 0 has the first of them,
rank 1 the next, and so on. A group may span ranks.

    rank           0  0  0  0  0  0 │ 1  1  1  1  1  1
    completion     0  1  2  3  4  5 │ 6  7  8  9 10 11
    group (G = 4)  0  0  0  0  1  1 │ 1  1  2  2  2  2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor

from colocate.reporting.metrics import Metrics

Item = TypeVar("Item")


def of_all_ranks(local: list[Item]) -> list[Item]:
    """The items of all ranks, in the order of ranks; every rank gets them all."""
    return gather_object(local)


def own_part(sizes: Sequence[int], rank: int) -> slice:
    """The slice of a rank's items among those of all ranks; `sizes` has each rank's number."""
    first = sum(sizes[:rank])
    return slice(first, first + sizes[rank])


def by_group(local: list[Item], first: int, num_groups: int, num_generations: int) -> list[list[Item]]:
    """This rank's items, one per completion, in the groups of all ranks: of each group all, some or none.

    Args:
        first: number of this rank's first completion over all ranks.
        num_generations: completions in a group, G.
    """
    groups: list[list[Item]] = [[] for _ in range(num_groups)]
    for number, item in enumerate(local, start=first):
        groups[number // num_generations].append(item)
    return groups


def exchanged(flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """The elements that all ranks have for this one, in the order of ranks.

    Args:
        flat: what this rank has for all, in the order of ranks.
        sent: the number of elements for each rank.
        received: the number of elements from each rank.
    """
    result = flat.new_empty(sum(received))
    dist.all_to_all_single(result, flat, list(received), list(sent))
    return result


def totals(metrics: Metrics) -> dict[str, float]:
    """The metrics over all ranks, from the totals and counts of each."""
    total = Metrics()
    for part in of_all_ranks([metrics.to_host()]):
        total.merge(part)
    return total.compute()


def means(parts: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """The mean of each metric over the ranks that have it."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, own in part.items():
            values.setdefault(name, []).extend(own)
    return {name: sum(own) / len(own) for name, own in values.items() if own}


def columns(parts: Sequence[dict[str, list[Any]]], sizes: Sequence[int]) -> dict[str, list[Any]]:
    """The columns of all ranks' rows; a rank that lacks a column has None in each of its rows.

    Args:
        sizes: the number of rows of each rank.
    """
    names = sorted({name for part in parts for name in part})
    return {
        name: [
            value for part, size in zip(parts, sizes, strict=True) for value in part.get(name, [None] * size)
        ]
        for name in names
    }
