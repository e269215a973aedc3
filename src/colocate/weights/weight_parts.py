"""A model's weights split over ranks, so that the trainer's part is what tensor-parallel decode reads.

With t parts and the names of `weights.layouts`, part r of a model is

    q, k, v, gate, up, embedding, head     rows r·n/t to (r+1)·n/t - 1, and those entries of their biases
    o, down                                as many columns, stored transposed: [in/t, out]
    norms, biases of o and down, adapters  all of them

in natural order, so that part r of q, k and v are the heads r·H/t to (r+1)·H/t - 1 with the keys that they
read. Products of a rank's part need one sum over ranks after o and one after down (Megatron-LM, Shoeybi et
al. 2019, arXiv:1909.08053). Every part is a range of rows in memory: gathered behind one another the parts
are the whole matrix without another copy (o and down transposed).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import AutoModelForCausalLM, PretrainedConfig

from colocate.weights.adapters import Adapter, base_linear, projection_adapters
from colocate.weights.layouts import WHOLE, Layout, WeightPart, causal_lm, layout_for, weight_part_of
from colocate.weights.quantized import is_4bit


@dataclass(frozen=True)
class Split:
    """The split of one parameter."""

    dim: Literal[0, 1] | None
    """0: by rows; 1: by columns, and its part is stored transposed; None: every rank holds all of it."""
    part: WeightPart

    def of_full(self, full: Tensor) -> Tensor:
        """This rank's part of a parameter's full tensor, a view of it."""
        if self.dim is None:
            return full
        size = full.shape[self.dim] // self.part.count
        return full.narrow(self.dim, self.part.index * size, size)

    def full_shape(self, local: torch.Size) -> torch.Size:
        """The shape of the full tensor, given the shape of a part as the module holds it."""
        if self.dim is None:
            return local
        return torch.Size(
            size * self.part.count if dim == self.dim else size for dim, size in enumerate(local)
        )


@dataclass(frozen=True)
class RowChunk(Split):
    """The split of a parameter by FSDP2: by rows as `torch.chunk` cuts them, so that the last parts may have
    fewer rows, or none."""

    shape: torch.Size
    """The shape of the whole parameter."""

    def of_full(self, full: Tensor) -> Tensor:
        num_rows = -(-len(full) // self.part.count)
        start = min(self.part.index * num_rows, len(full))
        return full[start : start + num_rows]

    def full_shape(self, local: torch.Size) -> torch.Size:
        return self.shape


UNSPLIT = Split(None, WHOLE)
"""The split of a parameter that every rank holds whole."""


def splits_of(model: nn.Module) -> dict[str, Split]:
    """The split of every parameter of `model.named_parameters()`, by its name.

    In a model whose weights were not split every part is the whole.
    """
    if (part := weight_part_of(model)) == WHOLE:
        return {name: UNSPLIT for name, _ in model.named_parameters()}
    if any(isinstance(p, DTensor) for p in model.parameters()):
        named = model.named_parameters()
        return {
            n: RowChunk(0, part, p.shape) if isinstance(p, DTensor) else Split(None, part) for n, p in named
        }
    layout = layout_for(model)
    dims = {id(parameter): dim for parameter, dim in _split_parameters(layout)}
    return {name: Split(dims.get(id(p)), layout.part) for name, p in model.named_parameters()}


def sizes_of(model: nn.Module) -> dict[str, int]:
    """The elements of every parameter of `model.named_parameters()` as a whole, by its name."""
    splits = splits_of(model)
    return {name: splits[name].full_shape(p.shape).numel() for name, p in model.named_parameters()}


def local_adapters(modules: Sequence[nn.Module], part: WeightPart) -> list[tuple[slice, Adapter]]:
    """The adapters' terms of this rank's product of layers that read the same input, with their columns of
    it. They take rows of B where the weights are split by rows, and columns of A in o and down.

    Adapters are whole on every rank, and W x + s B (A x) is a sum over the columns of x.
    """
    adapters = projection_adapters(modules)
    if part == WHOLE:
        return adapters
    if len(modules) == 1:
        inputs = Split(1, part)
        return [
            (
                columns,
                replace(adapter, a=inputs.of_full(adapter.a), bias=None if part.index else adapter.bias),
            )
            for columns, adapter in adapters
        ]
    rows, own = Split(0, part), []
    for columns, adapter in adapters:
        bias = None if adapter.bias is None else rows.of_full(adapter.bias)
        local = slice(columns.start // part.count, columns.stop // part.count)
        own.append((local, replace(adapter, b=rows.of_full(adapter.b), bias=bias)))
    return own


def local_part(parameter: Tensor) -> Tensor:
    """This rank's rows of a parameter that FSDP2 has split, without autograd; any other as it is."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def whole_tensor(parameter: Tensor) -> Tensor:
    """The whole of a parameter, without autograd: gathered where it is a DTensor, by all ranks that share it
    together; any other as it is."""
    detached = parameter.detach()
    if not isinstance(detached, DTensor):
        return detached
    # Inner rows first, one dimension of the mesh at a time: `full_tensor` of torch 2.11 fails on both at once
    # in a mesh whose ranks are in another order than the whole mesh's (`Mesh.by_part`).
    for dim in reversed(range(detached.device_mesh.ndim)):
        placements = [*detached.placements[:dim], *[Replicate()] * (detached.device_mesh.ndim - dim)]
        detached = detached.redistribute(placements=placements)
    return detached.to_local()


