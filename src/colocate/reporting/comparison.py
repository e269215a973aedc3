"""The report of several runs: their curves in the same charts, and how their options differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from colocate.reporting import charts
from colocate.reporting.axes import Axis, compact
from colocate.reporting.axes import percent as as_percent
from colocate.reporting.curves import course, ends, smooth, smoothing_window
from colocate.reporting.language import lang_attribute
from colocate.reporting.page import card, controls, page, wide_card
from colocate.reporting.plots import Plot
from colocate.reporting.report import NARROW, WIDE, duration
from colocate.reporting.run import RecordedRun, number, read_run

COMPARISON_FILE = "comparison.html"
PALETTE = ("blue", "orange", "green", "purple", "gold", "red", "slate", "gray")
_FIRST = (
    "reward", "completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std", "entropy", "kl",
    "grad_norm", "sampling/sampling_logp_difference/mean",
)  # fmt: skip
_LEFT_OUT = frozenset({"num_tokens", "step_time"})
_SETTINGS = frozenset({"learning_rate"})
_MOST_METRICS = 30
_COLUMNS = ("steps", "reward", "held-out reward", "time", "tokens/s", "peak GiB")


def write_comparison(run_dirs: Sequence[str | Path], path: str | Path = COMPARISON_FILE) -> Path:
    """Draw several runs into one page, at `path`, and return it.

    Raises:
        FileNotFoundError: a directory has no record.
        ValueError: a record has no step, a run is named twice, or the runs are more than there are colours.
    """
    directories = [Path(name).resolve() for name in run_dirs]
    if len(set(directories)) < len(directories):
        raise ValueError("A run is named twice: a comparison has each run once.")
    if len(directories) > len(PALETTE):
        raise ValueError(
            f"{len(directories)} runs were named, and a chart can tell {len(PALETTE)} apart: compare fewer."
        )
    runs = [read_run(directory) for directory in run_dirs]
    names = names_of(runs)
    body = "".join(
        [
            f"<h1>{len(runs)} runs</h1>",
            _warning(runs, names),
            _table(runs, names),
            f"<section>{controls()}<h2>How they learned</h2>{_charts(runs, names)}</section>",
            _options(runs, names),
            "<footer>Drawn by colocate. Point at a chart to read its values, drag across it to zoom."
            "</footer>",
        ]
    )
    path = Path(path)
    path.write_text(page(" and ".join(names), body), encoding="utf-8", errors="replace")
    return path


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """A name for each run, with its directory in front where two have one name."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else f"{run.directory}: {name}"
        for name, run in zip(names, runs, strict=True)
    ]


