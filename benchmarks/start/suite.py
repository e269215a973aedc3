"""The first minute of a process on one GPU: writes `results/start-<hardware>.json`.

    python -m benchmarks.start.suite [--parts cold_start step]
    python -m benchmarks.start.suite --merge

Every measurement is a process of its own with empty caches of Triton, Inductor and the driver; the operating
system's cache of files is warm from the second one on. Packages have bytecode, as pip leaves them: it is
made first, because images of machines without it exist. `cold_start` counts from the start of the process to
the end of its first completion, 16 tokens on a prompt of 256. `step` takes five GRPO steps of the case of
`benchmarks.step` with 32 prompts × 8: the ratio is that of the first to the median of the last
`NUM_STEADY`, and the step between them, in which the planner may still act upon what it measured, counts for
neither.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import Any

from benchmarks.common.results import ROOT, Record, origin
from benchmarks.common.suite import Claims, Suite
from benchmarks.rollout.cases import model_directory
from benchmarks.step.cases import COMPARISONS

NUM_COLD_STARTS, NUM_RUNS, NUM_STEADY = 3, 2, 3
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
WORK = COMPARISONS["1p5b"].work


class StartSuite(Suite):
    """The first minute of a process."""

    name = "start"
    parts = ("cold_start", "step")

    @staticmethod
    def part_of(record: Record) -> str:
        """Cold starts are not compared with steps, each of which is compared within its process."""
        return record["kind"]

    def measure(self, part: str) -> None:
        compile_packages()
        directory = model_directory(self.options.model_dir, "tiny" if self.options.tiny else WORK.model)
        for _ in range(NUM_COLD_STARTS if part == "cold_start" else NUM_RUNS):
            with tempfile.TemporaryDirectory() as empty:
                caches = dict.fromkeys(CACHES, empty)
                if part == "step":
                    words = ["--framework", "colocate", *WORK.words(), "--micro-batch", "16"]
                    words += ["--warm-up", "2", "--steps", str(NUM_STEADY), "--label", "start"]
                    words += [
                        "--model-dir",
                        str(self.options.model_dir),
                        "--out",
                        str(self.out("first-step")),
                    ]
                    self.run("step.run", *words, **caches)
                    continue
                start_s = time.time()
                output = self.run("start.cold_start", directory, **caches)
            if output is not None:
                done = {name: end - start_s for name, end in json.loads(output.splitlines()[-1]).items()}
                record = {
                    "kind": "cold_start",
                    "seconds": done["complete"],
                    "done_after_s": done,
                    **origin(self.environment["COLOCATE_COMMIT"]),
                }
                self.out("cold-start").write_text(json.dumps(record, indent=1) + "\n")

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {"work": vars(WORK), "num_steady": NUM_STEADY}


def compile_packages() -> None:
    """Write the bytecode of the packages that have none, in as many processes as there are cores."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    words = [sys.executable, "-m", "compileall", "-q", "-j", "0", sysconfig.get_path("purelib"), ROOT / "src"]
    # Some packages hold files of other Pythons' syntax, which leave an exit status and are never imported.
    subprocess.run(words, env=environment, check=False, stdout=subprocess.DEVNULL)


def compute_claims(records: list[Record]) -> Claims:
    """Both claims, medians over the processes; None where these are too few."""
    starts = [record["seconds"] for record in records if record["kind"] == "cold_start"]
    ratios = [first_over_steady(record) for record in records if record["kind"] == "step"]
    return {
        "start_cold_s": statistics.median(starts) if len(starts) >= NUM_COLD_STARTS else None,
        "first_step_over_steady": statistics.median(ratios) if len(ratios) >= NUM_RUNS else None,
    }


def first_over_steady(record: Record) -> float:
    """Seconds of the first step over the median of the steps after the second."""
    seconds = [step["step_s"] for step in record["steps"]]
    return seconds[0] / statistics.median(seconds[-NUM_STEADY:])


if __name__ == "__main__":
    StartSuite.main()
