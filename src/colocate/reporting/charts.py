"""The charts of a run. Each function draws one, or returns None when the run has no data for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from colocate.reporting.axes import Axis, compact
from colocate.reporting.axes import percent as as_percent
from colocate.reporting.curves import course, smooth, smoothing_window
from colocate.reporting.plots import Plot
from colocate.reporting.run import RecordedRun
from colocate.reporting.theme import PHASE_COLORS, color_of

_CHARTED = {"entropy", "kl", "cispo_clip_ratio", "grad_norm", "loss", "learning_rate", "frac_reward_zero_std"}


@dataclass(frozen=True)
class Curve:
    """One metric of a small chart."""

    metric: str
    label: str
    color: str


def reward_chart(run: RecordedRun, size: tuple[int, int]) -> Plot | None:
    """Reward by step: its value at each step, the running mean with its standard error, and evaluations.

    The band is mean ± std / √n with the unbiased deviation of a step's n completions. It stays within the
    rewards that were seen, since the largest of n values is at least std / √n above their mean (Brunk's
    inequality); a band of mean ± std would leave [0, 1] where rewards are 0 or 1.
    """
    reward = run.metric("reward")
    if not _has_data(reward):
        return None
    window = smoothing_window(len(reward))
    root = math.sqrt(run.completions_per_rollout)
    errors = [std / root for std in run.metric("reward_std")]
    lows = [m - e for m, e in zip(reward, errors, strict=True)]
    highs = [m + e for m, e in zip(reward, errors, strict=True)]
    eval_x, eval_y = run.eval_metric("eval_reward")
    legend = [("each step", "blue", "faint" if window > 1 else "line")]
    if _has_data(lows):
        legend.append(("± standard error", "blue", "band"))
    if eval_y:
        legend.append(("held-out evaluation", "orange", "dot"))
    legend.append((f"mean of {window} steps" if window > 1 else "", "blue", "mean"))
    plot = Plot(
        "Reward",
        step_axis(run.x + eval_x, size[0]),
        Axis.around([*reward, *smooth(lows, window), *smooth(highs, window), *eval_y]),
        legend=legend,
        width=size[0],
        height=size[1],
    )
    if _has_data(lows):
        plot.band(run.x, lows, highs, "blue", "± standard error", window=window, is_raw=False)
    plot.trend(run.x, reward, "blue", "reward", window=window)
    plot.hover()
    if eval_y:
        plot.points(eval_x, eval_y, "orange", "held-out reward")
    plot.describe(course("reward", reward))
    if eval_y:
        plot.describe(course("held-out reward", eval_y))
    return plot


def metric_chart(
    run: RecordedRun,
    title: str,
    curves: Sequence[Curve],
    *,
    zero: bool = False,
    log: bool = False,
    percent: bool = False,
    noisy: bool = True,
    note: str = "",
    around: tuple[float, ...] = (),
) -> Plot | None:
    """One chart of several metrics by step: their values and, in a long run, their running means.

    Args:
        log: use a logarithmic axis if the values span enough powers of ten.
        noisy: False: the values are a setting, which must not be averaged.
        around: values that the axis shows in any case, so that noise does not look like a signal.
    """
    curves = [curve for curve in curves if _has_data(run.metric(curve.metric))]
    if not curves:
        return None
    values = {curve.metric: run.metric(curve.metric) for curve in curves}
    positive = [v for column in values.values() for v in column if v > 0]
    log = log and max(positive, default=1.0) > 30 * min(positive, default=1.0)
    several = len(curves) > 1
    axis = Axis.around(
        [*around, *(v for column in values.values() for v in column)],
        zero=zero,
        log=log,
        format=as_percent if percent else None,
    )
    legend = [(curve.label, curve.color, "line") for curve in curves] if several else []
    plot = Plot(title, step_axis(run.x), axis, legend=legend, note=note, around=around)
    window = smoothing_window(len(run.x)) if noisy else 0
    for curve in curves:
        plot.trend(run.x, values[curve.metric], curve.color, curve.label, window=window)
        plot.describe(course(curve.label, values[curve.metric], percent=percent))

    plot.hover()
    return plot


def length_chart(run: RecordedRun) -> Plot | None:
    """Tokens per completion: mean, and from the shortest to the longest."""
    mean = run.metric("completions/mean_length")
    if not _has_data(mean):
        return None
    lows, highs = run.metric("completions/min_length"), run.metric("completions/max_length")
    plot = Plot(
        "Completion length",
        step_axis(run.x),
        Axis.around([*mean, *lows, *highs], zero=True),
        legend=[("mean", "blue", "line"), ("shortest to longest", "blue", "band")],
        note="tokens",
        unit="tokens",
    )
    if _has_data(lows):
        plot.band(run.x, lows, highs, "blue", "shortest to longest")
    plot.trend(run.x, mean, "blue", "mean", window=smoothing_window(len(run.x)))
    plot.hover()
    plot.describe(course("mean length in tokens", mean))
    return plot


def throughput_chart(run: RecordedRun, size: tuple[int, int]) -> Plot | None:
    """Prompt and completion tokens per second of wall time.

    The running mean weighs each step by its seconds, as the run's own throughput does.
    """
    speed = run.tokens_per_second
    if not _has_data(speed):
        return None
    plot = Plot(
        "Throughput",
        step_axis(run.x),
        Axis.around(speed, zero=True),
        width=size[0],
        height=size[1],
        note="tokens/s",
        unit="tokens/s",
    )
    window = smoothing_window(len(run.x))
    plot.trend(run.x, speed, "green", "throughput", window=window, weights=run.wall_s)
    plot.describe(course("throughput in tokens per second", speed))
    plot.hover()
    return plot


def phase_color(run: RecordedRun, phase: str) -> str:
    return color_of(phase, PHASE_COLORS, [name for name in run.phase_names if name not in PHASE_COLORS])


def time_chart(run: RecordedRun, size: tuple[int, int]) -> Plot | None:
    """Seconds by phase: one stacked bar per step, or per group of steps where single bars would be too
    thin."""
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
        step_axis([edges[0], edges[-1] + widths[-1]], size[0]),
        Axis.around([sum(bar.values()) for bar in heights], zero=True),
        legend=[(name, phase_color(run, name), "box") for name in names],
        width=size[0],
        height=size[1],
        note="seconds" if per_bar == 1 else f"seconds, bars: means of {per_bar} steps",
        unit="s",
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
    for name in names:
        plot.part_of_bars(run.x, run.seconds_in(name), phase_color(run, name), name)
    total = sum(run.phase_totals[name] for name in names)
    parts = ", ".join(f"{name} {100 * run.phase_totals[name] / total:.0f}%" for name in names)
    plot.describe(f"Share of the time: {parts}")
    return plot


@dataclass(frozen=True)
class _Small:
    """A small chart of how the policy learns: its title, its curves and the arguments of `metric_chart`."""

    title: str
    curves: list[Curve]
    zero: bool = False
    percent: bool = False
    log: bool = False
    noisy: bool = True
    note: str = ""
    around: tuple[float, ...] = ()


_SMALL = (
    _Small(
        "Completions without signal",
        [
            Curve("completions/clipped_ratio", "cut off at the limit", "orange"),
            Curve("frac_reward_zero_std", "group of equal rewards", "slate"),
        ],
        zero=True,
        percent=True,
    ),
    _Small("Entropy", [Curve("entropy", "entropy", "blue")], note="nats per token"),
    _Small("KL to the reference", [Curve("kl", "KL", "purple")], zero=True, note="nats per token"),
    _Small(
        "Clipped tokens",
        [
            Curve("clip_ratio/low_mean", "low", "blue"),
            Curve("clip_ratio/high_mean", "high", "orange"),
            Curve("cispo_clip_ratio", "CISPO", "purple"),
        ],
        zero=True,
        percent=True,
    ),
    _Small("Gradient norm", [Curve("grad_norm", "gradient norm", "blue")], log=True),
    _Small("Loss", [Curve("loss", "loss", "blue")]),
    _Small("Learning rate", [Curve("learning_rate", "learning rate", "slate")], zero=True, noisy=False),
    _Small(
        "Rollout against trainer",
        [
            Curve("sampling/sampling_logp_difference/mean", "mean", "blue"),
            Curve("sampling/sampling_logp_difference/max", "max", "orange"),
        ],
        log=True,
        note="|log-prob difference|",
    ),
    _Small(
        "Importance-sampling ratio",
        [
            Curve("sampling/importance_sampling_ratio/min", "min", "slate"),
            Curve("sampling/importance_sampling_ratio/mean", "mean", "blue"),
            Curve("sampling/importance_sampling_ratio/max", "max", "orange"),
        ],
        note="1: same policy",
        around=(0.9, 1.1),
    ),
)
_TITLES = {
    "reward": "Reward",
    "reward_std": "Reward, standard deviation",
    "completions/mean_length": "Completion length",
    **{f"completions/{which}_length": f"Completion length, {which}" for which in ("min", "max")},
    **{
        f"completions/{which}_terminated_length": f"Length of those that ended, {which}"
        for which in ("mean", "min", "max")
    },
    **{
        curve.metric: chart.title if len(chart.curves) == 1 else f"{chart.title}: {curve.label}"
        for chart in _SMALL
        for curve in chart.curves
    },
    "completions/clipped_ratio": "Completions cut off at the limit",
    "frac_reward_zero_std": "Groups of equal rewards",
}


def title_of(metric: str) -> str:
    """The title of a metric in the report of one run; the metric's own name where it has none there."""
    room, _, of_function = metric.partition("/")
    if room == "rewards" and "/" in of_function:
        name, _, what = of_function.rpartition("/")
        return f"Reward by {name}" + ("" if what == "mean" else f", {what}")
    return _TITLES.get(metric, metric)


