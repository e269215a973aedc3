"""The charts of memory: a rollout and the training on it as they went, and the fullest moment of each
phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from colocate.reporting.axes import Axis, compact
from colocate.reporting.charts import phase_color, step_axis
from colocate.reporting.curves import course
from colocate.reporting.plots import Plot
from colocate.reporting.run import RecordedRun, finite_or_zero, number
from colocate.reporting.theme import CATEGORY_COLORS, category_label, color_of

GIB = 2**30


def rollout_memory_chart(run: RecordedRun, size: tuple[int, int]) -> Plot | None:
    """The memory of one typical rollout, and of the steps that train on it, over their seconds, by category.

    A phase with points is drawn from point to point, any other phase at its fullest moment. Above it are its
    name and its peak.
    """
    steps = run.typical_steps()
    if not steps:
        return None
    by_step = _spans_in_a_row(run, steps)
    spans = [span for of_step in by_step for span in of_step]
    rest = "workspace" if any(span["points"] for span in spans) else "in use"
    drawn = [MemoryCurve(span) if span["points"] else _stack(span, rest) for span in spans]
    names = list(dict.fromkeys(name for part in drawn for name in _names_in(part)))
    # What came and went goes on top of what stayed, and what is not known on top of what is.
    names.sort(key=lambda name: _TOP.index(name) if name in _TOP else -1)
    unknown = [name for name in names if name not in CATEGORY_COLORS]
    colors = {name: color_of(name, CATEGORY_COLORS, unknown) for name in names}
    highest = max(part.highest if isinstance(part, MemoryCurve) else sum(part.values()) for part in drawn)
    limit = run.limit_bytes / GIB
    shows_limit = highest > 0.4 * limit
    first, last = f"{run.x[steps[0]]:.0f}", f"{run.x[steps[-1]]:.0f}"
    seconds = sum(run.wall_s[step] for step in steps)
    what = f"step (step {first})" if first == last else f"rollout (steps {first} to {last})"
    plot = Plot(
        f"Memory through one {what}",
        Axis.around([0.0, seconds, *(span["end_s"] for span in spans)], tight=True, num_ticks=6),
        # Above the limit its own name must find room.
        Axis.around([0.0, highest, *([limit * 1.1] if shows_limit else [])], zero=True, tight=shows_limit),
        legend=[
            (_category_label(name, names), colors[name], "box")
            for name in names
            if name != "other" or "workspace" not in names
        ],
        width=size[0],
        height=size[1],
        x_label=f"seconds since step {first} began",
        note="GiB",
        has_headings=True,
    )
    for span, part in zip(spans, drawn, strict=True):
        if isinstance(part, MemoryCurve):
            part.draw(plot, colors, names)
        else:
            _draw_stack(plot, span, part, colors, names)
    if shows_limit:
        plot.rule(limit, f"device: {compact(limit)} GiB")
    peaks = _head_phases(plot, by_step)
    plot.describe("Peaks in GiB: " + ", ".join(f"{name} {compact(peak)}" for name, peak in peaks.items()))
    return plot


def _spans_in_a_row(run: RecordedRun, steps: Sequence[int]) -> list[list[dict]]:
    """The spans of some steps, each step's times counted from the beginning of the first."""
    rows, begin_s = [], 0.0
    for step in steps:
        rows.append([_later(span, begin_s) for span in run.spans[step]])
        begin_s += run.wall_s[step]
    return rows


def _later(span: dict, seconds: float) -> dict:
    points = [{**point, "at_s": number(point["at_s"]) + seconds} for point in span["points"]]
    start_s, end_s = (number(span[key]) + seconds for key in ("start_s", "end_s"))
    return {**span, "start_s": start_s, "end_s": end_s, "points": points}


def _head_phases(plot: Plot, by_step: list[list[dict]]) -> dict[str, float]:
    """Write each phase's name and its peak above it; returns the greatest peaks in GiB by phase."""
    peaks: dict[str, float] = {}
    for spans in by_step:
        for phase, group in groupby(spans, lambda span: span["phase"]):
            in_a_row = list(group)
            peak = max(number(span["peak_bytes"]) / GIB for span in in_a_row)
            plot.heading((in_a_row[0]["start_s"], in_a_row[-1]["end_s"]), phase, f"{compact(peak)} GiB")
            peaks[phase] = max(peak, peaks.get(phase, 0.0))
    return peaks


def _draw_stack(
    plot: Plot, span: dict, stack: dict[str, float], colors: dict[str, str], names: Sequence[str]
) -> None:
    """Draw a phase by its fullest moment, if no others are known."""
    base = 0.0
    for name in names:
        if stack.get(name, 0.0) > 0:
            hover = f"{span['phase']}: {_category_label(name, names)} {compact(stack[name])} GiB"
            plot.box(
                (span["start_s"], span["end_s"]), (base, base + stack[name]), colors[name], hover, gap=1.5
            )
            base += stack[name]


_TOP = ("activations", "logits", "workspace", "in use")


