"""Attention of one query token per sequence over a paged KV cache, in Triton.

Two levels. The *prefix* kernel reads the pages that the completions of a prompt share, once for all of them,
and leaves normalised partial outputs with their log-sum-exp; the *suffix* kernel reads what each sequence has
of its own and continues the running softmax from there (online softmax, arXiv 1805.02867; split keys as in
FlashDecoding). A step is bound by memory: every key and value is used for R = H / K query heads only, so what
counts is that loads are wide, many at a time, and never for nothing.

Grids depend on shapes alone and every count that varies is read from device memory, so that a captured graph
stays valid as sequences grow, finish and are replaced. Exponentials are taken to base 2, which the hardware
has; log2(e) is folded into the scale. "lse" is therefore a base-2 logarithm throughout.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocate.engines.native.prefixes import (
    MAX_PARTIALS,
    NUM_ITEM_FIELDS,
    PREFIX_QUERIES,
    TARGET_PROGRAMS,
    SharedPrefixes,
    num_prefix_slots,
)

MAX_SPLITS = 16
MIN_QUERIES = 16
"""Rows of the smallest tensor-core product: fewer query heads per key-value head are padded to it."""


class Launch(NamedTuple):
    """How a kernel is compiled for one head size and element size."""

    max_tile_tokens: int
    num_warps: int
    num_stages: int


# Keyed by (D padded to a power of two, bytes per element). Bandwidth times latency is about 35 KB in flight
# per multiprocessor, so two programs with one tile of keys and one of values ahead suffice; what is more
# hides the products. float32 has no exact tensor-core product: small tiles there, or the operands spill from
# registers.
SUFFIX_LAUNCH: dict[tuple[int, int], Launch] = {
    (64, 2): Launch(128, 4, 3),
    (128, 2): Launch(64, 4, 3),
    (256, 2): Launch(32, 4, 3),
}
PREFIX_LAUNCH: dict[tuple[int, int], Launch] = {
    (64, 2): Launch(128, 4, 3),
    (128, 2): Launch(64, 4, 3),
    (256, 2): Launch(64, 8, 2),
}
OTHER_LAUNCH = Launch(16, 4, 2)

# The running maximum starts here and not at minus infinity, whose difference from itself is NaN. Scores are
# clamped by nothing: one this low is masked in all but name.
_LOWEST = tl.constexpr(-1.0e30)


class DecodeScratch:
    """Partial outputs and their log-sum-exp, at addresses that never change; layers use them in turn.

    Args:
        buffer: uint8, at least `num_bytes` long and aligned to 16 bytes.
        max_num_seqs: rows of the largest batch.
        num_heads: H.
        num_kv_heads: K.
        head_dim: D.
    """

    def __init__(
        self, buffer: Tensor, *, max_num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        self.num_prefix_slots = num_prefix_slots(max_num_seqs, num_heads, num_kv_heads)
        self.num_slots = _num_slots(max_num_seqs, num_heads, num_kv_heads)
        lse_bytes = 4 * _padded_lses(self.num_slots, num_heads)
        output_bytes = 4 * self.num_slots * num_heads * head_dim
        self.lses = buffer[:lse_bytes].view(torch.float32)[: self.num_slots * num_heads].view(-1, num_heads)
        """[slots, H] float32."""
        outputs = buffer[lse_bytes : lse_bytes + output_bytes].view(torch.float32)
        self.outputs = outputs.view(self.num_slots, num_heads, head_dim)
        """[slots, H, D] float32; the suffix kernel's slots come after those of the prefix kernel."""

    @staticmethod
    def num_bytes(*, max_num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """Size of the buffer."""
        num_slots = _num_slots(max_num_seqs, num_heads, num_kv_heads)
        return 4 * (_padded_lses(num_slots, num_heads) + num_slots * num_heads * head_dim)


def _num_slots(max_num_seqs: int, num_heads: int, num_kv_heads: int) -> int:
    # `num_splits_for` splits only while rows * splits stays within the programs it aims at.
    return num_prefix_slots(max_num_seqs, num_heads, num_kv_heads) + TARGET_PROGRAMS // num_kv_heads


def _padded_lses(num_slots: int, num_heads: int) -> int:
    return -(-num_slots * num_heads // 4) * 4


def num_splits_for(num_rows: int, num_kv_heads: int) -> int:
    """Parts to cut each row's keys into, a power of two, so that a small batch occupies the whole device.

    The batch and not the contexts decide, because a captured graph has to serve contexts of any length.
    """
    num_splits = 1
    while num_splits < MAX_SPLITS and 2 * num_splits * num_rows * num_kv_heads <= TARGET_PROGRAMS:
        num_splits *= 2
    return num_splits


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    prefixes: SharedPrefixes | None,
    scratch: DecodeScratch,
    *,
    scale: float,
    sliding_window: int | None,
    num_splits: int,
    out: Tensor,
) -> Tensor:
    """Attention of one query per sequence, whose key and value are already in the cache.

    Nothing is allocated and nothing is read on the host, so a CUDA graph can capture it.

    Args:
        q: [B, H, D], bfloat16, float16 or float32 (which is multiplied exactly, for comparisons); rows may be
            any distance apart.
        k_cache: [num_pages, K, page_size, D] of the same type, pages any distance apart; what is behind a
            sequence's last token is never used, be it NaN. The page size is a power of two, at least 16.
        v_cache: like `k_cache`.
        block_tables: [B, at least the pages of each sequence] int32, rows any distance apart; further entries
            are not read.
        context_lens: [B] int32, tokens of each sequence in the cache, the query's own included. 0: the row is
            finished, its output is zeros.
        prefixes: which rows share pages, up to date with `block_tables`. None: every row reads all it has.
        scratch: made for at least this B.
        scale: of the scores before the softmax.
        sliding_window: a query sees this many keys, itself included; None: all before it.
        num_splits: parts that a row's keys are cut into; `num_splits_for`.
        out: [B, H, D] of the same type, heads next to each other.

    Returns:
        `out`.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_cache.shape
    _check(q, k_cache, v_cache, block_tables, context_lens, prefixes, scratch, num_splits, out)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    ratio = num_heads // num_kv_heads
    common = dict(
        scale_log2=scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        RATIO=ratio,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        PAGE_SIZE=page_size,
        WINDOW=sliding_window or 0,
    )
    strides = (q.stride(0), k_cache.stride(0), v_cache.stride(0), block_tables.stride(0))
    inputs = (q, k_cache, v_cache, block_tables, context_lens)
    partials = (scratch.outputs, scratch.lses)
    rows: tuple[Tensor | None, ...] = (None, None, None)
    if prefixes is not None:
        rows = (prefixes.prefix_lens, prefixes.first_slots, prefixes.num_partials)
        launch = _fit(PREFIX_LAUNCH, padded_dim, page_size, PREFIX_QUERIES, q)
        _prefix_kernel[(TARGET_PROGRAMS,)](
            *inputs,
            prefixes.items,
            prefixes.num_items,
            *partials,
            *strides,
            **common,
            NUM_QUERIES=PREFIX_QUERIES,
            TILE=launch.max_tile_tokens,
            ROWS_PER_TILE=prefixes.rows_per_tile,
            NUM_FIELDS=NUM_ITEM_FIELDS,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    num_queries = max(MIN_QUERIES, triton.next_power_of_2(ratio))
    launch = _fit(SUFFIX_LAUNCH, padded_dim, page_size, num_queries, q)
    # Heads first: the heads of a page lie next to each other in memory and are read at the same time.
    _suffix_kernel[(num_kv_heads, num_splits, num_rows)](
        *inputs,
        *rows,
        *partials,
        out,
        *strides,
        out.stride(0),
        scratch.num_prefix_slots,
        **common,
        NUM_QUERIES=num_queries,
        TILE=launch.max_tile_tokens,
        NUM_SPLITS=num_splits,
        HAS_PREFIXES=prefixes is not None,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if num_splits > 1:
        _merge_kernel[(num_heads, num_rows)](
            context_lens,
            *rows[1:],
            *partials,
            out,
            out.stride(0),
            scratch.num_prefix_slots,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            NUM_SPLITS=num_splits,
            MAX_PREFIX_PARTIALS=MAX_PARTIALS if prefixes is not None else 0,
            num_warps=4,
        )
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    prefixes: SharedPrefixes | None,
    scratch: DecodeScratch,
    num_splits: int,
    out: Tensor,
) -> None:
    """What the pointer arithmetic of the kernels takes for granted."""
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_cache.shape
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads over {num_kv_heads} key-value heads"
    assert page_size >= 16 and page_size & (page_size - 1) == 0, f"a page size of {page_size}"
    assert q.stride()[1:] == (head_dim, 1) and out.stride()[1:] == (head_dim, 1), "q or out: heads are apart"
    assert q.dtype == k_cache.dtype == v_cache.dtype == out.dtype, f"{q.dtype} queries, {k_cache.dtype} cache"
    for cache in (k_cache, v_cache):
        assert cache.stride()[1:] == (page_size * head_dim, head_dim, 1), "a page's heads or tokens are apart"
    assert block_tables.dtype == context_lens.dtype == torch.int32, (
        "block tables and context lengths are int32"
    )
    assert block_tables.stride(1) == 1 and context_lens.stride(0) == 1, "tables or lengths have gaps"
    assert prefixes is None or prefixes.page_size == page_size, "the prefixes count pages of another size"
    num_slots = scratch.num_slots - scratch.num_prefix_slots
    assert num_splits == 1 or num_rows * num_splits <= num_slots, (
        f"{num_rows} rows in {num_splits} parts, scratch for {num_slots}: num_splits_for says how many"
    )


def _fit(
    launches: dict[tuple[int, int], Launch], padded_dim: int, page_size: int, num_queries: int, q: Tensor
) -> Launch:
    """The launch for this head size, its tile no longer than a page, its stages within shared memory."""
    item_bytes = q.element_size()
    launch = launches.get((padded_dim, item_bytes), OTHER_LAUNCH)
    tile_tokens = min(launch.max_tile_tokens, page_size)
    stage_bytes = 2 * tile_tokens * padded_dim * item_bytes
    num_stages = launch.num_stages
    if q.is_cuda:
        # Besides the stages: the queries, the probabilities on their way between layouts, reductions.
        rest_bytes = num_queries * (padded_dim * item_bytes + tile_tokens * 4) + 8 * 1024
        num_stages = min(num_stages, (_shared_memory_bytes(q.device.index) - rest_bytes) // stage_bytes)
    return Launch(tile_tokens, launch.num_warps, max(1, num_stages))


@functools.cache
def _shared_memory_bytes(device_index: int) -> int:
    """What one program may have: 227 KiB on an H200, 99 KiB on cards of compute capability 8.6 and 8.9."""
    return triton.runtime.driver.active.utils.get_device_properties(device_index)["max_shared_mem"]


@triton.jit
def _attend(
    q,
    maximum,
    total,
    acc,
    k_head,
    v_head,
    k_stride,
    v_stride,
    table,
    first_tile,
    end_tile,
    first_visible,
    end_visible,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Continue the running softmax of `q` [queries, D] with the tiles `first_tile` .. `end_tile` - 1.

    A tile is `TILE` tokens of one page. Visible are positions from `first_visible` [queries, 1] (with a
    window) to before `end_visible`. Returns the running maximum, the sum and the unnormalised output.
    """
    TILES_PER_PAGE: tl.constexpr = PAGE_SIZE // TILE
    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    offsets = tokens[:, None] * HEAD_DIM + dims[None, :]
    # The number of the next page is on its way while this one is in use: a load whose address waits for
    # another load would wait twice.
    page = tl.load(table + first_tile // TILES_PER_PAGE, mask=first_tile < end_tile, other=0)
    for tile in tl.range(first_tile, end_tile):
        following = tile + 1
        next_page = tl.load(table + following // TILES_PER_PAGE, mask=following < end_tile, other=0)
        positions = tile * TILE + tokens
        is_stored = positions < end_visible
        # Not only the scores: a weight of zero times a NaN from an unused slot would be NaN.
        mask = is_stored[:, None]
        if HEAD_DIM != PADDED_DIM:
            mask = mask & (dims < HEAD_DIM)[None, :]
        within_page = (tile % TILES_PER_PAGE) * (TILE * HEAD_DIM)
        k = tl.load(k_head + page.to(tl.int64) * k_stride + within_page + offsets, mask=mask, other=0.0)
        v = tl.load(v_head + page.to(tl.int64) * v_stride + within_page + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        is_visible = is_stored[None, :]
        if WINDOW > 0:
            is_visible = is_visible & (positions[None, :] >= first_visible)
        scores = tl.where(is_visible, scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        correction = tl.exp2(maximum - new_maximum)
        total = total * correction + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        maximum = new_maximum
        page = next_page
    return maximum, total, acc


@triton.jit
def _finish(maximum, total, acc):
    """Normalised output and log-sum-exp; zeros and minus infinity where no key was visible."""
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    return acc / divisor[:, None], tl.where(is_empty, -float("inf"), maximum + tl.log2(divisor))


@triton.jit
def _prefix_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    items,
    num_items,
    partial_outputs,
    partial_lses,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
):
    """One work item and key-value head after the other: some pages for the queries of several rows."""
    TILES_PER_PAGE: tl.constexpr = PAGE_SIZE // TILE
    dims = tl.arange(0, PADDED_DIM)
    queries = tl.arange(0, NUM_QUERIES)
    members = queries // RATIO
    for work in tl.range(tl.program_id(0), tl.load(num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        kv_head = work % NUM_KV_HEADS
        item = items + (work // NUM_KV_HEADS) * (NUM_FIELDS + ROWS_PER_TILE)
        rows = tl.load(item + NUM_FIELDS + members, mask=members < ROWS_PER_TILE, other=-1)
        contexts = tl.load(context_lens + rows, mask=rows >= 0, other=0)
        is_live = contexts > 0
        heads = kv_head * RATIO + queries % RATIO
        mask = is_live[:, None] & (dims < HEAD_DIM)[None, :]
        q_offsets = rows.to(tl.int64)[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        first_visible = contexts - WINDOW
        first_tile = tl.load(item) * TILES_PER_PAGE
        if WINDOW > 0:
            # A dead row must not widen the range, and a row that is padding neither.
            earliest = tl.min(tl.where(is_live, first_visible, 2147483647), 0)
            first_tile = tl.maximum(first_tile, tl.maximum(earliest, 0) // TILE)
        end_page = tl.load(item + 1)
        end_tile = tl.where(tl.max(contexts, 0) > 0, end_page * TILES_PER_PAGE, first_tile)
        maximum, total, acc = _attend(
            tl.load(q + q_offsets, mask=mask, other=0.0),
            tl.full([NUM_QUERIES], _LOWEST, tl.float32),
            tl.zeros([NUM_QUERIES], tl.float32),
            tl.zeros([NUM_QUERIES, PADDED_DIM], tl.float32),
            k_cache + kv_head * (PAGE_SIZE * HEAD_DIM),
            v_cache + kv_head * (PAGE_SIZE * HEAD_DIM),
            k_stride,
            v_stride,
            block_tables + tl.load(item + NUM_FIELDS) * table_stride,
            first_tile,
            end_tile,
            first_visible[:, None],
            end_page * PAGE_SIZE,
            scale_log2,
            HEAD_DIM,
            PADDED_DIM,
            PAGE_SIZE,
            TILE,
            WINDOW,
        )
        output, lse = _finish(maximum, total, acc)
        slots = tl.load(item + 2) + members * tl.load(item + 3)
        results = slots.to(tl.int64) * (NUM_KV_HEADS * RATIO) + heads
        tl.store(partial_lses + results, lse, mask=is_live)
        tl.store(partial_outputs + results[:, None] * HEAD_DIM + dims[None, :], output, mask=mask)


@triton.jit
def _suffix_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    prefix_lens,
    first_slots,
    num_partials,
    partial_outputs,
    partial_lses,
    out,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    out_stride,
    num_prefix_slots,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_PREFIXES: tl.constexpr,
):
    """One row, key-value head and part of the row's own keys."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * RATIO
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context = tl.load(context_lens + row)
    dims = tl.arange(0, PADDED_DIM)
    queries = tl.arange(0, NUM_QUERIES)
    heads = kv_head * RATIO + queries
    is_query = queries < RATIO
    mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    head_offsets = heads[:, None] * HEAD_DIM + dims[None, :]

    maximum = tl.full([NUM_QUERIES], _LOWEST, tl.float32)
    total = tl.zeros([NUM_QUERIES], tl.float32)
    acc = tl.zeros([NUM_QUERIES, PADDED_DIM], tl.float32)
    begin = 0
    if HAS_PREFIXES:
        begin = tl.load(prefix_lens + row)
        if NUM_SPLITS == 1:
            # A partial output is the normalised mean over its keys; its weight is the sum behind it, 2^lse.
            result = tl.load(first_slots + row).to(tl.int64) * NUM_HEADS
            for _ in range(tl.where(context > 0, tl.load(num_partials + row), 0)):
                lse = tl.load(partial_lses + result + heads, mask=is_query, other=-float("inf"))
                output = tl.load(partial_outputs + result * HEAD_DIM + head_offsets, mask=mask, other=0.0)
                new_maximum = tl.maximum(maximum, lse)
                correction = tl.exp2(maximum - new_maximum)
                weight = tl.exp2(lse - new_maximum)
                total = total * correction + weight
                acc = acc * correction[:, None] + output * weight[:, None]
                maximum = new_maximum
                result += NUM_HEADS
    if WINDOW > 0:
        begin = tl.maximum(begin, context - WINDOW)
    first_tile = begin // TILE
    end_tile = tl.cdiv(context, TILE)
    if NUM_SPLITS > 1:
        tiles_per_split = tl.cdiv(tl.maximum(end_tile - first_tile, 0), NUM_SPLITS)
        first_tile += split * tiles_per_split
        end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)
    maximum, total, acc = _attend(
        tl.load(q + row * q_stride + head_offsets, mask=mask, other=0.0),
        maximum,
        total,
        acc,
        k_cache + kv_head * (PAGE_SIZE * HEAD_DIM),
        v_cache + kv_head * (PAGE_SIZE * HEAD_DIM),
        k_stride,
        v_stride,
        block_tables + row * table_stride,
        first_tile,
        end_tile,
        context - WINDOW,
        context,
        scale_log2,
        HEAD_DIM,
        PADDED_DIM,
        PAGE_SIZE,
        TILE,
        WINDOW,
    )
    output, lse = _finish(maximum, total, acc)
    if NUM_SPLITS == 1:
        tl.store(out + row * out_stride + head_offsets, output.to(out.dtype.element_ty), mask=mask)
    else:
        result = (num_prefix_slots + row * NUM_SPLITS + split) * NUM_HEADS
        tl.store(partial_lses + result + heads, lse, mask=is_query)
        tl.store(partial_outputs + result * HEAD_DIM + head_offsets, output, mask=mask)


@triton.jit
def _weigh(partial_outputs, partial_lses, slots, is_used, NUM_HEADS, HEAD_DIM, PADDED_DIM: tl.constexpr):
    """One head's partial results [slots, D] and their lse [slots], minus infinity where not used."""
    dims = tl.arange(0, PADDED_DIM)
    results = slots.to(tl.int64) * NUM_HEADS + tl.program_id(0)
    lses = tl.load(partial_lses + results, mask=is_used, other=-float("inf"))
    mask = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    outputs = tl.load(partial_outputs + results[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    return outputs, lses


@triton.jit
def _merge_kernel(
    context_lens,
    first_slots,
    num_partials,
    partial_outputs,
    partial_lses,
    out,
    out_stride,
    num_prefix_slots,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_PREFIX_PARTIALS: tl.constexpr,
):
    """One row and head: the mean of all partial outputs, weighted with the sums behind them."""
    row = tl.program_id(1).to(tl.int64)
    splits = tl.arange(0, NUM_SPLITS)
    outputs, lses = _weigh(
        partial_outputs,
        partial_lses,
        num_prefix_slots + row * NUM_SPLITS + splits,
        splits >= 0,
        NUM_HEADS,
        HEAD_DIM,
        PADDED_DIM,
    )
    maximum = tl.maximum(tl.max(lses, 0), _LOWEST)
    if MAX_PREFIX_PARTIALS > 0:
        pieces = tl.arange(0, MAX_PREFIX_PARTIALS)
        # The prefix kernel left a finished row's slots as they were.
        is_used = (pieces < tl.load(num_partials + row)) & (tl.load(context_lens + row) > 0)
        prefix_outputs, prefix_lses = _weigh(
            partial_outputs,
            partial_lses,
            tl.load(first_slots + row) + pieces,
            is_used,
            NUM_HEADS,
            HEAD_DIM,
            PADDED_DIM,
        )
        maximum = tl.maximum(maximum, tl.max(prefix_lses, 0))
        prefix_weights = tl.exp2(prefix_lses - maximum)
    weights = tl.exp2(lses - maximum)
    total = tl.sum(weights, 0)
    output = tl.sum(outputs * weights[:, None], 0)
    if MAX_PREFIX_PARTIALS > 0:
        total += tl.sum(prefix_weights, 0)
        output += tl.sum(prefix_outputs * prefix_weights[:, None], 0)
    output = output / tl.where(total == 0.0, 1.0, total)
    dims = tl.arange(0, PADDED_DIM)
    offsets = row * out_stride + tl.program_id(0) * HEAD_DIM + dims
    tl.store(out + offsets, output.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
