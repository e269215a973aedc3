"""Seconds of a decode step at few rows, and what the hardware allows, both on the same card in one process.

    python -m benchmarks.rollout.decode --out decode.json [--rows 8 64 512]

Every row is a prompt of its own, so no two rows share keys. A step's time is the difference between a rollout
of `LONG_TOKENS` tokens and one of `SHORT_TOKENS`, divided by the steps between them: both have the prefill,
and what the host does at either end. The floor is that of `profile.least_s`: each matrix product at the
larger of its operations at the rate of a product of 8,192³ and its bytes at the rate of a copy, and every key
and value read once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.results import origin
from benchmarks.common.timing import copy_bytes_per_s
from benchmarks.rollout.cases import Case, model_directory
from benchmarks.rollout.profile import least_s, product_flops_per_s
from benchmarks.rollout.run import Native

ROWS = (8, 32, 64, 128)
LONG_TOKENS, SHORT_TOKENS = 512, 8
NUM_REPETITIONS = 3


def case_of(num_rows: int) -> Case:
    return Case("1.5b", num_rows, 1, 256, LONG_TOKENS)


def floor_s(num_rows: int, flops_per_s: float, bytes_per_s: float) -> float:
    """The products and the attention of `least_s`: a step cannot do without their bytes and operations."""
    least = least_s(case_of(num_rows), flops_per_s, bytes_per_s)
    return sum(seconds for role, seconds in least.items() if role.startswith(("product", "attention")))


def measure(native: Native, num_rows: int) -> dict[str, Any]:
    case = case_of(num_rows)
    prompts = case.prompts()

    def seconds(num_tokens: int, seed: int) -> float:
        start_s = time.perf_counter()
        native.rollout(case, prompts, [[num_tokens]] * num_rows, seed)
        return time.perf_counter() - start_s

    seconds(4 * SHORT_TOKENS, 0)  # compiles kernels and captures the step
    repetitions = []
    for number in range(1, NUM_REPETITIONS + 1):
        long_s, short_s = seconds(LONG_TOKENS, number), seconds(SHORT_TOKENS, number)
        step_s = (long_s - short_s) / (LONG_TOKENS - SHORT_TOKENS)
        repetitions.append({"long_s": long_s, "short_s": short_s, "step_s": step_s})
    step_s = statistics.median(repetition["step_s"] for repetition in repetitions)
    print(f"{num_rows} rows: {step_s * 1e3:.3f} ms a step", flush=True)
    return {"num_rows": num_rows, "step_s": step_s, "repetitions": repetitions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "colocate-models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    options = parser.parse_args()
    record: dict[str, Any] = {"kind": "decode", **origin()}
    native = Native(model_directory(options.model_dir, "1.5b"), [case_of(max(options.rows))])
    flops_per_s, bytes_per_s = product_flops_per_s(), copy_bytes_per_s()
    rows = [measure(native, num_rows) for num_rows in options.rows]
    for row in rows:
        row["floor_s"] = floor_s(row["num_rows"], flops_per_s, bytes_per_s)
    record |= {"flops_per_s": flops_per_s, "copy_bytes_per_s": bytes_per_s, "rows": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
