"""A policy's weights for an engine with its own copy: merged, under the base model's names, in buckets.

Adapters are merged, W + sum_i scaling_i * B_i A_i (Hu et al. 2021, https://arxiv.org/abs/2106.09685), and
4-bit weights are dequantised, one matrix at a time as its bucket is filled. So the model does not change, and
the computed weights never take more memory than one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colocate.weights.adapters import (
    active_adapters,
    base_linear,
    unreproducible_adapter,
    unsupported_adapters,
)
from colocate.weights.layouts import causal_lm
from colocate.weights.quantized import compute_dtype, dequantize, is_4bit
from colocate.weights.weight_parts import whole_tensor

BUCKET_BYTES = 2**30


def why_not_publishable(model: nn.Module) -> str | None:
    """The reason why `buckets` cannot give this model's weights; None if it can."""
    if (reason := unreproducible_adapter(model)) is not None:
        return reason
    base = causal_lm(model)
    if (reason := unsupported_adapters(base)) is not None:
        return reason
    for name, parameter in base.named_parameters():
        owner = base.get_submodule(name.rpartition(".")[0])
        if not parameter.is_floating_point() and not is_4bit(owner):
            return f"{name} is quantised in a way that is not understood ({parameter.dtype})"
    return None


def buckets(model: nn.Module, max_bytes: int = BUCKET_BYTES) -> Iterator[list[tuple[str, Tensor]]]:
    """All weights of a causal language model, which may be inside a PEFT wrapper, in buckets of bounded size.

    Names are those of the base model's own state dict. Plain parameters come as they are (detached, not
    copied), tied ones once. One that FSDP2 has split is gathered in its own type, for which all ranks that
    share the weights must take the buckets together. A merged weight is summed in float32 and rounded once
    to the base weight's type; the trainer's own forward rounds W x and B A x apart, so the two differ by a
    rounding.

    Args:
        max_bytes: a bucket's tensors have at most this size together. A larger tensor has a bucket for
            itself.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} must be positive.")
    if (reason := why_not_publishable(model)) is not None:
        raise ValueError(f"The policy's weights cannot be handed to the engine: {reason}.")
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, size_bytes, make in _weights(causal_lm(model), "", set()):
        if bucket and num_bytes + size_bytes > max_bytes:
            yield bucket
            # A new list: the old one belongs to the receiver now.
            bucket, num_bytes = [], 0
        bucket.append((name, make()))
        num_bytes += size_bytes
    if bucket:
        yield bucket


def all_bytes(model: nn.Module) -> int:
    """Bytes of all tensors that `buckets` yields, each counted once. None of them is computed."""
    return sum(size_bytes for _, size_bytes in sizes(model))


def sizes(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Name and bytes of each tensor that `buckets` yields, in its order. None of them is computed."""
    return ((name, size_bytes) for name, size_bytes, _ in _weights(causal_lm(model), "", set()))


def tied_head(model: nn.Module) -> str | None:
    """Name of the weight that is also the head's, as `buckets` calls it; None if the head has its own."""
    base = causal_lm(model)
    embedding, head = base.get_input_embeddings().weight, base.get_output_embeddings().weight
    if embedding is not head:
        return None
    return next(name for name, parameter in base.named_parameters() if parameter is embedding)


def _weights(module: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, int, Callable[[], Tensor]]]:
    """Name, bytes and maker of each weight below `module`; `seen` has the ids of those that came already."""
    is_adapted = hasattr(module, "get_base_layer")
    linear = base_linear(module)
    for name, parameter in linear.named_parameters(recurse=False):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if name == "weight" and is_4bit(linear):
            num_bytes = linear.in_features * linear.out_features * compute_dtype(linear).itemsize
        else:
            num_bytes = parameter.nbytes
        make = (
            partial(_merged, module, name)
            if is_adapted or is_4bit(linear)
            else partial(whole_tensor, parameter)
        )
        yield prefix + name, num_bytes, make
    if not is_adapted:  # the modules below an adapted layer are its adapters, which were merged
        for name, child in module.named_children():
            yield from _weights(child, f"{prefix}{name}.", seen)


@torch.no_grad()
def _merged(module: nn.Module, name: str) -> Tensor:
    """The weight or bias of a linear layer with its adapters added."""
    linear = base_linear(module)
    is_weight = name == "weight"
    base = dequantize(linear) if is_weight and is_4bit(linear) else whole_tensor(getattr(linear, name))
    adapters = active_adapters(module)
    if is_weight:
        updates = [(adapter.scaling, adapter) for adapter in adapters]
        if not updates:
            return base
        merged = base.float()
        for scaling, adapter in updates:
            merged = torch.addmm(merged, adapter.b.float(), adapter.a.float(), alpha=scaling)
    else:
        biases = [adapter.scaling * adapter.bias.float() for adapter in adapters if adapter.bias is not None]
        if not biases:
            return base
        merged = base.float() + sum(biases)
    return merged.to(base.dtype)
