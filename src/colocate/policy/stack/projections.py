"""The linear layers of a decoder layer for training: base weights fused, LoRA beside them, backward by hand.

    y = x W^T + b + sum_i s_i (d_i(x) A_i^T) B_i^T          (Hu et al. 2021, arXiv:2106.09685, eq. 3)

with dropout d_i. W may be frozen, and it may be stored in 4 bits; then it exists in full only during its
product. Adapters are float32 whatever the model's type is; their products take them in the model's type, with
float32 sums, as the engine does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colocate.kernels.definitions import wide_product
from colocate.policy.stack.weight_store import GatheredProjection
from colocate.weights.adapters import Adapter, active_adapters, base_linear
from colocate.weights.low_rank import MAX_RANK, LowRank
from colocate.weights.quantized import dequantize, is_4bit
from colocate.weights.shared_views import fused_view


class Gradients:
    """The sum of each parameter's gradients over the tiles of a micro-batch."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, parameter: Tensor, value: Tensor) -> None:
        """Add `value` to a parameter's sum. A first value is kept as it is; sums of two or more values are
        float32."""
        key = id(parameter)
        if key not in self._sums:
            self._sums[key] = value
        else:
            total = self._sums[key]
            self._sums[key] = total.to(torch.promote_types(total.dtype, torch.float32)).add_(value)

    def take(self, parameter: Tensor) -> Tensor | None:
        """Return and forget a parameter's sum, in the parameter's own type; None: it has none."""
        total = self._sums.pop(id(parameter), None)
        return None if total is None else total.to(parameter.dtype)

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums in the parameters' own types; None for a parameter that has none."""
        sums = [self._sums.get(id(parameter)) for parameter in parameters]
        return [
            None if s is None else s.to(p.dtype).view_as(p) for s, p in zip(sums, parameters, strict=True)
        ]


@dataclass(frozen=True)
class AdapterGroup:
    """Adapters that see the same input, so that it is read once for all of them."""

    rows: tuple[slice, ...]
    """The rows of the layer's output that each adapter adds to."""
    adapters: tuple[Adapter, ...]
    dropout: float
    """Probability with which training drops an input. An adapter with dropout is alone in its group, since
    each has masks of its own."""

    @property
    def ranks(self) -> list[int]:
        return [len(adapter.a) for adapter in self.adapters]

    def a(self, dtype: torch.dtype) -> Tensor:
        """The adapters' factors A, one below the other: [sum of ranks, in]."""
        parts = [adapter.a.to(dtype) for adapter in self.adapters]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def parts(self, reduced: Tensor) -> Iterator[tuple[slice, Adapter, Tensor]]:
        """Each adapter with its rows of the output and its columns of `reduced` [T, sum of
        ranks]."""
        return zip(self.rows, self.adapters, reduced.split(self.ranks, dim=1), strict=True)

    def dropped(self, x: Tensor, seed: int) -> Tensor:
        """`x` after dropout. The backward pass makes the mask again from `seed`: cheaper than keeping it."""
        if not self.dropout:
            return x
        generator = torch.Generator(x.device).manual_seed(seed)
        kept = torch.empty_like(x).bernoulli_(1 - self.dropout, generator=generator)
        return kept.div_(1 - self.dropout).mul_(x)


