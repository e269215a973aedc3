"""What a rollout's matrix products read: the trainer's own parameters, but for weights in 4 bits.

A product that unpacks 4-bit codes on the way is slower than one that reads 16 bits from some tens of rows on.
So a rollout multiplies with dequantised weights, in one of two ways:

    copy        all of them, made once at the rollout's beginning (8 B parameters: 14 GB)
    one by one  each before every product with it, all in one place as large as the largest (0.2 GB)

Per byte of the copy, a step reads one byte in the first; in the second it reads a quarter, writes one and
reads that again. Captured graphs see the same addresses in every rollout: the memory is an arena like the
cache's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colocate.memory.arena import Arena
from colocate.weights.adapters import base_linear
from colocate.weights.layouts import Layout
from colocate.weights.quantized import dequantize, is_4bit
from colocate.weights.shared_views import fused_view

ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class ProjectionWeight:
    """The weights of linear layers that read the same input, one below the other."""

    storage: Tensor  # [sum of out, in]
    linears: tuple[nn.Linear, ...] = ()
    """What `storage` has to be filled from before it is read; nothing: it always holds them."""

    def read(self) -> Tensor:
        """[sum of out, in], valid until another weight is read."""
        self.fill()
        return self.storage

    def fill(self) -> None:
        rows = self.storage.split([linear.out_features for linear in self.linears]) if self.linears else ()
        for part, linear in zip(rows, self.linears, strict=True):
            if is_4bit(linear):
                dequantize(linear, out=part)
            else:
                part.copy_(linear.weight)

    def identity(self) -> Iterator[object]:
        """What a captured graph that reads it depends on."""
        yield self.storage.data_ptr()
        for linear in self.linears:
            state = getattr(linear.weight, "quant_state", None)
            yield linear.weight.data_ptr(), None if state is None else state.absmax.data_ptr()


class RolloutWeights:
    """Memory for the dequantised weights of a model; for a model without 4-bit weights, none."""

    def __init__(self) -> None:
        self.is_copy: bool | None = None
        """Whether there is room for all weights, not for one at a time; None: nothing was taken yet."""
        self._arena: Arena | None = None
        self._storage: Tensor | None = None  # uint8; on a GPU as much as there could ever be
        self._places: dict[nn.Linear, Tensor] = {}
        """Of the dequantised weights, by the first of the layers that read the same input."""

    @property
    def num_bytes(self) -> int:
        """Memory taken; on a GPU in the arena's whole handles."""
        if self._arena is not None:
            return self._arena.mapped_bytes
        return 0 if self._storage is None else self._storage.nbytes

    def allocate(self, layout: Layout, *, is_copy: bool) -> None:
        """Take memory for the copy, or for one weight at a time. Contents are undefined until `prepare`.

        Raises:
            ArenaExhausted: the device has too little free memory; what was taken before still is.
        """
        num_bytes, device = needed_bytes(layout, is_copy=is_copy), layout.device
        if device.type != "cuda":
            if self._arena is not None or self.num_bytes != num_bytes:
                self.close()
                self._storage = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            if self._arena is None or self._arena.device != device:
                self.close()
                capacity_bytes = torch.cuda.get_device_properties(device).total_memory
                self._arena = Arena(device, capacity_bytes, purpose="rollout weights")
            self._arena.resize(num_bytes)
            if self._storage is None:
                self._storage = self._arena.tensor((self._arena.capacity_bytes,), torch.uint8)
        self.is_copy = is_copy

    def prepare(self, layout: Layout) -> None:
        """Lay the weights of `layout` out, and fill the copy if there is to be one.

        Every rollout makes it anew: that takes milliseconds, and misses no weight that was replaced in
        between (adapters merged, a checkpoint loaded).
        """
        self._places.clear()
        offset = 0
        for linears in _quantized_groups(layout):
            assert self._storage is not None, "there is no memory for dequantised weights"
            num_bytes = _num_bytes(linears, layout.dtype)
            place = self._storage[offset : offset + num_bytes].view(layout.dtype).view(_shape(linears))
            self._places[linears[0]] = place
            if self.is_copy:
                ProjectionWeight(place, linears).fill()
                offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def of(self, linears: Sequence[nn.Linear]) -> ProjectionWeight:
        """Where products with these layers find their weights; `prepare` was called with their layout."""
        if not any(map(is_4bit, linears)):
            return ProjectionWeight(joined([linear.weight for linear in linears]))
        return ProjectionWeight(self._places[linears[0]], () if self.is_copy else tuple(linears))

    def free(self, keep_bytes: int = 0) -> None:
        """Give the memory back, on a GPU all but `keep_bytes` of it (rounded down to whole handles)."""
        if self._arena is None:
            self._storage = None
            self._places.clear()
            return
        handle_bytes = self._arena.handle_bytes
        self._arena.resize(min(keep_bytes // handle_bytes * handle_bytes, self._arena.mapped_bytes))

    def close(self) -> None:
        """Give the memory back, and on a GPU the addresses, too."""
        if self._arena is not None:
            self._arena.close()
        self._arena = self._storage = None
        self._places.clear()


def needed_bytes(layout: Layout, *, is_copy: bool) -> int:
    """Memory for a copy of the projections with 4-bit weights, or for the largest; 0: there is none."""
    sizes = [_num_bytes(linears, layout.dtype) for linears in _quantized_groups(layout)]
    if is_copy:
        return sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
    return max(sizes, default=0)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Weights or biases of layers that read the same input, one below the other; never a copy."""
    return parts[0] if len(parts) == 1 else fused_view(parts)


def _quantized_groups(layout: Layout) -> Iterator[tuple[nn.Linear, ...]]:
    """Layers that read the same input, where any of them is in 4 bits."""
    for layer in layout.layers:
        for modules in layer.projection_groups():
            linears = tuple(base_linear(module) for module in modules)
            if any(map(is_4bit, linears)):
                yield linears


def _shape(linears: Sequence[nn.Linear]) -> tuple[int, int]:
    return sum(linear.out_features for linear in linears), linears[0].in_features


def _num_bytes(linears: Sequence[nn.Linear], dtype: torch.dtype) -> int:
    return math.prod(_shape(linears)) * dtype.itemsize
