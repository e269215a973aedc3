"""Slices of a cluster's bundles, over nodes of any sizes: none crosses a node, none shares a bundle."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from colocate.parallel.slices import Slice, cut

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def groups_of(sizes: list[int]) -> list[list[str]]:
    """A placement group for each size, on a node of its own."""
    return [[f"node{number}"] * size for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([8, 4], [("node0", 0, range(4)), ("node0", 0, range(4, 8)), ("node1", 1, range(4))]),
        ([4, 8], [("node0", 0, range(4)), ("node1", 1, range(4)), ("node1", 1, range(4, 8))]),
        ([6, 6], [("node0", 0, range(4)), ("node1", 1, range(4))]),
    ],
)
def test_four_gpus_each_of_unequal_nodes(sizes, expected):
    found = cut(groups_of(sizes), size=4, count=len(expected))
    assert found == [
        Slice(node, tuple((group, bundle) for bundle in bundles)) for node, group, bundles in expected
    ]


@given(sizes=SIZES, size=st.integers(1, 9), order=st.randoms(use_true_random=False))
@example(sizes=[8, 4], size=4, order=None)
@example(sizes=[4, 8], size=4, order=None)
def test_every_slice_is_on_one_node_and_every_bundle_in_one_slice(sizes, size, order):
    """Also with groups of all nodes' bundles mixed, as Ray's strategy PACK may give them."""
    tables = groups_of(sizes)
    if order is not None:
        mixed = [node for table in tables for node in table]
        order.shuffle(mixed)
        middle = order.randint(0, len(mixed))
        tables = [mixed[:middle], mixed[middle:]]
    capacity = sum(number // size for number in sizes)
    for count in range(1, capacity + 1):
        found = cut(tables, size, count)
        assert len(found) == count
        bundles = [bundle for each in found for bundle in each.bundles]
        assert len(set(bundles)) == len(bundles) == count * size
        for each in found:
            assert {tables[group][bundle] for group, bundle in each.bundles} == {each.node}
    with pytest.raises(ValueError, match=f"= {capacity} fit, as none crosses a node"):
        cut(tables, size, capacity + 1)


def test_what_does_not_fit_is_told_with_the_arithmetic():
    told = "asked 4 replicas of 4 GPUs each, and the nodes have 8 + 4: 2 + 1 = 3 fit, as none crosses a node"
    with pytest.raises(ValueError) as raised:
        cut(groups_of([8, 4]), size=4, count=4)
    assert str(raised.value) == told
    with pytest.raises(ValueError, match=r"asked 1 replicas of 8 GPUs each, and the nodes have none: 0 = 0"):
        cut([], size=8, count=1)


def test_groups_on_one_node_are_cut_together():
    assert cut([["a"], ["b"], ["a"]], size=2, count=1) == [Slice("a", ((0, 0), (2, 0)))]


@pytest.mark.parametrize(
    ("sizes", "replica", "expected"),
    [
        ([8, 4], 2, {1: [0, 1, 2, 3]}),
        ([4, 8], 1, {1: [0, 1, 2, 3]}),
        ([4, 8], 2, {1: [4, 5, 6, 7]}),
        ([8, 8], 1, {0: [4, 5, 6, 7]}),
        ([6, 6], 1, {0: [4, 5], 1: [0, 1]}),
    ],
)
def test_slices_of_ranks_may_cross_nodes(sizes, replica, expected):
    found = cut(groups_of(sizes), 4, replica + 1, may_cross_nodes=True)[replica]
    assert found.by_group == expected and found.node == f"node{min(expected)}"


@given(sizes=SIZES, size=st.integers(1, 9))
def test_slices_that_may_cross_nodes_have_every_bundle_once_and_in_order(sizes, size):
    every = [(group, bundle) for group, count in enumerate(sizes) for bundle in range(count)]
    count = len(every) // size
    found = cut(groups_of(sizes), size, count, may_cross_nodes=True)
    assert [bundle for each in found for bundle in each.bundles] == every[: count * size]
    for each in found:
        assert tuple((group, b) for group, own in each.by_group.items() for b in own) == each.bundles
    with pytest.raises(ValueError, match=rf"have {len(every)}: {count} = {count} fit$"):
        cut(groups_of(sizes), size, count + 1, may_cross_nodes=True)
