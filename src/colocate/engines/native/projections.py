"""A layer's projections: products with the weights of linear layers that read the same input.

Where ranks split the weights, a rank's q, k, v, gate and up make some columns of the output, and its o and
down read some columns of the input. Adapters are whole on every rank, which computes with its part of them
(`weights.weight_parts.local_adapters`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from colocate.engines.native.rollout_weights import RolloutWeights, joined
from colocate.engines.native.torch_backend import TorchBackend
from colocate.weights.adapters import AdaptedLinear, EightBitWeight, ScaledRows, base_linear
from colocate.weights.layouts import WeightPart
from colocate.weights.shared_views import stacked_view
from colocate.weights.weight_parts import local_adapters


class Projection:
    """Linear layers that read the same input: one product for all base weights, plus their adapters."""

    def __init__(
        self,
        weights: RolloutWeights,
        modules: Sequence[nn.Module],
        part: WeightPart,
        in_8bit: EightBitWeight | None = None,
    ) -> None:
        linears = [base_linear(module) for module in modules]
        self.weight = weights.of(modules, part)
        self.in_8bit = in_8bit
        self.bias = None if linears[0].bias is None else self._bias([linear.bias for linear in linears])
        self.adapters = local_adapters(modules, part)

    def __call__(self, backend: TorchBackend, x: Tensor | ScaledRows, *, in_parts: bool = False) -> Tensor:
        """x [T, in] times the weights, plus biases and adapters; [T, out], layer beside layer.

        With `in_parts` it may be parts of the sum (`TorchBackend.linear_in_parts`).
        """
        adapted = self._adapted()
        return backend.linear_in_parts(x, adapted) if in_parts else backend.linear(x, adapted)

    def gated(
        self,
        backend: TorchBackend,
        activation: Callable[[Tensor], Tensor],
        x: Tensor,
        *,
        in_8bit: bool = False,
    ) -> Tensor | ScaledRows:
        """activation(gate) * up from x [T, in], if the layers are gate and up; [T, out / 2].

        With `in_8bit` the result is in 8 bits, as the layer that reads it needs it.
        """
        return backend.gated_linear(activation, x, self._adapted(), in_8bit=in_8bit)

    @property
    def input_factor(self) -> Tensor | None:
        """The factor to divide inputs by before they are rounded to 8 bits; None: they stay in 16 bits, or
        each row has a factor of its own."""
        if self.in_8bit is None or self.in_8bit.by_row or not self.takes_8bit:
            return None
        return self.in_8bit.input_factor

    @property
    def takes_8bit(self) -> bool:
        """Whether nothing but a product in 8 bits reads the input."""
        return self.in_8bit is not None and not self.adapters

    def _adapted(self) -> AdaptedLinear:
        weight = self.weight
        if self.in_8bit is None:
            return AdaptedLinear(
                weight.read(),
                self.bias,
                self.adapters,
                weight.stack,
                weight.stacked_a,
                is_written_before_use=bool(weight.linears),
            )
        values = self.in_8bit.values
        return AdaptedLinear(
            values, self.bias, self.adapters, weight.stack, weight.read_stack(), self.in_8bit
        )

    def _bias(self, biases: Sequence[Tensor]) -> Tensor:
        """The joined biases, one element for each row of the weights, those of A below them included."""
        stack = self.weight.stack
        if stack is None or self.weight.stacked_a is not None or self.in_8bit is not None:
            return joined(biases)
        stacked = stacked_view(biases, stack.num_rows)
        assert stacked is not None, "biases were fused without the room that their weights have"
        return stacked

    def identity(self) -> Iterator[object]:
        """The addresses and shapes that a captured graph of this projection depends on."""
        yield from self.weight.identity()
        yield None if self.in_8bit is None else self.in_8bit.values.data_ptr()
        yield None if self.bias is None else self.bias.data_ptr()
        for columns, adapter in self.adapters:
            bias = None if adapter.bias is None else adapter.bias.data_ptr()
            yield columns.start, adapter.a.data_ptr(), adapter.b.data_ptr(), bias, adapter.scaling
            yield adapter.a.shape, adapter.a.dtype, adapter.b.dtype


class PartialProjection(Projection):
    """One linear layer of whose input this rank has a part; the output is to be summed over ranks."""

    def __init__(
        self,
        weights: RolloutWeights,
        modules: Sequence[nn.Module],
        part: WeightPart,
        in_8bit: EightBitWeight | None = None,
    ) -> None:
        super().__init__(weights, modules, part, in_8bit)
        self._is_whole = part.count == 1
        if part.index > 0:
            self.bias = None  # what every rank has is added once

    def for_norm(
        self, backend: TorchBackend, x: Tensor | ScaledRows, *, in_parts: bool = False
    ) -> Tensor | ScaledRows:
        """The product for `TorchBackend.add_rms_norm`, which with `in_parts` finishes it."""
        if isinstance(x, ScaledRows) and in_parts:
            return backend.linear_for_norm(x, self._adapted())
        if backend.parallel.num_parts == 1 or isinstance(x, ScaledRows):
            return self(backend, x, in_parts=in_parts)
        adapted = self._adapted()
        out = backend.parallel.room(len(x), len(adapted.weight), x.dtype)
        return backend.linear(x, adapted, out)

    @property
    def takes_8bit(self) -> bool:
        return super().takes_8bit and self._is_whole
