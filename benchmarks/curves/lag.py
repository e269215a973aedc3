"""Rewards where completions go on over the policy's updates, and where dull groups are replaced: writes
`results/lag-<hardware>.json`.

    python -m benchmarks.curves.lag --hardware cpu [--jobs 16] [--tasks calculator] [--settings lag0 refill]

The quickstart's task and the tool task, each from one warm start, at every setting with every seed, and with
a quarter of their learning rates at every lag. A run is a process with one thread on a CPU, and an optimizer
step trains on one batch of completions, so that at lag 0 it trains on the policy's own. The engine has rows
for one and a half batches: batches begun ahead have rows from the start, and an update comes in the middle of
their completions.

Seeds are paired: a difference to lag 0 is of two runs with the same prompts in the same order. A run that has
left its record in --records is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.results import Record, read_records
from benchmarks.common.suite import Claims, Suite
from benchmarks.curves.run import warm_start
from benchmarks.curves.suite import NUM_FINAL, final_reward

RUN_S = 1200.0
"""A run that takes longer has failed."""
BATCH_SIZE = 128
"""Completions of an optimizer step, of both tasks."""
NUM_ROWS = 192


@dataclass(frozen=True)
class Task:
    start: str
    """The task of `curves/run.py`, whose warm start it has."""
    num_steps: int
    reward: str
    """The reward function, in which the members of a group are to differ where groups are replaced."""
    options: tuple[str, ...] = ()
    settings: tuple[str, ...] = ("lag0", "lag1", "lag2", "refill")


LAGS = ("lag0", "lag1", "lag2")
TASKS = {
    "quickstart": Task("quickstart", 200, "correct", ("steps_per_generation=1",)),
    "calculator": Task("calculator", 60, "is_right"),
    # The learning rates of recipe and example were chosen at lag 0; these are a quarter of them.
    "quickstart_quarter": Task(
        "quickstart", 200, "correct", ("steps_per_generation=1", "learning_rate=2e-4"), LAGS
    ),
    "calculator_quarter": Task("calculator", 120, "is_right", ("learning_rate=2.5e-4",), LAGS),
}
SETTINGS: dict[str, tuple[str, ...]] = {
    "lag0": (),
    "lag1": ("max_policy_lag=1",),
    "lag2": ("max_policy_lag=2",),
    "refill": ("max_refill_rounds=3",),
}
BASE = "lag0"
"""The setting that the others are compared with."""


def cases_of(tasks: Iterable[str], settings: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of task and setting, those that are measured among all."""
    return [case for case in itertools.product(tasks, settings) if case[1] in TASKS[case[0]].settings]


class LagSuite(Suite):
    """The same training at several lags of the policy, and with replaced groups."""

    name = "lag"
    parts = ("runs",)
    hardware = "cpu"
    has_tiny = False

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side")
        parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
        parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--steps", type=int, help="of every run; by default as many as the task needs")

    @staticmethod
    def part_of(record: Record) -> str:
        return str(record["task"])

    def measure(self, part: str) -> None:
        """Run what is missing, as far as the time goes."""
        done = {(record["task"], record["setting"], record["seed"]) for record in read_records(self.records)}
        seeds = range(self.options.seeds)
        # Runs of the longest tasks begin, and there those whose completions may become long.
        cases = cases_of(self.options.tasks, self.options.settings)
        cases.sort(key=lambda case: (TASKS[case[0]].start != "quickstart", case[1] == BASE))
        runs = [(*case, seed) for case, seed in itertools.product(cases, seeds)]
        missing = [run for run in runs if run not in done]
        names = list(dict.fromkeys(TASKS[task].start for task in self.options.tasks))
        with ThreadPoolExecutor(self.options.jobs) as pool:
            starts = dict(zip(names, pool.map(self._warm_start, names), strict=True))
            list(pool.map(lambda run: self._train(*run, start=starts[TASKS[run[0]].start]), missing))

    def _warm_start(self, name: str) -> Path:
        """The directory of what runs start from."""
        directory = self.records / name
        if name == "quickstart":
            return warm_start(directory)
        if not (directory / "model/model.safetensors").exists():  # written last
            self.run("curves.tool_task", directory, timeout_s=RUN_S, OMP_NUM_THREADS="1")
        return directory

    def _train(self, task: str, setting: str, seed: int, *, start: Path) -> None:
        if self.time_is_up():
            return
        case = TASKS[task]
        options = [*case.options, *SETTINGS[setting], f"max_num_seqs={NUM_ROWS}"]
        if setting == "refill":
            options.append(f"refill_reward={case.reward}")
        self.run(
            "curves.run", "--task", case.start, "--start", start,
            "--steps", self.options.steps or case.num_steps,
            "--curves", "reward", "--label", f"task={task}", f"setting={setting}", f"seed={seed}",
            "--option", f"seed={seed}", *options, "--out", self.out(f"{task}-{setting}-{seed}"),
            timeout_s=RUN_S,
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
        )  # fmt: skip

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records, self.options.tasks, self.options.settings, self.options.seeds)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {
            "num_final_steps": NUM_FINAL,
            "batch_size": BATCH_SIZE,
            "num_rows": NUM_ROWS,
            "summary": summary(records),
        }


