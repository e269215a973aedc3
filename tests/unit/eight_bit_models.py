"""Models whose own forward computes what a rollout in 8 bits does: references for the native engine.

They round in float64, keys and values to whole numbers and products' with a table of all numbers in e4m3, and
know nothing of the bytes that are stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from colocate.weights.adapters import base_linear
from colocate.weights.layouts import causal_lm
from colocate.weights.quantized import dequantize, is_4bit

ONE_ROUNDING = 1e-2
"""How far a log-prob moves when numbers in 8 bits are rounded the other way, as float32's last bit does."""
E4M3_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3_NUMBERS = E4M3_NUMBERS[E4M3_NUMBERS.isfinite()].unique()  # in ascending order


def rounded(x: Tensor) -> Tensor:
    """`x`, at most 448 in size, rounded to the nearest number in e4m3, ties to even; float64."""
    x, numbers = x.double().contiguous(), E4M3_NUMBERS.to(x.device)
    above = torch.searchsorted(numbers, x).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    is_high = (high - x < x - low) | ((high - x == x - low) & _is_even(high, high - low))
    return torch.where(is_high, high, low)


def _is_even(number: Tensor, step: Tensor) -> Tensor:
    return (number / step).remainder(2) == 0


def power_for(largest: Tensor) -> Tensor:
    """The smallest power of two, at least 2^-32, by which `largest` is divided to be at most 448."""
    return torch.exp2(torch.ceil(torch.log2(largest.double() / 448)).clamp(min=-32))


def vectors_in_8bit(x: Tensor) -> Tensor:
    """Vectors [..., D] in e4m3, each relative to a power of two of its own."""
    power = power_for(x.abs().amax(-1, keepdim=True))
    return (rounded(x / power) * power).to(x.dtype)


def scale_for(largest: Tensor) -> Tensor:
    """The smallest power of 2^(1/8), at least 2^-22, by which `largest` is divided to be at most 127."""
    return torch.exp2(torch.ceil(8 * torch.log2(largest.double() / 127)).clamp(min=-8 * 22) / 8)


def heads_in_8bit(x: Tensor) -> Tensor:
    """Keys or values [..., D], each a whole number of times a scale of its vector."""
    scale = scale_for(x.abs().amax(-1, keepdim=True))
    return ((x.double() / scale).round() * scale).to(x.dtype)


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any):
    return sdpa_attention_forward(module, query, heads_in_8bit(key), heads_in_8bit(value), *args, **options)


def with_8bit_kv(model: Any) -> Any:
    """The model, whose attention reads keys and values from 8 bits."""
    AttentionInterface.register("kv_in_8_bits", _attention)
    AttentionMaskInterface.register("kv_in_8_bits", sdpa_mask)
    model.set_attn_implementation("kv_in_8_bits")
    return model


def with_8bit_products(model: Any) -> Any:
    """The model, whose products with q, k, v, gate, up and down multiply numbers in e4m3.

    Layers that read the same input share one power of two for their weights, and one for their inputs, for
    which a norm's weights are a bound; down divides each row by one of its own.
    """
    for layer in causal_lm(model).model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        # Gemma has norms before and after, and OLMo after alone.
        before_mlp = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        for norm, linears in (
            (getattr(layer, "input_layernorm", None), (attention.q_proj, attention.k_proj, attention.v_proj)),
            (before_mlp if hasattr(layer, "input_layernorm") else None, (mlp.gate_proj, mlp.up_proj)),
            (None, (mlp.down_proj,)),
        ):
            bases = tuple(base_linear(linear) for linear in linears)  # without the adapters around them
            for linear in bases:
                linear.forward = _Product(linear, bases, norm)
    return model


class _Product:
    def __init__(self, linear: nn.Module, linears: tuple[nn.Module, ...], norm: nn.Module | None) -> None:
        self._linear, self._linears, self._norm = linear, linears, norm

    @staticmethod
    def _weight(linear: nn.Module) -> Tensor:
        return dequantize(linear) if is_4bit(linear) else linear.weight

    def __call__(self, x: Tensor) -> Tensor:
        largest = max(float(self._weight(linear).detach().abs().max()) for linear in self._linears)
        power = power_for(torch.tensor(largest)).to(x.device)
        own = self._weight(self._linear)
        in_8bit = rounded(own / power) * power
        if self._norm is None:
            rows = vectors_in_8bit(x.detach().double())
        else:
            weight = self._norm.weight.detach()
            weight = 1 + weight if type(self._norm).__name__.startswith("Gemma") else weight
            bound = power_for(x.shape[-1] ** 0.5 * weight.abs().max())
            rows = rounded(x / bound) * bound
        output = rows @ in_8bit.t()
        output = (output if self._linear.bias is None else output + self._linear.bias).to(x.dtype)
        straight = nn.functional.linear(x, own.to(x.dtype), self._linear.bias)
        return straight + (output - straight).detach()  # the gradient is that of the product that is trained
