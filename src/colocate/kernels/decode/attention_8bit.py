"""Functions by which the levels of decode attention read keys and values in 8 bits (`fp8.int8`), inside
their kernels.

Arguments are those of `attention_levels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from colocate.kernels.fp8.quantize import exponents_for, inverse_power, power
from colocate.kernels.fp8.quantize_int8 import (
    UNIT,
    exponents,
    largest_of,
    numbers,
    quantized,
    scales_for,
)


@triton.jit
def narrowed_queries(q, scale_log2):
    """Queries [queries, D] in float16, with which keys in 8 bits are multiplied, and their scores' scales.

    A power of two brings each into float16's range, so values of bfloat16 stay as they are. Queries in
    float32 stay in it.
    """
    x = q.to(tl.float32)
    powers = exponents_for(tl.max(tl.abs(x), 1))
    narrow = x * inverse_power(powers)[:, None]
    if q.dtype != tl.float32:
        narrow = narrow.to(tl.float16)
    return narrow, scale_log2 * power(powers)


@triton.jit
def quantized_heads(heads):
    """Vectors [queries, D] as bytes, and their scales [queries] int32."""
    x = heads.to(tl.float32)
    scales = scales_for(largest_of(x))
    return quantized(x, scales), scales


@triton.jit
def _unpacked(x, DTYPE: tl.constexpr, IN_ASM: tl.constexpr, STAYS: tl.constexpr):
    """Bytes as the numbers that they stand for, in DTYPE; with IN_ASM in float16.

    A byte below 0x64 is in float16 the byte and 1024, from which 1152 is subtracted without rounding. With
    STAYS they are unpacked where they lie, and it is float16 whose layout is changed: values, which lie
    across a product's columns, Triton would read from shared memory byte by byte.
    """
    if IN_ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 low, high, zero; mov.b32 zero, 0x64806480; prmt.b32 low, $2, 0x64646464, 0x4140; "
            "prmt.b32 high, $2, 0x64646464, 0x4342; sub.f16x2 $0, low, zero; sub.f16x2 $1, high, zero; }",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=not STAYS,  # or else Triton would change the layout before
            pack=4,
        )
    else:
        return numbers(x).to(DTYPE)


@triton.jit
def _scales(
    head, stride, page, tile, end, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """The scales [TILE] of a tile's keys or values; that of 1 from position `end` on."""
    tokens = tl.arange(0, TILE)
    first = PAGE_SIZE * HEAD_DIM + (tile % (PAGE_SIZE // TILE)) * TILE
    places = head + page.to(tl.int64) * stride + first + tokens
    return tl.load(places, mask=tile * TILE + tokens < end, other=UNIT).to(tl.int32)


@triton.jit
def attend_8bit(
    q, maximum, total, acc, k_head, v_head, k_stride, v_stride, table, page, first_tile, end_tile,
    first_visible, end_visible, scales_log2,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, IN_ASM: tl.constexpr,
):  # fmt: skip
    """`_attend` to keys and values in 8 bits, with `narrowed_queries` [queries, D] and their scales.

    The maximum is that of score + exponent of the value's scale: 2^(score + exponent - maximum) is at most 1
    and multiplies a value as it is stored. The next tile's scales are on their way while a tile is in use.
    Nothing is carried over two tiles: Triton would not load keys and values ahead then.
    """
    TILES_PER_PAGE: tl.constexpr = PAGE_SIZE // TILE
    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    offsets = tokens[:, None] * HEAD_DIM + dims[None, :]
    end = tl.minimum(end_visible, end_tile * TILE)
    k_scales = _scales(k_head, k_stride, page, first_tile, end, HEAD_DIM, PAGE_SIZE, TILE)
    v_scales = _scales(v_head, v_stride, page, first_tile, end, HEAD_DIM, PAGE_SIZE, TILE)
    for tile in tl.range(first_tile, end_tile):
        following = tile + 1
        next_page = tl.load(table + following // TILES_PER_PAGE, mask=following < end_tile, other=0)
        next_k_scales = _scales(k_head, k_stride, next_page, tile + 1, end, HEAD_DIM, PAGE_SIZE, TILE)
        next_v_scales = _scales(v_head, v_stride, next_page, tile + 1, end, HEAD_DIM, PAGE_SIZE, TILE)
        positions = tile * TILE + tokens
        is_stored = positions < end_visible
        mask = is_stored[:, None]
        if HEAD_DIM != PADDED_DIM:
            mask = mask & (dims < HEAD_DIM)[None, :]
        within_page = (tile % TILES_PER_PAGE) * (TILE * HEAD_DIM)
        k = tl.load(k_head + page.to(tl.int64) * k_stride + within_page + offsets, mask=mask, other=0)
        v = tl.load(v_head + page.to(tl.int64) * v_stride + within_page + offsets, mask=mask, other=0)
        k, v = _unpacked(k, q.dtype, IN_ASM, True), _unpacked(v, q.dtype, IN_ASM, False)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        v_exponents = exponents(v_scales)
        scores = scores * tl.exp2(exponents(k_scales))[None, :] * scales_log2[:, None] + v_exponents[None, :]
        is_visible = is_stored[None, :]
        if WINDOW > 0:
            is_visible = is_visible & (positions[None, :] >= first_visible)
        scores = tl.where(is_visible, scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        correction = tl.exp2(maximum - new_maximum)
        total = total * correction + tl.sum(weights * tl.exp2(-v_exponents)[None, :], 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        maximum, page = new_maximum, next_page
        k_scales, v_scales = next_k_scales, next_v_scales
    return maximum, total, acc
