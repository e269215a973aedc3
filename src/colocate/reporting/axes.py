"""Axes with round ticks, and numbers as short text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A range of values and the ticks to show in it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False
    zero: bool = False
    """Whether it was asked to begin at zero."""
    format: Callable[[float], str] | None = None
    """Makes the text of a tick; None: a number with as many decimals as the ticks need."""

    @classmethod
    def around(
        cls,
        values: Iterable[float],
        *,
        tight: bool = False,
        zero: bool = False,
        log: bool = False,
        whole: bool = False,
        num_ticks: int = 5,
        format: Callable[[float], str] | None = None,
    ) -> Axis:
        """An axis that holds all finite values.

        Args:
            tight: the axis ends at the values, not at the ticks around them.
            zero: the axis starts at zero or below.
            whole: ticks are at whole numbers only.
            log: the axis is logarithmic; values that are not positive do not count.
        """
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
        if log:
            return cls._log_around(finite or [1.0], num_ticks, format)
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        if zero:
            low = min(low, 0.0)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            margin = 0.1 * abs(high) or 0.5
            low, high = (low if zero and low == 0 else low - margin), high + margin
        step = nice_step(max((high - low) / num_ticks, 1.0 if whole else 0.0))
        if whole and step == 2.5:
            step = 5.0
        if not tight:
            low, high = math.floor(low / step + 1e-6) * step, math.ceil(high / step - 1e-6) * step
        first = math.ceil(low / step - 1e-6)
        count = math.floor(high / step + 1e-6) - first + 1
        ticks = tuple((first + i) * step for i in range(count))
        return cls(low, high, ticks, zero=zero, format=format)

    @classmethod
    def _log_around(
        cls, values: Sequence[float], num_ticks: int, format: Callable[[float], str] | None
    ) -> Axis:
        first = math.floor(math.log10(min(values)) + 1e-9)
        last = max(math.ceil(math.log10(max(values)) - 1e-9), first + 1)
        stride = max(1, math.ceil((last - first) / num_ticks))
        ticks = tuple(10.0**power for power in range(first, last + 1, stride))
        return cls(10.0**first, 10.0**last, ticks, log=True, format=format)

    def fraction(self, value: float) -> float:
        """The position of `value` between the ends of the axis: 0 at the low end, 1 at the high end."""
        if self.log:
            span = math.log10(self.high) - math.log10(self.low)
            return (math.log10(max(value, self.low)) - math.log10(self.low)) / span
        return (value - self.low) / (self.high - self.low)

    def text(self, tick: float) -> str:
        if self.format is percent and len(self.ticks) > 1 and tick:
            return f"{_decimals(100 * tick, 100 * (self.ticks[1] - self.ticks[0]))}%"
        if self.format is not None:
            return self.format(tick)
        if self.log or len(self.ticks) < 2:
            return compact(tick).replace(".00e", "e")  # a power of ten
        return _tick_text(tick, self.ticks[1] - self.ticks[0], max(abs(self.low), abs(self.high)))


def nice_step(raw: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))


def compact(value: float, digits: int = 3) -> str:
    """A number as short text: 0.412, 28.4k, 1.2e-06; "–" for NaN."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{_rounded(value / min(size, 1e3) if suffix == 'k' else value / size, digits)}{suffix}"
    if abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-")
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else _rounded(value, digits)


def percent(value: float) -> str:
    """A share as text: 0.25 is "25%"."""
    return f"{compact(100 * value)}%"


def _rounded(value: float, digits: int) -> str:
    """`value` to so many digits, never with an exponent: 999.9 is "1000", not "1e+03"."""
    return f"{float(f'{value:.{digits}g}'):.15g}"


def _tick_text(tick: float, step: float, largest: float) -> str:
    if abs(tick) < step * 1e-6:
        return "0"
    if largest >= 1e4:
        size, suffix = next(pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= pair[0])
        return f"{_decimals(tick / size, step / size)}{suffix}"
    if largest < 1e-3:
        power = math.floor(math.log10(largest))
        return f"{_decimals(tick / 10.0**power, step / 10.0**power)}e{power}"
    return _decimals(tick, step)


def _decimals(value: float, step: float) -> str:
    """`value` with as many decimals as tell it from its neighbours one `step` away."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:
        decimals += 1  # a step of 2.5
    return f"{value:.{decimals}f}"