def storage_of(parameter: Tensor) -> Tensor:
    """A parameter as it lies in memory, contiguous, without autograd: itself, its rows on this rank where
    FSDP2 has split it, or [in/t, out] where a part of o or down is stored transposed."""
    tensor = local_part(parameter)
    if tensor.is_contiguous():
        return tensor
    if tensor.ndim == 2 and tensor.t().is_contiguous():
        return tensor.t()
    raise ValueError(f"a parameter of shape {tuple(tensor.shape)} has the strides {tensor.stride()}")


def why_whole(layout: Layout) -> str | None:
    """The block of a model that keeps its weights from being split over ranks; None: there is none."""
    first = layout.layers[0]
    if len(first.qkv) == 1:
        return "the weights of queries, keys and values are one matrix"
    if len(first.gate_up) == 1:
        return "the weights of gate and up are one matrix"
    if layout.norms_whole_qk:
        return "the norms of queries and keys go over all heads, of which each process would have a part"
    return None


def why_not_split(layout: Layout, count: int) -> str | None:
    """The reason that keeps a model's weights from being split into `count` parts; None: nothing does."""
    first = layout.layers[0]
    if (block := why_whole(layout)) is not None:
        return block
    if any(is_4bit(base_linear(module)) for module in chain(*first.projection_groups())):
        return "weights in 4 bits are not split"
    config = getattr(layout.base(), "config", None)
    if dropout := getattr(config, "attention_dropout", 0.0):  # transformers' modules read whole weights
        return (
            f"its attention_dropout={dropout} is computed by transformers' modules, from whole weights: set "
            "it to 0 in the model's configuration or model_init_kwargs"
        )
    mlp_size = len(base_linear(first.gate_up[0]).weight) * layout.part.count
    for name, size in (
        ("num_attention_heads", layout.num_heads),
        ("num_key_value_heads", layout.num_kv_heads),
        ("intermediate_size", mlp_size),
    ):
        if size % count:
            return f"its {name}={size} cannot be divided by {count}"
    if layout.vocab_size % count:
        return (
            f"its {layout.vocab_size} rows of embedding and head cannot be divided by {count}: load it, call "
            f"model.resize_token_embeddings({-(-layout.vocab_size // count) * count}), and pass the model"
        )
    return None


