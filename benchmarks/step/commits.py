"""Rollout and GRPO step of two commits in turns on one GPU: writes `results/commits-<hardware>.json`.

    python -m benchmarks.step.commits --base DIRECTORY [--turns 2]    # a checkout of the older commit
    python -m benchmarks.step.commits --base DIRECTORY --merge

Each commit runs its own rollout and step benchmark, a process each, and leaves records; the claims are ratios
of medians over all turns, older over newer: 1.0 is as fast, above it is faster. The steps that a process
begins with do not count.
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

CASE = "1p5b_512seq"
RUNS = {
    "rollout": ["--engine", "native", "--cases", CASE, "--repetitions", "3"],
    "step": ["--framework", "colocate", "--shape", "1.5b", "--warm-up", "2", "--steps", "3"],
}
"""What each commit runs, and with which options."""


def program(directory: Path, kind: str) -> list[str]:
    """The benchmark of a checkout, which of an older commit is a script."""
    script = f"benchmarks/{kind}.py"
    return [script] if (directory / script).exists() else ["-m", f"benchmarks.{kind}.run"]


class CommitsSuite(Suite):
    """Rollout and GRPO step of two commits in turns."""

    name = "commits"
    parts = ("turns",)
    has_tiny = False

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--base", type=Path, required=True, help="a checkout of the older commit")
        parser.add_argument("--turns", type=int, default=2)

    @staticmethod
    def part_of(record: Record) -> str:
        """Each commit is a part of its own: there are two on purpose."""
        return record["commit"]

    def measure(self, part: str) -> None:
        options = self.options
        base = subprocess.run(
            ["git", "-C", options.base, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        commits = ((options.base, base), (ROOT, self.environment["COLOCATE_COMMIT"]))
        for turn in range(options.turns):
            for place, (directory, commit) in enumerate(commits):
                paths = [str(directory.resolve() / "src"), os.environ.get("PYTHONPATH", "")]
                for kind, words in RUNS.items():
                    # Records are read in the order of their names, and claims take the first commit as older.
                    out = options.records.resolve() / f"{turn}-{place}-{kind}-{commit[:7]}.json"
                    command = [*program(directory, kind), *words, "--out", out]
                    subprocess.run(
                        [sys.executable, *command, "--model-dir", options.model_dir.resolve()],
                        cwd=directory,
                        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLOCATE_COMMIT": commit},
                        check=True,
                    )

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)


def seconds(record: dict[str, Any]) -> list[float]:
    if record["kind"] == "rollout":
        return [repetition["seconds"] for repetition in record["cases"][CASE]["repetitions"]]
    return [step["step_s"] for step in record["steps"][record["num_warm_up"] :]]


def compute_claims(records: list[dict[str, Any]]) -> Claims:
    """`rollout_ratio` and `step_ratio`; None where a commit has no record of it."""
    commits = list(dict.fromkeys(record["commit"] for record in records))
    claims: Claims = {}
    for kind in ("rollout", "step"):
        of_commits = [
            [
                s
                for record in records
                if (record["kind"], record["commit"]) == (kind, c)
                for s in seconds(record)
            ]
            for c in commits
        ]
        is_whole = len(of_commits) == 2 and all(of_commits)
        claims[f"{kind}_ratio"] = (
            statistics.median(of_commits[0]) / statistics.median(of_commits[1]) if is_whole else None
        )
    return claims


if __name__ == "__main__":
    CommitsSuite.main()
