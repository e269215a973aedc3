"""The weights that a rollout's matrix products read: the trainer's own, or dequantised ones if it has 4 bits.

LoRA adapters compute W x + s B (A x). On a GPU their A are stored as further rows below W, rounded to W's
type when a rollout begins, so that one product computes W x and every A x. A product with A alone would take
a decode step as long as a product with small weights, and A has a few hundredths of W's bytes. Where ranks
split the weights, training gathers W's parts and there is no room below them: the rank's part of each A is
copied to memory of its own when a rollout begins, and a projection takes one more product.

A product that unpacks 4-bit codes on the way is slower than one that reads 16-bit weights if it has more than
some tens of rows. So a rollout multiplies with dequantised weights, which it makes in one of two ways:

    copy        all weights, once when the rollout begins (14 GB for 8 B parameters)
    one by one  each weight before every product with it, all in one place as large as the largest (0.2 GB)

For each byte of dequantised weights a step moves one byte with the copy (it reads it), and 2.25 bytes one by
one (it reads a quarter as codes, writes one and reads it). The memory, that of such copies of A included, is
an arena like the cache's, so captured graphs find the same addresses in every rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from colocate.memory.arena import Arena
from colocate.weights.adapters import AdapterStack, base_linear
from colocate.weights.layouts import WHOLE, Layout, WeightPart
from colocate.weights.quantized import dequantize, is_4bit
from colocate.weights.shared_views import fused_view, stacked_view
from colocate.weights.weight_parts import local_adapters

ALIGNMENT_BYTES = 512
Place = TypeVar("Place")


@dataclass(frozen=True)
class ProjectionWeight:
    """The weights of linear layers that read the same input, one below the other."""

    storage: Tensor  # [sum of out + the stack's rows, in], without these rows if there is `stacked_a`
    stack: AdapterStack | None
    """The adapters whose A lie below the weights in `storage`, or in `stacked_a`; None: there are none."""
    linears: tuple[nn.Linear, ...] = ()
    """The layers whose weights are copied or dequantised into `storage` before every read; empty: `storage`
    holds the weights already."""
    stacked_a: Tensor | None = None  # [the stack's rows, in]

    def read(self) -> Tensor:
        """`storage`, valid until another weight is read."""
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

    def read_stack(self) -> Tensor | None:
        """The adapters' A alone, [the stack's rows, in], valid until another weight is read; None: no A."""
        if self.stack is None or self.stacked_a is not None:
            return self.stacked_a
        if self.linears:
            fill_stacks([(self.stack, self.storage)])
        return self.storage[-self.stack.num_rows :]

    def identity(self) -> Iterator[object]:
        """The addresses and sizes that a captured graph that reads these weights depends on."""
        yield self.storage.data_ptr(), None if self.stack is None else self.stack.num_rows
        yield None if self.stacked_a is None else self.stacked_a.data_ptr()
        for linear in self.linears:
            state = getattr(linear.weight, "quant_state", None)
            yield linear.weight.data_ptr(), None if state is None else state.absmax.data_ptr()


def fill_stacks(stacks: Sequence[tuple[AdapterStack, Tensor]]) -> None:
    """Copy the adapters' A into the last rows of each storage, rounded to its type, all at once."""
    rows = [row for stack, storage in stacks for row in stack.rows(storage[-stack.num_rows :])]
    if rows:
        torch._foreach_copy_(rows, [adapter.a.detach() for stack, _ in stacks for adapter in stack.adapters])


