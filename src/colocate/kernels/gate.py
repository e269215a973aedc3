"""silu(gate) * up (Shazeer 2020, arXiv:2002.05202), also of sums with what adapters add to gate and up.

As a product of its own that would be one more pass over the widest tensor of a layer; here it is arithmetic
beside its traffic. What the backward pass (`colocate.kernels.gate_backward`) shares with it is here, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocate.weights.adapters import padded_rank
from colocate.weights.low_rank import LowRank

_L2_BYTES = 50 * 2**20
BLOCK = 1024
NUM_WARPS = 4
"""8 values a thread: one 16-byte load of bfloat16 from each of the tensors read."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, silu rounded to the type before the product.

    Args:
        gate_up: [T, 2i], gates first; rows contiguous.

    Returns:
        [T, i], contiguous.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "a row of gate_up must be contiguous"
    output = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    num_blocks = triton.cdiv(width, BLOCK)
    # The product that made these rows wrote them tile by tile, all rows of some columns at a time. As long as
    # they fit into the L2 cache they are read in that order; beyond, row by row.
    _silu_mul_kernel[(num_rows * num_blocks,)](
        gate_up,
        output,
        gate_up.stride(0),
        num_rows,
        width,
        num_blocks,
        BLOCK=BLOCK,
        ROWS_FIRST=gate_up.nbytes <= _L2_BYTES,
        num_warps=NUM_WARPS,
    )
    return output


