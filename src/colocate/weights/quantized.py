"""Linear layers whose weight bitsandbytes keeps in 4 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

The weight is a list of 4-bit codes (NF4 or FP4), with one scale for each block of usually 64 codes; with
double quantisation the scales are 8-bit codes themselves. The weight is never updated: adapters are trained.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def is_4bit(linear: nn.Module) -> bool:
    """Whether this is bitsandbytes' 4-bit linear layer."""
    if "bitsandbytes" not in sys.modules:  # no such layer without the library that makes them
        return False
    from bitsandbytes.nn import Linear4bit

    return isinstance(linear, Linear4bit)


def compute_dtype(linear: Any) -> torch.dtype:
    """The type that a 4-bit linear layer multiplies in."""
    # A layer without a compute type multiplies in its input's type, which is that of the weight before it was
    # quantised.
    return linear.compute_dtype or _state(linear).dtype


def is_repacked(linear: Any) -> bool:
    """Whether bitsandbytes has re-packed the weight for inference on a CPU, which has no gradient."""
    state = getattr(linear.weight, "quant_state", None) or linear.quant_state
    return bool(getattr(state, "packing_format_for_cpu", False))


def keep_packing(linear: Any) -> None:
    """Keep bitsandbytes from re-packing the weight in a forward pass in evaluation mode."""
    if hasattr(linear, "support_avx512bf16_for_cpu"):
        linear.support_avx512bf16_for_cpu = False


def dequantize(linear: Any, out: Tensor | None = None) -> Tensor:
    """The weight of a 4-bit linear layer, as bitsandbytes multiplies with it: code * scale, rounded once.

    On CUDA these are a few kernels on the present stream, which a graph can capture.

    Args:
        linear: bitsandbytes' `Linear4bit`.
        out: [out, in], contiguous, for the result. Its type is the result's; None: the layer's compute type.

    Returns:
        [out, in].
    """
    from bitsandbytes import functional

    state = _state(linear)
    absmax = state.absmax
    if state.nested:
        absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    dtype = compute_dtype(linear) if out is None else out.dtype
    # With the layer's own state the result would be rounded to the type that the weight had, and then again
    # to this one.
    plain = functional.QuantState(
        absmax=absmax.float(),
        shape=state.shape,
        dtype=dtype,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
    )
    codes = linear.weight.detach().view(-1, 1)
    if out is None or out.device.type == "cuda":
        return functional.dequantize_4bit(codes, plain, out=out)
    # Except on CUDA, bitsandbytes does not write into a given tensor.
    return out.copy_(functional.dequantize_4bit(codes, plain))


def _state(linear: Any) -> Any:
    # Wrappers that convert parameters (FSDP) lose the weight's attribute; the layer keeps its own.
    state = getattr(linear.weight, "quant_state", None) or linear.quant_state
    if state is None:
        raise RuntimeError(
            "A 4-bit linear layer has not been quantised: bitsandbytes does that when the layer is moved to "
            "its device. Move the model there first (`model.to(device)`)."
        )
    if is_repacked(linear):
        raise RuntimeError(
            "bitsandbytes has re-packed a 4-bit weight for inference on this CPU, which rounds its scales. "
            "It does so in a forward pass in evaluation mode: load the model anew, and call model.train() "
            "before it runs."
        )
    return state
