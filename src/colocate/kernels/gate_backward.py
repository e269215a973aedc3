"""The gradient of silu(gate) * up, also of sums with what adapters add to gate, up and the gradient given."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocate.kernels.gate import (
    BLOCK,
    NUM_WARPS,
    factor_tile,
    gates_and_up,
    grid,
    largest_padded_rank,
    one_block,
    silu,
    tiling,
    two_blocks,
    with_low_rank,
)
from colocate.weights.low_rank import LowRank


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
    num_blocks = triton.cdiv(width, BLOCK)
    _silu_mul_backward_kernel[(num_rows * num_blocks,)](
        grad,
        gate_up,
        grad_gate_up,
        output,
        grad.stride(0),
        gate_up.stride(0),
        width,
        num_blocks,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
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
    activated = silu(gates, DTYPE)
    grad_gates = grad * up * sigmoid * (1.0 + gates * (1.0 - sigmoid))
    return grad_gates.to(DTYPE), (grad * activated).to(DTYPE), (activated * up).to(DTYPE)


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
    tiles = tiling(num_rows)
    _silu_mul_low_rank_backward_kernel[grid(num_rows, width, tiles["NUM_TILES"])](
        grad,
        *one_block(*grad_low_rank.parts()[0]),
        gate_up,
        *two_blocks(low_rank),
        grad_gate_up,
        output,
        num_rows,
        width,
        PADDED_RANK=largest_padded_rank(low_rank, grad_low_rank),
        **tiles,
    )
    return grad_gate_up, output


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
    dtype = output.dtype.element_ty
    grad_tile = factor_tile(
        dtype, grad_factor, grad_column_stride, grad_rank_stride, grad_rank, columns, width, PADDED_RANK
    )
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
        in_one, in_both = rows * width + columns[None, :], rows * (2 * width) + columns[None, :]
        wide_grad = tl.load(grad + in_one, mask=mask, other=0.0)
        gates, up = gates_and_up(
            gate_up + in_both, width, mask, rows, num_rows,
            gate_reduced, gate_reduced_stride, gate_rank, gate_scaling, gate_tile,
            up_reduced, up_reduced_stride, up_rank, up_scaling, up_tile, PADDED_RANK,
        )  # fmt: skip
        wide_grad = with_low_rank(
            wide_grad, grad_reduced, grad_reduced_stride, grad_rank, grad_scaling, grad_tile, rows, num_rows,
            PADDED_RANK,
        )  # fmt: skip
        grad_gates, grad_up, activated = _gradients(wide_grad, gates, up, dtype)
        tl.store(grad_gate_up + in_both, grad_gates, mask=mask)
        tl.store(grad_gate_up + in_both + width, grad_up, mask=mask)
        tl.store(output + in_one, activated, mask=mask)
