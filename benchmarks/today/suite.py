"""Newer PyTorch and Triton beside the environment's: tests on a GPU, and decode steps in turns.

    python -m benchmarks.today.suite --hardware h100 --sites /tmp/torch-2.15 [--rounds 3]

Every site is a folder with packages that come before the environment's. The last one is the newest stack, and
the claim is how long a decode step takes with the environment's own packages over how long it takes with that
one.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

from benchmarks.common.results import Record
from benchmarks.common.suite import Claims, Suite
from benchmarks.rollout.cases import model_directory

ROWS = (8, 64, 512)
IN_PROCESSES = ("tests/kernel_tests",)
ALONE = (
    "tests/gpu/test_gpu_engine.py",
    "tests/gpu/test_gpu_engine_lora.py",
    "tests/gpu/test_gpu_stack.py",
    "tests/gpu/test_gpu_arena.py",
    "tests/gpu/test_gpu_trainer.py",
    "tests/gpu/test_gpu_compile_ahead.py",
    "tests/gpu/test_gpu_cudnn_attention.py",
)
"""They measure and exhaust the GPU's memory."""


class TodaySuite(Suite):
    """The newest PyTorch and Triton beside those of the environment."""

    name = "today"
    parts = ("tests", "decode")
    hardware = "h100"
    has_tiny = False

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--sites", nargs="*", default=[], help="folders of packages; the newest last")
        parser.add_argument("--tests", nargs="*", default=[*IN_PROCESSES, *ALONE])
        parser.add_argument(
            "--note", default="", help="what versions do not say, such as other CUDA libraries"
        )

    def measure(self, part: str) -> None:
        if part == "tests":
            for site in self.options.sites:
                self._run_tests(site)
            return
        model_directory(self.options.model_dir, "1.5b")  # not within a measurement
        words = ["--model-dir", self.options.model_dir, "--rows", *ROWS]
        for _ in range(self.options.rounds):
            for site in (None, *self.options.sites):
                self.run("rollout.decode", *words, "--out", self.out("decode"), **self._packages(site))

    def _run_tests(self, site: str) -> None:
        together = [path for path in self.options.tests if path in IN_PROCESSES]
        alone = [path for path in self.options.tests if path not in IN_PROCESSES]
        for processes, paths in ((4, together), (1, alone)):
            if paths:
                options = ["--processes", processes, "--out", self.out("tests")]
                self.run("today.tests", *options, *paths, **self._packages(site))

    def _packages(self, site: str | None) -> dict[str, str]:
        paths = [*([site] if site else []), self.environment["PYTHONPATH"]]
        return {"PYTHONPATH": os.pathsep.join(paths)}

    def claims(self, records: list[Record]) -> Claims:
        ratios = decode_ratios(records)
        return {"newest_triton_decode_speed_1p5b": min(ratios.values()) if ratios else None}

    def setup(self, records: list[Record]) -> dict[str, Any]:
        steps = {
            stack: {str(rows): step_s(records, stack, rows) for rows in ROWS} for stack in stacks(records)
        }
        tests = [
            {"stack": stack_of(record), **{name: record[name] for name in ("paths", "counts", "failed")}}
            for record in records
            if record["kind"] == "tests"
        ]
        speeds = decode_ratios(records)
        return {"note": self.options.note, "decode_step_s": steps, "decode_speed": speeds, "tests": tests}


def stack_of(record: Record) -> str:
    versions = record["versions"]
    return f"PyTorch {versions['torch']}, Triton {versions['triton']}"


def stacks(records: list[Record]) -> list[str]:
    """The stacks that decoded, in the order in which they were first measured."""
    return list(dict.fromkeys(stack_of(record) for record in records if record["kind"] == "decode"))


def step_s(records: list[Record], stack: str, num_rows: int) -> float:
    """The median over a stack's processes."""
    return statistics.median(
        row["step_s"]
        for record in records
        if record["kind"] == "decode" and stack_of(record) == stack
        for row in record["rows"]
        if row["num_rows"] == num_rows
    )


def decode_ratios(records: list[Record]) -> dict[str, float]:
    """By rows: how fast the last stack decodes, as a multiple of the first one's speed."""
    found = stacks(records)
    if len(found) < 2:
        return {}
    return {str(rows): step_s(records, found[0], rows) / step_s(records, found[-1], rows) for rows in ROWS}


if __name__ == "__main__":
    TodaySuite.main()