class WeightMemory(Generic[Place]):
    """Memory for weights that a rollout reads elsewhere than the trainer; on a GPU an arena."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._arena: Arena | None = None
        self._storage: Tensor | None = None  # uint8; on a GPU all addresses, which need not have memory
        self._places: dict[nn.Linear, Place] = {}
        """The place of each group of layers that read the same input, by the first of them."""

    @property
    def num_bytes(self) -> int:
        """Bytes taken; on a GPU the arena takes whole handles."""
        if self._arena is not None:
            return self._arena.mapped_bytes
        return 0 if self._storage is None else self._storage.nbytes

    def _take(self, num_bytes: int, device: torch.device) -> None:
        """Take `num_bytes`; memory taken before stays taken if that fails."""
        if device.type != "cuda":
            if self._arena is not None or self.num_bytes != num_bytes:
                self.close()
                self._storage = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return
        if self._arena is None or self._arena.device != device:
            self.close()
            capacity_bytes = torch.cuda.get_device_properties(device).total_memory
            self._arena = Arena(device, capacity_bytes, purpose=self._purpose)
        self._arena.resize(num_bytes)
        if self._storage is None:
            self._storage = self._arena.tensor((self._arena.capacity_bytes,), torch.uint8)

    def free(self, keep_bytes: int = 0) -> None:
        """Give the memory back, on a GPU all but `keep_bytes` (rounded down to whole handles)."""
        if self._arena is None:
            self._storage = None
            self._places.clear()
            return
        handle_bytes = self._arena.handle_bytes
        self._arena.resize(min(keep_bytes // handle_bytes * handle_bytes, self._arena.mapped_bytes))

    def close(self) -> None:
        """Give the memory back and, on a GPU, the reserved addresses."""
        if self._arena is not None:
            self._arena.close()
        self._arena = self._storage = None
        self._places.clear()


class RolloutWeights(WeightMemory[Tensor]):
    """The weights that a rollout reads: the trainer's, dequantised ones, and copies of adapters' A.

    Args:
        stacks_adapters: the adapters' A lie below the weights, or in memory of their own if ranks split the
            weights.
    """

    def __init__(self, *, stacks_adapters: bool) -> None:
        super().__init__("rollout weights")
        self._stacks_adapters = stacks_adapters
        self.is_copy: bool | None = None
        """True: there is memory for all weights; False: for one at a time; None: none was taken yet."""

    def allocate(self, layout: Layout, *, is_copy: bool) -> None:
        """Take memory for the copy, or for one weight at a time. Contents are undefined until `prepare`.

        Raises:
            ArenaExhausted: the device has too little free memory; memory taken earlier stays taken.
        """
        self._take(self.needed_bytes(layout, is_copy=is_copy), layout.device)
        self.is_copy = is_copy

    def prepare(self, layout: Layout) -> None:
        """Assign memory to each group that needs some, fill the copy if there is one, and copy the adapters'
        A.

        Every rollout makes the copy anew, which takes milliseconds. So weights that were replaced since the
        last rollout (adapters were merged or trained, a checkpoint was loaded) are not missed.
        """
        self._places.clear()
        offset = 0
        stacks: list[tuple[AdapterStack, Tensor]] = []
        for modules in _groups(layout):
            linears, num_bytes = tuple(map(base_linear, modules)), self._num_bytes(modules, layout)
            if num_bytes:
                assert self._storage is not None, "there is no memory for the rollout's weights"
                place = self._storage[offset : offset + num_bytes].view(layout.dtype)
                self._places[linears[0]] = place.view(-1, num_inputs(modules, layout.part))
                if self.is_copy:
                    offset += aligned(num_bytes)
            if any(map(is_4bit, linears)):
                if self.is_copy:
                    stack = self._stack(modules, layout.part)
                    ProjectionWeight(self._places[linears[0]], stack, linears).fill()
                continue
            weight = self.of(modules, layout.part)
            if weight.stack is not None:
                stacks.append(
                    (weight.stack, weight.storage if weight.stacked_a is None else weight.stacked_a)
                )
        fill_stacks(stacks)

    def of(self, modules: Sequence[nn.Module], part: WeightPart) -> ProjectionWeight:
        """The weights of layers that read the same input; `prepare` was called with their layout before."""
        linears, stack = tuple(base_linear(module) for module in modules), self._stack(modules, part)
        if any(map(is_4bit, linears)):
            return ProjectionWeight(self._places[linears[0]], stack, () if self.is_copy else linears)
        weights = [linear.weight for linear in linears]
        if stack is not None and part != WHOLE:
            return ProjectionWeight(joined(weights), stack, stacked_a=self._places[linears[0]])
        stacked = None if stack is None else stacked_view(weights, stack.num_rows)
        if stacked is None:
            return ProjectionWeight(joined(weights), None)
        return ProjectionWeight(stacked, stack)

    def needed_bytes(self, layout: Layout, *, is_copy: bool) -> int:
        """Bytes for a copy of all 4-bit projections or of the largest one, and for this rank's part of the
        adapters' A if the weights are split. 0: a rollout reads the trainer's own."""
        sizes = [self._num_bytes(modules, layout) for modules in _groups(layout)]
        return sum(map(aligned, sizes)) if is_copy else max(sizes, default=0)

    def _stack(self, modules: Sequence[nn.Module], part: WeightPart) -> AdapterStack | None:
        return AdapterStack.of(local_adapters(modules, part)) if self._stacks_adapters else None

    def _num_bytes(self, modules: Sequence[nn.Module], layout: Layout) -> int:
        """Bytes of the storage of layers that read the same input; 0: they need none."""
        linears, stack = [base_linear(module) for module in modules], self._stack(modules, layout.part)
        has_4bit = any(map(is_4bit, linears))
        rows = sum(linear.out_features for linear in linears) if has_4bit else 0
        if stack is not None and (has_4bit or layout.part != WHOLE):
            rows += stack.num_rows
        return rows * num_inputs(modules, layout.part) * layout.dtype.itemsize


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One view of the weights or biases of layers that read the same input, one below the other; no copy."""
    return parts[0] if len(parts) == 1 else fused_view(parts)


def _groups(layout: Layout) -> Iterator[Sequence[nn.Module]]:
    """The model's linear layers in groups that read the same input."""
    for layer in layout.layers:
        yield from layer.projection_groups()


def num_inputs(modules: Sequence[nn.Module], part: WeightPart) -> int:
    """Columns of the input that this rank's part of layers that read the same input multiplies."""
    num_inputs: int = base_linear(modules[0]).in_features
    return num_inputs // part.count if len(modules) == 1 else num_inputs


def aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up to where the next weight may begin."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
