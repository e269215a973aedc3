"""silu(gate) * up (Shazeer 2020, arXiv:2002.05202), forward and backward.

Both come with a second form, which adds to its inputs on the way what adapters add to them. As a product of
its own that would be one more pass over the widest tensors of a layer; here it is arithmetic beside their
traffic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocate.policy.low_rank import LowRank

_BLOCK = 1024
_NUM_WARPS = 4
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
    num_blocks = triton.cdiv(width, _BLOCK)
    _silu_mul_kernel[(num_rows * num_blocks,)](
        gate_up, output, gate_up.stride(0), width, num_blocks, BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )
    return output


@triton.jit
def _silu_mul_kernel(gate_up, output, stride, width, num_blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    dtype = output.dtype.element_ty
    gates = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * width + columns, (_silu(gates, dtype) * up).to(dtype), mask=mask)


@triton.jit
def _silu(gates, DTYPE: tl.constexpr):
    """silu of float32 gates, rounded to the type; float32."""
    return (gates / (1.0 + tl.exp(-gates))).to(DTYPE).to(tl.float32)


def silu_mul_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `silu_mul` with respect to its input, and `silu_mul`'s output once more.

    With s = sigmoid(gate): d silu(gate) / d gate = s (1 + gate (1 - s)).

    Args:
        grad: [T, i]; gate_up: [T, 2i]. Rows of both are contiguous.

    Returns:
        [T, 2i] and [T, i], contiguous.
    """
    num_rows, width = grad.shape
    assert gate_up.shape == (num_rows, 2 * width), f"gate_up of {tuple(gate_up.shape)} for a grad of {width}"
    assert grad.stride(1) == gate_up.stride(1) == 1, "rows of grad and gate_up must be contiguous"
    grad_gate_up = torch.empty((num_rows, 2 * width), dtype=gate_up.dtype, device=gate_up.device)
    output = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    num_blocks = triton.cdiv(width, _BLOCK)
    _silu_mul_backward_kernel[(num_rows * num_blocks,)](
        grad,
        gate_up,
        grad_gate_up,
        output,
        grad.stride(0),
        gate_up.stride(0),
        width,
        num_blocks,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return grad_gate_up, output


@triton.jit
def _silu_mul_backward_kernel(
    grad,
    gate_up,
    grad_gate_up,
    output,
    grad_stride,
    gate_up_stride,
    width,
    num_blocks,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    dtype = output.dtype.element_ty
    pointers = gate_up + row * gate_up_stride + columns
    gates = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointers + width, mask=mask, other=0.0).to(tl.float32)
    wide_grad = tl.load(grad + row * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
    grad_gates, grad_up, activated = _gradients(wide_grad, gates, up, dtype)
    grad_pointers = grad_gate_up + row * (2 * width) + columns
    tl.store(grad_pointers, grad_gates, mask=mask)
    tl.store(grad_pointers + width, grad_up, mask=mask)
    tl.store(output + row * width + columns, activated, mask=mask)


@triton.jit
def _gradients(grad, gates, up, DTYPE: tl.constexpr):
    """Gradients of gates and up, and silu(gates) * up once more, in the type; given all in float32."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gates))
    activated = _silu(gates, DTYPE)
    grad_gates = grad * up * sigmoid * (1.0 + gates * (1.0 - sigmoid))
    return grad_gates.to(DTYPE), (grad * activated).to(DTYPE), (activated * up).to(DTYPE)


_ROWS, _COLUMNS, _NUM_TILES = 16, 128, 16
"""A program goes down 16 tiles of tokens, its columns' part of the adapters in registers, and fetches the
next tiles while it computes one. With one tile per program it would wait for memory first, then for the
products, twice as long in all."""
_TILES = dict(ROWS=_ROWS, COLUMNS=_COLUMNS, NUM_TILES=_NUM_TILES, NUM_STAGES=3, num_warps=4)


def silu_mul_low_rank(gate_up: Tensor, low_rank: LowRank) -> Tensor:
    """`silu_mul` of gate_up + low_rank, that sum rounded to the type.

    Args:
        gate_up: [T, 2i], contiguous.
        low_rank: two blocks of width i.

    Returns:
        [T, i], contiguous.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), "gate_up must be contiguous"
    output = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_low_rank_kernel[_grid(num_rows, width)](
        gate_up,
        *_two_blocks(low_rank),
        output,
        num_rows,
        width,
        PADDED_RANK=_padded_rank(low_rank),
        **_TILES,
    )
    return output


def silu_mul_low_rank_backward(
    grad: Tensor, gate_up: Tensor, low_rank: LowRank, grad_low_rank: LowRank
) -> tuple[Tensor, Tensor]:
    """`silu_mul_backward` of grad + grad_low_rank and gate_up + low_rank, those sums rounded to the type.

    Args:
        grad: [T, i]; gate_up: [T, 2i]. Both are contiguous.
        low_rank: two blocks of width i; grad_low_rank: one.

    Returns:
        [T, 2i] and [T, i], contiguous.
    """
    num_rows, width = grad.shape
    assert gate_up.shape == (num_rows, 2 * width), f"gate_up of {tuple(gate_up.shape)} for a grad of {width}"
    assert grad.is_contiguous() and gate_up.is_contiguous(), "grad and gate_up must be contiguous"
    grad_gate_up = torch.empty_like(gate_up)
    output = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_low_rank_backward_kernel[_grid(num_rows, width)](
        grad,
        *_block(*grad_low_rank.parts()[0]),
        gate_up,
        *_two_blocks(low_rank),
        grad_gate_up,
        output,
        num_rows,
        width,
        PADDED_RANK=_padded_rank(low_rank, grad_low_rank),
        **_TILES,
    )
    return grad_gate_up, output


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, _NUM_TILES * _ROWS), triton.cdiv(width, _COLUMNS)


