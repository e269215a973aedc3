"""Packing: every sequence once, within the budget, the same bins every time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from colocate.data.packing import pack, pack_padded
from colocate.policy.attention.pack import padded


def pack_alone(lengths: list[int], budget: int) -> list[list[int]]:
    """Sequences of which none shares its prompt."""
    return pack([[i] for i in range(len(lengths))], [1] * len(lengths), lengths, budget)


lengths = st.lists(st.integers(1, 50), max_size=40)


def padded_size(items: list[int]) -> int:
    return len(items) * max(items)


@pytest.mark.parametrize(("packer", "size"), [(pack_alone, sum), (pack_padded, padded_size)])
@given(lengths=lengths, budget=st.integers(1, 120))
def test_bins_hold_every_sequence_once_within_the_budget(packer, size, lengths, budget):
    bins = packer(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    for members in bins:
        assert size([lengths[i] for i in members]) <= budget or len(members) == 1


@given(lengths=lengths, budget=st.integers(50, 120))
def test_first_fit_leaves_no_two_bins_that_would_fit_together(lengths, budget):
    totals = sorted(sum(lengths[i] for i in b) for b in pack_alone(lengths, budget))
    assert len(totals) < 2 or totals[0] + totals[1] > budget


def test_longest_first_into_the_first_bin_with_room():
    assert pack_alone([3, 7, 5, 5, 2], 10) == [[1, 0], [2, 3], [4]]


def test_padding_counts():
    # Sums would allow [8, 1, 1] in 10 tokens; padded that is 24.
    assert pack_padded([8, 1, 1], 10) == [[0], [1, 2]]


@pytest.mark.parametrize("packer", [pack_alone, pack_padded])
def test_empty_and_bad_budget(packer):
    assert packer([], 8) == []
    with pytest.raises(ValueError, match="token_budget=0"):
        packer([1], 0)


@given(
    groups=st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), min_size=1, max_size=6))),
    budget=st.integers(50, 120),
)
def test_a_prompt_counts_once_for_the_part_of_its_group_in_a_bin(groups, budget):
    prompts = [prompt for prompt, completions in groups for _ in completions]
    lengths = [prompt + completion for prompt, completions in groups for completion in completions]
    numbers = iter(range(len(lengths)))
    members = [[next(numbers) for _ in completions] for _, completions in groups]
    bins = pack(members, prompts, lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    group_of = {i: n for n, group in enumerate(members) for i in group}
    for held in bins:
        shared = {group_of[i]: prompts[i] for i in held}
        assert sum(shared.values()) + sum(lengths[i] - prompts[i] for i in held) <= budget
    for (prompt, completions), group in zip(groups, members, strict=True):
        if prompt + sum(completions) <= budget:
            assert any(set(group) <= set(held) for held in bins)


class Operations(TorchDispatchMode):
    """Counts what a GPU would launch."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any), dtype=st.sampled_from("fi"))
def test_rows_are_padded_as_pytorch_pads_them_in_few_operations(lengths, dtype):
    kind = torch.float32 if dtype == "f" else torch.int64
    rows = list((torch.arange(sum(lengths), dtype=kind) + 1).requires_grad_(dtype == "f").split(lengths))
    with Operations() as operations:
        ours = padded(rows)
    assert ours.equal(pad_sequence(rows, batch_first=True))
    assert operations.count <= 12  # however many rows there are
    if dtype == "f":
        weights = torch.randn(ours.shape)
        (got,), (expected,) = (
            torch.autograd.grad((weights * x).sum(), [rows[0]], retain_graph=True)
            for x in (ours, pad_sequence(rows, batch_first=True))
        )
        assert got.equal(expected)
