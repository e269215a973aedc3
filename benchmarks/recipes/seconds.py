"""Seconds of the first steps of a recipe, by this library, by TRL and, where its sources are given, by an
earlier commit of this library: writes `results/recipe-seconds-<hardware>.json`.

    python -m benchmarks.recipes.seconds [--repetitions 3] [--before CHECKOUT]

Contestants take turns on one core. What counts is what the process has used of it, since others use the
machine, too; a busy machine lengthens these seconds as well, so their ratios are of neighbours in time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT, Record
from benchmarks.common.suite import Claims, Suite
from benchmarks.recipes.cases import warm_start_words

OPTIONS = ("max_steps=24", "eval_strategy=no", "max_eval_rows=32")
"""A dozen rollouts, and a small evaluation before them, whose end is where seconds begin."""


class RecipeSecondsSuite(Suite):
    """Seconds of the first steps of a recipe, by this library and by TRL."""

    name = "recipe-seconds"
    parts = ("addition",)
    hardware = "cpu"
    has_tiny = False
    has_all_claims = False  # there may be no earlier commit

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--repetitions", type=int, default=3)
        parser.add_argument("--before", type=Path, help="a checkout of the commit to compare with")

    @staticmethod
    def part_of(record: Record) -> str:
        return contestant(record)

    def measure(self, part: str) -> None:
        start = self.records / "starts" / part
        if not (start / "model/tokenizer.json").exists():
            script, *words = warm_start_words(part)
            command = [sys.executable, str(ROOT / script), *words, "--output_dir", str(start)]
            subprocess.run(command, check=True, env=self.environment | {"OMP_NUM_THREADS": "1"})
        for repetition in range(self.options.repetitions):
            for name in ("before", "colocate", "trl"):
                if name == "before" and self.options.before is None:
                    continue
                environment = self._of_before() if name == "before" else {}
                self.run(
                    "recipes.run", "--recipe", part, "--framework", "trl" if name == "trl" else "colocate",
                    "--algorithm", "grpo", "--seed", repetition, "--start", start,
                    "--out", self.out(name), "--option", *OPTIONS,
                    is_peer=name == "trl",
                    **{"OMP_NUM_THREADS": "1"} | environment,
                )  # fmt: skip

    def _of_before(self) -> dict[str, Any]:
        """The environment in which `colocate` is the earlier commit's."""
        source = self.options.before.resolve()
        head = subprocess.run(
            ["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        paths = [str(ROOT), str(source / "src")]
        return {"PYTHONPATH": os.pathsep.join(paths), "COLOCATE_COMMIT": head.stdout.strip()}

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)


def contestant(record: Record) -> str:
    """Who has trained: this library at some commit, or TRL."""
    return "trl" if record["framework"] == "trl" else f"colocate-{record['commit'][:7]}"


def compute_claims(records: list[Record]) -> Claims:
    """Every claim: `core_s_<who>`, medians over repetitions, and ratios of these.

    `before` is the commit that was measured first, if there are two: contestants take turns in this order.
    """
    names = dict.fromkeys(contestant(record) for record in records)
    seconds = {name: [r["core_s"] for r in records if contestant(r) == name] for name in names}
    *before, now = (name for name in names if name != "trl")
    ours, theirs = statistics.median(seconds[now]), statistics.median(seconds["trl"])
    earlier = statistics.median(seconds[before[0]]) if before else None
    return {
        "core_s_colocate": ours,
        "core_s_trl": theirs,
        "core_s_before": earlier,
        "core_s_ratio_trl": theirs / ours,
        "core_s_ratio_before": earlier / ours if earlier else None,
    }


if __name__ == "__main__":
    RecipeSecondsSuite.main()