def is_share(metric: str) -> bool:
    """Whether a metric is drawn from 0 in percent."""
    return any(chart.percent for chart in _SMALL for curve in chart.curves if curve.metric == metric)


def metric_charts(run: RecordedRun) -> list[Plot]:
    """The small charts of how the policy learns, as far as the run has data for them."""
    drawn = [reward_functions_chart(run), length_chart(run)]
    for chart in _SMALL:
        options = {name: value for name, value in vars(chart).items() if name not in ("title", "curves")}
        drawn.append(metric_chart(run, chart.title, chart.curves, **options))
    return [chart for chart in drawn if chart]


def other_metric_charts(run: RecordedRun) -> list[Plot]:
    """Charts of the first 24 metrics that no other chart shows, such as those logged by reward functions."""
    shown = {"reward", "reward_std", "num_tokens", "step_time"}
    shown_groups = ("rewards/", "completions/", "clip_ratio/", "sampling/")
    names = [n for n in run.metric_names if n not in shown | _CHARTED and not n.startswith(shown_groups)]
    charts = [metric_chart(run, name, [Curve(name, name, "slate")]) for name in names[:24]]
    return [chart for chart in charts if chart]


def reward_functions_chart(run: RecordedRun) -> Plot | None:
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


def step_axis(steps: Sequence[float], width: int = 360) -> Axis:
    return Axis.around(steps, tight=True, whole=True, num_ticks=8 if width > 500 else 4)


def _has_data(values: Sequence[float]) -> bool:
    return any(math.isfinite(value) for value in values)


def _mean_seconds(run: RecordedRun, rows: range, phase: str) -> float:
    return sum(run.seconds_in(phase)[rows.start : rows.stop]) / len(rows)
