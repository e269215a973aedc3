"""Models whose own forward computes what a rollout in 8 bits does: references for the native engine.

They round with a table of all numbers in e4m3, in float64, and know nothing of exponents that are stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

E4M3_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3_NUMBERS = E4M3_NUMBERS[E4M3_NUMBERS.isfinite()].unique()  # in ascending order


def rounded(x: Tensor) -> Tensor:
    """`x`, at most 448 in size, rounded to the nearest number in e4m3, ties to even; float64."""
    x = x.double()
    above = torch.searchsorted(E4M3_NUMBERS, x).clamp(1, len(E4M3_NUMBERS) - 1)
    low, high = E4M3_NUMBERS[above - 1], E4M3_NUMBERS[above]
    is_high = (high - x < x - low) | ((high - x == x - low) & _is_even(high, high - low))
    return torch.where(is_high, high, low)


def _is_even(number: Tensor, step: Tensor) -> Tensor:
    return (number / step).remainder(2) == 0


def power_for(largest: Tensor) -> Tensor:
    """The smallest power of two, at least 2^-32, by which `largest` is divided to be at most 448."""
    return torch.exp2(torch.ceil(torch.log2(largest.double() / 448)).clamp(min=-32))


def vectors_in_8bit(x: Tensor) -> Tensor:
    """Vectors [..., D] rounded, each relative to a power of two of its own."""
    power = power_for(x.abs().amax(-1, keepdim=True))
    return (rounded(x / power) * power).to(x.dtype)


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any):
    return sdpa_attention_forward(module, query, vectors_in_8bit(key), vectors_in_8bit(value), *args, **options)


def with_8bit_kv(model: Any) -> Any:
    """The model, whose attention reads keys and values from 8 bits."""
    AttentionInterface.register("kv_in_8_bits", _attention)
    AttentionMaskInterface.register("kv_in_8_bits", sdpa_mask)
    model.set_attn_implementation("kv_in_8_bits")
    return model
