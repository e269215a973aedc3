"""silu(gate) * up (Shazeer 2020, arXiv:2002.05202), forward and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    activated = (gates / (1.0 + tl.exp(-gates))).to(dtype).to(tl.float32)
    tl.store(output + row * width + columns, (activated * up).to(dtype), mask=mask)


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
    sigmoid = 1.0 / (1.0 + tl.exp(-gates))
    activated = (gates / (1.0 + tl.exp(-gates))).to(dtype).to(tl.float32)
    grad_gates = wide_grad * up * sigmoid * (1.0 + gates * (1.0 - sigmoid))
    grad_pointers = grad_gate_up + row * (2 * width) + columns
    tl.store(grad_pointers, grad_gates.to(dtype), mask=mask)
    tl.store(grad_pointers + width, (wide_grad * activated).to(dtype), mask=mask)
    tl.store(output + row * width + columns, (activated * up).to(dtype), mask=mask)
