"""Attention over packed sequences: no padding in the rest of the model, no mask over the pack.

Registered with transformers under `PACKED_ATTENTION`. No mask function is registered with it, so transformers
builds no [T, T] mask: which tokens see each other follows from the `PackedLayout` that travels as a keyword.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

PACKED_ATTENTION = "colocate_packed"


@dataclass(frozen=True)
class PackedLayout:
    """Where N sequences lie in a pack of T tokens."""

    cu_seqlens: Tensor  # [N + 1] int32: sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1]
    max_length: int
    position_ids: Tensor  # [T] int64, from 0 in every sequence
    slots: Tensor  # [T] int64: each token's place in a right-padded [N * max_length]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        # Worked out on the CPU: sizes that depend on data would each stop a GPU.
        length = torch.tensor(lengths)
        cu_seqlens = F.pad(length.cumsum(0), (1, 0))
        row = torch.arange(len(lengths)).repeat_interleave(length)
        position_ids = torch.arange(sum(lengths)) - cu_seqlens[row]
        slots = row * max(lengths) + position_ids
        return cls(cu_seqlens.int().to(device), max(lengths), position_ids.to(device), slots.to(device))


def packed_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a pack.

    Args:
        query: [1, H, T, D]; key, value: [1, K, T, D] with K dividing H.
        sliding_window: a token sees itself and the `sliding_window - 1` before it.

    Returns:
        [1, T, H, D], as transformers' attention interface wants it, and no attention weights.
    """
    query, key, value = (_to_padded(x, packed) for x in (query, key, value))
    mask = None
    if sliding_window is not None and sliding_window < packed.max_length:
        square = torch.ones(packed.max_length, packed.max_length, dtype=torch.bool, device=query.device)
        mask = square.tril().triu(1 - sliding_window)
    # Padding is on the right, so causality already hides it from every real token.
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return _to_packed(output, packed), None


def _to_padded(x: Tensor, packed: PackedLayout) -> Tensor:
    """[1, H, T, D] -> [N, H, max_length, D]."""
    tokens = x[0].transpose(0, 1)
    num_sequences = len(packed.cu_seqlens) - 1
    padded = tokens.new_zeros(num_sequences * packed.max_length, *tokens.shape[1:])
    padded = padded.index_copy(0, packed.slots, tokens)
    return padded.unflatten(0, (num_sequences, packed.max_length)).transpose(1, 2)


def _to_packed(x: Tensor, packed: PackedLayout) -> Tensor:
    """[N, H, max_length, D] -> [1, T, H, D]."""
    return x.transpose(1, 2).flatten(0, 1)[packed.slots].unsqueeze(0)


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
