"""Small plots as SVG text: lines, bands, points and boxes over two axes.

    plot = Plot("Reward", Axis.around(steps), Axis.around(rewards), legend=[("mean", "blue", "line")])
    plot.line(steps, rewards, "blue")
    plot.svg()

`theme.plot_rules` defines the styles. NaN makes a gap in a line and is never an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from colocate.reporting.axes import Axis, percent
from colocate.reporting.curves import decimate, smooth
from colocate.reporting.series import Series, extent
from colocate.reporting.theme import plot_rules, stylesheet

MAX_HOVERS = 100
CHARACTER_PX = 6.0  # of the 11 px font, on average; decides when a legend needs another row
_TITLE_PX = 7.2  # of the 13 px bold font of titles
_BOLD_PX = 6.8  # of the 11 px bold font of headings
_HEADING_PX = 36  # two lines of text and the line below them
Legend = Sequence[tuple[str, str, str]]  # (name, colour, "line" | "faint" | "band" | "dot" | "box" | "mean")


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
        unit: str = "",
        around: Sequence[float] = (),
        has_headings: bool = False,
    ) -> None:
        """Make an empty plot.

        Args:
            note: the units or the meaning of the line, right of the title, or below it if there is no room.
            unit: written behind the values of a step that a reader points at.
            around: values that the y axis shows in any part of the steps.
            has_headings: leave room for what `heading` writes above the area.
        """
        self._x, self._y = x, y
        self._unit, self._around = unit, around
        self._series: list[Series] = []
        self._rules: list[tuple[float, str]] = []
        self._width, self._height = width, height
        self._marks: list[str] = []
        self._left = 16 + max((CHARACTER_PX * len(y.text(tick)) for tick in y.ticks), default=0.0)
        fits = _TITLE_PX * len(title) + CHARACTER_PX * len(note) + 12 <= width
        note_row = 0 if fits else 17
        legend_svg, num_rows = _legend(legend, width, top=29 + note_row)
        self._top = 30.0 + note_row + 17 * num_rows + (_HEADING_PX if has_headings else 0)
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

    def trend(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        color: str,
        label: str,
        *,
        window: int = 1,
        weights: Sequence[float] | None = None,
        is_raw: bool = True,
    ) -> None:
        """Draw the values of steps, and over them their (weighted) running mean, if it spans more than one.

        Args:
            window: steps that the running mean spans; 0: the values are never smoothed.
            is_raw: whether the values themselves are drawn where there is a mean.
        """
        self._series.append(Series("line", label, color, xs, (ys,), window, weights, is_raw))
        if window <= 1 or is_raw:
            self.line(xs, ys, color, "faint" if window > 1 else "curve")
        if window > 1:
            self.line(xs, smooth(ys, window, weights), color)

    def band(
        self,
        xs: Sequence[float],
        lows: Sequence[float],
        highs: Sequence[float],
        color: str,
        label: str,
        *,
        window: int = 1,
        is_raw: bool = True,
    ) -> None:
        """Draw the area between two lines, or between their running means, where neither is NaN.

        Args:
            is_raw: False: the band belongs to a running mean, and is smoothed like it.
        """
        self._series.append(Series("band", label, color, xs, (lows, highs), window, is_raw=is_raw))
        lows, highs = (self._drawable(smooth(edge, window)) for edge in (lows, highs))
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

    def points(self, xs: Sequence[float], ys: Sequence[float], color: str, label: str) -> None:
        """Draw a dot for each of the values."""
        self._series.append(Series("dots", label, color, xs, (ys,)))
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

    def part_of_bars(self, xs: Sequence[float], heights: Sequence[float], color: str, label: str) -> None:
        """Add one part of the stacked bars, which `box` draws, to the data: a height for each step."""
        self._series.append(Series("bars", label, color, xs, (heights,)))

    def area(
        self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], color: str, hover: str = ""
    ) -> None:
        """Draw a filled shape between two lines through the points."""
        there = [self._point(x, y) for x, y in zip(xs, highs, strict=True)]
        back = [self._point(x, y) for x, y in zip(xs, lows, strict=True)][::-1]
        path = "L".join(f"{px} {py}" for px, py in there + back)
        title = f"<title>{escape(hover)}</title>" if hover else ""
        self._marks.append(f'<path class="f-{color}" d="M{path}Z">{title}</path>')

    def heading(self, xs: tuple[float, float], name: str, detail: str) -> None:
        """Write a name, and a detail below it, centred above the part of the area between two x. A text that
        is too wide is left out; the detail is left out with the name."""
        left, right = self.x(xs[0]), self.x(xs[1])
        if _BOLD_PX * len(name) > right - left:
            return
        self._marks.append(f'<path class="faint s-gray" d="M{left:.1f} {self._top - 5:.1f}H{right:.1f}"/>')
        lines = [("heading", name, _BOLD_PX, 22), ("detail", detail, CHARACTER_PX, 9)]
        for style, text, character_px, above in lines:
            if character_px * len(text) <= right - left:
                self._marks.append(
                    f'<text class="{style}" x="{(left + right) / 2:.1f}" y="{self._top - above:.1f}" '
                    f'text-anchor="middle">{escape(text)}</text>'
                )

    def rule(self, y: float, text: str) -> None:
        """Draw a dashed horizontal line, for a limit."""
        at = self.y(y)
        self._rules.append((y, text))
        self._marks.append(
            f'<path class="rule" d="M{self._left:.1f} {at:.1f}H{self._right:.1f}"/>'
            f'<text x="{self._right:.1f}" y="{at - 4:.1f}" text-anchor="end">{escape(text)}</text>'
        )

    def hover(self) -> None:
        """Show the values of a step while the mouse points at its column, in a page whose scripts do not
        run."""
        xs = sorted({x for series in self._series if series.kind != "dots" for x in series.xs})
        chosen = xs[:: max(1, math.ceil(len(xs) / MAX_HOVERS))]
        centres = [self.x(x) for x in chosen]
        edges = [self._left, *((a + b) / 2 for a, b in pairwise(centres)), self._right]
        for x, (left, right) in zip(chosen, pairwise(edges), strict=True):
            values = ", ".join(filter(None, (series.text_at(x) for series in self._series)))
            text = f"step {x:.0f}: {values} {self._unit}".rstrip()
            self._marks.append(
                f'<rect class="hit" x="{left:.1f}" y="{self._top:.1f}" width="{max(0.0, right - left):.1f}" '
                f'height="{self._bottom - self._top:.1f}"><title>{escape(text)}</title></rect>'
            )

    def describe(self, sentence: str) -> None:
        """Add a sentence to the alternative text, for readers who cannot see the picture."""
        self._description.append(sentence)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self._width, self._height

    def svg(self) -> str:
        spoken = self._title + "".join(f". {sentence}" for sentence in self._description)
        label_at = (self._left + self._right) / 2
        frame = (
            f'data-left="{self._left:.1f}" data-top="{self._top:.1f}" data-right="{self._right:.1f}" '
            f'data-bottom="{self._bottom:.1f}" data-from="{self._x.low}" data-to="{self._x.high}"'
        )
        return (
            f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" width="{self._width}" '
            f'height="{self._height}" viewBox="0 0 {self._width} {self._height}" role="img" '
            f'aria-label="{escape(spoken)}">{"".join(self._head)}'
            f'<g class="area" {frame}>{"".join([*self._axes(), *self._marks])}</g>'
            f'<text x="{label_at:.1f}" y="{self._height - 4}" text-anchor="middle">'
            f"{escape(self._x_label)}</text>"
            "</svg>"
        )

    def data(self) -> str:
        """The numbers of the plot as a script element of JSON; empty if it shows nothing over the steps."""
        if not any(len(series.xs) for series in self._series):
            return ""
        data = {
            "log": self._y.log,
            "zero": self._y.zero,
            "percent": self._y.format is percent,
            "around": [*self._around, *(y for y, _ in self._rules)],
            "rules": self._rules,
            "unit": self._unit,
            "steps": extent(self._series),
            "series": [series.as_data() for series in self._series],
        }
        # "</script>" in a metric's name must not end the element.
        text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
        return f'<script type="application/json" class="numbers">{text}</script>'

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
        return parts

    def _point(self, x: float, y: float) -> tuple[str, str]:
        return f"{self.x(x):.1f}", f"{self.y(y):.1f}"

    def _drawable(self, ys: Sequence[float]) -> list[float]:
        return [y if math.isfinite(y) and (y > 0 or not self._y.log) else math.nan for y in ys]


def standalone(panels: Sequence[tuple[str, int, int]], width: int, height: int) -> str:
    """An SVG file of plots, with their style for light and dark screens.

    Args:
        panels: the SVG text of each plot, and the x and y where it stands.
    """
    placed = "".join(svg.replace("<svg ", f'<svg x="{x}" y="{y}" ', 1) for svg, x, y in panels)
    # Nested pictures keep their own size: the rule that stretches a plot to its card is for the report.
    rules = plot_rules().replace("width:100%;height:auto;", "") + ".paper{fill:var(--card)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{stylesheet(rules)}</style>'
        f'<rect class="paper" width="{width}" height="{height}" rx="10"/>{placed}</svg>'
    )


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
    return f'<text class="note" {place}>{escape(note)}</text>'


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
        key = f'{swatch}<text class="key" x="{x + 19:.1f}" y="{y + 4}">{escape(name)}</text>'
        if kind == "mean":  # without a name: not drawn unless a reader asks for a mean
            visibility = "visible" if name else "hidden"
            key = f'<g class="mean-key" visibility="{visibility}">{key}</g>'
        parts.append(key)
        x += needed
    return parts, row + 1 if parts else 0