@triton.jit
def _silu_mul_kernel(
    gate_up, output, stride, num_rows, width, num_blocks, BLOCK: tl.constexpr, ROWS_FIRST: tl.constexpr
):
    number = tl.program_id(0)
    row = (number % num_rows if ROWS_FIRST else number // num_blocks).to(tl.int64)
    columns = (number // num_rows if ROWS_FIRST else number % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    dtype = output.dtype.element_ty
    gates = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * width + columns, (silu(gates, dtype) * up).to(dtype), mask=mask)


@triton.jit
def silu(gates, DTYPE: tl.constexpr):
    """silu of float32 gates, rounded to the type; float32."""
    return (gates / (1.0 + tl.exp(-gates))).to(DTYPE).to(tl.float32)


ROWS, COLUMNS, MAX_TILES = 16, 128, 16
"""A program goes down up to 16 tiles of tokens, its columns' part of the adapters in registers, and fetches
the next tiles while it computes one. With one tile per program it would wait for memory first, then for the
products. A decode step's rows are fewer: then it is parallelism that is short."""
_ROWS_PER_TILE = 64


def silu_mul_low_rank(gate_up: Tensor, low_rank: LowRank) -> Tensor:
    """`silu_mul` of gate_up + low_rank, that sum rounded to the type.

    Args:
        gate_up: [T, 2i], rows contiguous.
        low_rank: two blocks of width i.

    Returns:
        [T, i], contiguous.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "a row of gate_up must be contiguous"
    output = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    tiles = tiling(num_rows)
    _silu_mul_low_rank_kernel[grid(num_rows, width, tiles["NUM_TILES"])](
        gate_up,
        gate_up.stride(0),
        *two_blocks(low_rank),
        output,
        num_rows,
        width,
        PADDED_RANK=largest_padded_rank(low_rank),
        **tiles,
    )
    return output


def tiling(num_rows: int) -> dict[str, int]:
    """Constants of the kernels with adapters."""
    num_tiles = min(MAX_TILES, 1 << max(1, num_rows // _ROWS_PER_TILE).bit_length() - 1)
    return dict(ROWS=ROWS, COLUMNS=COLUMNS, NUM_TILES=num_tiles, NUM_STAGES=min(3, num_tiles), num_warps=4)


def grid(num_rows: int, width: int, num_tiles: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, num_tiles * ROWS), triton.cdiv(width, COLUMNS)


def largest_padded_rank(*terms: LowRank) -> int:
    return max(padded_rank(factor.shape[1]) for term in terms for factor in term.factors)


def two_blocks(low_rank: LowRank) -> tuple:
    gates, up = low_rank.parts()
    return *one_block(*gates), *one_block(*up)


def one_block(reduced: Tensor, factor: Tensor, scaling: float) -> tuple:
    """As the kernels take one."""
    assert reduced.stride(1) == 1, "a token's part must be contiguous"
    return reduced, reduced.stride(0), factor, *factor.stride(), factor.shape[1], scaling


@triton.jit
def factor_tile(
    DTYPE: tl.constexpr, factor, column_stride, rank_stride, rank, columns, width, PADDED_RANK: tl.constexpr
):
    """[PADDED_RANK, C]: an adapter's factor [width, rank], transposed, at these columns, in the type."""
    ranks = tl.arange(0, PADDED_RANK)[:, None]
    tile = tl.load(
        factor + ranks * rank_stride + columns[None, :] * column_stride,
        mask=(ranks < rank) & (columns < width)[None, :],
        other=0.0,
    )
    return tile.to(DTYPE)


@triton.jit
def with_low_rank(product, reduced, stride, rank, scaling, factor, rows, num_rows, PADDED_RANK: tl.constexpr):
    """product [R, C] + scaling * reduced [R, rank] factor [PADDED_RANK, C], rounded to its type; float32."""
    ranks = tl.arange(0, PADDED_RANK)[None, :]
    left = tl.load(reduced + rows * stride + ranks, mask=(rows < num_rows) & (ranks < rank), other=0.0)
    total = product.to(tl.float32) + scaling * tl.dot(left, factor, input_precision="ieee")
    return total.to(product.dtype).to(tl.float32)


@triton.jit
def gates_and_up(
    pointers, width, mask, rows, num_rows,
    gate_reduced, gate_reduced_stride, gate_rank, gate_scaling, gate_factor,
    up_reduced, up_reduced_stride, up_rank, up_scaling, up_factor, PADDED_RANK: tl.constexpr,
):  # fmt: skip
    """Gates, and up `width` columns further, with what adapters add to them; `with_low_rank` of each."""
    gates = tl.load(pointers, mask=mask, other=0.0)
    up = tl.load(pointers + width, mask=mask, other=0.0)
    gates = with_low_rank(
        gates, gate_reduced, gate_reduced_stride, gate_rank, gate_scaling, gate_factor, rows, num_rows,
        PADDED_RANK,
    )  # fmt: skip
    up = with_low_rank(
        up, up_reduced, up_reduced_stride, up_rank, up_scaling, up_factor, rows, num_rows, PADDED_RANK
    )
    return gates, up


@triton.jit
def _silu_mul_low_rank_kernel(
    gate_up,
    stride,
    gate_reduced,
    gate_reduced_stride,
    gate_factor,
    gate_column_stride,
    gate_rank_stride,
    gate_rank,
    gate_scaling,
    up_reduced,
    up_reduced_stride,
    up_factor,
    up_column_stride,
    up_rank_stride,
    up_rank,
    up_scaling,
    output,
    num_rows,
    width,
    PADDED_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dtype = output.dtype.element_ty
    gate_tile = factor_tile(
        dtype, gate_factor, gate_column_stride, gate_rank_stride, gate_rank, columns, width, PADDED_RANK
    )
    up_tile = factor_tile(
        dtype, up_factor, up_column_stride, up_rank_stride, up_rank, columns, width, PADDED_RANK
    )
    for tile in tl.range(NUM_TILES, num_stages=NUM_STAGES):
        first = (tl.program_id(0) * NUM_TILES + tile) * ROWS
        rows = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        mask = (rows < num_rows) & (columns < width)[None, :]
        in_both = rows * stride + columns[None, :]
        gates, up = gates_and_up(
            gate_up + in_both, width, mask, rows, num_rows,
            gate_reduced, gate_reduced_stride, gate_rank, gate_scaling, gate_tile,
            up_reduced, up_reduced_stride, up_rank, up_scaling, up_tile, PADDED_RANK,
        )  # fmt: skip
        activated = (silu(gates, dtype) * up).to(dtype)
        tl.store(output + rows * width + columns[None, :], activated, mask=mask)
