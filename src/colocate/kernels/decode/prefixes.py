"""Which rows of a decode batch share their first pages, as the work items of the shared-prefix kernel.

The completions of one prompt hold the same pages for it. Reading those pages once for several rows, instead
of once per row, divides their memory traffic by the number of rows; the price is a partial result per row,
written and read back in float32 (cascade or "prefix-shared" decode attention: Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PREFIX_QUERIES = 64
"""Query vectors that a program of the prefix kernel multiplies with a page: rows times heads per
key-value head. 64 is the height of the smallest warp-group matrix product of compute capability 9.0."""

TARGET_PROGRAMS = 2 * 132
"""Programs that keep an H200 busy: two on each of its 132 multiprocessors, one loading while one computes."""

MAX_PARTIALS = 16
"""Most pieces that the prefix of one row is cut into; its merge is a loop of that length."""

MIN_PIECE_TOKENS = 256
"""The shortest piece that is worth a partial result of its own: a row's piece of T tokens in a group of G
costs 4·T·D/G bytes of reads per key-value head and 8·D·R of partial result (bf16, R query heads per key-value
head)."""

MIN_SHARED_TOKENS = 256
"""Shorter prefixes are read by each row for itself: the rows of a group run next to each other, and the
second row to read a page finds it in the L2 cache. For them the prefix kernel would save only traffic between
that cache and the multiprocessors, which a batch too small to fill the multiprocessors has to spare: for such
a batch the shortest shared prefix is four times as long."""

NUM_ITEM_FIELDS = 4
"""Integers of a work item that precede its rows: first page, end page, first slot, slots from row to row."""


class SharedPrefixes:
    """Work items of the prefix kernel, in device tensors whose addresses never change.

    An item is a tile of rows of one group times a range of the pages they share. Its partial result for the
    i-th row of the tile goes to slot `first slot + i * slots from row to row`, so that a row's partial
    results lie next to each other. All tensors are int32; a captured graph reads them, whatever the last
    `update` put there.

    Args:
        max_num_seqs: rows of the largest batch.
        num_heads: H; it must be a multiple of `num_kv_heads`.
        num_kv_heads: K.
        page_size: tokens of a page.
        device: where the kernels run.
    """

    def __init__(
        self, *, max_num_seqs: int, num_heads: int, num_kv_heads: int, page_size: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.rows_per_tile = PREFIX_QUERIES // (num_heads // num_kv_heads)
        self.num_slots = num_prefix_slots(max_num_seqs, num_heads, num_kv_heads)
        self._max_num_seqs = max_num_seqs
        self._target_items = _target_items(num_kv_heads)
        # There are at most one tile per row, and as many more items as the cutting into pieces aims at.
        item_size = NUM_ITEM_FIELDS + self.rows_per_tile
        self._items_shape = (max_num_seqs + self._target_items, item_size)
        self._data = torch.zeros(
            4 + 3 * _padded(max_num_seqs) + self._items_shape[0] * item_size, dtype=torch.int32, device=device
        )
        (
            self.num_items,
            self.prefix_lens,
            self.first_slots,
            self.num_partials,
            self.items,
        ) = self._views(self._data)

    def _views(self, data: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Parts of `data`: number of items [1]; three of each row [max_num_seqs]; items [items, fields]."""
        rows = data[4 : 4 + 3 * _padded(self._max_num_seqs)].view(3, -1)[:, : self._max_num_seqs]
        items = data[-self._items_shape[0] * self._items_shape[1] :].view(self._items_shape)
        return data[:1], rows[0], rows[1], rows[2], items

    def update(self, rows_by_group: Sequence[tuple[Sequence[int], int]]) -> int:
        """Describe the groups of the batch to the kernels, in one copy that the host does not wait for.

        Args:
            rows_by_group: for each prompt, the rows of its completions (any indices, each in one group) and
                the number of full pages at the head of their block tables that are the same for all of them.
                A row that is not finished has at least that many pages of context.

        Returns:
            Number of work items. With 0, attention without prefixes computes the same.
        """
        is_pinned = self._data.device.type == "cuda"
        # Pinned memory comes from PyTorch's cache, which hands it out again only when the copy is done.
        staged = torch.zeros_like(self._data, device="cpu", pin_memory=is_pinned)
        num_items, *per_row, items = (view.numpy() for view in self._views(staged))
        tiles = self._tiles(rows_by_group)
        pieces = self._num_pieces(np.array([num_pages for _, num_pages in tiles]))
        item = slot = 0
        for (rows, num_pages), num_pieces in zip(tiles, pieces.tolist(), strict=True):
            bounds = num_pages * np.arange(num_pieces + 1) // num_pieces
            block = items[item : item + num_pieces]
            block[:, 0], block[:, 1] = bounds[:-1], bounds[1:]
            block[:, 2], block[:, 3] = slot + np.arange(num_pieces), num_pieces
            block[:, NUM_ITEM_FIELDS:] = -1
            block[:, NUM_ITEM_FIELDS : NUM_ITEM_FIELDS + len(rows)] = rows
            prefix_lens, first_slots, num_partials = per_row
            assert not prefix_lens[rows].any(), f"rows {rows.tolist()} are in more than one group"
            prefix_lens[rows] = num_pages * self.page_size
            first_slots[rows] = slot + num_pieces * np.arange(len(rows))
            num_partials[rows] = num_pieces
            item += num_pieces
            slot += num_pieces * len(rows)
        assert slot <= self.num_slots, f"{slot} partial results, room for {self.num_slots}"
        num_items[0] = item
        self._data.copy_(staged, non_blocking=True)
        return item

    def would_share(self, rows_by_group: Sequence[tuple[Sequence[int], int]]) -> bool:
        """Whether `update` of these groups would make work items."""
        return bool(self._tiles(rows_by_group))

    def _tiles(self, rows_by_group: Sequence[tuple[Sequence[int], int]]) -> list[tuple[np.ndarray, int]]:
        """Each tile's rows and number of shared pages; a group's tiles are neighbours, for the L2 cache."""
        tiles: list[tuple[np.ndarray, int]] = []
        if self.rows_per_tile < 2:
            return tiles
        num_rows = sum(len(rows) for rows, _ in rows_by_group)
        fills_device = num_rows > self._target_items
        min_tokens = max(MIN_SHARED_TOKENS * (1 if fills_device else 4), 1)
        for rows, num_pages in rows_by_group:
            if len(rows) >= 2 and num_pages * self.page_size >= min_tokens:
                num_tiles = -(-len(rows) // self.rows_per_tile)
                tiles += [(tile, num_pages) for tile in np.array_split(np.array(rows), num_tiles)]
        return tiles

    def _num_pieces(self, num_pages: np.ndarray) -> np.ndarray:
        """Pieces of each tile's pages, rounded down: one item more than programs costs a second round."""
        pages_per_piece = max(num_pages.sum() / self._target_items, MIN_PIECE_TOKENS / self.page_size, 1)
        return np.clip(num_pages / pages_per_piece, 1, MAX_PARTIALS).astype(np.int64)


def num_prefix_slots(max_num_seqs: int, num_heads: int, num_kv_heads: int) -> int:
    """The most partial results of `SharedPrefixes`: one per row, and those of the pieces that it aims at."""
    return max_num_seqs + PREFIX_QUERIES // (num_heads // num_kv_heads) * _target_items(num_kv_heads)


def num_partial_results(max_num_seqs: int, num_heads: int, num_kv_heads: int) -> int:
    """The most partial results ([H, D] and [H] float32) of a decode step, of prefixes and of split rows."""
    # A row is split only while rows * splits stays within the programs aimed at.
    return num_prefix_slots(max_num_seqs, num_heads, num_kv_heads) + TARGET_PROGRAMS // num_kv_heads


def decode_scratch_bytes(
    max_num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int]:
    """Bytes of a decode step's partial results and of their log-sum-exps."""
    num_partials = num_partial_results(max_num_seqs, num_heads, num_kv_heads)
    # The results behind the log-sum-exps begin at whole 16 bytes.
    return 4 * _padded(num_partials * num_heads), 4 * num_partials * num_heads * head_dim


def _target_items(num_kv_heads: int) -> int:
    return max(1, TARGET_PROGRAMS // num_kv_heads)


def _padded(count: int) -> int:
    """`size` int32 values, rounded up to whole 16 bytes, the alignment that the kernels are compiled for."""
    return -(-count // 4) * 4
