"""The report of a run: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from colocate.reporting import charts, memory_charts
from colocate.reporting.axes import compact
from colocate.reporting.curves import ends
from colocate.reporting.language import lang_attribute
from colocate.reporting.page import CHART_SCRIPTS, card, controls, page, wide_card
from colocate.reporting.run import RecordedRun, number, read_run
from colocate.reporting.samples import first_and_last, logged_completions, viewer

REPORT_FILE = "report.html"
MAX_SAMPLES = 3  # completions shown of the first and of the last logged step
MAX_TEXT = 2000  # characters shown of a prompt or a completion
WIDE, NARROW = (1128, 280), (360, 250)
TWO_THIRDS, TALL = (768, 300), (360, 320)


def write_report(run_dir: str | Path) -> Path:
    """Draw the run recorded in `run_dir` into `run_dir/report.html` and return that path.

    Raises:
        FileNotFoundError: there is no `metrics.jsonl`.
        ValueError: it has no record of a step.
    """
    run = read_run(run_dir)
    logged = logged_completions(run)
    completions = viewer(logged)
    body = "".join(
        [
            _header(run),
            _tiles(run),
            _warnings(run),
            f"<section>{controls()}{_learning(run)}{_time(run)}{_memory(run)}</section>",
            _completions(logged),
            completions,
            _origin(run),
            _footer(run),
        ]
    )
    scripts = (*CHART_SCRIPTS, "viewer.js") if completions else CHART_SCRIPTS
    html = page(f"{run.name} – run report", body, scripts=scripts)
    path = run.directory / REPORT_FILE
    # A completion may end within a character, which leaves half a surrogate pair.
    path.write_text(html, encoding="utf-8", errors="replace")
    return path


def duration(seconds: float) -> str:
    """Seconds as text: "3 h 07 min", "12 min 30 s", "41 s"."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 60} min {seconds % 60:02d} s" if seconds >= 60 else f"{seconds} s"


def _header(run: RecordedRun) -> str:
    versions = run.info.get("versions")
    last = run.x[-1]
    facts = [
        *(str(run.info[key]) for key in ("model", "dataset", "device") if run.info.get(key)),
        f"{last:,.0f} step{'s' if last != 1 else ''}",
        f"{duration(sum(run.wall_s))} of training" if sum(run.wall_s) > 0 else "",
        *(f"{name} {version}" for name, version in (versions.items() if isinstance(versions, dict) else ())),
    ]
    shown = "".join(f"<span>{escape(fact)}</span>" for fact in facts if fact)
    return f'<h1{lang_attribute(run.name)}>{escape(run.name)}</h1><p class="facts">{shown}</p>'


def _tiles(run: RecordedRun) -> str:
    first, last, count = ends(run.metric("reward"))
    tiles = []
    if count:
        over = f"means of the first and last {count} steps" if count > 1 else "first and last step"
        tiles.append(("Reward", f"{compact(first)} → {compact(last)}", over))
    eval_x, eval_y = run.eval_metric("eval_reward")
    if eval_y:
        value = f"{compact(eval_y[0])} → {compact(eval_y[-1])}" if len(eval_y) > 1 else compact(eval_y[0])
        at = f"steps {eval_x[0]:.0f} and {eval_x[-1]:.0f}" if len(eval_y) > 1 else f"step {eval_x[0]:.0f}"
        tiles.append(("Held-out reward", value, f"evaluated at {at}"))
    totals, wall = run.phase_totals, sum(run.wall_s)
    if math.isfinite(run.throughput):
        speed = f"{compact(run.throughput)} tokens/s"
        tiles.append(("Throughput", speed, "prompt and completion tokens"))
    if wall > 0:
        longest = max((n for n in totals if "/" not in n), key=totals.__getitem__, default="")
        share = f"{100 * totals[longest] / wall:.0f}% in {longest}" if longest else ""
        tiles.append(("Time per step", f"{compact(wall / len(run.steps))} s", share))
    peaks = [(number(s["peak_bytes"]), s["phase"]) for spans in run.spans for s in spans]
    if peaks:
        peak, phase = max(peaks)
        limit = run.limit_bytes
        of = f"of {compact(limit / memory_charts.GIB)} GiB, " if math.isfinite(limit) else ""
        tiles.append(("Peak memory", f"{compact(peak / memory_charts.GIB)} GiB", f"{of}in {phase}"))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b>'
            f"<small>{escape(note)}</small></div>"
            for name, value, note in tiles
        )
        + "</div>"
    )


def _warnings(run: RecordedRun) -> str:
    if not run.warnings:
        return ""
    shown = "".join(
        f'<div class="sample"><span class="chip">step {step:g}</span><pre>{escape(text)}</pre></div>'
        for step, text in run.warnings
    )
    return f'<h2>Warnings</h2><div class="card warnings">{shown}</div>'


