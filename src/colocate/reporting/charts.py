"""The charts of a run. Each function draws one, or returns None when the run has no data for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from colocate.reporting.plots import Axis, Plot, compact, smooth
from colocate.reporting.run import Run, finite_or_zero, number
from colocate.reporting.theme import CATEGORY_COLORS, PHASE_COLORS, color_of

GIB = 2**30
_CHARTED = {"entropy", "kl", "cispo_clip_ratio", "grad_norm", "loss", "learning_rate", "frac_reward_zero_std"}


@dataclass(frozen=True)
class Curve:
    """One metric of a small chart."""

    metric: str
    label: str
    color: str


def smoothing_window(num_steps: int) -> int:
    """Steps that a running mean spans: none for a short run, a twenty-fifth of a long one."""
    return 1 if num_steps < 30 else num_steps // 25 | 1


def reward_chart(run: Run, size: tuple[int, int]) -> str | None:
    """Reward by step: each step, the running mean, the spread over completions, evaluations."""
    reward = run.metric("reward")
    if not _has_data(reward):
        return None
    window = smoothing_window(len(reward))
    mean = smooth(reward, window)
    spread = smooth(run.metric("reward_std"), window)
    lows = [m - s for m, s in zip(mean, spread, strict=True)]
    highs = [m + s for m, s in zip(mean, spread, strict=True)]
    eval_x, eval_y = run.eval_metric("eval_reward")
    legend = [("each step", "blue", "faint"), (f"mean of {window} steps", "blue", "line")]
    if window == 1:
        legend = [("each step", "blue", "line")]
    if _has_data(lows):
        legend.append(("± std over completions", "blue", "band"))
    if eval_y:
        legend.append(("held-out evaluation", "orange", "dot"))
    plot = Plot(
        "Reward",
        _step_axis(run.x + eval_x, size[0]),
        Axis.around([*reward, *lows, *highs, *eval_y]),
        legend=legend,
        width=size[0],
        height=size[1],
    )
    plot.band(run.x, lows, highs, "blue")
    _noisy_line(plot, run.x, reward, "blue")
    plot.hover(run.x, lambda i: f"step {run.x[i]:.0f}: reward {compact(reward[i])}, mean {compact(mean[i])}")
    plot.points(eval_x, eval_y, "orange")
    return plot.svg()


def metric_chart(
    run: Run,
    title: str,
    curves: Sequence[Curve],
    *,
    zero: bool = False,
    log: bool = False,
    percent: bool = False,
    note: str = "",
) -> str | None:
    """Metrics by step, each as its values and, in a long run, their running mean.

    Args:
        log: on powers of ten, if the values span enough of them.
    """
    curves = [curve for curve in curves if _has_data(run.metric(curve.metric))]
    if not curves:
        return None
    values = {curve.metric: run.metric(curve.metric) for curve in curves}
    positive = [v for column in values.values() for v in column if v > 0]
    log = log and max(positive, default=1.0) > 30 * min(positive, default=1.0)
    several = len(curves) > 1
    axis = Axis.around(
        [v for column in values.values() for v in column],
        zero=zero,
        log=log,
        format=(lambda v: f"{100 * v:.3g}%") if percent else None,
    )
    legend = [(curve.label, curve.color, "line") for curve in curves] if several else []
    plot = Plot(title, _step_axis(run.x), axis, legend=legend, note=note)
    for curve in curves:
        _noisy_line(plot, run.x, values[curve.metric], curve.color)

    def describe(i: int) -> str:
        shown = ", ".join(f"{c.label} {compact(values[c.metric][i], 4)}" for c in curves)
        return f"step {run.x[i]:.0f}: {shown}"

    plot.hover(run.x, describe)
    return plot.svg()


def length_chart(run: Run) -> str | None:
    """Tokens per completion: mean, and from the shortest to the longest."""
    mean = run.metric("completions/mean_length")
    if not _has_data(mean):
        return None
    lows, highs = run.metric("completions/min_length"), run.metric("completions/max_length")
    plot = Plot(
        "Completion length",
        _step_axis(run.x),
        Axis.around([*mean, *lows, *highs], zero=True),
        legend=[("mean", "blue", "line"), ("shortest to longest", "blue", "band")],
        note="tokens",
    )
    plot.band(run.x, lows, highs, "blue")
    _noisy_line(plot, run.x, mean, "blue")
    plot.hover(
        run.x,
        lambda i: (
            f"step {run.x[i]:.0f}: mean {compact(mean[i])}, {compact(lows[i])} to {compact(highs[i])} tokens"
        ),
    )
    return plot.svg()


def throughput_chart(run: Run, size: tuple[int, int]) -> str | None:
    """Prompt and completion tokens per second of wall time."""
    speed = run.tokens_per_second
    if not _has_data(speed):
        return None
    plot = Plot(
        "Throughput",
        _step_axis(run.x),
        Axis.around(speed, zero=True),
        width=size[0],
        height=size[1],
        note="tokens/s",
    )
    _noisy_line(plot, run.x, speed, "green")
    plot.hover(run.x, lambda i: f"step {run.x[i]:.0f}: {compact(speed[i])} tokens/s")
    return plot.svg()


def phase_color(run: Run, phase: str) -> str:
    return color_of(phase, PHASE_COLORS, [name for name in run.phase_names if name not in PHASE_COLORS])


def time_chart(run: Run, size: tuple[int, int]) -> str | None:
    """Where each step's time went: one stacked bar per step, or per group of steps where they get thin."""
    names = run.phase_names
    if not names or sum(run.wall_s) <= 0:
        return None
    per_bar = math.ceil(4 * len(run.steps) / size[0])
    groups = [range(i, min(i + per_bar, len(run.steps))) for i in range(0, len(run.steps), per_bar)]
    heights = [{name: _mean_seconds(run, rows, name) for name in names} for rows in groups]
    # A resumed or thinned record skips steps: each bar reaches to the next one's first step at most.
    widths = [run.x[rows[-1]] - run.x[rows[0]] + 1 for rows in groups]
    edges = [run.x[rows[0]] - 0.5 for rows in groups]
    plot = Plot(
        "Where each step's time went",
        _step_axis([edges[0], edges[-1] + widths[-1]], size[0]),
        Axis.around([sum(bar.values()) for bar in heights], zero=True),
        legend=[(name, phase_color(run, name), "box") for name in names],
        width=size[0],
        height=size[1],
        note="seconds" if per_bar == 1 else f"seconds, bars: means of {per_bar} steps",
    )
    for rows, left, width, bar in zip(groups, edges, widths, heights, strict=True):
        first, last = run.x[rows[0]], run.x[rows[-1]]
        which = f"step {first:.0f}" if first == last else f"steps {first:.0f} to {last:.0f}"
        base = 0.0
        for name, seconds in bar.items():
            if seconds > 0:
                plot.box(
                    (left, left + width),
                    (base, base + seconds),
                    phase_color(run, name),
                    f"{which}: {name} {compact(seconds)} s of {compact(sum(bar.values()))} s",
                    gap=1 if len(groups) <= 60 else 0.4,
                )
                base += seconds
    return plot.svg()