def _warning(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """A sentence that names runs made by different versions, since these may explain differences; or none."""
    known = [run.info.get("versions") for run in runs]
    versions = [found if isinstance(found, dict) else {} for found in known]
    differing = []
    for package in dict.fromkeys(package for found in versions for package in found):
        of_runs = [str(found.get(package, "none")) for found in versions]
        if len(set(of_runs)) > 1:
            told = (f"{name} has {version}" for name, version in zip(names, of_runs, strict=True))
            differing.append(f"{package}: {', '.join(told)}")
    if not differing:
        return ""
    rows = "".join(f"<span>{escape(row)}</span>" for row in differing)
    return f'<p class="facts"><span>The runs were made by different versions.</span>{rows}</p>'


def _table(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in ("run", *_COLUMNS))
    rows = "".join(_row(run, name, color) for run, name, color in zip(runs, names, PALETTE, strict=False))
    return card(
        _scrolled("The runs", f'<table class="runs" role="table"><tr role="row">{head}</tr>{rows}</table>'),
        "gap",
    )


def _row(run: RecordedRun, name: str, color: str) -> str:
    first, last, count = ends(run.metric("reward"))
    _, held_out = run.eval_metric("eval_reward")
    peaks = [number(span["peak_bytes"]) for spans in run.spans for span in spans]
    cells = (
        f"{run.x[-1]:,.0f}",
        f"{compact(first)} → {compact(last)}" if count else "–",
        compact(held_out[-1]) if held_out else "–",
        duration(sum(run.wall_s)),
        compact(run.throughput),
        compact(max(peaks) / 2**30) if peaks else "–",
    )
    key = f'<td role="cell" class="key"><i class="b-{color}"></i>{escape(name)}</td>'
    named = (
        f'<td role="cell" data-name="{name}">{cell}</td>' for name, cell in zip(_COLUMNS, cells, strict=True)
    )
    return f'<tr role="row">{key}{"".join(named)}</tr>'


def _charts(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    found = dict.fromkeys(name for run in runs for name in run.metric_names if name not in _LEFT_OUT)
    metrics = [name for name in _FIRST if name in found] + [name for name in found if name not in _FIRST]
    flat = [name for name in metrics if all(_is_zero(run.metric(name)) for run in runs)]
    first, rest = "", [name for name in metrics if name not in flat][:_MOST_METRICS]
    if rest[:1] == ["reward"]:
        wide, narrow = (overlay(runs, names, rest[0], size) for size in (WIDE, NARROW))
        first = wide_card(wide, narrow)
        rest = rest[1:]
    drawn = [overlay(runs, names, metric) for metric in rest]
    listed = ", ".join(charts.title_of(name) for name in flat)
    zeros = f'<p class="facts gap">0 at every step of all runs: {escape(listed)}.</p>' if flat else ""
    return f'{first}<div class="grid3 gap">{"".join(card(chart) for chart in drawn)}</div>{zeros}'


def _is_zero(values: Sequence[float]) -> bool:
    return not any(math.isfinite(value) and value != 0 for value in values)


def overlay(
    runs: Sequence[RecordedRun], names: Sequence[str], metric: str, size: tuple[int, int] = (360, 230)
) -> Plot:
    """One metric of all runs by step; of long runs the running mean alone, as raw lines hide one another."""
    windows = [0 if metric in _SETTINGS else smoothing_window(len(run.x)) for run in runs]
    curves = [(run.x, run.metric(metric), window) for run, window in zip(runs, windows, strict=True)]
    means = [smooth(ys, window) for _, ys, window in curves]
    plot = Plot(
        charts.title_of(metric),
        charts.step_axis([x for xs, _, _ in curves for x in xs], size[0]),
        Axis.around(
            [y for ys in means for y in ys],
            zero=charts.is_share(metric),
            format=as_percent if charts.is_share(metric) else None,
        ),
        legend=[(name, color, "line") for name, color in zip(names, PALETTE, strict=False)],
        width=size[0],
        height=size[1],
    )
    for name, color, mean, (xs, ys, window) in zip(names, PALETTE, means, curves, strict=False):
        plot.trend(xs, ys, color, name, window=window, is_raw=False)
        plot.describe(course(name, mean))
    plot.hover()
    return plot


def _options(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """The options in which the runs differ, and, folded, those that they share."""
    all_options = [_options_of(run) for run in runs]
    every = dict.fromkeys(name for options in all_options for name in options)
    rows = {name: [_text(options.get(name)) for options in all_options] for name in every}
    differing = {name: texts for name, texts in rows.items() if len(set(texts)) > 1}
    shared = {name: texts[:1] for name, texts in rows.items() if name not in differing}
    table = _option_table(differing, ["option", *names]) if differing else "<p>They have equal options.</p>"
    if shared:
        summary = f"<summary>Options that they share ({len(shared)})</summary>"
        table += f"<details>{summary}{_option_table(shared, ['option', 'all runs'])}</details>"
    return f"<h2>In what they differ</h2>{card(_scrolled('Options', table))}"


def _option_table(rows: Mapping[str, Sequence[str]], columns: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td{lang_attribute(text)}>{escape(text)}</td>' for text in (name, *texts))}</tr>"
        for name, texts in rows.items()
    )
    return f'<table class="options"><tr>{head}</tr>{body}</table>'


def _options_of(run: RecordedRun) -> dict[str, Any]:
    options = run.info.get("options")
    facts = {name: run.info[name] for name in ("model", "dataset", "device", "commit") if run.info.get(name)}
    return facts | (options if isinstance(options, dict) else {})


def _scrolled(name: str, table: str) -> str:
    """A table in a box that can be scrolled, by keyboard as well, where it is too wide."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{table}</div>'


def _text(value: Any) -> str:
    if value is None:
        return "default"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
