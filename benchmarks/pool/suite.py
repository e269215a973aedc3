"""What several servers cost and survive, on CPU cores: writes `results/pool-<hardware>.json`.

python -m benchmarks.pool.suite

requests     512 requests over three stand-ins of vLLM's server, in processes of their own (run.py): the
             time over that of servers that are never idle, the trainer's own time, and the time until a
             killed server's work is on its way elsewhere
faults       generated schedules of faults, which the tests play with stand-ins of vLLM's server
             (tests/unit/test_engine_pool.py)
native_faults  the same with native servers, of which the engines hang and end, too
             (tests/unit/test_native_pool.py)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT, Record, origin
from benchmarks.common.suite import Claims, Suite
from benchmarks.pool.run import IDEAL_S, NUM_REQUESTS, NUM_SERVERS, SECONDS, SLOTS

SCHEDULES = {"faults": "tests/unit/test_engine_pool.py", "native_faults": "tests/unit/test_native_pool.py"}
"""Parts that play 200 schedules of faults, and the tests that do."""


class PoolSuite(Suite):
    """Several servers as one engine."""

    name, hardware = "pool", "cpu"
    parts = ("requests", *SCHEDULES, "ray_start")
    has_tiny = False
    extends_result = True

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--repetitions", type=int, default=5)

    @staticmethod
    def part_of(record: Record) -> str:
        return str(record["kind"])

    def measure(self, part: str) -> None:
        if part == "requests":
            self.run("pool.run", "--repetitions", self.options.repetitions, "--out", self.out(part))
            return
        if part == "ray_start":
            self.run("pool.ray_start", "--out", self.out(part))
            return
        record: Record = {"kind": part, **origin()}
        with tempfile.TemporaryDirectory() as directory:
            counts = Path(directory) / "counts.json"
            words = ["-m", "pytest", "-q", SCHEDULES[part], "-k", "two_hundred"]
            environment = os.environ | {"COLOCATE_SCHEDULES": str(counts)}
            subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)
            record |= json.loads(counts.read_text())
        self.out(part).write_text(json.dumps(record, indent=1) + "\n")

    def claims(self, records: list[Record]) -> Claims:
        def median(kind: str, rows: str, value: Callable[[Any], float]) -> float | None:
            found = [value(row) for record in records if record["kind"] == kind for row in record[rows]]
            return statistics.median(found) if found else None

        starts_s = [median("ray_start", launcher, float) for launcher in ("ray", "torchrun")]

        def survived(kind: str) -> int | None:
            played = [record for record in records if record["kind"] == kind]
            return played[-1]["num_finished"] + played[-1]["num_named"] if played else None

        lost_s = [row["failover_s"] for record in records for row in record.get("losses", [])]
        return {
            "pool_overhead": median("requests", "rollouts", lambda row: row["wall_s"] / IDEAL_S),
            "pool_client_ms_per_request": median("requests", "rollouts", lambda row: row["client_ms"]),
            "failover_s": max(lost_s) if lost_s else None,
            "faults_survived": survived("faults"),
            "faults_survived_native": survived("native_faults"),
            "ray_start_s": None if None in starts_s else starts_s[0] - starts_s[1],  # type: ignore[operator]
        }

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {
            "num_servers": NUM_SERVERS,
            "num_requests": NUM_REQUESTS,
            "slots": SLOTS,
            "seconds": SECONDS,
            "ideal_s": IDEAL_S,
        }


if __name__ == "__main__":
    PoolSuite.main()
