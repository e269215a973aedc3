"""The longest contexts under a cap, and how well the plan predicts: writes `results/memory-<hardware>.json`.

    python -m benchmarks.memory.suite --cases 8b-qlora --lengths 47500 80000 95000
    python -m benchmarks.memory.suite --cases 32b-lora --lengths 6144 12288
    python -m benchmarks.memory.suite --cases 14b-lora --lengths 32768
    python -m benchmarks.memory.suite --cases plan
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
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common.device_watch import DeviceWatch
from benchmarks.common.results import origin, write_suite_result
from benchmarks.common.runner import ROOT, Record, read_records
from benchmarks.memory.cases import CONTEXT_CASES, PLAN_CASES, Case
from benchmarks.step.run import assignment

CONTEXT_CLAIMS = {"8b-qlora": "context_8b_qlora_80gb", "32b-lora": "context_32b_lora_80gb"}
PEAK_LENGTH = 32768
MIN_PLAN_CONFIGURATIONS = 6
PLAN_NEW_TOKENS = 256
GIB = 2**30


def run(case: Case, length: int, new_tokens: int, options: argparse.Namespace, *words: str) -> Record:
    """One run in its process, under the case's cap: whether it passed, and what it took."""
    watch = DeviceWatch(case.cap_bytes) if torch.cuda.is_available() else None
    command = [
        sys.executable, "-m", "benchmarks.memory.run", "--model", "tiny" if options.tiny else case.model,
        "--method", case.method, "--generations", str(case.num_generations), "--length", str(length),
        "--new-tokens", str(new_tokens), *words,
        *(word for name, value in options.option for word in ("--option", f"{name}={json.dumps(value)}")),
    ]  # fmt: skip
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    if options.expandable_segments:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    print(" ".join(command[1:]), flush=True)
    log = options.records / f"{time.time_ns()}-memory-run.log"
    start_s, error = time.perf_counter(), None
    with log.open("w") as stderr:
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True,
                timeout=options.timeout,
            )  # fmt: skip
            output, status = done.stdout.splitlines(), done.returncode
        except subprocess.TimeoutExpired:
            output, status = [], 124
    if status:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        error = f"status {status}: " + (lines[-1] if lines else "no output")
    record: Record = {
        "passed": status == 0,
        "error": error,
        "seconds": time.perf_counter() - start_s,
        "length": length,
        "options": dict(options.option),
        "expandable_segments": options.expandable_segments,
        **vars(case),
    }
    if watch is not None:
        record |= {
            "free_at_start_bytes": watch.free_bytes,
            "driver_peak_bytes": watch.peak_bytes(),
        }
        watch.close()
    if status == 0:
        record |= json.loads(output[-1])
    shown = {key: value for key, value in record.items() if key != "steps"}
    print(f"  {json.dumps(shown)}", flush=True)
    return record


def measure(name: str, options: argparse.Namespace, taken: Record) -> None:
    """Run a case; each record is written as soon as it is there, with the origin that was taken before."""

    def save(record: Record) -> None:
        path = options.records / f"{time.time_ns()}-memory-{name}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")

    if name == "plan":
        for case, length in PLAN_CASES:
            save(taken | {"kind": "plan"} | run(case, length, PLAN_NEW_TOKENS, options))
        return
    for length in options.lengths:
        # The longer run of the two comes last: a length that fails in the other is not tried in it.
        for words in [[]] * options.decoded + [["--teacher-forced"]] * options.teacher_forced:
            record = run(CONTEXT_CASES[name], length, options.new_tokens, options, *words)
            save(taken | {"kind": "context", "case": name, "teacher_forced": bool(words)} | record)
            if not record["passed"]:
                break


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


def compute_claims(records: list[Record]) -> dict[str, float | None]:
    """Every claim; None where the records do not suffice."""
    claims: dict[str, float | None] = {
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


def part(record: Record) -> str:
    """A model's peak does not depend on when another's was measured, nor does the error of its plan."""
    return f"{record['kind']}, {record['model']} {record['method']}"


def merge(options: argparse.Namespace) -> None:
    """Print the claims, and write the result if all are there."""
    records = read_records(options.records, part)
    claims = compute_claims(records)
    print(json.dumps({"plan_errors": plan_errors(records), "claims": claims}, indent=1))
    write_suite_result(
        "memory",
        options.hardware,
        claims,
        records,
        part=part,
        plan_errors=plan_errors(records),
        protocol=__doc__,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=(*CONTEXT_CASES, "plan"), default=[])
    parser.add_argument("--lengths", nargs="+", type=int, default=[PEAK_LENGTH], help="tried in this order")
    parser.add_argument("--new-tokens", type=int, default=1024, help="generated ones, of the decoded runs")
    parser.add_argument("--decoded", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--teacher-forced", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds for one run")
    parser.add_argument("--option", type=assignment, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--expandable-segments", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the scripts")
    parser.add_argument(
        "--records", type=Path, default=Path(tempfile.gettempdir()) / "colocate-memory-records"
    )
    parser.add_argument("--merge", action="store_true", help="measure nothing")
    parser.add_argument("--hardware", default="h200")
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.records.mkdir(parents=True, exist_ok=True)
    if not options.merge:
        taken = origin()
        for name in options.cases:
            measure(name, options, taken)
    merge(options)


if __name__ == "__main__":
    main()
