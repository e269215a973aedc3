"""`WeightSource`: a policy's weights for an engine with a copy: merged, under the base model's names.

Adapters are merged, W + sum_i scaling_i * B_i A_i (Hu et al. 2021, https://arxiv.org/abs/2106.09685), and
4-bit weights are dequantised, one matrix at a time as its bucket is filled. So the model does not change, and
the computed weights never take more memory than one bucket.
"""

from __future__ import annotations

import itertools
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
from colocate.weights.chunks import Chunk, layout_hash, packed
from colocate.weights.layouts import causal_lm
from colocate.weights.quantized import compute_dtype, dequantize, is_4bit
from colocate.weights.weight_parts import whole_tensor

BUCKET_BYTES = 2**30


def why_not_publishable(model: nn.Module) -> str | None:
    """The reason why a `WeightSource` cannot give this model's weights; None if it can."""
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


class WeightSource:
    """The weights of a causal language model, which may be inside a PEFT wrapper, as they are when asked for.

    Names are those of the base model's own state dict. Plain parameters come as they are (detached, not
    copied), tied ones once. One that FSDP2 has split is gathered in its own type, for which all ranks that
    share the weights must read together. A merged weight is summed in float32 and rounded once to the base
    weight's type; the trainer's own forward rounds W x and B A x apart, so the two differ by a rounding.

    Args:
        max_bytes: the tensors of a bucket or chunk have at most this size together. A larger tensor has one
            for itself.

    Raises:
        ValueError: `max_bytes` is not positive.
    """

    def __init__(self, model: nn.Module, max_bytes: int = BUCKET_BYTES) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes} must be positive.")
        self.model = model
        self.max_bytes = max_bytes

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Name and bytes of each tensor, in the order in which they come. None of them is computed."""
        return [(name, num_bytes) for name, num_bytes, _ in self._makers()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(num_bytes for _, num_bytes in self.sizes)

    @property
    def layout(self) -> str:
        """The name for names and sizes of all tensors that `layout_hash` gives."""
        return layout_hash(self.sizes)

    @property
    def tied_head(self) -> str | None:
        """Name of the weight that is also the head's; None if the head has its own."""
        base = causal_lm(self.model)
        embedding, head = base.get_input_embeddings().weight, base.get_output_embeddings().weight
        if embedding is not head:
            return None
        return next(name for name, parameter in base.named_parameters() if parameter is embedding)

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """All tensors with their names, in lists of bounded size.

        Raises:
            ValueError: `why_not_publishable` has a reason.
        """
        if (reason := why_not_publishable(self.model)) is not None:
            raise ValueError(f"The policy's weights cannot be handed to the engine: {reason}.")
        bucket: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for name, size_bytes, make in self._makers():
            if bucket and num_bytes + size_bytes > self.max_bytes:
                yield bucket
                # A new list: the old one belongs to the receiver now.
                bucket, num_bytes = [], 0
            bucket.append((name, make()))
            num_bytes += size_bytes
        if bucket:
            yield bucket

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors with their names, one by one. Raises what `buckets` raises."""
        return itertools.chain.from_iterable(self.buckets())

    def chunks(self, buffer: Callable[[int], Tensor]) -> Iterator[Chunk]:
        """All tensors in chunks, each a bucket packed into one buffer. Raises what `buckets` raises.

        Args:
            buffer: gives the memory [bytes] uint8 of the next chunk. If it is that of the chunk before, its
                readers must have copied it by then.
        """
        return (packed(bucket, buffer) for bucket in self.buckets())

    def _makers(self) -> Iterator[tuple[str, int, Callable[[], Tensor]]]:
        return _weights(causal_lm(self.model), "", set())


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
