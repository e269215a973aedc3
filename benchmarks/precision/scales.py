"""Relative errors of a model's numbers that are rounded to 8 bits, with each way of choosing scales.

An error is the root of the mean square of what rounding changes, over that of the values, of all layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from colocate.kernels.fp8 import e4m3

PAGE_SIZE = 64
BLOCK = 128
Rounding = Callable[[Tensor], Tensor]


def with_scale(x: Tensor, largest: Tensor, *, is_power_of_two: bool = False) -> Tensor:
    """`x` as it is read back if `largest`, of a shape like that of `x`, becomes 448; more is cut."""
    scale = (largest.float() / 448).clamp(min=2.0**-32)
    if is_power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return (x.float() / scale).clamp(-448, 448).to(e4m3.DTYPE).float() * scale


def largest_in(x: Tensor, *sizes: int) -> Tensor:
    """The largest size in each block of `sizes` along the last dimensions, spread over the block."""
    for dim, size in zip(range(-len(sizes), 0), sizes, strict=True):
        parts = [part.abs().amax(dim, keepdim=True).expand_as(part) for part in x.split(size, dim)]
        x = torch.cat(parts, dim)
    return x


def from_first(x: Tensor, headroom: float) -> Tensor:
    """Each page's scale is fixed by its first token, [heads, tokens, D]."""
    pages = [
        page[..., :1, :].abs().amax((-2, -1), keepdim=True).expand_as(page) for page in x.split(PAGE_SIZE, -2)
    ]
    return headroom * torch.cat(pages, -2)


HEADS: dict[str, Rounding] = {
    "token_power_of_two": lambda x: with_scale(x, largest_in(x, x.shape[-1]), is_power_of_two=True),
    "token_float32": lambda x: with_scale(x, largest_in(x, x.shape[-1])),
    "page_known_before": lambda x: with_scale(x, largest_in(x, PAGE_SIZE, x.shape[-1])),
    **{
        f"page_first_token_times_{headroom}": lambda x, headroom=headroom: with_scale(
            x, from_first(x, headroom)
        )
        for headroom in (1, 2, 4)
    },
}
"""Of keys and values [heads, tokens, D]."""
WEIGHTS: dict[str, Rounding] = {
    "matrix_power_of_two": lambda w: with_scale(w, w.abs().amax(), is_power_of_two=True),
    "blocks_of_128x128": lambda w: with_scale(w, largest_in(w, BLOCK, BLOCK)),
}
ROWS: dict[str, Rounding] = {
    "row_power_of_two": lambda x: with_scale(x, largest_in(x, x.shape[-1]), is_power_of_two=True),
    "blocks_of_128": lambda x: with_scale(x, largest_in(x, BLOCK)),
}


class Errors:
    """Sums of squares of values and of what rounding changes, by kind and way."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))

    def add(self, kind: str, ways: dict[str, Rounding], x: Tensor) -> None:
        x = x.detach().float()
        for way, rounding in ways.items():
            sums = self._sums[kind][way]
            sums[0] += float((rounding(x) - x).square().sum())
            sums[1] += float(x.square().sum())

    def relative(self) -> dict[str, dict[str, float]]:
        return {
            kind: {way: math.sqrt(changed / whole) for way, (changed, whole) in ways.items()}
            for kind, ways in self._sums.items()
        }


@torch.no_grad()
def scale_errors(model: Any, tokens: Tensor) -> dict[str, dict[str, float]]:
    """Relative errors of this model's numbers, while it reads `tokens` [sequences, T]."""
    errors = Errors()

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        errors.add("keys", HEADS, key)
        errors.add("values", HEADS, value)
        return sdpa_attention_forward(module, query, key, value, *args, **options)

    def hook(kind: str, ways: dict[str, Rounding]) -> Callable[..., None]:
        return lambda module, inputs: errors.add(kind, ways, inputs[0])

    AttentionInterface.register("seen", attention)
    AttentionMaskInterface.register("seen", sdpa_mask)
    handles = []
    for layer in model.model.layers:
        for norm, linear in (
            (layer.input_layernorm, layer.self_attn.q_proj),
            (layer.post_attention_layernorm, layer.mlp.gate_proj),
        ):
            bound = math.sqrt(norm.weight.numel()) * norm.weight.abs().max()
            known = {"bound_power_of_two": lambda x, b=bound: with_scale(x, b, is_power_of_two=True)}
            handles.append(linear.register_forward_pre_hook(hook("norms", known | ROWS)))
        handles.append(layer.mlp.down_proj.register_forward_pre_hook(hook("activations", ROWS)))
        for linear in (layer.self_attn.q_proj, layer.mlp.gate_proj, layer.mlp.down_proj):
            errors.add("weights", WEIGHTS, linear.weight)
    before = model.config._attn_implementation
    model.set_attn_implementation("seen")
    model(tokens)
    model.set_attn_implementation(before)
    for handle in handles:
        handle.remove()
    return errors.relative()
