"""Rollout and GRPO step of two commits in turns on one GPU: writes `results/commits-<hardware>.json`.

    python -m benchmarks.step.commits --base DIRECTORY [--turns 2]    # a checkout of the older commit
    python -m benchmarks.step.commits --base DIRECTORY --merge

Each commit runs its own rollout and step benchmark, a process each, and leaves records; the claims are ratios
of medians over all turns, older over newer: 1.0 is as fast, above it is faster. The steps that a process
begins with do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.results import committed, write_suite_result
from benchmarks.common.runner import ROOT, read_records

CASE = "1p5b_512seq"
RUNS = {
    "rollout": ["--engine", "native", "--cases", CASE, "--repetitions", "3"],
    "step": ["--framework", "colocate", "--shape", "1.5b", "--warm-up", "2", "--steps", "3"],
}
"""What each commit runs, and with which options."""


def program(directory: Path, kind: str) -> list[str]:
    """The benchmark of a checkout; until November 2026 it was a script."""
    script = f"benchmarks/{kind}.py"
    return [script] if (directory / script).exists() else ["-m", f"benchmarks.{kind}.run"]


def measure(options: argparse.Namespace) -> None:
    new = committed()
    base = subprocess.run(
        ["git", "-C", options.base, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for turn in range(options.turns):
        for directory, commit in ((options.base, base), (ROOT, new)):
            source = str(directory.resolve() / "src")
            paths = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
            for kind, words in RUNS.items():
                out = options.records.resolve() / f"{turn}-{kind}-{commit[:7]}.json"
                words = [*program(directory, kind), *words, "--model-dir", options.model_dir.resolve()]
                subprocess.run(
                    [sys.executable, *words, "--out", out],
                    cwd=directory,
                    env=os.environ | {"PYTHONPATH": paths, "COLOCATE_COMMIT": commit},
                    check=True,
                )


def seconds(record: dict[str, Any]) -> list[float]:
    if record["kind"] == "rollout":
        return [repetition["seconds"] for repetition in record["cases"][CASE]["repetitions"]]
    return [step["step_s"] for step in record["steps"][record["num_warm_up"] :]]


def compute_claims(records: list[dict[str, Any]]) -> dict[str, float | None]:
    """`rollout_ratio` and `step_ratio`; None where a commit has no record of it."""
    commits = list(dict.fromkeys(record["commit"] for record in records))
    claims: dict[str, float | None] = {}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--merge", action="store_true", help="measure nothing")
    parser.add_argument("--hardware", default="h200")
    temporary = Path(tempfile.gettempdir())
    parser.add_argument("--model-dir", type=Path, default=temporary / "colocate-models")
    parser.add_argument("--records", type=Path, default=temporary / "colocate-commits-records")
    options = parser.parse_args()
    options.records.mkdir(parents=True, exist_ok=True)
    if not options.merge:
        measure(options)
    # Two commits on purpose, so that each is a part of its own.
    records = read_records(options.records, part=lambda record: record["commit"])
    claims = compute_claims(records)
    print(json.dumps(claims, indent=1))
    write_suite_result("commits", options.hardware, claims, records, part=lambda record: record["commit"])


if __name__ == "__main__":
    main()
