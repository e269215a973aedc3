"""Which architectures the native engine can run, and where it finds their weights.

A `Layout` points at the modules of a Hugging Face model. Weights are read from the modules when a rollout or
a step starts, so a parameter that was moved in between is never read from an old place. Finding a layout
checks every module (11 ms for 28 layers with LoRA). Therefore each model's layout is kept until a module or
a parameter is added, removed or replaced, which takes 0.5 ms to notice.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from colocate.weights.adapters import (
    adapter_state,
    base_linear,
    unreproducible_adapter,
    unsupported_adapters,
)
from colocate.weights.architectures import ARCHITECTURES, Blocks
from colocate.weights.context_length import longest_context
from colocate.weights.missing_blocks import missing_blocks
from colocate.weights.quantized import compute_dtype, is_4bit

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")

ONE_TABLE = "all layers"
"""The key of the only rotary table, where all layers rotate by the same angles."""

RotaryTables = dict[str | None, tuple[Tensor, Tensor]]
"""Cosines and sines by `LayerLayout.rotary`. Where layers do not rotate, the angles of the key None are 0."""


@dataclass(frozen=True)
class WeightPart:
    """Which part of the weights a model holds (`colocate.weights.weight_parts`)."""

    index: int
    count: int
    """The number of equal parts, of which each of as many ranks holds one."""


WHOLE = WeightPart(0, 1)
"""The part that a model holds whose weights were not split: all of them."""


@dataclass(frozen=True)
class LayerLayout:
    """The modules of one decoder layer.

    Projections are `nn.Linear`, bitsandbytes' `Linear4bit`, or PEFT's LoRA around either.
    """

    qkv: tuple[nn.Module, ...]
    """The projections to queries, keys and values, in this order: three matrices, or one with all three."""
    o: nn.Module
    gate_up: tuple[nn.Module, ...]
    """The projections to gate and up: two matrices, or one with gate's columns first."""
    down: nn.Module
    input_norm: nn.Module | None
    """The norm before attention. A layer has one before or after attention, or both, and so for its MLP."""
    attention_output_norm: nn.Module | None
    """The norm of what attention adds to the residual."""
    mlp_norm: nn.Module | None
    """The norm before the MLP."""
    mlp_output_norm: nn.Module | None
    """The norm of what the MLP adds to the residual."""
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    activation: Callable[[Tensor], Tensor]
    sliding_window: int | None
    """A query at position i sees the keys in (i - sliding_window, i]; None: all up to i."""
    rotary: str | None
    """The key of the rotary table for queries and keys; None: they are not rotated by their positions."""

    def norms(self) -> tuple[nn.Module, ...]:
        """The norms that there are, in the order of a forward pass."""
        norms = (
            self.input_norm, self.q_norm, self.k_norm, self.attention_output_norm, self.mlp_norm,
            self.mlp_output_norm,
        )  # fmt: skip
        return tuple(norm for norm in norms if norm is not None)

    def projection_groups(self) -> tuple[tuple[nn.Module, ...], ...]:
        """The projections in the order of a forward pass, those together that read the same input."""
        return self.qkv, (self.o,), self.gate_up, (self.down,)


