"""The picture of a run: one SVG file for a README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from colocate.reporting import charts, memory_charts
from colocate.reporting.run import read_run
from colocate.reporting.theme import plot_rules, stylesheet

PICTURE_FILE = "picture.svg"
_HEIGHT, _GAP, _MARGIN = 300, 32, 20


def write_picture(run_dir: str | Path) -> Path:
    """Draw reward by step, and one step's time and memory, into `run_dir/picture.svg`; return that path.

    Raises:
        FileNotFoundError: there is no `metrics.jsonl`.
        ValueError: it has no record of a step, or neither rewards nor times nor memory.
    """
    run = read_run(run_dir)
    size = (470, _HEIGHT)
    panels = [
        charts.reward_chart(run, size),
        memory_charts.step_memory_chart(run, size, "One step: time and memory")
        or charts.time_chart(run, size),
    ]
    drawn = [panel.svg() for panel in panels if panel]
    if not drawn:
        raise ValueError(f"No rewards, times or memory to draw in the record in {run.directory.resolve()}.")
    path = run.directory / PICTURE_FILE
    path.write_text(standalone(drawn, size) + "\n", encoding="utf-8")
    return path


def standalone(panels: Sequence[str], size: tuple[int, int]) -> str:
    """One SVG picture of charts side by side, with its style, for light and dark screens.

    Args:
        panels: the charts' SVG, as `charts` draws them.
        size: width and height of each.
    """
    width = 2 * _MARGIN + len(panels) * size[0] + (len(panels) - 1) * _GAP
    height = 2 * _MARGIN + size[1]
    placed = "".join(
        panel.replace("<svg ", f'<svg x="{_MARGIN + i * (size[0] + _GAP)}" y="{_MARGIN}" ', 1)
        for i, panel in enumerate(panels)
    )
    # Nested pictures keep their own size: the rule that stretches a plot to its card is for the report.
    rules = plot_rules().replace("width:100%;height:auto;", "") + ".paper{fill:var(--card)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{stylesheet(rules)}</style>'
        f'<rect class="paper" width="{width}" height="{height}" rx="10"/>{placed}</svg>'
    )