class MemoryCurve:
    """The memory of a phase from point to point, in GiB, by category.

    Memory that belongs to no known category is called "other" if it was in use when the phase began (the CUDA
    context; on a CPU what the allocator keeps, and libraries that were loaded late), and is taken for
    activations if it came later. Between two points memory is drawn as changing evenly, since layers, which
    are all alike, fill and empty it.
    """

    def __init__(self, span: dict) -> None:
        """`span` is one of `RecordedRun.spans` that has points."""
        points = span["points"]
        self._phase = span["phase"]
        self.xs = [span["start_s"], *(number(point["at_s"]) for point in points), span["end_s"]]
        # The categories are not asked at the ends: there they are taken to be as at the points beside them.
        sampled = [_sizes(point) for point in points]
        moments = [{**_sizes(span), **sizes} for sizes in (sampled[0], *sampled, sampled[-1])]
        totals = [span.get("before_bytes"), *(point["in_use_bytes"] for point in points)]
        totals.append(span.get("after_bytes"))
        unknown = [
            max(0.0, finite_or_zero(total) / GIB - sum(moment.values()))
            for moment, total in zip(moments, totals, strict=True)
        ]
        for moment, size in zip(moments, unknown, strict=True):
            moment["other"] = min(size, unknown[0])
            moment["activations"] = size - moment["other"]
        self.heights = {name: [moment.get(name, 0.0) for moment in moments] for name in moments[0]}
        self.totals = [sum(moment.values()) for moment in moments]
        # By interval between two points: what came and went in it, beyond the fuller of its ends.
        self.transients = [
            (
                str(point.get("transient", "workspace")),
                max(0.0, number(point["peak_bytes"]) / GIB - max(self.totals[i : i + 2])),
            )
            for i, point in enumerate(points)
        ]

    @property
    def highest(self) -> float:
        pairs = zip(self.totals[:-1], self.totals[1:], [*self.transients, ("", 0.0)], strict=True)
        return max(max(start, end) + extra for start, end, (_, extra) in pairs)

    def draw(self, plot: Plot, colors: dict[str, str], names: Sequence[str]) -> None:
        base = [0.0] * len(self.xs)
        for name in names:
            heights = self.heights.get(name, [0.0])
            if max(heights) > 0:
                top = [low + height for low, height in zip(base, heights, strict=True)]
                hover = f"{self._phase}: {_category_label(name, names)} at most {compact(max(heights))} GiB"
                plot.area(self.xs, base, top, colors[name], hover)
                base = top
        for i, (name, extra) in enumerate(self.transients):
            if extra > 0:
                top = [total + extra for total in self.totals[i : i + 2]]
                hover = f"{self._phase}: {_category_label(name, names)} {compact(extra)} GiB"
                plot.area(self.xs[i : i + 2], self.totals[i : i + 2], top, colors[name], hover)


def _names_in(part: MemoryCurve | dict[str, float]) -> list[str]:
    if isinstance(part, dict):
        return list(part)
    held = [name for name, heights in part.heights.items() if max(heights) > 0]
    return held + [name for name, extra in part.transients if extra > 0]


def peak_memory_chart(run: RecordedRun) -> Plot | None:
    """The fullest moment of each phase, by step."""
    names = list(dict.fromkeys(span["phase"] for spans in run.spans for span in spans))
    if not names:
        return None
    peaks = {name: [_phase_peak(spans, name) for spans in run.spans] for name in names}
    highest = max(v for column in peaks.values() for v in column if math.isfinite(v))
    limit = run.limit_bytes / GIB
    shows_limit = highest > 0.4 * limit
    plot = Plot(
        "Peak memory by phase",
        step_axis(run.x),
        Axis.around([highest, *([limit * 1.04] if shows_limit else [])], zero=True),
        legend=[(name, phase_color(run, name), "line") for name in names],
        note="GiB",
        unit="GiB",
    )
    for name in names:
        # A phase that not every step has is a line through those that have it.
        known = [(x, peak) for x, peak in zip(run.x, peaks[name], strict=True) if math.isfinite(peak)]
        xs, ys = [x for x, _ in known], [peak for _, peak in known]
        plot.trend(xs, ys, phase_color(run, name), name)
        plot.describe(course(name, peaks[name]))
    if shows_limit:
        plot.rule(limit, f"device: {compact(limit)} GiB")
    plot.hover()
    return plot


def _phase_peak(spans: Sequence[dict], phase: str) -> float:
    return max((number(s["peak_bytes"]) / GIB for s in spans if s["phase"] == phase), default=math.nan)


def _stack(span: dict, rest_name: str) -> dict[str, float]:
    """GiB of each category that is not empty; `rest_name` is the name for the rest of the peak."""
    stack = {name: size for name, size in _sizes(span).items() if size}
    rest = number(span["peak_bytes"]) / GIB - sum(stack.values())
    return {**stack, rest_name: rest} if rest > 0 else stack


def _sizes(part: dict) -> dict[str, float]:
    """GiB of the categories of a span or of a point."""
    categories = part.get("categories")
    known = categories.items() if isinstance(categories, dict) else ()
    return {name: finite_or_zero(size) / GIB for name, size in known}


def _category_label(name: str, names: Sequence[str]) -> str:
    if name == "in use" and len(names) > 1:
        return "activations, gradients, other"
    if name == "workspace":  # the two have one colour
        return "workspace, other"
    return category_label(name)
