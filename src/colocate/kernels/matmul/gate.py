"""silu(gate) * up (Shazeer 2020, arXiv:2002.05202) and its gradient, as Triton kernels. They also compute it
with the tanh approximation of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415) in place of SiLU.

Two more kernels also add what LoRA adapters contribute to gate, to up and to the incoming gradient. Added by
a product of its own, that contribution would cost one more pass over the widest tensor of a layer; here it is
arithmetic on values that are in registers anyway.
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
"""Warps of a program: a thread then has 8 values, one 16-byte load of bfloat16 from each tensor."""


@triton.jit
def silu(gates, DTYPE: tl.constexpr):
    """silu of float32 gates, rounded to the model's type and returned as float32."""
    return (gates / (1.0 + tl.exp(-gates))).to(DTYPE).to(tl.float32)


@triton.jit
def tanh_gelu(gates, DTYPE: tl.constexpr):
    """The tanh approximation of GELU, as `silu`: x (1 + tanh(u)) / 2 = x sigmoid(2 u), where
    u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    twice = 1.5957691216057308 * gates * (1.0 + 0.044715 * gates * gates)
    return (gates / (1.0 + tl.exp(-twice))).to(DTYPE).to(tl.float32)


@triton.jit
def gated(gates, up, DTYPE: tl.constexpr, IS_GELU: tl.constexpr = False):
    """silu(gates) * up, or gelu(gates) * up, of float32 gates and up, returned in the model's type."""
    activated = tanh_gelu(gates, DTYPE) if IS_GELU else silu(gates, DTYPE)
    return (activated * up).to(DTYPE)


@triton.jit
def gradients(grad, gates, up, DTYPE: tl.constexpr, IS_GELU: tl.constexpr):
    """Gradients of gates and up, and `gated` once more, in the model's type; operands are float32."""
    if IS_GELU:
        squares = gates * gates
        twice = 1.5957691216057308 * gates * (1.0 + 0.044715 * squares)
        sigmoid = 1.0 / (1.0 + tl.exp(-twice))
        activated = tanh_gelu(gates, DTYPE)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * squares)
        grad_gates = grad * up * sigmoid * (1.0 + gates * slope * (1.0 - sigmoid))
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gates))
        activated = silu(gates, DTYPE)
        grad_gates = grad * up * sigmoid * (1.0 + gates * (1.0 - sigmoid))
    return grad_gates.to(DTYPE), (grad * activated).to(DTYPE), (activated * up).to(DTYPE)


