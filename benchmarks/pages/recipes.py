"""The tables and the picture of runs in docs/recipes.md, from the runs' files.

    python -m benchmarks.pages.recipes cpu docs/recipes-cpu.svg

prints the tables and draws the picture.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.common.results import Record
from benchmarks.pages.pictures import HEIGHT, WIDTH, picture
from benchmarks.recipes.cases import run_name
from benchmarks.recipes.suite import groups, published_runs
from colocate.reporting.plots import Axis, Plot

NAMES = {
    "grpo": "GRPO", "dr_grpo": "Dr. GRPO", "dapo": "DAPO", "gspo": "GSPO", "cispo": "CISPO",
}  # fmt: skip
COLORS = {"grpo": "blue", "dr_grpo": "green", "dapo": "orange", "gspo": "purple", "cispo": "slate"}
PEERS = {"trl": ("TRL, GRPO", "red"), "trl_vllm": ("TRL with vLLM, GRPO", "gold")}
GPU_NAMES = ("h100", "h200")


def is_on_gpu(record: Record) -> bool:
    return str(record["hardware"]["name"]).startswith(GPU_NAMES)


def line_name(record: Record) -> str:
    peer = PEERS.get(record["framework"])
    return peer[0] if peer else NAMES[record["algorithm"]]


def line_color(record: Record) -> str:
    peer = PEERS.get(record["framework"])
    return peer[1] if peer else COLORS[record["algorithm"]]


def recipes_table(records: list[Record]) -> list[str]:
    """A row for each run: held-out accuracy before and after with its 95 % interval, what the run took, its
    commit, and a link to its file."""
    lines = [
        "| recipe | trained by | seed | steps | accuracy before | after | seconds | tokens/s | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        accuracy = record["evaluations"]
        seconds = record["train_s"] if is_on_gpu(record) else record["core_s"]
        bounds = zip(accuracy["low"], accuracy["value"], accuracy["high"], strict=True)
        shares = [f"{value:.0%} ({low:.0%} to {high:.0%})" for low, value, high in bounds]
        file = f"../benchmarks/results/recipes/{run_name(record)}-{record['hardware']['name']}.json"
        cells = [
            f"[{record['recipe']}, {_millions(record['num_parameters'])}M]({file})",
            line_name(record),
            record["seed"],
            record["options"]["max_steps"],
            shares[0],
            shares[-1],
            f"{seconds:,.0f}",
            f"{record['num_tokens'] / seconds:,.0f}",
            f"`{record['commit'][:7]}`",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _millions(count: int) -> str:
    return f"{count / 1e6:.2g}" if count < 99.5e6 else f"{count / 1e6:,.0f}"


def expectations_table(records: list[Record]) -> list[str]:
    """A row for each recipe: what its warm start took, and how far our GRPO comes from there: the least and
    the greatest of its seeds."""
    lines = [
        "| recipe | imitation | its last loss | its seconds | accuracy before | after | training seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for (recipe, framework, algorithm), runs in groups(records).items():
        if (framework, algorithm) != ("colocate", "grpo"):
            continue
        # Runs of before this was recorded do not have it.
        imitation = runs[0].get("imitation")
        before, after = ([run["evaluations"]["value"][place] for run in runs] for place in (0, -1))
        cells = [
            f"`{recipe}`",
            *(
                (f"{imitation['num_steps']} steps", f"{imitation['loss']:.3f}", f"{imitation['core_s']:.0f}")
                if imitation
                else ("–", "–", "–")
            ),
            *(f"{min(values):.0%} to {max(values):.0%}" for values in (before, after)),
            f"{statistics.median(run['core_s'] for run in runs):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def recipes_panels(records: list[Record]) -> list[str]:
    """Held-out accuracy by step and, of recipes that TRL trains, too, by seconds: a faint line for each seed,
    and their mean in full."""
    panels = []
    for recipe in dict.fromkeys(record["recipe"] for record in records):
        runs = [record for record in records if record["recipe"] == recipe]
        panels.append(_panel(f"{recipe}: accuracy by step", runs, "step", "step"))
        if any(record["framework"] in PEERS for record in runs):
            on_gpu = is_on_gpu(runs[0])
            label = "seconds of training" if on_gpu else "core seconds of training"
            panels.append(_panel(f"{recipe}: by seconds", runs, "train_s" if on_gpu else "core_s", label))
    return panels


def _panel(title: str, runs: list[Record], x: str, x_label: str) -> str:
    lines = groups(runs)
    legend = [(line_name(of_seeds[0]), line_color(of_seeds[0]), "line") for of_seeds in lines.values()]
    plot = Plot(
        title,
        Axis.around([value for run in runs for value in run["evaluations"][x]], tight=True, zero=True),
        Axis.around(
            [value for run in runs for value in run["evaluations"]["value"]],
            zero=True,
            format=lambda share: f"{share:.0%}",
        ),
        legend=legend,
        width=WIDTH,
        height=HEIGHT,
        x_label=x_label,
        note="held-out problems",
    )
    for of_seeds in lines.values():
        color = line_color(of_seeds[0])
        curves = [run["evaluations"] for run in of_seeds]
        if len(curves) > 1:
            for curve in curves:
                plot.line(curve[x], curve["value"], color, "faint")
        means = {
            name: [
                statistics.fmean(values) for values in zip(*(curve[name] for curve in curves), strict=True)
            ]
            for name in (x, "value")
        }
        plot.line(means[x], means["value"], color)
    return plot.svg()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("hardware")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    records = published_runs(options.hardware)
    print(*expectations_table(records), "", *recipes_table(records), sep="\n")
    options.picture.write_text(picture(recipes_panels(records)), encoding="utf-8")


if __name__ == "__main__":
    main()