@dataclass(frozen=True)
class Layout:
    """A causal language model seen as a stack of decoder layers."""

    architecture: str
    embed_tokens: nn.Embedding
    layers: tuple[LayerLayout, ...]
    norm: nn.Module
    lm_head: nn.Linear
    rotary_emb: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    norm_offset: float | None
    """Added to the weights of all norms (`kernels.definitions.rms_norm`); None: they round before it."""
    norms_whole_qk: bool
    """Whether `q_norm` and `k_norm` take the root mean square over all heads of a token, not over each."""
    norms_last: bool
    """Whether `q_norm` and `k_norm` come after the rotation."""
    pair_distance: int | None
    """The distance of values that are turned with one another (`kernels.definitions.Rotation`)."""
    scaling: float
    """Factor on the attention scores: 1 / sqrt(head_dim), or Granite's `attention_multiplier`."""
    embedding_multiplier: float
    """Factor on the embeddings: 1 but for Granite and Gemma."""
    residual_multiplier: float
    """Factor on what attention and the MLP add to their input: 1 but for Granite, as is the next."""
    logits_multiplier: float
    """Factor on the logits, 1 / `logits_scaling`."""
    max_position: int
    """Longest context whose rotary frequencies do not depend on the length of the sequence, in tokens."""
    max_position_reason: str
    """The option of the model that gives `max_position`, for messages."""
    base: weakref.ref[nn.Module]
    """The causal language model itself; a weak reference, so that its layout does not keep it alive."""
    parts: tuple[object, ...] = field(repr=False)
    """Every module and parameter below `base`, and their types, when the layout was found."""
    part: WeightPart = WHOLE
    """The part of the weights that the modules hold. The numbers above are the whole model's."""

    def is_current(self) -> bool:
        """Whether the model still consists of the modules and parameters that it had."""
        base = self.base()
        if base is None:
            return False
        parts = _parts(base)
        return len(parts) == len(self.parts) and all(map(operator.is_, parts, self.parts))

    @property
    def num_local_heads(self) -> int:
        """Query heads of this rank's part of the weights."""
        return self.num_heads // self.part.count

    @property
    def num_local_kv_heads(self) -> int:
        """Key heads of this rank's part of the weights."""
        return self.num_kv_heads // self.part.count

    @property
    def local_vocab_size(self) -> int:
        """Tokens of this rank's part of embedding and head; it begins at `part.index` times this number."""
        return self.vocab_size // self.part.count

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def adapter_states(self) -> list[tuple[object, ...]]:
        """Which adapters are on, and their settings; switching an adapter changes them."""
        projections = (module for layer in self.layers for g in layer.projection_groups() for module in g)
        return [adapter_state(module) for module in projections if hasattr(module, "get_base_layer")]

    def rotary_tables(self, num_positions: int) -> RotaryTables:
        """The tables of positions 0 .. num_positions - 1, each [num_positions, D] in the model's dtype.

        They come from the model's own rotary module, so every scaling is the trainer's, bit for bit. A copy
        is called because `dynamic` and `longrope` modules change their buffers in forward.
        """
        positions = torch.arange(num_positions, device=self.device)
        return self.rotary_tables_at(positions, self.dtype, copy.deepcopy(self.rotary_emb))

    def rotary_tables_at(
        self, positions: Tensor, dtype: torch.dtype, rotary_emb: nn.Module | None = None
    ) -> RotaryTables:
        """The tables of `positions` [T], each [T, D]; `rotary_emb` is a copy of the model's own module."""
        rotary_emb, like = rotary_emb or self.rotary_emb, positions.new_empty(0, dtype=dtype)
        tables: RotaryTables = {}
        for kind in dict.fromkeys(layer.rotary for layer in self.layers):
            if kind is None:
                ones = like.new_ones(len(positions), self.head_dim)
                tables[kind] = ones, torch.zeros_like(ones)
            else:
                of_kind = () if kind == ONE_TABLE else (kind,)
                cos, sin = rotary_emb(like, positions[None], *of_kind)
                tables[kind] = self._by_place(cos[0].to(dtype), 1.0), self._by_place(sin[0].to(dtype), 0.0)
        return tables

    def _by_place(self, angles: Tensor, unturned: float) -> Tensor:
        """Cosines or sines [T, D] for the places of a head, given those that the model's own module made for
        the part that is turned; the rest is filled with `unturned`."""
        if self.pair_distance == 1:
            angles = angles[:, : angles.shape[1] // 2].repeat_interleave(2, dim=1)
        missing = self.head_dim - angles.shape[1]
        return nn.functional.pad(angles, (0, missing), value=unturned) if missing else angles


def causal_lm(model: nn.Module) -> Any:
    """The causal language model itself, inside a PEFT wrapper or not."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if get_base_model is not None else model


def num_embeddings(model: nn.Module) -> int:
    """The number of tokens that the whole model embeds, inside PEFT's wrapper of the embedding or not."""
    embedding = base_linear(causal_lm(model).get_input_embeddings())
    # PEFT's copies of an embedding (`modules_to_save`, trainable tokens) keep it in other places.
    inside = getattr(embedding, "token_adapter", None)
    embedding = base_linear(inside) if inside is not None else embedding
    return int(getattr(embedding, "original_module", embedding).num_embeddings)


def body(model: nn.Module) -> Any:
    """The model without its head: the module whose `last_hidden_state` the head reads."""
    lm = causal_lm(model)
    if lm.base_model is not lm:
        return lm.base_model
    # The `base_model_prefix` of Mllama and Llama 4 names a module that contains them, not one inside. Llama 4
    # with a vision tower has a causal language model inside.
    return lm.model if hasattr(lm, "model") else body(lm.language_model)


def weight_part_of(model: nn.Module) -> WeightPart:
    """The part of its weights that a model holds, which may have no layout or be inside a PEFT wrapper."""
    part: WeightPart = vars(causal_lm(model)).get("weight_part", WHOLE)
    return part


class _Found:
    """A layout that its model keeps in its `__dict__`, and that goes when the model goes. Kept elsewhere it
    would keep the model alive for ever, since its modules' hooks may refer to the model. A copy of the model
    has none."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def has_layout(model: nn.Module) -> bool:
    """Whether the native engine can run this model exactly."""
    return unreproducible_adapter(model) is None and isinstance(_layout_or_reason(model), Layout)


def why_no_layout(model: nn.Module) -> str | None:
    """The reason why the native engine cannot run this model exactly, in words; None: it can."""
    if (reason := unreproducible_adapter(model)) is not None:
        return reason
    layout = _layout_or_reason(model)
    return _in_full(layout, model) if isinstance(layout, str) else None


def layout_for(model: nn.Module) -> Layout:
    """The layout of a model, which may be inside a PEFT wrapper.

    Returns:
        The very layout that it returned before, while that is current.

    Raises:
        ValueError: the native engine cannot run the model exactly; says why and which engine to use.
    """
    if (reason := unreproducible_adapter(model)) is not None:
        raise ValueError(reason)
    layout = _layout_or_reason(model)
    if isinstance(layout, str):
        _refuse(_in_full(layout, model))
    return layout


def _layout_or_reason(model: nn.Module) -> Layout | str:
    """The layout of a model, or why the native engine cannot run the model exactly."""
    base: Any = causal_lm(model)
    if (reason := _unsupported_options(base)) is not None:
        return reason
    found: _Found | None = vars(base).get("_found_layout")
    if found is None or not found.layout.is_current():
        if (reason := unsupported_adapters(base) or _unexpected_modules(base)) is not None:
            return reason
        found = vars(base)["_found_layout"] = _Found(_resolved(base))
    return found.layout


def _in_full(reason: str, model: nn.Module) -> str:
    """A reason with the blocks of the model that are missing, if it has no layout at all."""
    base: Any = causal_lm(model)
    if type(base) in ARCHITECTURES:
        return reason
    blocks = missing_blocks(base)
    return f"{reason}, for lack of {' and of '.join(blocks)}" if blocks else reason


def _parts(base: Any) -> list[object]:
    """Every module and parameter below `base`, in an order that depends on nothing else, and their types."""
    parts: list[object] = [base.model.embed_tokens.weight.dtype, vars(base).get("weight_part")]
    waiting = [base]
    while waiting:
        module = waiting.pop()
        children = [child for child in module._modules.values() if child is not None]
        parts += children
        parts += module._parameters.values()
        parts.append(vars(module).get("compute_dtype"))  # of 4-bit layers
        waiting += children
    return parts


def _resolved(base: Any) -> Layout:
    """The layout of a causal language model whose modules were found to be those of its architecture."""
    config = base.config
    # `dynamic` keeps the unscaled frequencies up to max_position_embeddings.
    longest = longest_context(config)
    attention = base.model.layers[0].self_attn
    part, blocks = weight_part_of(base), ARCHITECTURES[type(base)]
    return Layout(
        architecture=type(base).__name__,
        embed_tokens=base.model.embed_tokens,
        layers=tuple(_layer_layout(layer, config, blocks) for layer in base.model.layers),
        norm=base.model.norm,
        lm_head=base.lm_head,
        rotary_emb=base.model.rotary_emb,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        vocab_size=base.lm_head.weight.shape[0] * part.count,
        rms_norm_eps=config.rms_norm_eps,
        norm_offset=blocks.norm_offset,
        norms_whole_qk=blocks.norms_whole_qk,
        norms_last=blocks.norms_last,
        pair_distance=_pair_distance(base.model.rotary_emb, attention.head_dim, blocks),
        scaling=attention.scaling,
        embedding_multiplier=_embedding_multiplier(base.model),
        residual_multiplier=float(getattr(base.model.layers[0], "residual_multiplier", 1.0)),
        logits_multiplier=1.0 / (getattr(config, "logits_scaling", None) or 1.0),
        max_position=longest.num_tokens or config.max_position_embeddings,
        max_position_reason=longest.reason,
        base=weakref.ref(base),
        parts=tuple(_parts(base)),
        part=part,
    )


def _layer_layout(layer: Any, config: Any, blocks: Blocks) -> LayerLayout:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = (
        (getattr(parent, packed),) if hasattr(parent, packed) else tuple(getattr(parent, n) for n in apart)
        for parent, packed, apart in (
            (attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            (mlp, "gate_up_proj", ("gate_proj", "up_proj")),
        )
    )
    input_norm, attention_output_norm, mlp_norm, mlp_output_norm = (
        None if name is None else getattr(layer, name) for name in blocks.norms
    )
    return LayerLayout(
        qkv=qkv,
        o=attention.o_proj,
        gate_up=gate_up,
        down=mlp.down_proj,
        input_norm=input_norm,
        attention_output_norm=attention_output_norm,
        mlp_norm=mlp_norm,
        mlp_output_norm=mlp_output_norm,
        q_norm=getattr(attention, blocks.qk_norms[0], None),
        k_norm=getattr(attention, blocks.qk_norms[1], None),
        activation=mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn,
        sliding_window=blocks.window(attention, config),
        rotary=_rotary_of(attention, config, blocks),
    )


def _embedding_multiplier(model: Any) -> float:
    scale = getattr(model.embed_tokens, "scalar_embed_scale", None)
    if scale is None:
        return float(getattr(model, "embedding_multiplier", 1.0))
    # Gemma's is rounded to the type of the weights.
    return torch.tensor(scale, dtype=model.embed_tokens.weight.dtype, device="cpu").item()


def _pair_distance(rotary_emb: Any, head_dim: int, blocks: Blocks) -> int | None:
    if blocks.interleaves:
        return 1
    # One frequency for each pair; modules with a table for each kind of layer turn whole heads.
    frequencies = getattr(rotary_emb, "inv_freq", None)
    if frequencies is None or len(frequencies) == head_dim // 2:
        return None
    return len(frequencies)


def _rotary_of(attention: Any, config: Any, blocks: Blocks) -> str | None:
    if not blocks.rotates(attention, config):
        return None
    return config.layer_types[attention.layer_idx] if blocks.rotary_by_kind else ONE_TABLE


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary options, of each kind of layer where they differ by kind."""
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    return [rope] if "rope_type" in rope else [of_kind for of_kind in rope.values() if of_kind is not None]


def _unsupported_options(base: Any) -> str | None:
    """Name an option or class of the model that the native engine does not support; None: it supports all."""
    if type(base) not in ARCHITECTURES:
        return f"{type(base).__name__} has no layout"
    config, name = base.config, type(base).__name__
    if (quantization := _unsupported_quantization(config)) is not None:
        return f"{name} is quantised ({quantization})"
    for option in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, option, None) not in (None, False):
            return f"{name} sets {option}={getattr(config, option)}"
    for rope in _rope_parameters(config):
        if rope["rope_type"] not in ROPE_TYPES:
            return f"RoPE type {rope['rope_type']!r} is not one of {', '.join(ROPE_TYPES)}"
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and not ARCHITECTURES[type(base)].partial_rotary:
            return f"partial_rotary_factor={rope['partial_rotary_factor']} rotates only part of each head"
    if unknown := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return f"layer types {sorted(unknown)} are unknown"
    return None


