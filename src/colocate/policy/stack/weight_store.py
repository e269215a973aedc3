"""Whole weights for one layer at a time, on ranks that each hold a part of them.

The arithmetic of training does not change when the weights are split (`weights.weight_parts`): before a layer
is computed, forward or backward, its parts are gathered from the ranks of the weight group, and the gradients
of its whole matrices go back to the ranks that hold the parts (ZeRO stage 3, Rajbhandari et al. 2020,
arXiv:1910.02054, with the layer as its unit).

    compute    layer 0      layer 1      layer 2   …   layer 2      layer 1      layer 0
    gather     1            2            3         …   1            0
    reduce                                                          of 2         of 1        of 0

There are two buffers, of one layer each. A matrix of part r is a range of rows, so that it is gathered
straight into its place: q, k and v one below the other, gate and up too, all in natural order; o and down
transposed. Collectives run beside the computation on the stream of the process group.

Gradients are exchanged and then added up here, in float32 and in the order of the ranks. A reduce-scatter
moves as many bytes; but one in bfloat16 rounds every partial sum, and one in float32 moves twice as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from colocate.parallel.collectives import gather_rows
from colocate.weights.adapters import base_linear
from colocate.weights.layouts import LayerLayout, Layout
from colocate.weights.weight_parts import RowChunk, Split, storage_of, whole_tensor

AddGradient = Callable[[Tensor, Tensor], None]
"""(parameter, value): adds `value`, of the shape of `storage_of(parameter)`, to the parameter's gradient."""


def gather_full(parameter: Tensor, split: Split, group: ProcessGroup) -> Tensor:
    """The full tensor of a parameter that is split over the ranks of `group`, by rows, transposed, or as
    FSDP2 splits it.

    All ranks of the group must call it together. A parameter that is not split is returned as it is.
    """
    if split.dim is None:
        return parameter.detach()
    if isinstance(split, RowChunk):
        return whole_tensor(parameter)
    full = _gathered(storage_of(parameter), split.part.count, group)
    return full.t() if split.dim == 1 else full


def _gathered(part: Tensor, count: int, group: ProcessGroup) -> Tensor:
    full = part.new_empty(len(part) * count, *part.shape[1:])
    gather_rows(full, part, group).wait()
    return full


