"""A layer's projections: products with the weights of linear layers that read the same input.

Where ranks split the weights, a rank's q, k, v, gate and up make some columns of the output, and its o and
down read some columns of the input. Adapters are whole on every rank, which takes rows of B for the former
and columns of A for the latter: W x + s B (A x) is a sum over the columns of x.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from colocate.engines.native.rollout_weights import RolloutWeights, joined
from colocate.engines.native.torch_backend import TorchBackend
from colocate.weights.adapters import AdaptedLinear, Adapter, base_linear, projection_adapters
from colocate.weights.layouts import WeightPart
from colocate.weights.shared_views import stacked_view
from colocate.weights.weight_parts import Split


class Projection:
    """Linear layers that read the same input: one product for all base weights, plus their adapters."""

    def __init__(self, weights: RolloutWeights, modules: Sequence[nn.Module], part: WeightPart) -> None:
        linears = [base_linear(module) for module in modules]
        self.weight = weights.of(modules)
        self.bias = None if linears[0].bias is None else self._bias([linear.bias for linear in linears])
        self.adapters = self._parts(projection_adapters(modules), part)

    def _parts(
        self, adapters: Sequence[tuple[slice, Adapter]], part: WeightPart
    ) -> list[tuple[slice, Adapter]]:
        """What the adapters add to this rank's columns of the output."""
        rows, parts = Split(0, part), []
        for columns, adapter in adapters:
            own = slice(columns.start // part.count, columns.stop // part.count)
            bias = None if adapter.bias is None else rows.of_full(adapter.bias)
            parts.append((own, dataclasses.replace(adapter, b=rows.of_full(adapter.b), bias=bias)))
        return parts

    def __call__(self, backend: TorchBackend, x: Tensor) -> Tensor:
        """x [T, in] times the weights, plus biases and adapters; [T, out], layer beside layer."""
        return backend.linear(x, self._adapted())

    def gated(self, backend: TorchBackend, activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """activation(gate) * up from x [T, in], if the layers are gate and up; [T, out / 2]."""
        return backend.gated_linear(activation, x, self._adapted())

    def _adapted(self) -> AdaptedLinear:
        return AdaptedLinear(self.weight.read(), self.bias, self.adapters, self.weight.stack)

    def _bias(self, biases: Sequence[Tensor]) -> Tensor:
        """The joined biases, one element for each row of the weights, those of the adapters' A included."""
        if self.weight.stack is None:
            return joined(biases)
        stacked = stacked_view(biases, self.weight.stack.num_rows)
        assert stacked is not None, "biases were fused without the room that their weights have"
        return stacked

    def identity(self) -> Iterator[object]:
        """The addresses and shapes that a captured graph of this projection depends on."""
        yield from self.weight.identity()
        yield None if self.bias is None else self.bias.data_ptr()
        for columns, adapter in self.adapters:
            bias = None if adapter.bias is None else adapter.bias.data_ptr()
            yield columns.start, adapter.a.data_ptr(), adapter.b.data_ptr(), bias, adapter.scaling
            yield adapter.a.shape, adapter.a.dtype, adapter.b.dtype


class PartialProjection(Projection):
    """One linear layer of whose input this rank has a part; the output is to be summed over ranks."""

    def __init__(self, weights: RolloutWeights, modules: Sequence[nn.Module], part: WeightPart) -> None:
        super().__init__(weights, modules, part)
        if part.index > 0:
            self.bias = None  # what every rank has is added once

    def __call__(self, backend: TorchBackend, x: Tensor) -> Tensor:
        adapted = self._adapted()
        out = backend.parallel.room(len(x), len(adapted.weight), x.dtype)
        return backend.linear(x, adapted, out)

    def _parts(
        self, adapters: Sequence[tuple[slice, Adapter]], part: WeightPart
    ) -> list[tuple[slice, Adapter]]:
        """What the adapters make of this rank's columns of the input."""
        return [
            (
                columns,
                dataclasses.replace(
                    adapter,
                    a=Split(1, part).of_full(adapter.a),
                    bias=adapter.bias if part.index == 0 else None,
                ),
            )
            for columns, adapter in adapters
        ]
