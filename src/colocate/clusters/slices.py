"""Cuts a cluster's bundles into slices, one for each replica of an engine: arithmetic, without Ray."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Slice(NamedTuple):
    """The bundles of one replica, all on one node."""

    node: Hashable
    """The node, as the tables name it."""
    bundles: tuple[tuple[int, int], ...]
    """For each GPU the number of its placement group and of its bundle there, in rising order."""


def cut(tables: Sequence[Sequence[Hashable]], size: int, count: int, kind: str = "GPU") -> list[Slice]:
    """Cut `count` slices of `size` bundles, none of which crosses a node or has a bundle of another one.

    A replica with tensor parallelism of `size` needs one slice, one that is data-parallel as well needs as
    many as it has copies. Nodes may be of different sizes, and several groups may be on one node: the bundles
    of a node are counted together, and what is left of it is passed over.

    Args:
        tables: for each placement group the node of each bundle, by the bundle's number
            (`placement_group_table(group)["bundles_to_node_id"]`).
        size: bundles of a slice; at least 1.
        count: slices; at least 1.
        kind: what a bundle has one of, for messages.

    Returns:
        The slices, node by node as the nodes first appear in the tables.

    Raises:
        ValueError: there are not so many; the message has the arithmetic.
    """
    found: dict[Hashable, list[tuple[int, int]]] = {}
    for group, table in enumerate(tables):
        for bundle, node in enumerate(table):
            found.setdefault(node, []).append((group, bundle))
    slices = [
        Slice(node, tuple(bundles[first : first + size]))
        for node, bundles in found.items()
        for first in range(0, len(bundles) - size + 1, size)
    ]
    if len(slices) < count:
        sizes = [len(bundles) for bundles in found.values()]
        fitting = " + ".join(str(number // size) for number in sizes) or "0"
        raise ValueError(
            f"asked {count} replicas of {size} {kind}s each, and the nodes have "
            f"{' + '.join(map(str, sizes)) or 'none'}: {fitting} = {len(slices)} fit, as none crosses a node"
        )
    return slices[:count]
