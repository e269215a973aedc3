"""Packing: every sequence once, within the budget, the same bins every time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocate.data.packing import pack, pack_padded

lengths = st.lists(st.integers(1, 50), max_size=40)


def padded_size(items: list[int]) -> int:
    return len(items) * max(items)


@pytest.mark.parametrize(("packer", "size"), [(pack, sum), (pack_padded, padded_size)])
@given(lengths=lengths, budget=st.integers(1, 120))
def test_bins_hold_every_sequence_once_within_the_budget(packer, size, lengths, budget):
    bins = packer(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    for members in bins:
        assert size([lengths[i] for i in members]) <= budget or len(members) == 1


@given(lengths=lengths, budget=st.integers(50, 120))
def test_first_fit_leaves_no_two_bins_that_would_fit_together(lengths, budget):
    totals = sorted(sum(lengths[i] for i in b) for b in pack(lengths, budget))
    assert len(totals) < 2 or totals[0] + totals[1] > budget


def test_longest_first_into_the_first_bin_with_room():
    assert pack([3, 7, 5, 5, 2], 10) == [[1, 0], [2, 3], [4]]


def test_padding_counts():
    # Sums would allow [8, 1, 1] in 10 tokens; padded that is 24.
    assert pack_padded([8, 1, 1], 10) == [[0], [1, 2]]


@pytest.mark.parametrize("packer", [pack, pack_padded])
def test_empty_and_bad_budget(packer):
    assert packer([], 8) == []
    with pytest.raises(ValueError, match="token_budget=0"):
        packer([1], 0)
