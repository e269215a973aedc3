"""Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467), forward and backward, as Triton kernels.

Engine and trainer run one kernel, which rounds where `definitions.rms_norm` does; they differ in the tiles
that they cut the rows into. A row's sum of squares depends on its tile in the last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from colocate.kernels.fp8 import e4m3
from colocate.kernels.launch import can_overlap, num_programs

_READ_AHEAD_BYTES = 48 * 2**10
"""Shared memory that a program may fill by reading ahead: half of what the smallest supported GPU has."""


@triton.jit
def inverse_rms(squares, size, eps):
    """1 / root mean square of `size` values, given the sum of their squares."""
    return tl.rsqrt(squares / size + eps)


@triton.jit
def rms_normed(x, inverse, weight, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """The norm of float32 `x`, in the model's type, given 1 / root mean square and float32 weights."""
    if OFFSET is not None:
        weight += OFFSET
    return (weight * multiplied(x * inverse, DTYPE, OFFSET)).to(DTYPE)


@triton.jit
def multiplied(normed, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """The factor that a norm multiplies by its weights: x / rms, rounded to the model's type if there is no
    offset."""
    if OFFSET is None:
        normed = normed.to(DTYPE).to(tl.float32)
    return normed


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float | None = None,
    factor: Tensor | None = None,
    row_factors: Tensor | None = None,
    output_weight: Tensor | None = None,
    *,
    follows_kernel: bool = True,
) -> tuple[Tensor, Tensor]:
    """The residual sum and its root-mean-square norm, in the tiles of a decode step: one row a program.

    Args:
        x: [T, hidden], rows contiguous; output of the attention or the MLP, or the embeddings. Or its parts,
            [parts, T, hidden] float32, contiguous, which are summed in their order and rounded to the type of
            the residual (`streamed.product`).
        residual: [T, hidden], rows contiguous; None: there is none yet.
        weight: [hidden], the norm's; None: there is none, and the sum is returned twice.
        offset: added to the weights; see `definitions.rms_norm`.
        factor: [] float32, a power of two: the norm is divided by it and returned as e4m3.
        row_factors: [T] float32, powers of two, by which rows of `x`, not in parts, are multiplied before.
        output_weight: [hidden], of a norm of `x` itself before it is added to a residual.
        follows_kernel: what comes before on the stream is a kernel, whose end the norm may overlap with;
            between ranks that split the weights it is a copy, or another stream's event.

    Returns:
        The norm, [T, hidden], and the sum, [T, hidden]: the next residual, `x` itself if there was none.
    """
    block = triton.next_power_of_2(x.shape[-1])
    # 8 values a thread: one 16-byte load of bfloat16.
    tile = 1, block, min(max(block // 256, 1), 16)
    overlaps = follows_kernel and can_overlap(x)
    return _norm(
        x, residual, weight, eps, offset, *tile, factor, row_factors, output_weight, overlaps=overlaps
    )


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float | None = None, out: Tensor | None = None
) -> Tensor:
    """`train.operations.rms_norm` of x [T, hidden], rows contiguous, several short ones a program; `out` may
    be `x`, or have rows any distance apart."""
    normed, _ = _norm(x, None, weight, eps, offset, *_tile(x.shape[1]), out=out)
    assert normed is not None, "there is a weight"
    return normed


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float | None,
    rows: int,
    block: int,
    num_warps: int,
    factor: Tensor | None = None,
    row_factors: Tensor | None = None,
    output_weight: Tensor | None = None,
    *,
    overlaps: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_parts = len(x) if x.dim() == 3 else 1
    num_rows, hidden_size = x.shape[-2:]
    assert x.stride(-1) == 1, "a row of x must be contiguous"
    assert x.dim() == 2 or (x.is_contiguous() and residual is not None), "parts have gaps, or no residual"
    assert residual is None or residual.stride(1) == 1, "a row of the residual must be contiguous"
    for own in (weight, output_weight):
        assert own is None or (own.is_contiguous() and own.shape == (hidden_size,)), (
            f"weight is not [{hidden_size}]"
        )
    for read in (row_factors, output_weight):
        assert read is None or residual is not None, "rows with factors or a norm are added to a residual"
    dtype = x.dtype if residual is None else residual.dtype
    if weight is None and residual is None:
        return x, x
    shape, normed = (num_rows, hidden_size), out
    stride = None if out is None else out.stride(0)
    if weight is not None and out is None:
        normed_dtype = dtype if factor is None else e4m3.DTYPE
        normed = torch.empty(shape, dtype=normed_dtype, device=x.device)
    summed = x if residual is None else torch.empty(shape, dtype=dtype, device=x.device)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, residual, weight, output_weight, factor, row_factors, normed, summed, x.stride(-2),
        0 if residual is None else residual.stride(0), eps, num_rows, hidden_size, OFFSET=offset, ROWS=rows,
        BLOCK=block, NUM_PARTS=num_parts, OVERLAPS=overlaps, NORMED_STRIDE=stride, launch_pdl=overlaps,
        num_warps=num_warps,
    )  # fmt: skip
    return summed if normed is None else normed, summed


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, residual, weight, output_weight, factor, row_factors, normed, summed, x_stride, residual_stride, eps,
    num_rows, hidden_size, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr, OVERLAPS: tl.constexpr, NORMED_STRIDE: tl.constexpr,
):  # fmt: skip
    """Norm ROWS rows; with `residual`, norm the sum of `x` and `residual`, which is written to `summed`.

    `x` is the sum of NUM_PARTS matrices that lie one behind the other, its rows yet to be multiplied by
    `row_factors` [T] if these are given, and then normed with `output_weight` if that is given. With `factor`
    the norm is divided by it and rounded to the type of `normed` after that of `summed`. Without `weight`
    there is only the sum. Rows of `normed` are NORMED_STRIDE apart; None: they have no gaps.
    """
    if OVERLAPS:
        gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < hidden_size)
    dtype = summed.dtype.element_ty
    if weight is not None:
        weights = tl.load(weight + columns, mask=columns < hidden_size, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_wait()
    value = tl.load(x + rows * x_stride + columns, mask=mask, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        pointers = x + (part * num_rows + rows) * x_stride + columns
        value += tl.load(pointers, mask=mask, other=0.0)
    if row_factors is not None:
        value = value.to(tl.float32) * tl.load(row_factors + rows, mask=rows < num_rows, other=0.0)
    value = value.to(dtype)
    if output_weight is not None:
        own_weights = tl.load(output_weight + columns, mask=columns < hidden_size, other=0.0).to(tl.float32)
        own = value.to(tl.float32)
        own_inverse = inverse_rms(tl.sum(own * own, axis=1), hidden_size, eps)[:, None]
        value = rms_normed(own, own_inverse, own_weights, dtype, OFFSET)
    if residual is not None:
        added = tl.load(residual + rows * residual_stride + columns, mask=mask, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(dtype)
        tl.store(summed + rows * hidden_size + columns, value, mask=mask)
    if weight is not None:
        upcast = value.to(tl.float32)
        inverse = inverse_rms(tl.sum(upcast * upcast, axis=1), hidden_size, eps)[:, None]
        output = rms_normed(upcast, inverse, weights, dtype, OFFSET)
        if factor is not None:
            output = (output.to(tl.float32) / tl.load(factor)).to(normed.dtype.element_ty)
        if NORMED_STRIDE is None:
            tl.store(normed + rows * hidden_size + columns, output, mask=mask)
        else:
            tl.store(normed + rows * NORMED_STRIDE + columns, output, mask=mask)


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    grad_residual: Tensor | None = None,
    offset: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`train.operations.rms_norm_backward` of [T, hidden], rows of all gradients and `x` contiguous."""
    num_rows, hidden_size = x.shape
    for rows_of in (grad, x) if grad_residual is None else (grad, x, grad_residual):
        assert rows_of.shape == x.shape, f"{tuple(rows_of.shape)} beside x of {tuple(x.shape)}"
        assert rows_of.stride(1) == 1, "rows of x and of the gradients must be contiguous"
    assert weight.is_contiguous() and weight.shape == (hidden_size,), f"weight is not [{hidden_size}]"
    rows, block, num_warps = _tile(hidden_size)
    grad_x = torch.empty((num_rows, hidden_size), dtype=x.dtype, device=x.device) if out is None else out
    assert grad_x.is_contiguous() and grad_x.shape == x.shape, "out has gaps or another shape than x"
    num_sums = min(triton.cdiv(num_rows, rows), num_programs(x.device, num_warps))
    sums = torch.empty((num_sums, hidden_size), dtype=torch.float32, device=x.device)
    # Tiles are fetched while one is worked on: otherwise every row would wait for its own reads.
    num_ahead = min(_READ_AHEAD_BYTES // (3 * rows * block * x.element_size()), 2)
    _rms_norm_backward_kernel[(num_sums,)](
        grad, x, weight, grad_residual, grad_x, sums, grad.stride(0), x.stride(0),
        0 if grad_residual is None else grad_residual.stride(0), eps, num_rows, hidden_size, OFFSET=offset,
        ROWS=rows, BLOCK=block, NUM_STAGES=1 + num_ahead, num_warps=num_warps,
    )  # fmt: skip
    return grad_x, sums.sum(0)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward_kernel(
    grad, x, weight, grad_residual, grad_x, sums, grad_stride, x_stride, residual_stride, eps, num_rows,
    hidden_size, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of every `num_programs`-th tile of ROWS rows; gradients of the weight are added to `sums`."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)[None, :]
    in_row = columns < hidden_size
    dtype = grad_x.dtype.element_ty
    weights = tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
    if OFFSET is not None:
        weights += OFFSET
    grad_weight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for tile in tl.range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        mask = (rows < num_rows) & in_row
        value = tl.load(x + rows * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        wide_grad = tl.load(grad + rows * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
        inverse = inverse_rms(tl.sum(value * value, axis=1), hidden_size, eps)[:, None]
        normed = value * inverse
        grad_weight += wide_grad * multiplied(normed, dtype, OFFSET)
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
    """A tile's rows, columns and warps: a thread gets 16 values, two 16-byte loads of bfloat16."""
    block = triton.next_power_of_2(hidden_size)
    rows = max(1024 // block, 1)
    return rows, block, min(max(rows * block // 512, 1), 32)
