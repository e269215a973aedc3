"""Small plots as SVG text: lines, bands, points and boxes over two axes.

    plot = Plot("Reward", Axis.around(steps), Axis.around(rewards), legend=[("mean", "blue", "line")])
    plot.line(steps, rewards, "blue")
    plot.svg()

`theme.plot_rules` defines the styles. NaN makes a gap in a line and is never an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

MAX_POINTS = 500  # per line: more than the pixels of a small plot, few enough to keep a page light
MAX_HOVERS = 100
CHARACTER_PX = 6.0  # of the 11 px font, on average; decides when a legend needs another row
_TITLE_PX = 7.2  # of the 13 px bold font of titles
Legend = Sequence[tuple[str, str, str]]  # (name, colour, "line" | "faint" | "band" | "dot" | "box")


@dataclass(frozen=True)
class Axis:
    """A range of values and the ticks to show in it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False
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
        return cls(low, high, tuple((first + i) * step for i in range(count)), format=format)

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
        if self.format is not None:
            return self.format(tick)
        if self.log or len(self.ticks) < 2:
            return compact(tick).replace(".00e", "e")  # a power of ten
        return _tick_text(tick, self.ticks[1] - self.ticks[0], max(abs(self.low), abs(self.high)))


class Plot:
    """An SVG picture of one plot; marks are drawn in the order of the calls."""

    def __init__(
        self,
        title: str,
        x: Axis,
        y: Axis,
        *,
        legend: Legend = (),
        width: int = 360,
        height: int = 230,
        x_label: str = "step",
        note: str = "",
    ) -> None:
        """Make an empty plot. `note`, the units or the meaning of the line, is right of the title, or below
        it if there is no room."""
        self._x, self._y = x, y
        self._width, self._height = width, height
        self._marks: list[str] = []
        self._left = 16 + max((CHARACTER_PX * len(y.text(tick)) for tick in y.ticks), default=0.0)
        fits = _TITLE_PX * len(title) + CHARACTER_PX * len(note) + 12 <= width
        note_row = 0 if fits else 17
        legend_svg, num_rows = _legend(legend, width, top=29 + note_row)
        self._top = 30.0 + note_row + 17 * num_rows
        self._right, self._bottom = width - 14.0, height - 36.0
        self._head = [
            f'<text class="title" x="0" y="14">{escape(title)}</text>',
            _note(note, width, note_row) if note else "",
            *legend_svg,
        ]
        self._title, self._x_label = title, x_label
        self._description: list[str] = []

    def x(self, value: float) -> float:
        return self._left + self._x.fraction(value) * (self._right - self._left)

    def y(self, value: float) -> float:
        return self._bottom - self._y.fraction(value) * (self._bottom - self._top)

    def line(self, xs: Sequence[float], ys: Sequence[float], color: str, style: str = "curve") -> None:
        """Draw a line through the points, broken where y is NaN; a point between two gaps is a dot.

        Args:
            style: "curve" or "faint".
        """
        for run in _runs(*decimate(xs, self._drawable(ys))):
            if len(run) == 1:
                cx, cy = self._point(*run[0])
                self._marks.append(f'<circle class="f-{color}" cx="{cx}" cy="{cy}" r="2"/>')
            else:
                path = "L".join(f"{px} {py}" for px, py in (self._point(*point) for point in run))
                self._marks.append(f'<path class="{style} s-{color}" d="M{path}"/>')

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], color: str) -> None:
        """Draw the area between two lines, where neither is NaN."""
        lows, highs = self._drawable(lows), self._drawable(highs)
        for run in _runs(xs, [lo + hi for lo, hi in zip(lows, highs, strict=True)]):
            inside = {x for x, _ in run}
            edges = []
            for edge in (lows, highs):
                pairs = [(x, v) for x, v in zip(xs, edge, strict=True) if x in inside]
                edges.append(decimate([x for x, _ in pairs], [v for _, v in pairs]))
            (low_xs, low_ys), (high_xs, high_ys) = edges
            there = [self._point(x, v) for x, v in zip(high_xs, high_ys, strict=True)]
            back = [self._point(x, v) for x, v in zip(low_xs, low_ys, strict=True)][::-1]
            path = "L".join(f"{px} {py}" for px, py in there + back)
            self._marks.append(f'<path class="band f-{color}" d="M{path}Z"/>')

    def points(self, xs: Sequence[float], ys: Sequence[float], color: str) -> None:
        xs, ys = decimate(xs, self._drawable(ys))
        for x, y in zip(xs, ys, strict=True):
            if math.isfinite(y):
                cx, cy = self._point(x, y)
                self._marks.append(f'<circle class="dot f-{color}" cx="{cx}" cy="{cy}" r="3.5"/>')

    def box(
        self,
        xs: tuple[float, float],
        ys: tuple[float, float],
        color: str,
        hover: str = "",
        gap: float = 0,
    ) -> None:
        """Draw a filled rectangle between two x and two y, `gap` pixels narrower than that."""
        left, bottom = self.x(xs[0]), self.y(ys[0])
        width, height = max(0.3, self.x(xs[1]) - left - gap), max(0.0, bottom - self.y(ys[1]))
        title = f"<title>{escape(hover)}</title>" if hover else ""
        self._marks.append(
            f'<rect class="f-{color}" x="{left:.2f}" y="{bottom - height:.2f}" width="{width:.2f}" '
            f'height="{height:.2f}">{title}</rect>'
        )

    def area(
        self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], color: str, hover: str = ""
    ) -> None:
        """Draw a filled shape between two lines through the points."""
        there = [self._point(x, y) for x, y in zip(xs, highs, strict=True)]
        back = [self._point(x, y) for x, y in zip(xs, lows, strict=True)][::-1]
        path = "L".join(f"{px} {py}" for px, py in there + back)
        title = f"<title>{escape(hover)}</title>" if hover else ""
        self._marks.append(f'<path class="f-{color}" d="M{path}Z">{title}</path>')

    def label(self, x: float, y: float, text: str) -> None:
        """Write text centred on a point, in a colour that can be read on a filled box."""
        cx, cy = self._point(x, y)
        self._marks.append(
            f'<text class="label" x="{cx}" y="{cy}" dy="4" text-anchor="middle">{escape(text)}</text>'
        )

    def rule(self, y: float, text: str) -> None:
        """Draw a dashed horizontal line, for a limit."""
        at = self.y(y)
        self._marks.append(
            f'<path class="rule" d="M{self._left:.1f} {at:.1f}H{self._right:.1f}"/>'
            f'<text x="{self._right:.1f}" y="{at - 4:.1f}" text-anchor="end">{escape(text)}</text>'
        )

    def hover(self, xs: Sequence[float], texts: Callable[[int], str]) -> None:
        """Show `texts(i)` while the mouse points at the column of the i-th x."""
        chosen = range(0, len(xs), math.ceil(len(xs) / MAX_HOVERS)) if len(xs) else range(0)
        centres = [self.x(xs[i]) for i in chosen]
        edges = [self._left, *((a + b) / 2 for a, b in pairwise(centres)), self._right]
        for i, (left, right) in zip(chosen, pairwise(edges), strict=True):
            self._marks.append(
                f'<rect class="hit" x="{left:.1f}" y="{self._top:.1f}" width="{max(0.0, right - left):.1f}" '
                f'height="{self._bottom - self._top:.1f}"><title>{escape(texts(i))}</title></rect>'
            )

    def describe(self, sentence: str) -> None:
        """Add a sentence to the alternative text, for readers who cannot see the picture."""
        self._description.append(sentence)

    def svg(self) -> str:
        spoken = self._title + "".join(f". {sentence}" for sentence in self._description)
        body = "".join([*self._head, *self._axes(), *self._marks])
        return (
            f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" width="{self._width}" '
            f'height="{self._height}" viewBox="0 0 {self._width} {self._height}" role="img" '
            f'aria-label="{escape(spoken)}">{body}</svg>'
        )

    def _axes(self) -> list[str]:
        parts = []
        for tick in self._y.ticks:
            at = self.y(tick)
            parts.append(f'<path class="grid" d="M{self._left:.1f} {at:.1f}H{self._right:.1f}"/>')
            parts.append(
                f'<text class="y-tick" x="{self._left - 6:.1f}" y="{at:.1f}" dy="4" text-anchor="end">'
                f"{escape(self._y.text(tick))}</text>"
            )
        for tick in self._x.ticks:
            parts.append(
                f'<text class="x-tick" x="{self.x(tick):.1f}" y="{self._bottom + 16:.1f}" '
                f'text-anchor="middle">{escape(self._x.text(tick))}</text>'
            )
        parts.append(
            f'<text x="{(self._left + self._right) / 2:.1f}" y="{self._height - 4}" text-anchor="middle">'
            f"{escape(self._x_label)}</text>"
        )
        return parts

    def _point(self, x: float, y: float) -> tuple[str, str]:
        return f"{self.x(x):.1f}", f"{self.y(y):.1f}"

    def _drawable(self, ys: Sequence[float]) -> list[float]:
        return [y if math.isfinite(y) and (y > 0 or not self._y.log) else math.nan for y in ys]