class WeightStore:
    """The whole weights of a model's layers, two at a time, and the way of their gradients to the parts.

    All ranks of the weight group must make the same calls in the same order.

    Args:
        layout: of a model that holds a part of its weights.
        group: the ranks that hold the other parts, in the order of the parts.
        add_gradient: takes the sum over the group of a part's gradients; None: the weights are frozen, or
            nobody asks for gradients.
    """

    def __init__(self, layout: Layout, group: ProcessGroup, add_gradient: AddGradient | None = None) -> None:
        self._layers = layout.layers
        self._ends = layout.embed_tokens.weight, layout.lm_head.weight
        self._count, self._group, self._add_gradient = layout.part.count, group, add_gradient
        self._buffers: list[_Buffer] = []
        self._reductions: list[_Reduction] = []
        self._num_made = 0
        """The calls of `load`, `gather` and `reduce` that were made in this micro-batch."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, between the first `load` of a pass and `release`."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    def projections(self, index: int) -> tuple[GatheredProjection, ...]:
        """The projections of layer `index`, in the order of `LayerLayout.projection_groups`."""
        return tuple(GatheredProjection(self, index, number) for number in range(4))

    def load(self, index: int, *, is_forward: bool) -> None:
        """Make the whole weights of layer `index` available, until the next but one layer is loaded; and
        start to gather those of the layer that comes next."""
        if not self._buffers:
            self._buffers = [_Buffer(self._layers[0], self._count) for _ in range(2)]
        self._start(index)
        self._buffers[index % 2].wait()
        following = index + (1 if is_forward else -1)
        if 0 <= following < len(self._layers):
            self._start(following)
        self._num_made += 1

    def _start(self, index: int) -> None:
        # Neighbours never share a buffer. Whatever still reads the layer that was here before is on the
        # device's queue already, and a collective waits for that.
        buffer = self._buffers[index % 2]
        if buffer.index != index:
            buffer.fill(index, self._layers[index], self._group)

    def buffer(self, index: int) -> _Buffer:
        """The buffer that holds layer `index`."""
        buffer = self._buffers[index % 2] if self._buffers else None
        if buffer is None or buffer.index != index or buffer.works:
            raise RuntimeError(f"layer {index} is computed, and its weights were not gathered before")
        return buffer

    def whole(self, parameter: Tensor) -> Tensor:
        """The whole embedding or head [V, hidden], which lasts as long as it is referred to.

        It is differentiable: its gradient is reduced, and the parameter itself gets none.
        """
        result: Tensor = _Whole.apply(parameter, self)  # type: ignore[no-untyped-call]
        return result

    def gather(self, parameter: Tensor) -> Tensor:
        """The parts of an embedding or a head, one below the other: [V, hidden]."""
        full = _gathered(storage_of(parameter), self._count, self._group)
        self._num_made += 1
        return full

    def reduce(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Start to bring a gradient to the ranks that hold the parameter's parts.

        Args:
            parameter: as this rank holds it.
            gradient: of the whole parameter as it lies in memory (`storage_of`), in the parameter's type; it
                must not be changed any more. None: zeros, from a rank that has none.
        """
        if gradient is None:
            part = storage_of(parameter)
            gradient = part.new_zeros(len(part) * self._count, *part.shape[1:])
        self._reductions.append(_Reduction.start(parameter, gradient, self._group))
        self._num_made += 1

    def settle(self) -> None:
        """Wait for the gradients on their way to this rank, and add them to those of its parts."""
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            assert self._add_gradient is not None, "nobody asks for gradients of frozen weights"
            self._add_gradient(reduction.parameter, reduction.total(self._count))

    def begin(self) -> None:
        """Begin a micro-batch, whose calls `finish` can complete."""
        self._num_made = 0

    def finish(self, *, has_backward: bool) -> None:
        """Make the calls of the micro-batch that were not made, because this rank has none or has failed in
        it: the others wait for them."""
        for call in self._calls(has_backward)[self._num_made :]:
            call()
        self.settle()

    def _calls(self, has_backward: bool) -> list[Callable[[], object]]:
        """The calls of one micro-batch, with zeros as gradients."""
        embedding, head = self._ends
        layers = range(len(self._layers))
        calls: list[Callable[[], object]] = [partial(self.gather, embedding)]
        calls += [partial(self.load, index, is_forward=True) for index in layers]
        calls.append(partial(self.gather, head))
        if not has_backward:
            return calls
        calls += self._empty_reductions([head])
        for index in reversed(layers):
            calls.append(partial(self.load, index, is_forward=False))
            calls += self._empty_reductions(split_parameters(self._layers[index]))
        return calls + self._empty_reductions([embedding])

    def _empty_reductions(self, parameters: Iterable[Tensor]) -> list[Callable[[], object]]:
        return [
            partial(self._reduce_nothing, parameter) for parameter in parameters if parameter.requires_grad
        ]

    def _reduce_nothing(self, parameter: Tensor) -> None:
        self.settle()  # what was sent before, so that zeros do not pile up
        self.reduce(parameter, None)

    def release(self) -> None:
        """Free the buffers, and forget gradients that were not added: at the end of a pass, or after an
        exception in it. Weights that changed are gathered anew."""
        for buffer in self._buffers:
            buffer.wait()  # or its gathers would write into memory that is somebody else's by then
        for reduction in self._reductions:
            reduction.work.wait()
        self._buffers, self._reductions = [], []