# ── Claims ───────────────────────────────────────────────────────────────────────────────────────────────


def mean_reward(record: Record) -> float:
    """The mean of all steps: how soon a run has learnt as well as how much."""
    return statistics.fmean(record["reward"])


FIGURES = {"final_reward": final_reward, "mean_reward": mean_reward}


def compute_claims(records: list[Record], tasks: list[str], settings: list[str], num_seeds: int) -> Claims:
    """Every claim; None where a run is missing.

    - `<figure>_<task>_<setting>`: the mean over seeds of the `final_reward` or the `mean_reward`.
    - `<figure>_difference_<task>_<setting>`: of it to that of lag 0.
    - `<figure>_difference_error_<task>_<setting>`: the standard error of that, from the differences of runs
      of one seed.
    """
    claims: Claims = {}
    runs = {(record["task"], record["setting"], record["seed"]): record for record in records}
    for task, setting in cases_of(tasks, settings):
        pairs = [(runs.get((task, setting, seed)), runs.get((task, BASE, seed))) for seed in range(num_seeds)]
        for name, figure in FIGURES.items():
            values = [figure(run) for run, _ in pairs if run]
            differences = [figure(run) - figure(base) for run, base in pairs if run and base]
            is_whole, is_paired = len(values) == num_seeds, len(differences) == num_seeds
            claims[f"{name}_{task}_{setting}"] = statistics.fmean(values) if is_whole else None
            if setting != BASE:
                key = f"{task}_{setting}"
                mean, error = _mean_and_error(differences) if is_paired and num_seeds > 1 else (None, None)
                claims |= {f"{name}_difference_{key}": mean, f"{name}_difference_error_{key}": error}
    return claims


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _range(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def summary(records: list[Record]) -> list[dict[str, Any]]:
    """A row for each task and setting: the means over its runs of the metrics' means and of the tokens that
    were generated and read, the lowest and the highest of their rewards, and a run's time."""
    rows = []
    for task, setting in cases_of(TASKS, SETTINGS):
        runs = [record for record in records if (record["task"], record["setting"]) == (task, setting)]
        if runs:
            means = {name: statistics.fmean(run["means"][name] for run in runs) for name in runs[0]["means"]}
            rows.append(
                {
                    **{"task": task, "setting": setting, **means},
                    "num_tokens": statistics.fmean(run["num_tokens"] for run in runs),
                    **{f"{name}_range": _range(list(map(figure, runs))) for name, figure in FIGURES.items()},
                    "total_s": statistics.median(run["total_s"] for run in runs),
                }
            )
    return rows


if __name__ == "__main__":
    LagSuite.main()