def silu_mul(gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
    """silu(gate) * up of `gate_up` [T, 2i], rows contiguous, silu rounded before; [T, i], contiguous. With
    `is_gelu`, here and below, GELU takes the place of SiLU."""
    # The product that made these rows wrote them tile by tile, all rows of some columns at a time. As long as
    # they fit into the L2 cache they are read in that order; larger ones are read row by row.
    return _silu_mul(gate_up, None, None, rows_first=gate_up.nbytes <= _L2_BYTES, is_gelu=is_gelu)


def silu_mul_backward(grad: Tensor, gate_up: Tensor, *, is_gelu: bool = False) -> tuple[Tensor, Tensor]:
    """Gradient [T, 2i] of `silu_mul`, and its output [T, i] once more, contiguous as the rows given.

    With s = sigmoid(gate): d silu(gate) / d gate = s (1 + gate (1 - s))."""
    num_rows, width = grad.shape
    assert gate_up.shape == (num_rows, 2 * width), f"gate_up of {tuple(gate_up.shape)} for a grad of {width}"
    assert grad.stride(1) == 1, "a row of grad must be contiguous"
    grad_gate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    return grad_gate_up, _silu_mul(gate_up, grad, grad_gate_up, rows_first=False, is_gelu=is_gelu)


def _silu_mul(
    gate_up: Tensor, grad: Tensor | None, grad_gate_up: Tensor | None, *, rows_first: bool, is_gelu: bool
) -> Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "a row of gate_up must be contiguous"
    output = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    num_blocks = triton.cdiv(width, BLOCK)
    _silu_mul_kernel[(num_rows * num_blocks,)](
        gate_up, grad, grad_gate_up, output, gate_up.stride(0), None if grad is None else grad.stride(0),
        num_rows, width, num_blocks, BLOCK=BLOCK, ROWS_FIRST=rows_first, IS_GELU=is_gelu,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_rows"])
def _silu_mul_kernel(
    gate_up, grad, grad_gate_up, output, gate_up_stride, grad_stride, num_rows, width, num_blocks,
    BLOCK: tl.constexpr, ROWS_FIRST: tl.constexpr, IS_GELU: tl.constexpr,
):  # fmt: skip
    """`silu_mul` of BLOCK columns of one row; with `grad`, also its gradient, written to `grad_gate_up`.

    Programs count rows first (ROWS_FIRST) or the `num_blocks` blocks of a row first; strides are from row to
    row.
    """
    number = tl.program_id(0)
    row = (number % num_rows if ROWS_FIRST else number // num_blocks).to(tl.int64)
    columns = (number // num_rows if ROWS_FIRST else number % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    dtype = output.dtype.element_ty
    pointers = gate_up + row * gate_up_stride + columns
    gates = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointers + width, mask=mask, other=0.0).to(tl.float32)
    if grad is None:
        activated = gated(gates, up, dtype, IS_GELU)
    else:
        wide_grad = tl.load(grad + row * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
        grad_gates, grad_up, activated = gradients(wide_grad, gates, up, dtype, IS_GELU)
        grad_pointers = grad_gate_up + row * (2 * width) + columns
        tl.store(grad_pointers, grad_gates, mask=mask)
        tl.store(grad_pointers + width, grad_up, mask=mask)
    tl.store(output + row * width + columns, activated, mask=mask)


ROWS, COLUMNS, MAX_TILES = 16, 128, 16
"""A program keeps its columns' part of the adapters in registers, goes down up to 16 tiles of tokens and
fetches the next tiles while it computes one. With one tile per program it would wait for memory first, then
for the products. A decode step has fewer rows; there programs get fewer tiles each, so that all
multiprocessors have work."""
_ROWS_PER_TILE = 64


def silu_mul_low_rank(gate_up: Tensor, low_rank: LowRank, *, is_gelu: bool = False) -> Tensor:
    """`silu_mul` of gate_up + low_rank (two blocks of width i), that sum rounded to the type."""
    assert gate_up.stride(1) == 1, "a row of gate_up must be contiguous"
    return _silu_mul_low_rank(gate_up, low_rank, None, None, None, is_gelu=is_gelu)


def silu_mul_low_rank_backward(
    grad: Tensor, gate_up: Tensor, low_rank: LowRank, grad_low_rank: LowRank, *, is_gelu: bool = False
) -> tuple[Tensor, Tensor]:
    """`silu_mul_backward` of grad + grad_low_rank (one block) and gate_up + low_rank, those sums rounded."""
    num_rows, width = grad.shape
    assert gate_up.shape == (num_rows, 2 * width), f"gate_up of {tuple(gate_up.shape)} for a grad of {width}"
    assert grad.is_contiguous() and gate_up.is_contiguous(), "grad and gate_up must be contiguous"
    grad_gate_up = torch.empty_like(gate_up)
    return grad_gate_up, _silu_mul_low_rank(
        gate_up, low_rank, grad, grad_low_rank, grad_gate_up, is_gelu=is_gelu
    )


def _silu_mul_low_rank(
    gate_up: Tensor,
    low_rank: LowRank,
    grad: Tensor | None,
    grad_low_rank: LowRank | None,
    grad_gate_up: Tensor | None,
    *,
    is_gelu: bool,
) -> Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    parts = low_rank.halves() + ([] if grad_low_rank is None else grad_low_rank.parts())
    blocks = [*(one_block(*part) for part in parts), (None,) * 7]
    num_tiles = min(MAX_TILES, 1 << max(1, num_rows // _ROWS_PER_TILE).bit_length() - 1)
    _silu_mul_low_rank_kernel[triton.cdiv(num_rows, num_tiles * ROWS), triton.cdiv(width, COLUMNS)](
        gate_up, gate_up.stride(0), *blocks[0], *blocks[1], grad, *blocks[2], grad_gate_up, output, num_rows,
        width, PADDED_RANK=max(padded_rank(factor.shape[1]) for _, factor, _ in parts), ROWS=ROWS,
        COLUMNS=COLUMNS, NUM_TILES=num_tiles, NUM_STAGES=min(3, num_tiles), IS_GELU=is_gelu, num_warps=4,
    )  # fmt: skip
    return output


def one_block(reduced: Tensor, factor: Tensor, scaling: float) -> tuple:
    """A block of a `LowRank` as the kernel's arguments: reduced, stride, factor, strides, rank, scaling."""
    assert reduced.stride(1) == 1, "a token's part must be contiguous"
    return reduced, reduced.stride(0), factor, *factor.stride(), factor.shape[1], scaling


@triton.jit
def factor_tile(
    DTYPE: tl.constexpr, factor, column_stride, rank_stride, rank, columns, width, PADDED_RANK: tl.constexpr
):
    """An adapter's factor [width, rank] at C columns, transposed: [PADDED_RANK, C] in the model's type."""
    ranks = tl.arange(0, PADDED_RANK)[:, None]
    tile = tl.load(
        factor + ranks * rank_stride + columns[None, :] * column_stride,
        mask=(ranks < rank) & (columns < width)[None, :],
        other=0.0,
    )
    return tile.to(DTYPE)


@triton.jit
def with_low_rank(product, reduced, stride, rank, scaling, factor, rows, num_rows, PADDED_RANK: tl.constexpr):
    """product [R, C] + scaling * reduced [R, rank] @ factor [PADDED_RANK, C], rounded to the type of
    `product` and returned as float32."""
    ranks = tl.arange(0, PADDED_RANK)[None, :]
    left = tl.load(reduced + rows * stride + ranks, mask=(rows < num_rows) & (ranks < rank), other=0.0)
    total = product.to(tl.float32) + scaling * tl.dot(left, factor, input_precision="ieee")
    return total.to(product.dtype).to(tl.float32)


@triton.jit
def _silu_mul_low_rank_kernel(
    gate_up, stride,
    gate_reduced, gate_reduced_stride, gate_factor, gate_column_stride, gate_rank_stride, gate_rank,
    gate_scaling,
    up_reduced, up_reduced_stride, up_factor, up_column_stride, up_rank_stride, up_rank, up_scaling,
    grad,
    grad_reduced, grad_reduced_stride, grad_factor, grad_column_stride, grad_rank_stride, grad_rank,
    grad_scaling,
    grad_gate_up, output, num_rows, width,
    PADDED_RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUM_TILES: tl.constexpr,
    NUM_STAGES: tl.constexpr, IS_GELU: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up with the adapters' terms added; with `grad`, its gradient as well.

    A program computes COLUMNS columns of NUM_TILES tiles of ROWS tokens. In the order of the arguments:

    `gate_up` [T, 2i] with its row stride; with a gradient, `grad_gate_up` has this stride too.

    `gate_*`, `up_*` and `grad_*`: the adapter's term of each tensor, scaling * reduced [T, rank] @ factor^T,
    where factor is [i, rank] with any strides (`one_block`).

    `grad` [T, i], contiguous; None: forward only, and neither `grad_*` nor `grad_gate_up` is read.

    `grad_gate_up` [T, 2i] and `output` [T, i], both written.
    """
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dtype = output.dtype.element_ty
    if grad is not None:
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
        in_one, in_both = rows * width + columns[None, :], rows * stride + columns[None, :]
        if grad is not None:
            wide_grad = tl.load(grad + in_one, mask=mask, other=0.0)
        gates = tl.load(gate_up + in_both, mask=mask, other=0.0)
        up = tl.load(gate_up + in_both + width, mask=mask, other=0.0)
        gates = with_low_rank(
            gates, gate_reduced, gate_reduced_stride, gate_rank, gate_scaling, gate_tile, rows, num_rows,
            PADDED_RANK,
        )  # fmt: skip
        up = with_low_rank(
            up, up_reduced, up_reduced_stride, up_rank, up_scaling, up_tile, rows, num_rows, PADDED_RANK
        )
        if grad is None:
            activated = gated(gates, up, dtype, IS_GELU)
        else:
            wide_grad = with_low_rank(
                wide_grad, grad_reduced, grad_reduced_stride, grad_rank, grad_scaling, grad_tile, rows,
                num_rows, PADDED_RANK,
            )  # fmt: skip
            grad_gates, grad_up, activated = gradients(wide_grad, gates, up, dtype, IS_GELU)
            tl.store(grad_gate_up + in_both, grad_gates, mask=mask)
            tl.store(grad_gate_up + in_both + width, grad_up, mask=mask)
        tl.store(output + in_one, activated, mask=mask)