@dataclass(frozen=True)
class GatheredProjection:
    """The whole weights of layers that read the same input, taken from the store when they are read."""

    store: WeightStore
    layer: int
    number: int
    """Which of `LayerLayout.projection_groups`."""

    def weight(self) -> Tensor:
        """[out, in]; of o and down a transposed view."""
        return self.store.buffer(self.layer).weights[self.number]

    def bias(self) -> Tensor | None:
        """[out]; None: there is none, or every rank has all of it."""
        return self.store.buffer(self.layer).biases[self.number]


def split_parameters(layer: LayerLayout) -> Iterator[Tensor]:
    """A layer's parameters that are split over ranks: weights and then biases of each projection."""
    for modules in layer.projection_groups():
        linears = [base_linear(module) for module in modules]
        yield from (linear.weight for linear in linears)
        if len(linears) > 1:
            yield from (linear.bias for linear in linears if linear.bias is not None)


class _Buffer:
    """The whole weights of one layer at a time; all layers have equal shapes."""

    def __init__(self, layer: LayerLayout, count: int) -> None:
        self.index: int | None = None
        self.works: list[Any] = []
        """The gathers that have not arrived."""
        self._places: list[Tensor] = []
        """Where each parameter goes, in the order of `split_parameters`."""
        self.weights: list[Tensor] = []
        """The joint weight of each of `LayerLayout.projection_groups`, [out, in]."""
        self.biases: list[Tensor | None] = []
        """The joint bias of each, [out]; None: none that is split."""
        for modules in layer.projection_groups():
            linears = [base_linear(module) for module in modules]
            weight = self._fused([linear.weight for linear in linears], count)
            self.weights.append(weight.t() if len(linears) == 1 else weight)
            has_biases = linears[0].bias is not None and len(linears) > 1
            self.biases.append(
                self._fused([linear.bias for linear in linears], count) if has_biases else None
            )

    def _fused(self, parameters: list[Tensor], count: int) -> Tensor:
        """Memory for the whole parameters, one below the other, with a place for each."""
        parts = [storage_of(parameter) for parameter in parameters]
        sizes = [len(part) * count for part in parts]
        fused = parts[0].new_empty(sum(sizes), *parts[0].shape[1:])
        self._places += fused.split(sizes)
        return fused

    @property
    def num_bytes(self) -> int:
        return sum(place.nbytes for place in self._places)

    def fill(self, index: int, layer: LayerLayout, group: ProcessGroup) -> None:
        """Start to gather layer `index`; nothing may read it before `wait`."""
        self.index = index
        self.works = [
            gather_rows(place, storage_of(parameter), group)
            for place, parameter in zip(self._places, split_parameters(layer), strict=True)
        ]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


@dataclass(frozen=True)
class _Reduction:
    """A gradient on its way to the ranks that hold the parameter's parts."""

    parameter: Tensor
    sent: Tensor  # [n, ...], kept until it has left
    received: Tensor  # [n, ...], this rank's rows from every rank, one below the other
    work: Any

    @classmethod
    def start(cls, parameter: Tensor, gradient: Tensor, group: ProcessGroup) -> _Reduction:
        received = torch.empty_like(gradient)
        work = dist.all_to_all_single(received, gradient, group=group, async_op=True)
        return cls(parameter, gradient, received, work)

    def total(self, count: int) -> Tensor:
        """The sum of this rank's rows [n/t, ...], in float32 at least."""
        self.work.wait()
        dtype = torch.promote_types(self.received.dtype, torch.float32)
        return self.received.unflatten(0, (count, -1)).sum(0, dtype=dtype)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, store):
        ctx.parameter, ctx.store = parameter, store
        return store.gather(parameter)

    @staticmethod
    def backward(ctx, grad):
        # The layers' backward pass, where memory is fullest, begins only when this gradient has arrived.
        ctx.store.reduce(ctx.parameter, grad.contiguous())
        ctx.store.settle()
        return None, None
