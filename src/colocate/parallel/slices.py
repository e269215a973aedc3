"""Cuts a cluster's bundles into slices, one for each replica of an engine: arithmetic, without Ray."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Slice(NamedTuple):
    """The bundles of one replica."""

    node: Hashable
    """The node of the first, as the tables name it."""
    bundles: tuple[tuple[int, int], ...]
    """Each GPU's number of its placement group and of its bundle there, in rising order."""

    @property
    def by_group(self) -> dict[int, list[int]]:
        """The numbers of its bundles by the number of their placement group."""
        groups: dict[int, list[int]] = {}
        for group, bundle in self.bundles:
            groups.setdefault(group, []).append(bundle)
        return groups


def cut(
    tables: Sequence[Sequence[Hashable]],
    size: int,
    count: int,
    kind: str = "GPU",
    *,
    may_cross_nodes: bool = False,
) -> list[Slice]:
    """Cut `count` slices of `size` bundles each; none share a bundle.

    A replica with tensor parallelism of `size` needs one slice, one that is data-parallel as well needs as
    many as it has copies. Nodes may be of different sizes, and several groups may be on one node: the bundles
    of a node are counted together, and its left-over bundles are skipped.

    Args:
        tables: for each placement group the node of each bundle, by the bundle's number
            (`placement_group_table(group)["bundles_to_node_id"]`).
        size: bundles of a slice; at least 1.
        count: slices; at least 1.
        kind: the resource of which a bundle has one, for messages.
        may_cross_nodes: bundles are numbered through all groups, as ranks are, and a slice may continue on
            the next node. Else no slice crosses a node.

    Returns:
        The slices, node by node as the nodes first appear in the tables.

    Raises:
        ValueError: there are not so many; the message has the arithmetic.
    """
    found: dict[Hashable, list[tuple[int, int]]] = {}
    for group, table in enumerate(tables):
        for bundle, node in enumerate(table):
            found.setdefault(None if may_cross_nodes else node, []).append((group, bundle))
    cuts = [
        tuple(bundles[first : first + size])
        for bundles in found.values()
        for first in range(0, len(bundles) - size + 1, size)
    ]
    if len(cuts) < count:
        sizes = " + ".join(str(len(bundles)) for bundles in found.values()) or "none"
        fitting = " + ".join(str(len(bundles) // size) for bundles in found.values()) or "0"
        why = "" if may_cross_nodes else ", as none crosses a node"
        raise ValueError(
            f"asked {count} replicas of {size} {kind}s each, and the nodes have {sizes}: {fitting} = "
            f"{len(cuts)} fit{why}"
        )
    return [Slice(tables[own[0][0]][own[0][1]], own) for own in cuts[:count]]
