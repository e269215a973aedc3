"""The work items of shared prefixes: every page of every row's prefix in exactly one of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colocate.kernels.decode import prefixes as prefixes_module
from colocate.kernels.decode.prefixes import NUM_ITEM_FIELDS, SharedPrefixes

PAGE_SIZE = 64
MAX_NUM_SEQS = 96


@st.composite
def batches(draw):
    """Groups over distinct rows of a batch, in any order, some rows in none."""
    rows = draw(st.permutations(range(MAX_NUM_SEQS)))
    groups = []
    for size in draw(st.lists(st.integers(0, 40), max_size=40)):
        if size <= len(rows):
            groups.append((rows[:size], draw(st.sampled_from([0, 1, 7, 8, 9, 30, 64, 500]))))
            rows = rows[size:]
    return groups


@given(
    groups=batches(), heads=st.sampled_from([(1, 1), (12, 2), (28, 4), (64, 8), (64, 1), (40, 1), (300, 300)])
)
def test_items_cover_each_prefix_once(groups, heads):
    num_heads, num_kv_heads = heads
    prefixes = SharedPrefixes(
        max_num_seqs=MAX_NUM_SEQS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        page_size=PAGE_SIZE,
        device=torch.device("cpu"),
    )
    prefixes.update([([0, 1], 500)])
    is_shared = prefixes.would_share(groups)
    num_items = prefixes.update(groups)
    assert is_shared == (num_items > 0)
    assert num_items == prefixes.num_items.item() <= len(prefixes.items)
    fills_device = sum(len(rows) for rows, _ in groups) * num_kv_heads > 264 - 264 % num_kv_heads
    group_of = {row: number for number, (rows, _) in enumerate(groups) for row in rows}
    pages_read = [[] for _ in range(MAX_NUM_SEQS)]
    slots = [[] for _ in range(MAX_NUM_SEQS)]
    for first_page, end_page, first_slot, slot_stride, *rows in prefixes.items[:num_items].tolist():
        rows = [row for row in rows if row >= 0]
        assert len({group_of[row] for row in rows}) == 1 and len(rows) * (num_heads // num_kv_heads) <= 64
        assert end_page > first_page
        for number, row in enumerate(rows):
            pages_read[row] += range(first_page, end_page)
            slots[row].append(first_slot + number * slot_stride)
    for row in range(MAX_NUM_SEQS):
        num_tokens, first, num_partials = (
            tensor[row].item()
            for tensor in (prefixes.prefix_lens, prefixes.first_slots, prefixes.num_partials)
        )
        assert pages_read[row] == list(range(num_tokens // PAGE_SIZE)) and num_tokens % PAGE_SIZE == 0
        assert slots[row] == list(range(first, first + num_partials) if num_partials else [])
        rows, num_shared = groups[group_of[row]] if row in group_of else ([], 0)
        is_worth_it = len(rows) > 1 and num_shared * PAGE_SIZE >= (256 if fills_device else 1024)
        is_worth_it = is_worth_it and num_heads // num_kv_heads <= 32
        assert num_tokens == (num_shared * PAGE_SIZE if is_worth_it else 0)
        assert num_partials <= prefixes_module.MAX_PARTIALS
    used = [slot for per_row in slots for slot in per_row]
    assert len(used) == len(set(used)) and max(used, default=-1) < prefixes.num_slots
    assert (prefixes.items[:num_items, NUM_ITEM_FIELDS] >= 0).all()


def test_long_prompts_of_few_groups_occupy_the_device_once():
    """16 prompts of 4,096 tokens times 16: as many items as there are programs, in one round."""
    prefixes = SharedPrefixes(
        max_num_seqs=256, num_heads=12, num_kv_heads=2, page_size=PAGE_SIZE, device=torch.device("cpu")
    )
    rows = np.arange(256).reshape(16, 16)
    num_programs = 2 * prefixes.update([(group.tolist(), 64) for group in rows])
    assert 0.9 * prefixes_module.TARGET_PROGRAMS < num_programs <= prefixes_module.TARGET_PROGRAMS


def test_a_row_in_two_groups_is_noticed():
    prefixes = SharedPrefixes(
        max_num_seqs=4, num_heads=4, num_kv_heads=2, page_size=PAGE_SIZE, device=torch.device("cpu")
    )
    with pytest.raises(AssertionError, match="more than one group"):
        prefixes.update([([0, 1], 100), ([1, 2], 100)])
