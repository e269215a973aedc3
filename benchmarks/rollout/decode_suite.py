"""Decode steps at few rows beside their floor, commit by commit on one card.

    python -m benchmarks.rollout.decode_suite [--rounds 1]
    python -m benchmarks.rollout.decode_suite --merge

Every measurement is a process of its own (`rollout.decode`). To compare with an older commit, run it with
that `src` on PYTHONPATH, its name in COLOCATE_COMMIT and its record among --records. The claims are those
of the commit that was measured last.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.common.results import Record, by_part
from benchmarks.common.suite import Claims, Suite
from benchmarks.rollout.cases import model_directory
from benchmarks.rollout.decode import ROWS, case_of


class DecodeSuite(Suite):
    """Decode steps of the native engine at few rows."""

    name = "decode"
    parts = ("steps",)
    has_tiny = False

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=1)

    @staticmethod
    def part_of(record: Record) -> str:
        """The run that a record is of."""
        return f"{record['commit']} on {record['machine']}"

    def measure(self, part: str) -> None:
        model_directory(self.options.model_dir, "1.5b")  # not within a measurement
        for _ in range(self.options.rounds):
            self.run("rollout.decode", "--model-dir", self.options.model_dir, "--out", self.out("decode"))

    def claims(self, records: list[Record]) -> Claims:
        runs = list(by_part(records, self.part_of).values())
        return claims_of_run(runs[-1] if runs else [])

    def setup(self, records: list[Record]) -> dict[str, Any]:
        runs = {run: claims_of_run(of_run) for run, of_run in by_part(records, self.part_of).items()}
        return {"runs": runs, "cases": {str(num_rows): vars(case_of(num_rows)) for num_rows in ROWS}}


def claims_of_run(records: list[Record]) -> Claims:
    """Seconds of a step and its floor's fraction of them by rows, medians over a run's processes."""
    claims: Claims = {}
    for num_rows in ROWS:
        rows = [row for record in records for row in record["rows"] if row["num_rows"] == num_rows]
        step_s = statistics.median(row["step_s"] for row in rows) if rows else None
        floor_s = statistics.median(row["floor_s"] for row in rows) if rows else None
        claims[f"decode_step_s_{num_rows}rows"] = step_s
        claims[f"decode_fraction_of_floor_{num_rows}rows"] = floor_s / step_s if step_s and floor_s else None
    return claims


if __name__ == "__main__":
    DecodeSuite.main()
