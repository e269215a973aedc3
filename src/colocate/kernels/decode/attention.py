"""Attention of one query token per sequence over a paged KV cache, in Triton.

Two levels. The *prefix* kernel reads the pages that the completions of a prompt share, once for all of them,
and leaves normalised partial outputs with their log-sum-exp; the *suffix* kernel reads what each sequence has
of its own and continues the running softmax from there (online softmax, arXiv 1805.02867; split keys as in
FlashDecoding). Both turn queries by their positions (rotary embedding, arXiv 2104.09864) as they load them,
and the suffix kernel turns and stores the new key: a kernel of its own would cost each layer a launch and
memory traffic. A step is bound by memory: every key and value that is read serves only R = H / K query heads,
so the kernels are built for loads that are wide, many at a time, and never wasted.

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
from torch import Tensor

from colocate.kernels.decode.attention_levels import merge_kernel, prefix_kernel, suffix_kernel
from colocate.kernels.decode.prefixes import (
    MAX_PARTIALS,
    NUM_ITEM_FIELDS,
    PREFIX_QUERIES,
    TARGET_PROGRAMS,
    SharedPrefixes,
    decode_scratch_bytes,
    num_partial_results,
    num_prefix_slots,
)
from colocate.kernels.definitions import Rotation
from colocate.kernels.fp8.int8 import head_block_size, is_8bit
from colocate.kernels.launch import can_overlap

MAX_SPLITS = 16
MIN_QUERIES = 16
"""The smallest tensor-core product has 16 rows: fewer query heads per key-value head are padded to 16."""


class Launch(NamedTuple):
    """How a kernel is compiled for one head size and element size."""

    max_tile_tokens: int
    num_warps: int
    num_stages: int


# Keyed by (D padded to a power of two, bytes of a value in the cache). Bandwidth times latency is about 35 KB
# in flight per multiprocessor, so two programs with one tile of keys and one of values ahead suffice; the
# stages written here are a program's that has a multiprocessor to itself. float32 has no exact tensor-core
# product: its tiles are small, so that the operands do not spill from registers.
SUFFIX_LAUNCH: dict[tuple[int, int], Launch] = {
    (64, 1): Launch(128, 4, 3),
    (128, 1): Launch(64, 4, 4),
    (256, 1): Launch(32, 8, 3),  # with 4 warps the assembler of CUDA 12.8 crashes
    (64, 2): Launch(128, 4, 3),
    (128, 2): Launch(64, 4, 5),
    (256, 2): Launch(32, 4, 3),
}
PREFIX_LAUNCH: dict[tuple[int, int], Launch] = {
    (64, 1): Launch(128, 4, 3),
    (128, 1): Launch(64, 4, 3),
    (256, 1): Launch(64, 8, 2),
    (64, 2): Launch(128, 4, 3),
    (128, 2): Launch(64, 4, 3),
    (256, 2): Launch(64, 8, 2),
}
OTHER_LAUNCH = Launch(16, 4, 2)


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
        self.num_slots = num_partial_results(max_num_seqs, num_heads, num_kv_heads)
        lse_bytes, output_bytes = decode_scratch_bytes(max_num_seqs, num_heads, num_kv_heads, head_dim)
        self.lses = buffer[:lse_bytes].view(torch.float32)[: self.num_slots * num_heads].view(-1, num_heads)
        """[slots, H] float32."""
        outputs = buffer[lse_bytes : lse_bytes + output_bytes].view(torch.float32)
        self.outputs = outputs.view(self.num_slots, num_heads, head_dim)
        """[slots, H, D] float32; the suffix kernel's slots come after those of the prefix kernel."""

    @staticmethod
    def num_bytes(*, max_num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """Size of the buffer."""
        return sum(decode_scratch_bytes(max_num_seqs, num_heads, num_kv_heads, head_dim))


def num_splits_for(num_rows: int, num_kv_heads: int) -> int:
    """The number of parts to cut each row's keys into, so that a small batch occupies the whole device.

    It is a power of two and depends on the batch only: a captured graph has to serve contexts of any length.
    One program on each multiprocessor is enough to keep memory busy, and fewer parts are merged sooner.
    """
    num_splits = 1
    while num_splits < MAX_SPLITS and 4 * num_splits * num_rows * num_kv_heads <= TARGET_PROGRAMS:
        num_splits *= 2
    return num_splits


def decode_attention(
    qkv: Tensor,
    rotation: Rotation,
    slots: Tensor,
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
    """Attention of one new token per sequence: norms and rotates its heads, and stores its key and value.

    Nothing is allocated and nothing is read on the host, so a CUDA graph can capture it.

    Args:
        qkv: [B, H + 2 K, D], queries, keys and values, bfloat16, float16 or float32 (which is multiplied
            exactly, for comparisons); rows may be any distance apart. Or parts of it, [parts, B, H + 2 K, D]
            float32, which are summed in their order and rounded to the cache's type. It stays as it is.
        rotation: its tables have the cache's type and a row for every position of a context.
        slots: [B] int32, where keys and values go: page * page_size + offset in the page, that of the block
            table's position context - 1. Negative if and only if the row is finished.
        k_cache: [num_pages, K, page_size, D] of the same type, pages any distance apart; what is behind a
            sequence's last token is never used, be it NaN. The page size is a power of two, at least 16. Or
            bytes, with scales behind each head's numbers (`int8.scales_of`).
        v_cache: like `k_cache`.
        block_tables: [B, at least the pages of each sequence] int32, rows any distance apart; further entries
            are not read.
        context_lens: [B] int32, tokens of each sequence, the new one included, which is at position
            context - 1. 0: the row is finished, its output is zeros and nothing is stored.
        prefixes: which rows share pages, up to date with `block_tables`; the new token's page is not one of
            them. None: every row reads all it has.
        scratch: made for at least this B.
        scale: of the scores before the softmax.
        sliding_window: a query sees this many keys, itself included; None: all before it.
        num_splits: parts that a row's keys are cut into; `num_splits_for`.
        out: [B, H, D] of the same type, heads next to each other.

    Returns:
        `out`.
    """
    num_rows, num_heads, head_dim = out.shape
    _, num_kv_heads, page_size, _ = k_cache.shape
    _check(
        qkv, rotation, slots, k_cache, v_cache, block_tables, context_lens, prefixes, scratch, num_splits, out
    )
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    ratio = num_heads // num_kv_heads
    overlaps = can_overlap(qkv)
    common = dict(
        scale_log2=scale * math.log2(math.e),
        eps=rotation.eps,
        NUM_PARTS=len(qkv) if qkv.dim() == 4 else 1,
        OFFSET=rotation.offset,
        DISTANCE=rotation.pair_distance,
        NORMS_LAST=rotation.norms_last,
        NUM_KV_HEADS=num_kv_heads,
        RATIO=ratio,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        PAGE_SIZE=page_size,
        HEAD_BLOCK=head_block_size(page_size, head_dim, k_cache.dtype),
        WINDOW=sliding_window or 0,
        IN_ASM=out.is_cuda and out.dtype != torch.float32 and head_dim % 16 == 0,
        OVERLAPS=overlaps,
    )
    strides = (qkv.stride(-3), qkv.stride(0), k_cache.stride(0), v_cache.stride(0), block_tables.stride(0))
    queries = (qkv, rotation.cos, rotation.sin, rotation.q_norm)
    cached = (k_cache, v_cache, block_tables, context_lens)
    partials = (scratch.outputs, scratch.lses)
    rows: tuple[Tensor | None, ...] = (None, None, None)
    if prefixes is not None:
        rows = (prefixes.prefix_lens, prefixes.first_slots, prefixes.num_partials)
        launch = _fit(PREFIX_LAUNCH, padded_dim, page_size, PREFIX_QUERIES, out, k_cache)
        prefix_kernel[(TARGET_PROGRAMS,)](
            *queries, *cached, prefixes.items, prefixes.num_items, *partials, *strides, **common,
            NUM_QUERIES=PREFIX_QUERIES, TILE=launch.max_tile_tokens, ROWS_PER_TILE=prefixes.rows_per_tile,
            NUM_FIELDS=NUM_ITEM_FIELDS, launch_pdl=overlaps, num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )  # fmt: skip
    num_queries = max(MIN_QUERIES, triton.next_power_of_2(ratio))
    launch = _fit(SUFFIX_LAUNCH, padded_dim, page_size, num_queries, out, k_cache)
    num_stages, num_warps = launch.num_stages, launch.num_warps
    num_programs = num_kv_heads * num_splits * num_rows
    if num_programs > TARGET_PROGRAMS // 2:
        # Several programs on each multiprocessor load side by side; with deeper queues fewer would fit.
        num_stages = min(num_stages, 2)
    if num_programs > TARGET_PROGRAMS and padded_dim == 128 and out.dtype != torch.float32:
        # They come in rounds, and with fewer warps each, one more fits. Other sizes were not measured.
        num_warps = 2
    # Heads first: the heads of a page lie next to each other in memory and are read at the same time.
    suffix_kernel[(num_kv_heads, num_splits, num_rows)](
        *queries, rotation.k_norm, slots, *cached, *rows, *partials, out, *strides, out.stride(0),
        scratch.num_prefix_slots, **common,
        NUM_QUERIES=num_queries, TILE=launch.max_tile_tokens, NUM_SPLITS=num_splits,
        HAS_PREFIXES=prefixes is not None, launch_pdl=overlaps, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if num_splits > 1:
        merge_kernel[(num_heads, num_rows)](
            context_lens, *rows[1:], *partials, out, out.stride(0), scratch.num_prefix_slots,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, NUM_SPLITS=num_splits,
            MAX_PREFIX_PARTIALS=MAX_PARTIALS if prefixes is not None else 0, OVERLAPS=overlaps,
            launch_pdl=overlaps, num_warps=4,
        )  # fmt: skip
    return out


def _check(
    qkv: Tensor,
    rotation: Rotation,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    prefixes: SharedPrefixes | None,
    scratch: DecodeScratch,
    num_splits: int,
    out: Tensor,
) -> None:
    """Assert the layouts that the pointer arithmetic of the kernels takes for granted."""
    num_rows, num_heads, head_dim = out.shape
    _, num_kv_heads, page_size, _ = k_cache.shape
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads over {num_kv_heads} key-value heads"
    assert qkv.shape[-3:] == (num_rows, num_heads + 2 * num_kv_heads, head_dim), (
        f"{list(qkv.shape)} is not [{num_rows}, {num_heads} + 2 * {num_kv_heads}, {head_dim}]"
    )
    assert head_dim % 2 == 0, f"rotary embedding turns pairs, and a head has {head_dim} values"
    for table in (rotation.cos, rotation.sin):
        assert table.is_contiguous() and table.dtype == out.dtype, "rotary tables have gaps or another type"
    assert page_size >= 16 and page_size & (page_size - 1) == 0, f"a page size of {page_size}"
    assert qkv.stride()[-2:] == (head_dim, 1) and out.stride()[1:] == (head_dim, 1), (
        "qkv or out: heads are apart"
    )
    expected = torch.float32 if qkv.dim() == 4 else out.dtype
    assert qkv.dtype == expected, f"{qkv.dtype} queries, {out.dtype} output"
    head_block = head_block_size(page_size, head_dim, k_cache.dtype)
    for cache in (k_cache, v_cache):
        assert is_8bit(cache) or cache.dtype == out.dtype, f"{out.dtype} output, {cache.dtype} cache"
        assert num_kv_heads == 1 or cache.stride(1) == head_block, "a page's heads are apart"
        assert cache.stride()[2:] == (head_dim, 1), "a page's tokens are apart"
    for indices in (block_tables, context_lens, slots):
        assert indices.dtype == torch.int32, "block tables, context lengths and slots are int32"
        assert indices.stride(-1) == 1, "block tables, context lengths or slots have gaps"
    assert prefixes is None or prefixes.page_size == page_size, "the prefixes count pages of another size"
    num_slots = scratch.num_slots - scratch.num_prefix_slots
    assert num_splits == 1 or num_rows * num_splits <= num_slots, (
        f"{num_rows} rows in {num_splits} parts, scratch for {num_slots}: num_splits_for says how many"
    )


def _fit(
    launches: dict[tuple[int, int], Launch],
    padded_dim: int,
    page_size: int,
    num_queries: int,
    out: Tensor,
    cache: Tensor,
) -> Launch:
    """The launch for this head size, its tile no longer than a page, its stages within shared memory."""
    item_bytes = cache.element_size()
    launch = launches.get((padded_dim, item_bytes), OTHER_LAUNCH)
    if out.dtype == torch.float32:
        launch = OTHER_LAUNCH
    tile_tokens = min(launch.max_tile_tokens, page_size)
    stage_bytes = 2 * tile_tokens * padded_dim * item_bytes
    num_stages = launch.num_stages
    if out.is_cuda:
        # Besides the stages: the queries, the probabilities on their way between layouts, reductions.
        rest_bytes = num_queries * (padded_dim * out.element_size() + tile_tokens * 4) + 8 * 1024
        if is_8bit(cache):  # a tile of keys and one of values again, in 16 bits
            rest_bytes += 2 * tile_tokens * padded_dim * 2
        num_buffers = (_shared_memory_bytes(out.device.index) - rest_bytes) // stage_bytes
        # There is one buffer less than stages, except for warp-group products, which read a buffer while
        # others are filled.
        is_warp_group = num_queries >= 64 and torch.cuda.get_device_capability(out.device) >= (9, 0)
        num_stages = min(num_stages, num_buffers if is_warp_group else num_buffers + 1)
    return Launch(tile_tokens, launch.num_warps, max(1, num_stages))


@functools.cache
def _shared_memory_bytes(device_index: int) -> int:
    """Shared memory of one program: 227 KiB on an H200, 99 KiB on cards of compute capability 8.6 and 8.9."""
    return triton.runtime.driver.active.utils.get_device_properties(device_index)["max_shared_mem"]