@torch.no_grad()
def split_weights(model: nn.Module, part: WeightPart) -> None:
    """Keep one part of a model's weights, in place.

    The `nn.Parameter` objects stay; their `.data` is the part. The numbers that modules keep (`in_features`,
    `num_embeddings`, ...) stay those of the whole model, so that PEFT makes whole adapters. Parts of q, k and
    v are row slices of one storage, as after `fuse_parameters`, and so are those of gate and up. Meanwhile
    one matrix at a time exists both whole and as a part.
    """
    layout = layout_for(model)
    if layout.part != WHOLE:
        raise ValueError(f"the model holds one of {layout.part.count} parts of its weights already")
    if (reason := why_not_split(layout, part.count)) is not None:
        raise ValueError(
            f"shard={part.count} splits the weights of {layout.architecture} over {part.count} processes, "
            f"but {reason}. Set shard to another number, or to 1, which splits the optimizer alone."
        )
    # Inference mode is left, because tensors made in it cannot be trained.
    with torch.inference_mode(False):
        for layer in layout.layers:
            for modules in layer.projection_groups():
                linears = [base_linear(module) for module in modules]
                if len(linears) == 1:
                    weight = linears[0].weight
                    weight.data = Split(1, part).of_full(weight.detach()).t().contiguous().t()
                    continue
                _keep_rows([linear.weight for linear in linears], part)
                if linears[0].bias is not None:
                    _keep_rows([linear.bias for linear in linears], part)
        # A tied head is the embedding's own parameter.
        for parameter in {layout.embed_tokens.weight, layout.lm_head.weight}:
            _keep_rows([parameter], part)
    base: Any = causal_lm(model)
    base.weight_part = part
    base.register_forward_pre_hook(_refuse_forward)
    base.save_pretrained = partial(refuse_saving, part)


def _refuse_forward(model: Any, *_: Any) -> None:
    """Raise an error, since transformers' modules would take a part of the weights for the whole."""
    raise RuntimeError(
        f"This process has one of {model.weight_part.count} parts of the model's weights (shard), with which "
        "the model can neither be called nor generate. Call trainer.evaluate(), or load what "
        "trainer.save_model() has saved."
    )


def refuse_saving(part: WeightPart, *_: Any, **__: Any) -> None:
    """Raise an error instead of `save_pretrained`, which would write a part as if it were the whole."""
    raise RuntimeError(
        f"This process has one of {part.count} parts of the model's weights (shard). Save them with "
        "trainer.save_model(), which all processes must call."
    )


def _keep_rows(parameters: Sequence[Tensor], part: WeightPart) -> None:
    kept = torch.cat([Split(0, part).of_full(parameter.detach()) for parameter in parameters])
    sizes = [len(parameter) // part.count for parameter in parameters]
    for parameter, rows in zip(parameters, kept.split(sizes), strict=True):
        parameter.data = rows


def _split_parameters(layout: Layout) -> Iterator[tuple[Tensor, Literal[0, 1]]]:
    """The parameters that are split over ranks, with the dimension that is split."""
    for layer in layout.layers:
        for modules in layer.projection_groups():
            is_row_parallel = len(modules) == 1
            for linear in map(base_linear, modules):
                yield linear.weight, 1 if is_row_parallel else 0
                if linear.bias is not None and not is_row_parallel:
                    yield linear.bias, 0
    yield layout.embed_tokens.weight, 0
    yield layout.lm_head.weight, 0


def empty_parts(model: Any, config: PretrainedConfig, device: torch.device | str) -> None:
    """Give the weights of a model on the meta device, which may be parts, memory with undefined values."""
    model.to_empty(device=device)
    model.tie_weights()
    rotary = model.model.rotary_emb
    # Buffers are empty by now: the frequencies, and the factor on Gemma's embeddings.
    model.model.rotary_emb = type(rotary)(config).to(device)
    embedding = model.model.embed_tokens
    if (scale := getattr(embedding, "scalar_embed_scale", None)) is not None:
        embedding.embed_scale = torch.tensor(scale, device=device)


def random_parts(
    config: PretrainedConfig,
    part: WeightPart,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
) -> Any:
    """A causal language model that holds one part of random weights, which never exist as a whole.

    Matrices are drawn from a normal distribution with the configuration's `initializer_range`, norms are ones
    and biases zeros. Ranks that hold the same part have the same weights.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if part != WHOLE:
        split_weights(model, part)  # on the meta device only shapes change
    empty_parts(model, config, device)
    generator = torch.Generator(device).manual_seed(seed + part.index)
    for name, parameter in model.named_parameters():
        weights = storage_of(parameter)
        if weights.ndim == 2:
            weights.normal_(0.0, getattr(config, "initializer_range", 0.02), generator=generator)
        else:
            weights.fill_(0.0 if name.endswith("bias") else 1.0)
    return model
