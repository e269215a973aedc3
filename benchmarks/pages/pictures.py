"""Draw the pictures of docs/benchmarks.md, and from the record of a run the one of README.md.

python -m benchmarks.pages.pictures benchmarks/results/modes-h200x2.json docs/modes-h200x2.svg
python -m benchmarks.pages.pictures benchmarks/results/curves-h200.json docs/curves-h200.svg
python -m benchmarks.pages.pictures benchmarks/results/lag-cpu.json docs/lag-cpu.svg
python -m benchmarks.pages.pictures benchmarks/results/recipes/handover-h100 docs/handover-h100.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.pages.tables import LAG_SETTINGS, LAG_TASKS, NAMES, mode_name
from colocate.reporting.axes import Axis
from colocate.reporting.charts import reward_chart, time_chart
from colocate.reporting.memory_charts import rollout_memory_chart
from colocate.reporting.plots import Plot, standalone
from colocate.reporting.run import read_run

WIDTH, HEIGHT, GAP, MARGIN = 470, 300, 32, 20
NUM_COLUMNS = 2
COLORS = {"native": "blue", "colocate": "orange", "server": "slate"}
LAG_COLORS = {"lag0": "slate", "lag1": "blue", "lag2": "orange", "refill": "green"}
NUM_AVERAGED = 5
"""Steps whose mean is a point of a line, so that lines of several runs can be told apart."""


def is_plain(row: dict[str, Any]) -> bool:
    """vLLM on a GPU each with weights as it likes, or another mode."""
    return row["tensor_parallel_size"] == 1 and row["weights"] == "auto"


def other_color(row: dict[str, Any]) -> str:
    """The same in all panels."""
    return "green" if row["tensor_parallel_size"] > 1 else "purple"


def modes_panels(result: dict[str, Any]) -> list[str]:
    """Completions per second by completions per step, a panel for each model and a line for each mode."""
    rows = result["setup"]["summary"]
    panels = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        sizes = sorted({row["num_completions"] for row in of_model})
        measured = {row["mode"] for row in of_model}
        legend = [(NAMES[mode], COLORS[mode], "line") for mode in NAMES if mode in measured]
        # Measured at one batch size only.
        others = {mode_name(row): row for row in of_model if not is_plain(row)}
        legend += [(name, other_color(row), "dot") for name, row in others.items()]
        plot = Plot(
            f"{model.replace('p', '.').upper()} on {result['setup']['num_gpus']} GPUs",
            Axis(sizes[0] / 1.1, sizes[-1] * 1.1, tuple(sizes), log=True, format=lambda size: f"{size:,.0f}"),
            Axis.around([row["completions_per_s"] for row in of_model], zero=True),
            legend=legend,
            width=WIDTH,
            height=HEIGHT,
            x_label="completions per step",
            note="completions/s",
        )
        for mode in NAMES:
            line = sorted(
                (row["num_completions"], row["completions_per_s"])
                for row in of_model
                if row["mode"] == mode and is_plain(row)
            )
            xs, ys = [x for x, _ in line], [y for _, y in line]
            plot.line(xs, ys, COLORS[mode])
            plot.points(xs, ys, COLORS[mode], NAMES[mode])
        for name, row in others.items():
            plot.points([row["num_completions"]], [row["completions_per_s"]], other_color(row), name)
        panels.append(plot.svg())
    return panels


def curves_panels(result: dict[str, Any]) -> list[str]:
    """Reward by step, and the difference of log-probs: a faint line for each seed, their mean in full."""
    records = result["repetitions"]
    panels = []
    for title, name, note, log in (
        ("Reward", "reward", "mean of each rollout", False),
        ("Log-probs: trainer and engine", "gap_mean", "mean |difference|", True),
    ):
        plot = Plot(
            title,
            Axis.around([step for record in records for step in record["step"]], tight=True, whole=True),
            Axis.around([value for record in records for value in record[name]], log=log),
            legend=[(NAMES[mode], COLORS[mode], "line") for mode in NAMES],
            width=WIDTH,
            height=HEIGHT,
            note=note,
        )
        for mode in NAMES:
            runs = [record for record in records if record["mode"] == mode]
            for record in runs:
                plot.line(record["step"], record[name], COLORS[mode], "faint")
            means = [statistics.fmean(values) for values in zip(*(r[name] for r in runs), strict=True)]
            plot.line(runs[0]["step"], means, COLORS[mode])
        panels.append(plot.svg())
    return panels


def lag_panels(result: dict[str, Any]) -> list[str]:
    """Reward by step, a panel for each task: a faint line for each seed, their mean in full."""
    panels = []
    for task in dict.fromkeys(row["task"] for row in result["setup"]["summary"]):
        lines: dict[str, list[list[float]]] = {}
        for record in result["repetitions"]:
            if record["task"] == task:
                lines.setdefault(record["setting"], []).append(averaged(record["reward"]))
        settings = [setting for setting in LAG_COLORS if setting in lines]
        values = [value for setting in settings for line in lines[setting] for value in line]
        num_points = len(lines[settings[0]][0])
        steps = [NUM_AVERAGED * (i + 0.5) + 0.5 for i in range(num_points)]  # the middle of steps from 1 on
        plot = Plot(
            f"Reward: {LAG_TASKS[task]}",
            Axis.around([0, NUM_AVERAGED * num_points], tight=True, whole=True),
            Axis.around(values),
            legend=[(LAG_SETTINGS[setting], LAG_COLORS[setting], "line") for setting in settings],
            width=WIDTH,
            height=HEIGHT,
            note=f"mean of {NUM_AVERAGED} steps",
        )
        for setting in settings:
            for line in lines[setting]:
                plot.line(steps, line, LAG_COLORS[setting], "faint")
        for setting in settings:  # over all that is faint
            means = [statistics.fmean(rewards) for rewards in zip(*lines[setting], strict=True)]
            plot.line(steps, means, LAG_COLORS[setting])
        panels.append(plot.svg())
    return panels


def averaged(values: list[float]) -> list[float]:
    """The means of every `NUM_AVERAGED` values."""
    return [
        statistics.fmean(values[i : i + NUM_AVERAGED])
        for i in range(0, len(values) - NUM_AVERAGED + 1, NUM_AVERAGED)
    ]


def picture(panels: list[str]) -> str:
    """The panels in rows of two, as one SVG file."""
    num_rows = -(-len(panels) // NUM_COLUMNS)
    width = 2 * MARGIN + NUM_COLUMNS * WIDTH + (NUM_COLUMNS - 1) * GAP
    height = 2 * MARGIN + num_rows * HEIGHT + (num_rows - 1) * GAP
    placed = [
        (panel, MARGIN + i % NUM_COLUMNS * (WIDTH + GAP), MARGIN + i // NUM_COLUMNS * (HEIGHT + GAP))
        for i, panel in enumerate(panels)
    ]
    return standalone(placed, width, height) + "\n"


def draw_picture(run_dir: Path) -> str:
    """The reward of a run by step, and the memory of one rollout and of the training on it, as an SVG file.

    Raises:
        FileNotFoundError: there is no `metrics.jsonl`.
        ValueError: it has no record of a step, or neither rewards nor times nor memory.
    """
    run = read_run(run_dir)
    memory_size = (626, 330)
    panels = [
        reward_chart(run, (340, 330)),
        rollout_memory_chart(run, memory_size) or time_chart(run, memory_size),
    ]
    drawn = [panel for panel in panels if panel]
    if not drawn:
        raise ValueError(f"No rewards, times or memory to draw in the record in {run.directory.resolve()}.")
    placed, x = [], MARGIN
    for panel in drawn:
        placed.append((panel.svg(), x, MARGIN))
        x += panel.size[0] + GAP
    height = 2 * MARGIN + max(panel.size[1] for panel in drawn)
    return standalone(placed, x - GAP + MARGIN, height) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="a result, or the directory of a run's record")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    if options.result.is_dir():
        options.picture.write_text(draw_picture(options.result), encoding="utf-8")
        return
    result = json.loads(options.result.read_text())
    panels = {"modes": modes_panels, "curves": curves_panels, "lag": lag_panels}[result["name"]](result)
    options.picture.write_text(picture(panels), encoding="utf-8")


if __name__ == "__main__":
    main()
