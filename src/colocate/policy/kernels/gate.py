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


_ROWS, _COLUMNS, _BACKWARD_COLUMNS = 64, 128, 64
"""Tiles of tokens and columns. A tile of an adapter is read once for each tile of tokens, from L2."""


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
    num_row_blocks = triton.cdiv(num_rows, _ROWS)
    _silu_mul_low_rank_kernel[(num_row_blocks * triton.cdiv(width, _COLUMNS),)](
        gate_up,
        *_two_blocks(low_rank),
        output,
        num_rows,
        width,
        num_row_blocks,
        PADDED_RANK=_padded_rank(low_rank),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=8,
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
    num_row_blocks = triton.cdiv(num_rows, _ROWS)
    _silu_mul_low_rank_backward_kernel[(num_row_blocks * triton.cdiv(width, _BACKWARD_COLUMNS),)](
        grad,
        *_block(*grad_low_rank.parts()[0]),
        gate_up,
        *_two_blocks(low_rank),
        grad_gate_up,
        output,
        num_rows,
        width,
        num_row_blocks,
        PADDED_RANK=_padded_rank(low_rank, grad_low_rank),
        ROWS=_ROWS,
        COLUMNS=_BACKWARD_COLUMNS,
        num_warps=8,
    )
    return grad_gate_up, output


def _padded_rank(*terms: LowRank) -> int:
    largest = max(factor.shape[1] for term in terms for factor in term.factors)
    return max(16, triton.next_power_of_2(largest))  # a product takes 16 at least


def _two_blocks(low_rank: LowRank) -> tuple:
    gates, up = low_rank.parts()
    return *_block(*gates), *_block(*up)


def _block(reduced: Tensor, factor: Tensor, scaling: float) -> tuple:
    """As `_low_rank_tile` takes one."""
    assert reduced.stride(1) == 1, "a token's part must be contiguous"
    return reduced, reduced.stride(0), factor, *factor.stride(), factor.shape[1], scaling


@triton.jit
def _low_rank_tile(
    reduced,
    reduced_stride,
    factor,
    column_stride,
    rank_stride,
    rank,
    scaling,
    rows,
    num_rows,
    columns,
    width,
    PADDED_RANK: tl.constexpr,
):
    """scaling * reduced factor^T at rows [R, 1] and columns [C]; float32."""
    ranks = tl.arange(0, PADDED_RANK)
    left = tl.load(
        reduced + rows * reduced_stride + ranks[None, :],
        mask=(rows < num_rows) & (ranks < rank)[None, :],
        other=0.0,
    )
    right = tl.load(
        factor + ranks[:, None] * rank_stride + columns[None, :] * column_stride,
        mask=(ranks < rank)[:, None] & (columns < width)[None, :],
        other=0.0,
    )
    return scaling * tl.dot(left, right, input_precision="ieee")


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
    num_row_blocks,
    PADDED_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = (tl.program_id(0) % num_row_blocks * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    columns = tl.program_id(0) // num_row_blocks * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < num_rows) & (columns < width)[None, :]
    dtype = output.dtype.element_ty
    pointers = gate_up + rows * (2 * width) + columns[None, :]
    gates = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointers + width, mask=mask, other=0.0).to(tl.float32)
    gates += _low_rank_tile(
        gate_reduced, gate_reduced_stride, gate_factor, gate_column_stride, gate_rank_stride, gate_rank,
        gate_scaling, rows, num_rows, columns, width, PADDED_RANK,
    )  # fmt: skip
    up += _low_rank_tile(
        up_reduced, up_reduced_stride, up_factor, up_column_stride, up_rank_stride, up_rank,
        up_scaling, rows, num_rows, columns, width, PADDED_RANK,
    )  # fmt: skip
    gates, up = gates.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    tl.store(output + rows * width + columns[None, :], (_silu(gates, dtype) * up).to(dtype), mask=mask)


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
    num_row_blocks,
    PADDED_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = (tl.program_id(0) % num_row_blocks * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    columns = tl.program_id(0) // num_row_blocks * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < num_rows) & (columns < width)[None, :]
    dtype = output.dtype.element_ty
    in_one, in_both = rows * width + columns[None, :], rows * (2 * width) + columns[None, :]
    gates = tl.load(gate_up + in_both, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + in_both + width, mask=mask, other=0.0).to(tl.float32)
    wide_grad = tl.load(grad + in_one, mask=mask, other=0.0).to(tl.float32)
    gates += _low_rank_tile(
        gate_reduced, gate_reduced_stride, gate_factor, gate_column_stride, gate_rank_stride, gate_rank,
        gate_scaling, rows, num_rows, columns, width, PADDED_RANK,
    )  # fmt: skip
    up += _low_rank_tile(
        up_reduced, up_reduced_stride, up_factor, up_column_stride, up_rank_stride, up_rank,
        up_scaling, rows, num_rows, columns, width, PADDED_RANK,
    )  # fmt: skip
    wide_grad += _low_rank_tile(
        grad_reduced, grad_reduced_stride, grad_factor, grad_column_stride, grad_rank_stride, grad_rank,
        grad_scaling, rows, num_rows, columns, width, PADDED_RANK,
    )  # fmt: skip
    gates, up = gates.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    wide_grad = wide_grad.to(dtype).to(tl.float32)
    grad_gates, grad_up, activated = _gradients(wide_grad, gates, up, dtype)
    tl.store(grad_gate_up + in_both, grad_gates, mask=mask)
    tl.store(grad_gate_up + in_both + width, grad_up, mask=mask)
    tl.store(output + in_one, activated, mask=mask)
