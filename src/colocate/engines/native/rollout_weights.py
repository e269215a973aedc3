"""The weights that a rollout's matrix products read: the trainer's own, or dequantised ones if it has 4 bits.

LoRA adapters compute W x + s B (A x). On a GPU their A are stored as further rows below W, rounded to W's
type when a rollout begins, so that one product computes W x and every A x. A product with A alone would take
a decode step as long as a product with small weights, and A has a few hundredths of W's bytes.

A product that unpacks 4-bit codes on the way is slower than one that reads 16-bit weights if it has more than
some tens of rows. So a rollout multiplies with dequantised weights, which it makes in one of two ways:

    copy        all weights, once when the rollout begins (14 GB for 8 B parameters)
    one by one  each weight before every product with it, all in one place as large as the largest (0.2 GB)

For each byte of dequantised weights a step moves one byte with the copy (it reads it), and 2.25 bytes one by
one (it reads a quarter as codes, writes one and reads it). The memory is an arena like the cache's, so
captured graphs find the same addresses in every rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colocate.memory.arena import Arena
from colocate.weights.adapters import AdapterStack, base_linear, projection_adapters
from colocate.weights.layouts import Layout
from colocate.weights.quantized import dequantize, is_4bit
from colocate.weights.shared_views import fused_view, stacked_view

ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class ProjectionWeight:
    """The weights of linear layers that read the same input, one below the other."""

    storage: Tensor  # [sum of out + the stack's rows, in]
    stack: AdapterStack | None
    """The adapters whose A lie below the weights in `storage`; None: there are none."""
    linears: tuple[nn.Linear, ...] = ()
    """The layers whose weights are copied or dequantised into `storage` before every read; empty: `storage`
    holds the weights already."""

    def read(self) -> Tensor:
        """[sum of out + the stack's rows, in], valid until another weight is read."""
        if self.linears:
            self.fill()
        return self.storage

    def fill(self) -> None:
        """Copy or dequantise the weights of `linears` into `storage`, and the adapters' A below them."""
        widths = [linear.out_features for linear in self.linears]
        for part, linear in zip(self.storage[: sum(widths)].split(widths), self.linears, strict=True):
            if is_4bit(linear):
                dequantize(linear, out=part)
            else:
                part.copy_(linear.weight)
        if self.stack is not None:
            fill_stacks([(self.stack, self.storage)])

    def identity(self) -> Iterator[object]:
        """The addresses and sizes that a captured graph that reads these weights depends on."""
        yield self.storage.data_ptr(), None if self.stack is None else self.stack.num_rows
        for linear in self.linears:
            state = getattr(linear.weight, "quant_state", None)
            yield linear.weight.data_ptr(), None if state is None else state.absmax.data_ptr()


def fill_stacks(stacks: Sequence[tuple[AdapterStack, Tensor]]) -> None:
    """Copy the adapters' A into the rows below each storage's weights, rounded to its type, all at once."""
    rows = [row for stack, storage in stacks for row in stack.rows(storage[-stack.num_rows :])]
    if rows:
        torch._foreach_copy_(rows, [adapter.a.detach() for stack, _ in stacks for adapter in stack.adapters])


class RolloutWeights:
    """Where a rollout finds its weights, with memory for those that must be dequantised.

    Args:
        stacks_adapters: the adapters' A lie below the weights.
    """

    def __init__(self, *, stacks_adapters: bool) -> None:
        self._stacks_adapters = stacks_adapters
        self.is_copy: bool | None = None
        """True: there is memory for all weights; False: for one at a time; None: none was taken yet."""
        self._arena: Arena | None = None
        self._storage: Tensor | None = None  # uint8; on a GPU all addresses, which need not have memory
        self._places: dict[nn.Linear, Tensor] = {}
        """Where each group's dequantised weights lie, by the first of the layers that read the same input."""

    @property
    def num_bytes(self) -> int:
        """Bytes taken; on a GPU the arena takes whole handles."""
        if self._arena is not None:
            return self._arena.mapped_bytes
        return 0 if self._storage is None else self._storage.nbytes

    def allocate(self, layout: Layout, *, is_copy: bool) -> None:
        """Take memory for the copy, or for one weight at a time. Contents are undefined until `prepare`.

        Raises:
            ArenaExhausted: the device has too little free memory; memory taken earlier stays taken.
        """
        num_bytes, device = self.needed_bytes(layout, is_copy=is_copy), layout.device
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
        """Give each group of 4-bit layers its place, fill the copy if there is one, and copy the adapters' A.

        Every rollout makes the copy anew, which takes milliseconds. So weights that were replaced since the
        last rollout (adapters were merged, a checkpoint was loaded) are not missed.
        """
        self._places.clear()
        offset = 0
        stacks: list[tuple[AdapterStack, Tensor]] = []
        for modules in _groups(layout):
            linears = tuple(base_linear(module) for module in modules)
            if not any(map(is_4bit, linears)):
                weight = self.of(modules)
                stacks += [] if weight.stack is None else [(weight.stack, weight.storage)]
                continue
            assert self._storage is not None, "there is no memory for dequantised weights"
            num_bytes = self._num_bytes(modules, layout.dtype)
            place = self._storage[offset : offset + num_bytes].view(layout.dtype)
            self._places[linears[0]] = place.view(-1, linears[0].in_features)
            if self.is_copy:
                ProjectionWeight(self._places[linears[0]], self._stack(modules), linears).fill()
                offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        fill_stacks(stacks)

    def of(self, modules: Sequence[nn.Module]) -> ProjectionWeight:
        """The weights of layers that read the same input; `prepare` was called with their layout before."""
        linears, stack = tuple(base_linear(module) for module in modules), self._stack(modules)
        if any(map(is_4bit, linears)):
            return ProjectionWeight(self._places[linears[0]], stack, () if self.is_copy else linears)
        weights = [linear.weight for linear in linears]
        stacked = None if stack is None else stacked_view(weights, stack.num_rows)
        if stacked is None:
            return ProjectionWeight(joined(weights), None)
        return ProjectionWeight(stacked, stack)

    def needed_bytes(self, layout: Layout, *, is_copy: bool) -> int:
        """Bytes for a copy of all projections with 4-bit weights, or for the largest one; 0: none has any."""
        sizes = [
            self._num_bytes(modules, layout.dtype)
            for modules in _groups(layout)
            if any(is_4bit(base_linear(module)) for module in modules)
        ]
        if is_copy:
            return sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
        return max(sizes, default=0)

    def _stack(self, modules: Sequence[nn.Module]) -> AdapterStack | None:
        return AdapterStack.of(projection_adapters(modules)) if self._stacks_adapters else None

    def _num_bytes(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> int:
        linears, stack = [base_linear(module) for module in modules], self._stack(modules)
        rows = sum(linear.out_features for linear in linears) + (0 if stack is None else stack.num_rows)
        return rows * linears[0].in_features * dtype.itemsize

    def free(self, keep_bytes: int = 0) -> None:
        """Give the memory back, on a GPU all but `keep_bytes` (rounded down to whole handles)."""
        if self._arena is None:
            self._storage = None
            self._places.clear()
            return
        handle_bytes = self._arena.handle_bytes
        self._arena.resize(min(keep_bytes // handle_bytes * handle_bytes, self._arena.mapped_bytes))

    def close(self) -> None:
        """Give the memory back, and on a GPU the reserved addresses, too."""
        if self._arena is not None:
            self._arena.close()
        self._arena = self._storage = None
        self._places.clear()


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One view of the weights or biases of layers that read the same input, one below the other; no copy."""
    return parts[0] if len(parts) == 1 else fused_view(parts)


def _groups(layout: Layout) -> Iterator[Sequence[nn.Module]]:
    """The model's linear layers in groups that read the same input."""
    for layer in layout.layers:
        yield from layer.projection_groups()