def step_memory_chart(run: Run, size: tuple[int, int], title: str | None = None) -> str | None:
    """One typical step: memory by what holds it, over the step's seconds.

    A phase with points is drawn as it went; any other at its fullest moment.
    """
    index = run.typical_step()
    if index is None:
        return None
    spans = run.spans[index]
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
    plot = Plot(
        title or f"Memory through one step (step {run.x[index]:.0f})",
        Axis.around([0.0, run.wall_s[index], *(span["end_s"] for span in spans)], tight=True, num_ticks=6),
        Axis.around([0.0, highest, *([limit * 1.04] if shows_limit else [])], zero=True),
        legend=[
            (_category_label(name, names), colors[name], "box")
            for name in names
            if name != "other" or "workspace" not in names
        ],
        width=size[0],
        height=size[1],
        x_label="seconds since the step began",
        note="GiB",
    )
    for span, part in zip(spans, drawn, strict=True):
        if isinstance(part, MemoryCurve):
            part.draw(plot, colors, names)
            _label_span(plot, span["phase"], span["start_s"], span["end_s"], part.lowest)
            continue
        base = 0.0
        for name in names:
            if part.get(name, 0.0) > 0:
                hover = f"{span['phase']}: {_category_label(name, names)} {compact(part[name])} GiB"
                plot.box(
                    (span["start_s"], span["end_s"]), (base, base + part[name]), colors[name], hover, gap=1.5
                )
                base += part[name]
        _label_span(plot, span["phase"], span["start_s"], span["end_s"], base)
    if shows_limit:
        plot.rule(limit, f"device: {compact(limit)} GiB")
    return plot.svg()


_TOP = ("activations", "logits", "workspace", "in use")


class MemoryCurve:
    """The memory of a phase from point to point, in GiB, by what holds it.

    Of what is in use beyond the categories that are known, what was there when the phase began is "other"
    (the CUDA context, on a CPU all of Python), and what came in it is taken for activations. Between two
    points it is drawn as changing evenly, which is how layers, one like the other, fill and empty it.
    """

    def __init__(self, span: dict) -> None:
        """`span` is one of `Run.spans` that has points."""
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

    @property
    def lowest(self) -> float:
        """The least that is in use at a point."""
        return min(self.totals)

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


def peak_memory_chart(run: Run) -> str | None:
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
        _step_axis(run.x),
        Axis.around([highest, *([limit * 1.04] if shows_limit else [])], zero=True),
        legend=[(name, phase_color(run, name), "line") for name in names],
        note="GiB",
    )
    for name in names:
        plot.line(run.x, peaks[name], phase_color(run, name))
    if shows_limit:
        plot.rule(limit, f"device: {compact(limit)} GiB")
    plot.hover(
        run.x,
        lambda i: f"step {run.x[i]:.0f}: " + ", ".join(f"{n} {compact(peaks[n][i])} GiB" for n in names),
    )
    return plot.svg()


