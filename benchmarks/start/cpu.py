"""Starts of two commits in turns on a CPU: writes `results/start-cpu.json`.

    python -m benchmarks.start.cpu [--rounds 5]
    python -m benchmarks.start.cpu --merge

Every start is a process of its own. The first round fills the caches of files and of bytecode, and does not
count. Whatever else runs on the machine makes the wall time longer: a record has the processor's time, too.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT, Record
from benchmarks.common.suite import Claims, Suite
from benchmarks.start.cases import BEFORE, CASES, RUN


class StartCpuSuite(Suite):
    """Starts of two commits in turns."""

    name, hardware = "start", "cpu"
    parts = tuple(CASES)
    has_tiny = False

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=5, help="of each case and commit")

    @staticmethod
    def part_of(record: Record) -> str:
        """Each commit is a part of its own: there are two on purpose."""
        return record["commit"]

    def __init__(self, options: argparse.Namespace, commit: str) -> None:
        super().__init__(options, commit)
        self.directory = options.model_dir.resolve() / "start"
        self._temporary = tempfile.TemporaryDirectory()
        self.sources: dict[str, Path] = {}
        if commit:
            prepare(self.directory)
            self.sources = {one: source_of(one, Path(self._temporary.name)) for one in (BEFORE, commit)}

    def measure(self, part: str) -> None:
        for turn in range(self.options.rounds + 1):
            for commit, source in self.sources.items():
                out = self.out(part) if turn else Path(self._temporary.name, "uncounted.json")
                words = (part, "--source", source, "--directory", self.directory, "--out", out)
                self.run("start.run", *words, COLOCATE_COMMIT=commit)

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {"commands": {name: " ".join(case.words) for name, case in CASES.items()}, "run": RUN}


def prepare(directory: Path) -> None:
    """Write the files of the cases: the quickstart's model and data, run files, and the run that is reported
    on."""
    environment = {"cwd": ROOT, "check": True}
    if not (directory / "model" / "config.json").exists():
        script = "examples/quickstart/warm_start.py"
        subprocess.run([sys.executable, script, "--output_dir", directory], **environment)
    (directory / "run.yaml").write_text(RUN.format(directory=directory))
    (directory / "wrong.yaml").write_text(RUN.format(directory=directory) + "learning_rat: 1e-6\n")
    if not (directory / "run" / "metrics.jsonl").exists():
        subprocess.run([sys.executable, "-m", "colocate", "train", directory / "run.yaml"], **environment)


def source_of(commit: str, parent: Path) -> Path:
    """The packages of a commit, written out."""
    place = parent / commit
    place.mkdir()
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
    return place / "src"


def compute_claims(records: list[Record]) -> Claims:
    """Medians of each case, of the newer commit and of `BEFORE`; None where a commit has no record of it."""
    claims: Claims = {}
    for case in CASES:
        for suffix, is_before in (("", False), ("_before", True)):
            of_case = [r for r in records if r["case"] == case and (r["commit"] == BEFORE) == is_before]
            for name in ("wall_s", "cpu_s"):
                seconds = [record[name] for record in of_case]
                claims[f"{case}{suffix}_{name}"] = statistics.median(seconds) if seconds else None
    return claims


if __name__ == "__main__":
    StartCpuSuite.main()
