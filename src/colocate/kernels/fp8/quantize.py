"""Quantisation to 8 bits as Triton kernels, and inside others, as `e4m3` defines it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocate.kernels.fp8.e4m3 import BIAS, DTYPE, LEAST_EXPONENT
from colocate.kernels.matmul.gate import gated

_BLOCK = 4096
"""Values that a program has at a time: with 8 warps a thread has 16, two 16-byte loads of bfloat16."""
_NUM_WARPS = 8
_VALUES_PER_THREAD = 32
"""Values of a row's first block that a thread has: all its loads are under way at the same time."""
_MAX_ROW_BLOCK = 512 * _VALUES_PER_THREAD
"""The longest block of a row. Two blocks stay in registers; what is behind them is read twice."""

_LEAST = tl.constexpr(BIAS + LEAST_EXPONENT)


@triton.jit
def exponents_for(largest):
    """The biased exponents, int32, of the smallest powers of two that bring float32 `largest` to 448 or less.

    448 is 1.75 * 2^8: what is above 1.75 in a mantissa is carried into the exponent.
    """
    bits = largest.to(tl.int32, bitcast=True)
    return tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, _LEAST)


@triton.jit
def power(exponents):
    """2^(exponents - 127) in float32, of biased exponents below 255."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(exponents):
    """2^(127 - exponents) in float32, of biased exponents below 254."""
    return power(254 - exponents.to(tl.int32))


def scaled(x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """x / factor as e4m3, where all quotients are at most 448.

    Args:
        x: any shape, contiguous.
        factor: [] float32, a power of two.
        out: e4m3, where the result goes; None: a new tensor.
    """
    assert x.is_contiguous(), "x must be contiguous"
    out = torch.empty_like(x, dtype=DTYPE) if out is None else out
    assert out.is_contiguous() and out.numel() == x.numel(), "out must be contiguous and as large as x"
    _scaled_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        x, factor, out, x.numel(), BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )
    return out


@triton.jit
def _scaled_kernel(x, factor, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < count
    value = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + places, (value / tl.load(factor)).to(tl.float8e4nv), mask=mask)


def rows(x: Tensor, *, is_gate_up: bool = False) -> tuple[Tensor, Tensor]:
    """Rows as e4m3, each divided by a power of two of its own.

    Args:
        x: [T, n], rows contiguous.
        is_gate_up: quantise silu(gate) * up, [T, n / 2], of rows with gates first, as `gate.silu_mul` has it.

    Returns:
        e4m3 values [T, n] (or [T, n / 2]), contiguous, and the powers of two [T] float32.
    """
    num_rows, width = x.shape[0], x.shape[1] // (2 if is_gate_up else 1)
    assert x.stride(1) == 1, "a row of x must be contiguous"
    values = torch.empty((num_rows, width), dtype=DTYPE, device=x.device)
    factors = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    # The largest power of two within the row, and the smallest that covers the rest: one block for all would
    # leave up to half of the threads without values.
    block = min(max(_VALUES_PER_THREAD * 128, (triton.next_power_of_2(width + 1) // 2)), _MAX_ROW_BLOCK)
    second_block = min(triton.next_power_of_2(max(width - block, 1)), block)
    _rows_kernel[(num_rows,)](
        x, values, factors, x.stride(0), width, IS_GATE_UP=is_gate_up, BLOCK=block, SECOND_BLOCK=second_block,
        num_warps=block // (32 * _VALUES_PER_THREAD),
    )  # fmt: skip
    return values, factors


@triton.jit
def _rows_kernel(
    x, values, factors, x_stride, width,
    IS_GATE_UP: tl.constexpr, BLOCK: tl.constexpr, SECOND_BLOCK: tl.constexpr,
):  # fmt: skip
    """`rows` of one row. Its first BLOCK + SECOND_BLOCK values stay in registers until their exponent is
    known."""
    row = tl.program_id(0).to(tl.int64)
    columns, second_columns = tl.arange(0, BLOCK), BLOCK + tl.arange(0, SECOND_BLOCK)
    x_row, values_row = x + row * x_stride, values + row * width
    kept = _value(x_row, columns, width, IS_GATE_UP)
    second_kept = _value(x_row, second_columns, width, IS_GATE_UP)
    largest = tl.abs(kept)
    for first in tl.range(BLOCK + SECOND_BLOCK, width, BLOCK):
        largest = tl.maximum(largest, tl.abs(_value(x_row, first + columns, width, IS_GATE_UP)))
    exponent = exponents_for(tl.maximum(tl.max(largest, 0), tl.max(tl.abs(second_kept), 0)))
    tl.store(factors + row, power(exponent))
    factor = inverse_power(exponent)
    tl.store(values_row + columns, (kept * factor).to(tl.float8e4nv), mask=columns < width)
    second = (second_kept * factor).to(tl.float8e4nv)
    tl.store(values_row + second_columns, second, mask=second_columns < width)
    for first in tl.range(BLOCK + SECOND_BLOCK, width, BLOCK):
        value = _value(x_row, first + columns, width, IS_GATE_UP)
        mask = first + columns < width
        tl.store(values_row + first + columns, (value * factor).to(tl.float8e4nv), mask=mask)


@triton.jit
def _value(row, columns, width, IS_GATE_UP: tl.constexpr):
    """Values of a row in float32, rounded to the model's type before; 0 behind its end."""
    mask = columns < width
    value = tl.load(row + columns, mask=mask, other=0.0)
    if IS_GATE_UP:
        up = tl.load(row + width + columns, mask=mask, other=0.0)
        value = gated(value.to(tl.float32), up.to(tl.float32), row.dtype.element_ty)
    return value.to(tl.float32)
