"""Recipes run to the end: writes `results/recipes/<run>-<hardware>.json` for each run, and a summary of them,
`results/recipes-<hardware>.json`.

    python -m benchmarks.recipes.suite --hardware cpu [--parts addition game] [--seeds 2]
    python -m benchmarks.recipes.suite --hardware h200 --parts addition_30m --seeds 1 [--peer-site DIR]

A recipe's runs start from one warm start, made by the command at the head of its run file. Contestants take
turns: where TRL trains, too, it comes first in every other seed. A run that has left its record in --records
is not repeated, and published runs of the same hardware stay in the summary.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results import RESULTS, ROOT, Record, read_records, write_suite_result
from benchmarks.common.suite import Claims, Suite
from benchmarks.recipes.cases import CASES, CPU_CASES, IMITATION, Case, run_name, warm_start_words

RUN_S = 3600.0
"""A run that takes longer has failed."""
CURVES = ("rollouts", "evaluations")
"""What only a run's own file has."""


def runs_of(recipe: str, case: Case, num_seeds: int) -> Iterator[tuple[str, str, str, int]]:
    """Recipe, framework, algorithm and seed of each run, in their order.

    The first algorithm is measured with all seeds before the others are, so that a limit of time cuts what is
    less wanted.
    """
    frameworks = ["colocate", *case.peers]
    first, *others = case.algorithms
    for seed in range(num_seeds):
        for framework in frameworks if seed % 2 == 0 else reversed(frameworks):
            yield recipe, framework, first, seed
    for seed in range(num_seeds):
        for algorithm in others:
            yield recipe, "colocate", algorithm, seed


class RecipesSuite(Suite):
    """Recipes run to the end, some of them by TRL, too."""

    name = "recipes"
    parts = tuple(CASES)
    hardware = "cpu"
    has_tiny = False

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=2)
        parser.add_argument("--runs", default="*", help="of those, the ones so named: addition-*-grpo-?")
        parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE", help="of every run")
        parser.set_defaults(parts=list(CPU_CASES))

    @staticmethod
    def part_of(record: Record) -> str:
        return str(record["recipe"])

    def measure(self, part: str) -> None:
        """Run what is missing of a recipe, as far as the time goes."""
        done = {run_name(record) for record in read_records(self.records)}
        keys = ("recipe", "framework", "algorithm", "seed")
        for run in runs_of(part, CASES[part], self.options.seeds):
            recipe, framework, algorithm, seed = run
            name = run_name(dict(zip(keys, run, strict=True)))
            if self.time_is_up() or name in done or not fnmatch(name, self.options.runs):
                continue
            if framework == "trl_vllm" and importlib.util.find_spec("vllm") is None:
                print(f"{recipe}: without TRL on vLLM, which is not installed", flush=True)
                continue
            self.run(
                "recipes.run", "--recipe", recipe, "--framework", framework,
                "--algorithm", algorithm, "--seed", seed, "--start", self._warm_start(recipe),
                "--out", self.out(name),
                *(["--option", *self.options.option] if self.options.option else []),
                is_peer=framework != "colocate",
                timeout_s=RUN_S,
                **self._threads(),
            )  # fmt: skip

    def _warm_start(self, recipe: str) -> Path:
        """The directory of what a recipe's runs start from, made if it is not there."""
        directory = self.records / "starts" / recipe
        if not (directory / IMITATION).exists():  # written last
            script, *words = warm_start_words(recipe)
            command = [sys.executable, str(ROOT / script), *words, "--output_dir", str(directory)]
            subprocess.run(command, check=True, env=self.environment | self._threads())
        return directory

    def _threads(self) -> dict[str, str]:
        # On a CPU one thread: products of models this small are shorter than waking a second one.
        return {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"}

    def merge(self) -> None:
        """Write a file for each run that is new, and a summary of all that there are."""
        directory, hardware = runs_directory(), self.options.hardware
        directory.mkdir(parents=True, exist_ok=True)
        for record in read_records(self.records, self.part_of):
            path = directory / f"{run_name(record)}-{hardware}.json"
            named = {**record, "hardware": {"name": hardware, **record["hardware"]}}
            path.write_text(json.dumps(named, indent=1) + "\n")
        records = published_runs(hardware, directory)
        claims = self.claims(records)
        print(json.dumps(claims, indent=1))
        if records:
            short = [{k: v for k, v in record.items() if k not in CURVES} for record in records]
            write_suite_result(self.name, hardware, claims, short, part=self.part_of)

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)


def runs_directory() -> Path:
    """Where the runs' files go."""
    return Path(os.environ.get("OUT", RESULTS)) / "recipes"


def published_runs(hardware: str, directory: Path = RESULTS / "recipes") -> list[Record]:
    """The runs of some hardware, from their files, in the order of recipes, contestants and algorithms."""
    records = [json.loads(path.read_text()) for path in sorted(directory.glob(f"*-{hardware}.json"))]

    def order(record: Record) -> tuple[Any, ...]:
        case = CASES[record["recipe"]]
        algorithm = case.algorithms.index(record["algorithm"])
        return (list(CASES).index(record["recipe"]), record["framework"], algorithm, record["seed"])

    return sorted(records, key=order)


def groups(records: list[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """The runs of all seeds by recipe, framework and algorithm."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record["recipe"], record["framework"], record["algorithm"]), []).append(record)
    return found


def compute_claims(records: list[Record]) -> Claims:
    """Every claim.

    - `accuracy_before_<recipe>_<framework>_<algorithm>`, `accuracy_after_...`: held-out accuracy of the first
      and the last evaluation, means over seeds; `train_s_...` and `core_s_...`: medians.
    - `core_s_ratio_<recipe>_<peer>`, `train_s_ratio_...`: the peer's median over ours, of one algorithm.
    """
    claims: Claims = {}
    found = groups(records)
    for key, runs in found.items():
        name = "_".join(key)
        for figure, place in (("before", 0), ("after", -1)):
            values = [run["evaluations"]["value"][place] for run in runs]
            claims[f"accuracy_{figure}_{name}"] = statistics.fmean(values)
        for seconds in ("train_s", "core_s"):
            claims[f"{seconds}_{name}"] = statistics.median(run[seconds] for run in runs)
    for recipe, framework, algorithm in found:
        if framework != "colocate" and (ours := found.get((recipe, "colocate", algorithm))):
            theirs = found[recipe, framework, algorithm]
            for seconds in ("train_s", "core_s"):
                medians = [statistics.median(run[seconds] for run in runs) for runs in (theirs, ours)]
                claims[f"{seconds}_ratio_{recipe}_{framework}"] = medians[0] / medians[1]
    return claims


if __name__ == "__main__":
    RecipesSuite.main()