def _learning(run: RecordedRun) -> str:
    wide, narrow = charts.reward_chart(run, WIDE), charts.reward_chart(run, NARROW)
    small = charts.metric_charts(run)
    parts = ["<h2>How it learned</h2>", wide_card(wide, narrow)]
    if small:
        parts.append(f'<div class="grid3 gap">{"".join(card(chart) for chart in small)}</div>')
    others = charts.other_metric_charts(run)
    if others:
        cards = "".join(card(chart) for chart in others)
        parts.append(
            f"<details><summary>More metrics ({len(others)})</summary>"
            f'<div class="grid3">{cards}</div></details>'
        )
    return "".join(parts) if wide or small or others else ""


def _time(run: RecordedRun) -> str:
    wide, narrow = charts.time_chart(run, WIDE), charts.time_chart(run, NARROW)
    if wide is None:
        return ""
    throughput = charts.throughput_chart(run, TALL)
    cards = f'<div class="card two">{_share_of_time(run)}</div>' + (card(throughput) if throughput else "")
    return f'<h2>Where the time went</h2>{wide_card(wide, narrow)}<div class="grid3 gap">{cards}</div>'


def _share_of_time(run: RecordedRun) -> str:
    totals, wall = run.phase_totals, sum(run.wall_s)
    names = run.phase_names
    bar = "".join(
        f'<i class="b-{charts.phase_color(run, name)}" style="width:{100 * totals[name] / wall:.2f}%" '
        f'title="{escape(name)} {100 * totals[name] / wall:.1f}%"></i>'
        for name in names
    )
    rows = []
    for name in names:
        parts = sorted(part for part in totals if part.startswith(f"{name}/"))
        for row in (name, *parts):
            is_part = row != name
            key = f'<i class="b-{charts.phase_color(run, name)}"></i>' if not is_part else ""
            label = row.removeprefix(f"{name}/") if is_part else row
            rows.append(
                f'<tr><td class="{"part" if is_part else "key"}">{key}{escape(label)}</td>'
                f"<td>{compact(totals[row] / len(run.steps))} s</td>"
                f"<td>{100 * totals[row] / wall:.1f}%</td></tr>"
            )
    head = "<tr><th>phase</th><th>per step</th><th>share</th></tr>"
    return f'<h3>Share of the run</h3><div class="share">{bar}</div><table>{head}{"".join(rows)}</table>'


def _memory(run: RecordedRun) -> str:
    wide, narrow = (
        memory_charts.rollout_memory_chart(run, TWO_THIRDS),
        memory_charts.rollout_memory_chart(run, NARROW),
    )
    peaks = memory_charts.peak_memory_chart(run)
    if wide is None or peaks is None:
        return ""
    cards = wide_card(wide, narrow, "two") + card(peaks)
    return f'<h2>Where the memory went</h2><div class="grid3">{cards}</div>'


def _completions(logged: list[dict[str, Any]]) -> str:
    columns = "".join(_samples(samples) for samples in first_and_last(logged, MAX_SAMPLES))
    return f'<h2>What it wrote</h2><div class="grid2">{columns}</div>' if columns else ""


def _samples(samples: Sequence[dict[str, Any]]) -> str:
    shown = []
    for sample in samples:
        chips = "".join(
            f'<span class="chip">{escape(name)} {escape(compact(number(value)))}</span>'
            for name, value in sample["scores"].items()
        )
        texts = (
            f'<pre{css} lang="{sample[f"{part}_lang"]}" tabindex="0">{_clipped(sample[part])}</pre>'
            for part, css in (("prompt", ' class="prompt"'), ("completion", ""))
        )
        shown.append(f'<div class="sample">{chips}{"".join(texts)}</div>')
    return f'<div class="card"><h3>Step {samples[0]["step"]:g}</h3>{"".join(shown)}</div>'


def _clipped(text: str) -> str:
    more = f"\n[{len(text) - MAX_TEXT:,} more characters]" if len(text) > MAX_TEXT else ""
    return escape(text[:MAX_TEXT] + more)


def _origin(run: RecordedRun) -> str:
    """The card with the command, the commit and the options, as far as `run.json` has them."""
    command, commit, options = (run.info.get(name) for name in ("command", "commit", "options"))
    parts = []
    if command:
        parts.append(f"<pre>{escape(str(command))}</pre>")
    if commit:
        parts.append(f'<p class="facts">Commit {escape(str(commit))}</p>')
    if isinstance(options, dict) and options:
        rows = "".join(
            f"<tr><td>{escape(str(name))}</td><td{lang_attribute(text)}>{escape(text)}</td></tr>"
            for name, text in ((name, _one_line(value)) for name, value in options.items())
        )
        parts.append(
            f"<details><summary>Options that are not at their defaults ({len(options)})</summary>"
            f'<table class="options">{rows}</table></details>'
        )
    return f'<h2>How it was run</h2><div class="card origin">{"".join(parts)}</div>' if parts else ""


def _one_line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _footer(run: RecordedRun) -> str:
    facts = [f"Drawn by colocate from {len(run.steps):,} steps and {len(run.evals):,} evaluations."]
    if run.num_unreadable:
        facts.append(f"{run.num_unreadable:,} unreadable lines of the record were left out.")
    facts.append("Point at a chart to read its values, drag across it to zoom.")
    return f"<footer>{escape(' '.join(facts))}</footer>"