def _unsupported_quantization(config: Any) -> str | None:
    """Name the model's quantisation; None if it is not quantised, or by bitsandbytes to 4 bits."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    options = quantization if isinstance(quantization, dict) else quantization.to_dict()
    # Depending on its version, transformers writes the member of an enumeration or its value.
    method = getattr(options.get("quant_method"), "value", options.get("quant_method"))
    if method != "bitsandbytes":
        return str(method)
    return None if options.get("load_in_4bit") else "bitsandbytes, 8 bits"


def _unexpected_modules(base: Any) -> str | None:
    blocks = ARCHITECTURES[type(base)]
    for index, layer in enumerate(base.model.layers):
        for module, expected in ((layer.self_attn, blocks.attention), (layer.mlp, blocks.mlp)):
            if type(module) is not expected:
                return f"layer {index} has {type(module).__name__} where {expected.__name__} is expected"
        for projection in chain(*_layer_layout(layer, base.config, blocks).projection_groups()):
            linear = base_linear(projection)
            if type(linear) is not nn.Linear and not is_4bit(linear):
                return f"layer {index} has a projection of type {type(linear).__name__}"
            if is_4bit(linear) and (dtype := compute_dtype(linear)) != base.model.embed_tokens.weight.dtype:
                return (
                    f"layer {index} has a 4-bit projection that computes in {dtype}, and the model is in "
                    f"{base.model.embed_tokens.weight.dtype}. Load it with dtype=torch.bfloat16 and "
                    "bnb_4bit_compute_dtype=torch.bfloat16, without prepare_model_for_kbit_training, which "
                    "converts it to float32"
                )
    if type(base.lm_head) is not nn.Linear or base.lm_head.bias is not None:
        return "lm_head is not a plain linear layer without bias"
    if type(base.model.embed_tokens) is not blocks.embedding:
        return f"embed_tokens is {type(base.model.embed_tokens).__name__}, not {blocks.embedding.__name__}"
    devices = {parameter.device for parameter in base.parameters()}
    if len(devices) > 1:
        return f"the parameters are spread over {sorted(map(str, devices))}"
    return None


def _refuse(reason: str) -> NoReturn:
    names = ", ".join(architecture.__name__ for architecture in ARCHITECTURES)
    raise ValueError(
        f"The native engine cannot run this model: {reason}. It has layouts for {names}, with linear "
        "layers unquantised or in bitsandbytes' 4 bits, and plain LoRA on them. Use the 'transformers' "
        "engine instead."
    )
