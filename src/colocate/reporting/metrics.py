"""Metrics that are summed over micro-batches and then over ranks, before they become single numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Metrics:
    """Named means, minima and maxima that can be merged without losing their weights.

    A mean of micro-batch means is not the mean of the step when micro-batches differ in tokens, so totals
    and counts are kept apart until `compute`.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float | Tensor, float | Tensor]] = {}
        self._minima: dict[str, float | Tensor] = {}
        self._maxima: dict[str, float | Tensor] = {}

    def add_mean(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Add `total` over `count` items (tensors stay on their device: no synchronisation here)."""
        old_total, old_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old_total + total, old_count + count)

    def add_min(self, name: str, value: float | Tensor) -> None:
        self._minima[name] = _extreme(torch.fmin, self._minima.get(name), value)

    def add_max(self, name: str, value: float | Tensor) -> None:
        self._maxima[name] = _extreme(torch.fmax, self._maxima.get(name), value)

    def merge(self, other: Metrics) -> None:
        for name, (total, count) in other._sums.items():
            self.add_mean(name, total, count)
        for name, value in other._minima.items():
            self.add_min(name, value)
        for name, value in other._maxima.items():
            self.add_max(name, value)

    def to_host(self) -> Metrics:
        """A copy of the metrics as Python floats, ready to be sent to another rank."""
        pairs = [value for pair in self._sums.values() for value in pair]
        numbers = iter(_to_floats([*pairs, *self._minima.values(), *self._maxima.values()]))
        host = Metrics()
        host._sums = {name: (next(numbers), next(numbers)) for name in self._sums}
        host._minima = {name: next(numbers) for name in self._minima}
        host._maxima = {name: next(numbers) for name in self._maxima}
        return host

    def compute(self) -> dict[str, float]:
        """The final number of each metric. A mean over nothing is NaN."""
        host = self.to_host()
        means = {n: float(t) / float(c) if c else math.nan for n, (t, c) in host._sums.items()}
        return means | {n: float(v) for part in (host._minima, host._maxima) for n, v in part.items()}


def _to_floats(values: Sequence[float | Tensor]) -> list[float]:
    """Scalars as Python floats, with one transfer for all that are tensors: each is a wait for the device."""
    tensors = [value.detach().reshape(()).double() for value in values if isinstance(value, Tensor)]
    together = (
        torch.stack([tensor.to(tensors[0].device) for tensor in tensors]) if tensors else torch.empty(0)
    )
    numbers = iter(together.tolist())
    return [next(numbers) if isinstance(value, Tensor) else float(value) for value in values]


def _extreme(
    choose: Callable[[Tensor, Tensor], Tensor], old: float | Tensor | None, new: float | Tensor
) -> float | Tensor:
    if old is None:
        return new
    # fmin/fmax ignore NaN: an empty micro-batch has no extreme and must not erase the others'. Numbers that
    # came from another rank are Python floats and keep their precision.
    device = next((x.device for x in (old, new) if isinstance(x, Tensor)), None)
    values = [
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device=device)
        for x in (old, new)
    ]
    return choose(*values)


class MetricHistory:
    """The values of each metric since the last log; a log averages them, without NaN (nothing to measure)."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value)

    def flush(self) -> dict[str, float | None]:
        """Return the averages and forget the values. None where no value was a number (loggers cannot store
        NaN)."""
        averages: dict[str, float | None] = {}
        for name, values in self._values.items():
            numbers = [v for v in values if not math.isnan(v)]
            averages[name] = sum(numbers) / len(numbers) if numbers else None
        self._values.clear()
        return averages

    def state_dict(self) -> dict[str, list[float]]:
        return {name: list(values) for name, values in self._values.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self._values = {name: list(values) for name, values in state.items()}