class Projection:
    """Linear layers that read the same input, seen as one.

    Args:
        modules: `nn.Linear`s, 4-bit ones, or PEFT's LoRA around them.
        is_training: whether LoRA's dropout applies.
        gathered: the whole weights, where the modules hold a part of them. Gradients of the base weights are
            those of the whole matrices as the parts lie in memory: of o and down [in, out].
        factor: all of y, the bias and the adapters included, is multiplied by it.
    """

    def __init__(
        self,
        *modules: nn.Module,
        is_training: bool,
        gathered: GatheredProjection | None = None,
        factor: float = 1.0,
    ) -> None:
        self._factor = factor
        self._linears = [base_linear(module) for module in modules]
        self._gathered = gathered
        self._rows: list[slice] = []
        adapters: list[tuple[slice, Adapter]] = []
        start = 0
        for module, linear in zip(modules, self._linears, strict=True):
            rows = slice(start, start + linear.out_features)
            self._rows.append(rows)
            adapters += [(rows, adapter) for adapter in active_adapters(module)]
            start = rows.stop
        dropping = [pair for pair in adapters if is_training and pair[1].dropout]
        others = [pair for pair in adapters if not (is_training and pair[1].dropout)]
        self._groups = [AdapterGroup((rows,), (adapter,), adapter.dropout) for rows, adapter in dropping]
        if others:
            self._groups.append(AdapterGroup(*map(tuple, zip(*others, strict=True)), 0.0))  # type: ignore

        self._is_low_rank = (
            factor == 1.0
            and len(self._groups) == len({linear.out_features for linear in self._linears}) == 1
            and list(self._groups[0].rows) == self._rows
            and not self._groups[0].dropout
            and all(adapter.bias is None and len(adapter.a) <= MAX_RANK for _, adapter in adapters)
        )
        """Whether adapters can be added as factors: all layers have one width, each has one adapter of small
        rank, and nothing else (dropout, an adapter's bias) is in the way."""

    @property
    def has_dropout(self) -> bool:
        return any(group.dropout for group in self._groups)

    def parameters(self) -> list[Tensor]:
        """All trained tensors: those of base layers and of adapters that a gradient is asked for."""
        base = [x for linear in self._linears for x in (linear.weight, linear.bias)]
        adapters = [adapter for group in self._groups for adapter in group.adapters]
        low_rank = [x for adapter in adapters for x in (adapter.a, adapter.b, adapter.bias)]
        return [x for x in (*base, *low_rank) if x is not None and x.requires_grad]

    def __call__(self, x: Tensor, seed: int) -> Tensor:
        """The layers' output y [T, out] for x [T, in]; `seed` determines the dropout masks."""
        y = self._base_product(x)
        for number, group in enumerate(self._groups):
            reduced = group.dropped(x, seed + number) @ group.a(x.dtype).T
            for rows, adapter, part in group.parts(reduced):
                y[:, rows].addmm_(part, adapter.b.to(x.dtype).T, alpha=adapter.scaling)
                if adapter.bias is not None:
                    y[:, rows].add_(adapter.bias, alpha=adapter.scaling)
        return self._multiplied(y)

    def in_two_terms(self, x: Tensor, seed: int) -> tuple[Tensor, LowRank | None]:
        """The output of `__call__` in two terms: the base product [T, out], and the adapters' term, in
        factors.

        A kernel that reads the base product anyway can add the second term on the way, which saves a pass
        over the output. Where the adapters do not allow factors (`_is_low_rank`), the first term is the whole
        output and the second is None.
        """
        if not self._is_low_rank:
            return self(x, seed), None
        return self._base_product(x), self.low_rank(x)

    def low_rank(self, x: Tensor) -> LowRank | None:
        """The adapters' term of the output for x [T, in], in factors: the second term of
        `in_two_terms`."""
        if not self._is_low_rank:
            return None
        (group,) = self._groups
        return LowRank(
            (x @ group.a(x.dtype).T).split(group.ranks, dim=1),
            tuple(adapter.b for adapter in group.adapters),
            tuple(adapter.scaling for adapter in group.adapters),
        )

    def reduced_gradients(self, grad: Tensor) -> list[Tensor]:
        """s_i dy B_i of every adapter, [T, sum of ranks] by group, given the gradient dy of y [T, out].

        `input_gradient` and `add_gradients` both need these products, so they are made once.
        """
        reduced = [grad.new_empty(len(grad), sum(group.ranks)) for group in self._groups]
        for group, grad_reduced in zip(self._groups, reduced, strict=True):
            for rows, adapter, part in group.parts(grad_reduced):
                scaling = adapter.scaling * self._factor
                torch.mm(grad[:, rows], adapter.b.to(grad.dtype), out=part).mul_(scaling)
        return reduced

    def input_gradient(self, grad: Tensor, reduced: list[Tensor], seed: int) -> Tensor:
        """The gradient of x [T, in], given the gradient of y [T, out] and `reduced_gradients` of it."""
        grad_x = self._multiplied(grad @ self._weight())
        for number, (group, grad_reduced) in enumerate(zip(self._groups, reduced, strict=True)):
            if group.dropout:
                grad_x += group.dropped(grad_reduced @ group.a(grad.dtype), seed + number)
            else:
                grad_x.addmm_(grad_reduced, group.a(grad.dtype))
        return grad_x

    def input_gradient_in_two_terms(
        self, grad: Tensor, reduced: list[Tensor], seed: int
    ) -> tuple[Tensor, LowRank | None]:
        """The gradient of x [T, in] in two terms, as `in_two_terms` gives y: dy W, and the adapters' term, in
        factors.

        Where the adapters do not allow factors, the first term is the whole gradient and the second is None.
        """
        if not self._is_low_rank:
            return self.input_gradient(grad, reduced, seed), None
        (group,), (grad_reduced,) = self._groups, reduced
        return grad @ self._weight(), LowRank((grad_reduced,), (group.a(grad.dtype).T,), (1.0,))

    def add_gradients(
        self,
        gradients: Gradients,
        grad: Tensor,
        reduced: list[Tensor],
        x: Tensor,
        seed: int,
        low_rank: LowRank | None = None,
    ) -> None:
        """Add the parameters' gradients to `gradients`, for x [T, in] and the gradient of y [T, out].

        With `reduced` = s_i dy B_i, an adapter's gradients are dA_i = reduced^T d_i(x) and dB_i = s_i dy^T
        (d_i(x) A_i^T). The product d_i(x) A_i^T is taken from `low_rank`, the result of `low_rank(x)`, if the
        caller has it.
        """
        self._add_base_gradients(gradients, grad, x)
        for number, (group, grad_reduced) in enumerate(zip(self._groups, reduced, strict=True)):
            dropped = group.dropped(x, seed + number)
            joint = wide_product(grad_reduced.T, dropped).split(group.ranks)
            if low_rank is None:
                parts = (dropped @ group.a(x.dtype).T).split(group.ranks, dim=1)
            else:
                parts = low_rank.reduced
            for rows, adapter, part, grad_a in zip(group.rows, group.adapters, parts, joint, strict=True):
                scaling = adapter.scaling * self._factor
                gradients.add(adapter.a, grad_a)
                gradients.add(adapter.b, wide_product(grad[:, rows].T, part).mul_(scaling))
                if adapter.bias is not None:
                    gradients.add(adapter.bias, _column_sum(grad[:, rows]).mul_(scaling))

    def _add_base_gradients(self, gradients: Gradients, grad: Tensor, x: Tensor) -> None:
        if self._gathered is not None and len(self._linears) == 1:
            if self._linears[0].weight.requires_grad:
                gradients.add(self._linears[0].weight, self._multiplied(x.T @ grad))
        elif all(linear.weight.requires_grad for linear in self._linears):
            joint = self._multiplied(grad.T @ x)
            for linear, rows in zip(self._linears, self._rows, strict=True):
                gradients.add(linear.weight, joint[rows])
        else:
            for linear, rows in zip(self._linears, self._rows, strict=True):
                if linear.weight.requires_grad:
                    gradients.add(linear.weight, self._multiplied(grad[:, rows].T @ x))
        biases = [linear.bias for linear in self._linears]
        if any(bias is not None and bias.requires_grad for bias in biases):
            sums = self._multiplied(_column_sum(grad))
            for bias, rows in zip(biases, self._rows, strict=True):
                if bias is not None and bias.requires_grad:
                    gradients.add(bias, sums[rows])

    def _multiplied(self, product: Tensor) -> Tensor:
        return product if self._factor == 1.0 else product.mul_(self._factor)

    def _base_product(self, x: Tensor) -> Tensor:
        bias = None if self._gathered is None else self._gathered.bias()
        if bias is None and self._linears[0].bias is not None:
            bias = fused_view([linear.bias for linear in self._linears])
        return F.linear(x, self._weight(), bias)

    def _weight(self) -> Tensor:
        """The joint weight [out, in] in the model's type; for 4-bit weights a copy for one product."""
        if self._gathered is not None:
            return self._gathered.weight()
        if any(is_4bit(linear) for linear in self._linears):
            parts = [dequantize(linear) if is_4bit(linear) else linear.weight for linear in self._linears]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        return fused_view([linear.weight for linear in self._linears])


def _column_sum(grad: Tensor) -> Tensor:
    """The sum over the tokens of `grad` [T, out], in float32 at least.

    In 16 bits on a GPU it is a product with ones, which also adds in float32, and reads `grad` in two thirds
    of a reduction's time; with eight rows of ones cuBLAS is fastest.
    """
    if not grad.is_cuda or grad.element_size() > 2:
        return grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32))
    return wide_product(grad.new_ones(8, len(grad)), grad)[0]
