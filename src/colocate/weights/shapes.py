"""The sizes of a model on which memory and time depend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Literal

import torch
from torch import nn

from colocate.weights.adapters import active_adapters, base_linear, padded_rank
from colocate.weights.layouts import Layout, layout_for
from colocate.weights.quantized import is_4bit
from colocate.weights.weight_parts import splits_of, why_whole

_DEFAULT_LORA_TARGETS = ("q_proj", "v_proj")
"""The matrices that PEFT adapts in Llama, Mistral and Qwen models when no target is named."""
_BLOCK = 64
"""Number of 4-bit weights with one scale, bitsandbytes' default."""
_NESTED_BLOCK = 256
"""Number of scales with one scale of their own, with double quantisation."""


@dataclass(frozen=True)
class Lora:
    """Adapters that a model will get."""

    rank: int
    target_modules: Sequence[str] | Literal["all-linear"] | None = None
    """Names of the adapted matrices, or "all-linear". None: PEFT's choice for Llama, Mistral and Qwen."""


@dataclass(frozen=True)
class FourBit:
    """The storage of projections in bitsandbytes' 4 bits (QLoRA, arXiv:2305.14314)."""

    double_quantized: bool = False

    def weight_bytes(self, num_weights: int) -> int:
        """Bytes of the codes and scales of one matrix.

        A code has half a byte. A block of 64 codes has a float32 scale. With double quantisation it has a
        scale of one byte, and 256 blocks have a float32 together.
        """
        num_blocks = -(-num_weights // _BLOCK)
        codes_bytes = -(-num_weights // 2)
        if not self.double_quantized:
            return codes_bytes + 4 * num_blocks
        return codes_bytes + num_blocks + 4 * -(-num_blocks // _NESTED_BLOCK)


@dataclass(frozen=True)
class ModelShapes:
    """The sizes of a model with a layout (`colocate.weights.layouts`), whose layers all have equal shapes."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    mlp_size: int
    vocab_size: int
    has_tied_head: bool
    num_parameters: int
    """Parameters of the base model; a tied head counts once, and a 4-bit weight counts as one parameter."""
    trained_sizes: tuple[int, ...] = field(repr=False)
    """Elements of each trained tensor."""
    adapter_sizes: tuple[int, ...] = field(repr=False)
    """Elements of each tensor of the adapters; empty without adapters."""
    num_stacked: int
    """Elements of all adapters' A that a rollout keeps in the weights' type, where the engine pads their
    ranks."""
    four_bit: FourBit | None
    """How the projections are stored; None: in the model's type."""
    why_whole: str | None = None
    """The block that keeps the weights from being split over ranks; None: there is none."""
    num_rotary_tables: int = 1
    """Tables of cosines and sines: more than one if kinds of layers differ, or some do not rotate."""
    has_output_norms: bool = False
    """Whether what attention and the MLP add to their input is normed before."""
    norms_whole_qk: bool = False
    """Whether norms of queries and keys go over all heads of a token."""
    num_split_stacked: int = 0
    """How many of `num_stacked` belong to o and down, so that they are split with the weights."""

    @classmethod
    def of(
        cls, model: nn.Module, *, lora: Lora | None = None, four_bit: FourBit | None = None
    ) -> ModelShapes:
        """The sizes of a model, which may be loaded or on the meta device.

        If the model holds a part of its weights, they are the sizes of the whole (`ModelShapes.part`).

        Args:
            lora, four_bit: adapters, and the quantisation, that the model will get and does not have yet.

        Raises:
            ValueError: the model has no layout, or LoRA's targets name no matrix of it.
        """
        layout = layout_for(model)
        first = layout.layers[0]
        hidden_size = layout.embed_tokens.embedding_dim
        projections = [base_linear(p) for p in _projections(layout)]
        if four_bit is None and is_4bit(projections[0]):
            four_bit = FourBit(double_quantized=projections[0].weight.quant_state.nested)
        adapters = [adapter for p in _projections(layout) for adapter in active_adapters(p)]
        adapter_tensors = [x for adapter in adapters for x in (adapter.a, adapter.b, adapter.bias)]
        adapter_sizes = tuple(x.numel() for x in adapter_tensors if x is not None)
        partial = [projection for layer in layout.layers for projection in (layer.o, layer.down)]
        not_counted = {id(tensor) for tensor in (*adapter_tensors, *(p.weight for p in projections))}
        # `named_parameters` yields a tied head once, and it takes memory once.
        splits, parameters = splits_of(model), dict(model.named_parameters())
        sizes = {name: splits[name].full_shape(p.shape).numel() for name, p in parameters.items()}
        others = sum(sizes[name] for name, p in parameters.items() if id(p) not in not_counted)
        shapes = cls(
            num_layers=len(layout.layers),
            num_heads=layout.num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_size=layout.head_dim,
            hidden_size=hidden_size,
            mlp_size=base_linear(first.down).in_features,
            vocab_size=layout.vocab_size,
            has_tied_head=layout.lm_head.weight is layout.embed_tokens.weight,
            num_parameters=others + sum(p.in_features * p.out_features for p in projections),
            trained_sizes=tuple(sizes[name] for name, p in parameters.items() if p.requires_grad),
            adapter_sizes=adapter_sizes,
            num_stacked=_num_stacked(_projections(layout)),
            four_bit=four_bit,
            why_whole=why_whole(layout),
            num_rotary_tables=len({layer.rotary for layer in layout.layers}),
            has_output_norms=first.attention_output_norm is not None,
            norms_whole_qk=layout.norms_whole_qk,
            num_split_stacked=_num_stacked(partial),
        )
        return shapes if lora is None else shapes.with_lora(lora)

    def with_lora(self, lora: Lora) -> ModelShapes:
        """The sizes with new adapters, which are then the only trained tensors."""
        adapted = {
            name: sizes
            for name, sizes in self.matrices.items()
            if lora.target_modules == "all-linear" or name in (lora.target_modules or _DEFAULT_LORA_TARGETS)
        }
        if not adapted:
            raise ValueError(
                f"lora_target_modules={lora.target_modules!r} names no matrix of the layers; they are "
                f"{sorted(self.matrices)}."
            )
        # LoRA adds A [r, in] and B [out, r] to each targeted matrix (arXiv:2106.09685, eq. 3).
        sizes = tuple(lora.rank * size for matrix in adapted.values() for size in matrix) * self.num_layers
        stacked = {
            name: padded_rank(lora.rank) * num_in * self.num_layers for name, (num_in, _) in adapted.items()
        }
        return replace(
            self,
            trained_sizes=sizes,
            adapter_sizes=sizes,
            num_stacked=sum(stacked.values()),
            num_split_stacked=stacked.get("o_proj", 0) + stacked.get("down_proj", 0),
        )

    def part(self, num_parts: int) -> ModelShapes:
        """The sizes of one rank's part of a model whose weights are split over `num_parts` ranks.

        Every matrix is split, by heads, by the MLP's width or by the vocabulary; norms and biases count
        whole, and so do adapters, which every rank has; the second copy that a rollout keeps of them is
        split.
        """
        return self if num_parts == 1 else _part(self, num_parts)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each projection of a layer."""
        h, i, q, kv = self.hidden_size, self.mlp_size, self.q_size, self.kv_size
        return {
            "q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h),
            "gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h),
        }  # fmt: skip

    @property
    def q_size(self) -> int:
        """Columns of the queries, H · D."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Columns of the keys, and of the values, K · D."""
        return self.num_kv_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def group_sizes(self) -> tuple[int, int, int, int]:
        """Numbers of weights of q/k/v, o, gate/up and down in one layer."""
        h, i = self.hidden_size, self.mlp_size
        return h * self.qkv_size, self.q_size * h, 2 * h * i, h * i

    @property
    def num_projection_weights(self) -> int:
        return self.num_layers * sum(self.group_sizes)

    @property
    def num_8bit_weights(self) -> int:
        """Weights of q, k, v, gate, up and down, which a rollout in 8 bits multiplies in e4m3."""
        qkv, _, gate_up, down = self.group_sizes
        return self.num_layers * (qkv + gate_up + down)

    @property
    def num_head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def has_adapters(self) -> bool:
        return bool(self.adapter_sizes)

    @property
    def num_trained(self) -> int:
        return sum(self.trained_sizes)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the base model's weights, where those that are not quantised have type `dtype`."""
        if self.four_bit is None:
            return self.num_parameters * dtype.itemsize
        matrices = (num_in * num_out for num_in, num_out in self.matrices.values())
        projections_bytes = self.num_layers * sum(map(self.four_bit.weight_bytes, matrices))
        return projections_bytes + (self.num_parameters - self.num_projection_weights) * dtype.itemsize

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in all layers, 2 · L · K · D · bytes of `dtype`; in 8 bits
        plus a scale for each head."""
        scales = self.num_kv_heads if dtype == torch.uint8 else 0
        return 2 * self.num_layers * (self.kv_size * dtype.itemsize + scales)


@cache  # plans ask for it hundreds of times
def _part(shapes: ModelShapes, num_parts: int) -> ModelShapes:
    # The smallest matrix is that of the keys; no vector is as long.
    smallest = shapes.hidden_size * shapes.kv_size
    split = shapes.num_projection_weights + shapes.num_head_weights * (1 if shapes.has_tied_head else 2)
    sizes = shapes.trained_sizes
    if not shapes.has_adapters:
        sizes = tuple(-(-size // num_parts) if size >= smallest else size for size in sizes)
    return replace(
        shapes,
        num_heads=shapes.num_heads // num_parts,
        num_kv_heads=shapes.num_kv_heads // num_parts,
        mlp_size=shapes.mlp_size // num_parts,
        vocab_size=shapes.vocab_size // num_parts,
        num_parameters=shapes.num_parameters - split + split // num_parts,
        trained_sizes=sizes,
        num_stacked=shapes.num_stacked - shapes.num_split_stacked + shapes.num_split_stacked // num_parts,
        num_split_stacked=shapes.num_split_stacked // num_parts,
    )


def _num_stacked(projections: Iterable[nn.Module]) -> int:
    adapters = (adapter for projection in projections for adapter in active_adapters(projection))
    return sum(padded_rank(len(adapter.a)) * adapter.a.shape[1] for adapter in adapters)


def _projections(layout: Layout) -> Iterable[nn.Module]:
    return (p for layer in layout.layers for p in chain(*layer.projection_groups()))