def _padded_rank(*terms: LowRank) -> int:
    largest = max(factor.shape[1] for term in terms for factor in term.factors)
    return max(16, triton.next_power_of_2(largest))  # a product takes 16 at least


def _two_blocks(low_rank: LowRank) -> tuple:
    gates, up = low_rank.parts()
    return *_block(*gates), *_block(*up)


def _block(reduced: Tensor, factor: Tensor, scaling: float) -> tuple:
    """As the kernels take one."""
    assert reduced.stride(1) == 1, "a token's part must be contiguous"
    return reduced, reduced.stride(0), factor, *factor.stride(), factor.shape[1], scaling


@triton.jit
def _factor_tile(factor, column_stride, rank_stride, rank, columns, width, PADDED_RANK: tl.constexpr):
    """[PADDED_RANK, C]: an adapter's factor [width, rank], transposed, at these columns."""
    ranks = tl.arange(0, PADDED_RANK)[:, None]
    return tl.load(
        factor + ranks * rank_stride + columns[None, :] * column_stride,
        mask=(ranks < rank) & (columns < width)[None, :],
        other=0.0,
    )


@triton.jit
def _sum(product, reduced, stride, rank, scaling, factor, rows, num_rows, PADDED_RANK: tl.constexpr):
    """product [R, C] + scaling * reduced [R, rank] factor [PADDED_RANK, C], rounded to its type; float32."""
    ranks = tl.arange(0, PADDED_RANK)[None, :]
    left = tl.load(reduced + rows * stride + ranks, mask=(rows < num_rows) & (ranks < rank), other=0.0)
    total = product.to(tl.float32) + scaling * tl.dot(left, factor, input_precision="ieee")
    return total.to(product.dtype).to(tl.float32)


@triton.jit
def _silu_mul_low_rank_kernel(
    gate_up,
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
    gate_tile = _factor_tile(
        gate_factor, gate_column_stride, gate_rank_stride, gate_rank, columns, width, PADDED_RANK
    )
    up_tile = _factor_tile(up_factor, up_column_stride, up_rank_stride, up_rank, columns, width, PADDED_RANK)
    dtype = output.dtype.element_ty
    for tile in tl.range(NUM_TILES, num_stages=NUM_STAGES):
        first = (tl.program_id(0) * NUM_TILES + tile) * ROWS
        rows = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        mask = (rows < num_rows) & (columns < width)[None, :]
        in_both = rows * (2 * width) + columns[None, :]
        gates = tl.load(gate_up + in_both, mask=mask, other=0.0)
        up = tl.load(gate_up + in_both + width, mask=mask, other=0.0)
        gates = _sum(
            gates, gate_reduced, gate_reduced_stride, gate_rank, gate_scaling, gate_tile, rows, num_rows,
            PADDED_RANK,
        )  # fmt: skip
        up = _sum(
            up, up_reduced, up_reduced_stride, up_rank, up_scaling, up_tile, rows, num_rows, PADDED_RANK
        )
        activated = (_silu(gates, dtype) * up).to(dtype)
        tl.store(output + rows * width + columns[None, :], activated, mask=mask)


@triton.jit
def _silu_mul_low_rank_backward_kernel(
    grad,
    grad_reduced,
    grad_reduced_stride,
    grad_factor,
    grad_column_stride,
    grad_rank_stride,
    grad_rank,
    grad_scaling,
    gate_up,
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
    grad_gate_up,
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
    grad_tile = _factor_tile(
        grad_factor, grad_column_stride, grad_rank_stride, grad_rank, columns, width, PADDED_RANK
    )
    gate_tile = _factor_tile(
        gate_factor, gate_column_stride, gate_rank_stride, gate_rank, columns, width, PADDED_RANK
    )
    up_tile = _factor_tile(up_factor, up_column_stride, up_rank_stride, up_rank, columns, width, PADDED_RANK)
    dtype = output.dtype.element_ty
    for tile in tl.range(NUM_TILES, num_stages=NUM_STAGES):
        first = (tl.program_id(0) * NUM_TILES + tile) * ROWS
        rows = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        mask = (rows < num_rows) & (columns < width)[None, :]
        in_one, in_both = rows * width + columns[None, :], rows * (2 * width) + columns[None, :]
        gates = tl.load(gate_up + in_both, mask=mask, other=0.0)
        up = tl.load(gate_up + in_both + width, mask=mask, other=0.0)
        wide_grad = tl.load(grad + in_one, mask=mask, other=0.0)
        gates = _sum(
            gates, gate_reduced, gate_reduced_stride, gate_rank, gate_scaling, gate_tile, rows, num_rows,
            PADDED_RANK,
        )  # fmt: skip
        up = _sum(
            up, up_reduced, up_reduced_stride, up_rank, up_scaling, up_tile, rows, num_rows, PADDED_RANK
        )
        wide_grad = _sum(
            wide_grad, grad_reduced, grad_reduced_stride, grad_rank, grad_scaling, grad_tile, rows, num_rows,
            PADDED_RANK,
        )  # fmt: skip
        grad_gates, grad_up, activated = _gradients(wide_grad, gates, up, dtype)
        tl.store(grad_gate_up + in_both, grad_gates, mask=mask)
        tl.store(grad_gate_up + in_both + width, grad_up, mask=mask)
        tl.store(output + in_one, activated, mask=mask)