def decimate(
    xs: Sequence[float], ys: Sequence[float], max_points: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """At most about `max_points` of the points: the two ends, and the lowest and highest point of each
    bucket.

    A stretch of NaN is kept as a single point, which draws the gap.
    """
    if len(xs) <= max_points:
        return list(xs), list(ys)
    bucket = math.ceil(len(xs) / (max_points // 4))
    keep: list[int] = []
    for start in range(0, len(xs), bucket):
        rows = range(start, min(start + bucket, len(xs)))
        finite = [i for i in rows if math.isfinite(ys[i])]
        if finite:
            lowest, highest = min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)
            keep += sorted({finite[0], lowest, highest, finite[-1]})
        else:
            keep.append(start)
    return [xs[i] for i in keep], [ys[i] for i in keep]


def smooth(ys: Sequence[float], window: int, weights: Sequence[float] | None = None) -> list[float]:
    """Running mean over `window` values centred on each value, over fewer at the ends. NaN does not count,
    and stays.

    Args:
        weights: positive weights of the values in the mean; None: all are equal.
    """
    sums, totals = [0.0], [0.0]
    for y, weight in zip(ys, weights or [1.0] * len(ys), strict=True):
        counted = weight if math.isfinite(y) else 0.0
        sums.append(sums[-1] + (y * weight if counted else 0.0))
        totals.append(totals[-1] + counted)
    means = []
    for i, y in enumerate(ys):
        first, last = max(0, i - window // 2), min(len(ys), i + window // 2 + 1)
        total = totals[last] - totals[first]
        means.append((sums[last] - sums[first]) / total if math.isfinite(y) and total else math.nan)
    return means


def ends(ys: Sequence[float]) -> tuple[float, float, int]:
    """(mean of the first n finite values, mean of the last n, n), where n is a tenth of them, ten at most."""
    finite = [y for y in ys if math.isfinite(y)]
    if not finite:
        return math.nan, math.nan, 0
    count = max(1, min(10, len(finite) // 10))
    return sum(finite[:count]) / count, sum(finite[-count:]) / count, count


def course(name: str, ys: Sequence[float], *, percent: bool = False) -> str:
    """A sentence that says what a curve does: "reward rises from 0.42 to 0.92, between 0.4 and 0.95"."""
    first, last, count = ends(ys)
    if not count:
        return f"{name} has no values"

    def text(y: float) -> str:
        return f"{compact(100 * y)}%" if percent else compact(y)

    finite = [y for y in ys if math.isfinite(y)]
    low, high = min(finite), max(finite)
    if text(low) == text(high):
        return f"{name} stays at {text(low)}"
    if abs(last - first) <= 0.1 * (high - low) or text(first) == text(last):
        way = f"begins at {text(first)} and ends at {text(last)}"
    else:
        way = f"{'rises' if last > first else 'falls'} from {text(first)} to {text(last)}"
    return f"{name} {way}, between {text(low)} and {text(high)}"


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
            return f"{value / min(size, 1e3) if suffix == 'k' else value / size:.{digits}g}{suffix}"
    if abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-")
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


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


def _runs(xs: Sequence[float], ys: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The stretches of points without a NaN between them."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _note(note: str, width: int, row_px: int) -> str:
    """The note at the right of the title's line, or at the left of the line below it."""
    place = f'x="0" y="{14 + row_px}"' if row_px else f'x="{width}" y="14" text-anchor="end"'
    return f"<text {place}>{escape(note)}</text>"


def _legend(legend: Legend, width: int, top: int) -> tuple[list[str], int]:
    """The keys from left to right, from `top` pixels on, and the number of rows that they fill."""
    parts, x, row = [], 0.0, 0
    for name, color, kind in legend:
        name = name if len(name) <= 40 else name[:39] + "…"
        needed = 20 + CHARACTER_PX * len(name) + 14
        if x > 0 and x + needed - 14 > width:
            x, row = 0.0, row + 1
        y = top + 17 * row
        if kind in ("band", "box"):
            swatch = f'<rect class="{kind} f-{color}" x="{x:.1f}" y="{y - 5}" width="14" height="10" rx="2"/>'
        elif kind == "dot":
            swatch = f'<circle class="dot f-{color}" cx="{x + 7:.1f}" cy="{y}" r="3.5"/>'
        else:
            style = "faint" if kind == "faint" else "curve"
            swatch = f'<path class="{style} s-{color}" d="M{x:.1f} {y}h14"/>'
        parts.append(f'{swatch}<text class="key" x="{x + 19:.1f}" y="{y + 4}">{escape(name)}</text>')
        x += needed
    return parts, row + 1 if parts else 0