def metric_charts(run: Run) -> list[str]:
    """The small charts of how the policy learns, those that the run has data for."""
    charts: list[str | None] = [
        reward_functions_chart(run),
        length_chart(run),
        metric_chart(
            run,
            "Completions without signal",
            [
                Curve("completions/clipped_ratio", "cut off at the limit", "orange"),
                Curve("frac_reward_zero_std", "group of equal rewards", "slate"),
            ],
            zero=True,
            percent=True,
        ),
        metric_chart(run, "Entropy", [Curve("entropy", "entropy", "blue")], note="nats per token"),
        metric_chart(
            run, "KL to the reference", [Curve("kl", "KL", "purple")], zero=True, note="nats per token"
        ),
        metric_chart(
            run,
            "Clipped tokens",
            [
                Curve("clip_ratio/low_mean", "low", "blue"),
                Curve("clip_ratio/high_mean", "high", "orange"),
                Curve("cispo_clip_ratio", "CISPO", "purple"),
            ],
            zero=True,
            percent=True,
        ),
        metric_chart(run, "Gradient norm", [Curve("grad_norm", "gradient norm", "blue")], log=True),
        metric_chart(run, "Loss", [Curve("loss", "loss", "blue")]),
        metric_chart(run, "Learning rate", [Curve("learning_rate", "learning rate", "slate")], zero=True),
        metric_chart(
            run,
            "Rollout against trainer",
            [
                Curve("sampling/sampling_logp_difference/mean", "mean", "blue"),
                Curve("sampling/sampling_logp_difference/max", "max", "orange"),
            ],
            log=True,
            note="|log-prob difference|",
        ),
        metric_chart(
            run,
            "Importance-sampling ratio",
            [
                Curve("sampling/importance_sampling_ratio/min", "min", "slate"),
                Curve("sampling/importance_sampling_ratio/mean", "mean", "blue"),
                Curve("sampling/importance_sampling_ratio/max", "max", "orange"),
            ],
        ),
    ]
    return [chart for chart in charts if chart]


def other_metric_charts(run: Run) -> list[str]:
    """What no other chart shows, such as metrics logged by reward functions; the first 24."""
    shown = {"reward", "reward_std", "num_tokens", "step_time"}
    shown_groups = ("rewards/", "completions/", "clip_ratio/", "sampling/")
    names = [n for n in run.metric_names if n not in shown | _CHARTED and not n.startswith(shown_groups)]
    charts = [metric_chart(run, name, [Curve(name, name, "slate")]) for name in names[:24]]
    return [chart for chart in charts if chart]


def reward_functions_chart(run: Run) -> str | None:
    """The mean of every reward function; the first six if there are more."""
    suffix = "/mean"
    names = [n for n in run.metric_names if n.startswith("rewards/") and n.endswith(suffix)]
    if len(names) < 2:
        return None
    palette = ("blue", "orange", "green", "purple", "gold", "red")
    curves = [
        Curve(name, name.removeprefix("rewards/").removesuffix(suffix), color)
        for name, color in zip(names, palette, strict=False)
    ]
    return metric_chart(run, "Reward by function", curves)


def _step_axis(steps: Sequence[float], width: int = 360) -> Axis:
    return Axis.around(steps, tight=True, whole=True, num_ticks=8 if width > 500 else 4)


def _noisy_line(plot: Plot, xs: Sequence[float], ys: Sequence[float], color: str) -> None:
    """The values and, in a long run where they hide the trend, their running mean over them."""
    window = smoothing_window(len(xs))
    plot.line(xs, ys, color, "faint" if window > 1 else "curve")
    if window > 1:
        plot.line(xs, smooth(ys, window), color)


def _has_data(values: Sequence[float]) -> bool:
    return any(math.isfinite(value) for value in values)


def _mean_seconds(run: Run, rows: Sequence[int], phase: str) -> float:
    total = sum(run.phases[i].get(phase, 0.0) for i in rows)
    if phase == "other":
        total += sum(run.wall_s[i] - sum(run.phases[i].values()) for i in rows)
    return total / len(rows)


def _phase_peak(spans: Sequence[dict], phase: str) -> float:
    return max((number(s["peak_bytes"]) / GIB for s in spans if s["phase"] == phase), default=math.nan)


def _stack(span: dict, rest_name: str) -> dict[str, float]:
    """GiB by category that holds any; `rest_name` is what the peak holds beyond them."""
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
    return name.replace("_", " ").replace("kv", "KV")


def _label_span(plot: Plot, phase: str, start: float, end: float, top: float) -> None:
    """The phase's name inside its box, if it fits there."""
    if plot.x(end) - plot.x(start) > 7 * len(phase) + 8 and plot.y(0.0) - plot.y(top) > 22:
        plot.label((start + end) / 2, top / 2, phase)
