"""Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467), forward and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocate.kernels.programs import num_programs

_READ_AHEAD_BYTES = 48 * 2**10
"""Shared memory of a program for what it reads ahead; half of what the smallest of the GPUs has."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x's rows times `weight`, rounded to the type before and after that product.

    Args:
        x: [T, hidden], rows contiguous.
        weight: [hidden], in the type of `x`.

    Returns:
        [T, hidden], contiguous.
    """
    num_rows, hidden_size = x.shape
    assert x.stride(1) == 1, "a row of x must be contiguous"
    assert weight.is_contiguous() and weight.shape == (hidden_size,), f"weight is not [{hidden_size}]"
    normed = torch.empty((num_rows, hidden_size), dtype=x.dtype, device=x.device)
    rows, block, num_warps = _tile(hidden_size)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        weight,
        normed,
        x.stride(0),
        eps,
        num_rows,
        hidden_size,
        ROWS=rows,
        BLOCK=block,
        num_warps=num_warps,
    )
    return normed


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, weight, normed, x_stride, eps, num_rows, hidden_size, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < hidden_size)
    dtype = normed.dtype.element_ty
    value = tl.load(x + rows * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / hidden_size + eps)[:, None]
    rounded = (value * inverse).to(dtype).to(tl.float32)
    weights = tl.load(weight + columns, mask=columns < hidden_size, other=0.0).to(tl.float32)
    tl.store(normed + rows * hidden_size + columns, (weights * rounded).to(dtype), mask=mask)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, grad_residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm` with respect to its input and its weight.

    With r = 1 / rms(x), y = x r and g = grad * weight: dx = r (g - y mean(g y)), dweight = sum_T grad y.

    Args:
        grad: [T, hidden], of the norm's output.
        x, weight: as `rms_norm` was given them.
        grad_residual: [T, hidden], added to the gradient of `x`. Rows of all three are contiguous.

    Returns:
        [T, hidden] in the type of `x`, contiguous; [hidden] float32.
    """
    num_rows, hidden_size = x.shape
    for rows_of in (grad, x) if grad_residual is None else (grad, x, grad_residual):
        assert rows_of.shape == x.shape, f"{tuple(rows_of.shape)} beside x of {tuple(x.shape)}"
        assert rows_of.stride(1) == 1, "rows of x and of the gradients must be contiguous"
    assert weight.is_contiguous() and weight.shape == (hidden_size,), f"weight is not [{hidden_size}]"
    rows, block, num_warps = _tile(hidden_size)
    grad_x = torch.empty((num_rows, hidden_size), dtype=x.dtype, device=x.device)
    num_sums = min(triton.cdiv(num_rows, rows), num_programs(x.device, num_warps))
    sums = torch.empty((num_sums, hidden_size), dtype=torch.float32, device=x.device)
    # Tiles on their way while one is worked on: else every row would wait for its own reads.
    tile_bytes = 3 * rows * block * x.element_size()
    num_ahead = min(_READ_AHEAD_BYTES // tile_bytes, 2)
    _rms_norm_backward_kernel[(num_sums,)](
        grad,
        x,
        weight,
        grad_residual,
        grad_x,
        sums,
        grad.stride(0),
        x.stride(0),
        0 if grad_residual is None else grad_residual.stride(0),
        eps,
        num_rows,
        hidden_size,
        ROWS=rows,
        BLOCK=block,
        NUM_STAGES=1 + num_ahead,
        num_warps=num_warps,
    )
    return grad_x, sums.sum(0)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward_kernel(
    grad,
    x,
    weight,
    grad_residual,
    grad_x,
    sums,
    grad_stride,
    x_stride,
    residual_stride,
    eps,
    num_rows,
    hidden_size,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)[None, :]
    in_row = columns < hidden_size
    dtype = grad_x.dtype.element_ty
    weights = tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for tile in tl.range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        mask = (rows < num_rows) & in_row
        value = tl.load(x + rows * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        wide_grad = tl.load(grad + rows * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, axis=1) / hidden_size + eps)[:, None]
        normed = value * inverse
        grad_weight += wide_grad * normed.to(dtype).to(tl.float32)
        scaled = wide_grad * weights
        mean = (tl.sum(scaled * normed, axis=1) / hidden_size)[:, None]
        result = inverse * (scaled - normed * mean)
        if grad_residual is not None:
            residual = grad_residual + rows * residual_stride + columns
            result += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + rows * hidden_size + columns, result.to(dtype), mask=mask)
    total = tl.sum(grad_weight, axis=0)[None, :]
    tl.store(sums + program * hidden_size + columns, total, mask=in_row)


def _tile(hidden_size: int) -> tuple[int, int, int]:
    """Rows of a tile, its columns, and warps: 16 values a thread, two 16-byte loads of bfloat16."""
    block = triton.next_power_of_2(hidden_size)
    rows = max(1024 // block, 1)
    return rows, block, min(max(rows * block // 512, 1), 32)
