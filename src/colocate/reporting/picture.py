"""The picture of a run: one SVG file for a README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from colocate.reporting import charts, memory_charts
from colocate.reporting.plots import Plot
from colocate.reporting.run import read_run
from colocate.reporting.theme import plot_rules, stylesheet

PICTURE_FILE = "picture.svg"
_REWARD_SIZE, _MEMORY_SIZE = (340, 330), (626, 330)
_GAP, _MARGIN = 32, 20


def write_picture(run_dir: str | Path) -> Path:
    """Draw a run's picture into `run_dir/picture.svg`; return that path.

    Raises:
        FileNotFoundError, ValueError: as `draw_picture`.
    """
    path = Path(run_dir) / PICTURE_FILE
    path.write_text(draw_picture(run_dir), encoding="utf-8")
    return path


def draw_picture(run_dir: str | Path) -> str:
    """The reward of a run by step, and the memory of one rollout and of the training on it, as an SVG file.

    Raises:
        FileNotFoundError: there is no `metrics.jsonl`.
        ValueError: it has no record of a step, or neither rewards nor times nor memory.
    """
    run = read_run(run_dir)
    panels = [
        charts.reward_chart(run, _REWARD_SIZE),
        memory_charts.rollout_memory_chart(run, _MEMORY_SIZE) or charts.time_chart(run, _MEMORY_SIZE),
    ]
    drawn = [panel for panel in panels if panel]
    if not drawn:
        raise ValueError(f"No rewards, times or memory to draw in the record in {run.directory.resolve()}.")
    return standalone(drawn) + "\n"


def standalone(panels: Sequence[Plot]) -> str:
    """One SVG picture of charts side by side, with its style, for light and dark screens."""
    placed, x = "", _MARGIN
    for panel in panels:
        placed += panel.svg().replace("<svg ", f'<svg x="{x}" y="{_MARGIN}" ', 1)
        x += panel.size[0] + _GAP
    width = x - _GAP + _MARGIN
    height = 2 * _MARGIN + max(panel.size[1] for panel in panels)
    # Nested pictures keep their own size: the rule that stretches a plot to its card is for the report.
    rules = plot_rules().replace("width:100%;height:auto;", "") + ".paper{fill:var(--card)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{stylesheet(rules)}</style>'
        f'<rect class="paper" width="{width}" height="{height}" rx="10"/>{placed}</svg>'
    )
