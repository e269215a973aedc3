"""The longest contexts under a cap, and how well the plan predicts: writes `results/memory-<hardware>.json`.

    python -m benchmarks.memory.suite --parts 8b-qlora --lengths 47500 80000 95000
    python -m benchmarks.memory.suite --parts 32b-lora --lengths 6144 12288
    python -m benchmarks.memory.suite --parts 14b-lora --lengths 32768
    python -m benchmarks.memory.suite --parts plan
    python -m benchmarks.memory.suite --merge

Every run is a process of its own (`run.py`). The cap is enforced: beside it another process holds so
much of the GPU that no more than the cap is free when the run begins, for everything that it takes, CUDA
context included; that process also reads the peak from the driver, every 2 ms. A length counts when both
divisions of it pass, the decoded one and the teacher-forced one (see `run.py`). --merge writes the
result when every claim is there.

LoRA has rank 32 on all linear layers of attention and MLP. The figures that are published for other systems
leave targets, batch and the division into prompt and completion open.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from benchmarks.common.device_watch import DeviceWatch
from benchmarks.common.results import Record, origin
from benchmarks.common.suite import Claims, Suite
from benchmarks.memory.cases import CONTEXT_CASES, PLAN_CASES, Case
from benchmarks.step.run import assignment

CONTEXT_CLAIMS = {"8b-qlora": "context_8b_qlora_80gb", "32b-lora": "context_32b_lora_80gb"}
PEAK_LENGTH = 32768
MIN_PLAN_CONFIGURATIONS = 6
PLAN_NEW_TOKENS = 256
GIB = 2**30


class MemorySuite(Suite):
    """The longest contexts under a cap, and how well the plan predicts."""

    name = "memory"
    parts = (*CONTEXT_CASES, "plan")

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lengths", nargs="+", type=int, default=[PEAK_LENGTH], help="in this order")
        parser.add_argument("--new-tokens", type=int, default=1024, help="generated ones, of decoded runs")
        parser.add_argument("--decoded", action=argparse.BooleanOptionalAction, default=True)
        parser.add_argument("--teacher-forced", action=argparse.BooleanOptionalAction, default=True)
        parser.add_argument("--timeout", type=float, default=280.0, help="seconds for one run")
        parser.add_argument("--option", type=assignment, action="append", default=[], metavar="NAME=VALUE")
        parser.add_argument("--expandable-segments", action=argparse.BooleanOptionalAction, default=True)

    @staticmethod
    def part_of(record: Record) -> str:
        """A model's peak does not depend on when another's was measured, nor does the error of its plan."""
        return f"{record['kind']}, {record['model']} {record['method']}"

    def measure(self, part: str) -> None:
        options = self.options
        if part == "plan":
            for case, length in PLAN_CASES:
                self._run(case, length, PLAN_NEW_TOKENS, {"kind": "plan"})
            return
        for length in options.lengths:
            # The longer run of the two comes last: a length that fails in the other is not tried in it.
            for teacher_forced in [False] * options.decoded + [True] * options.teacher_forced:
                labels = {"kind": "context", "case": part, "teacher_forced": teacher_forced}
                if not self._run(CONTEXT_CASES[part], length, options.new_tokens, labels):
                    break

    def _run(self, case: Case, length: int, new_tokens: int, labels: dict[str, Any]) -> bool:
        """Whether a run under the case's cap passed; either way it leaves a record, and what it took."""
        options = self.options
        out = self.out(f"memory-{case.model}")
        record = origin(self.environment["COLOCATE_COMMIT"]) | labels | vars(case)
        record |= {
            "length": length,
            "options": dict(options.option),
            "expandable_segments": options.expandable_segments,
        }
        watch = DeviceWatch(case.cap_bytes) if torch.cuda.is_available() else None
        start_s = time.perf_counter()
        output = self.run(
            "memory.run", "--model", case.model, "--method", case.method,
            "--generations", case.num_generations, "--length", length, "--new-tokens", new_tokens,
            *(["--teacher-forced"] if labels.get("teacher_forced") else []),
            *(word for name, value in options.option for word in ("--option", f"{name}={json.dumps(value)}")),
            timeout_s=options.timeout,
            PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{options.expandable_segments}",
        )  # fmt: skip
        record |= {"passed": output is not None, "seconds": time.perf_counter() - start_s}
        # That a length does not fit is a finding, not a failure.
        record["error"] = self.failures.pop() if output is None else None
        if watch is not None:
            record |= {"free_at_start_bytes": watch.free_bytes, "driver_peak_bytes": watch.peak_bytes()}
            watch.close()
        if output is not None:
            record |= json.loads(output.splitlines()[-1])
        out.write_text(json.dumps(record, indent=1) + "\n")
        return record["passed"]

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {"plan_errors": plan_errors(records), "protocol": __doc__}


def passing_lengths(records: list[Record], case: str) -> list[int]:
    """Lengths of which both divisions passed the last time."""
    last = {
        (r["length"], r["teacher_forced"]): r["passed"]
        for r in records
        if r["kind"] == "context" and r["case"] == case
    }
    return sorted({length for length, _ in last if last.get((length, False)) and last.get((length, True))})


def plan_errors(records: list[Record]) -> dict[str, float]:
    """Relative error of the predicted peak, by configuration (of its last run)."""
    return {
        f"{r['model']} {r['method']} {r['length']} x {r['num_generations']}": (
            abs(r["predicted_peak_bytes"] - r["driver_peak_bytes"]) / r["driver_peak_bytes"]
        )
        for r in records
        if r["kind"] == "plan" and r["passed"] and "predicted_peak_bytes" in r  # not on a CPU
    }


def compute_claims(records: list[Record]) -> Claims:
    """Every claim; None where the records do not suffice."""
    claims: Claims = {
        claim: max(passing_lengths(records, case), default=None) for case, claim in CONTEXT_CLAIMS.items()
    }
    last = {
        r["teacher_forced"]: r
        for r in records
        if r["kind"] == "context" and r["case"] == "14b-lora" and r["length"] == PEAK_LENGTH
    }
    passed = bool(last) and all(record["passed"] for record in last.values())
    peak = max((record.get("driver_peak_bytes", 0) for record in last.values()), default=0)
    claims["context_14b_lora_80gb"] = peak / GIB if passed and peak else None
    errors = plan_errors(records)
    enough = len(errors) >= MIN_PLAN_CONFIGURATIONS
    claims["plan_error"] = max(errors.values()) if enough else None
    return claims


if __name__ == "__main__":
    MemorySuite.main()
