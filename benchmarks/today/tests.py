"""Outcomes of the tests that need a GPU, with the PyTorch and the Triton that are here.

python -m benchmarks.today.tests --out tests.json [--processes 8] tests/kernel_tests
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.common.results import ROOT, origin

MARKS = "gpu and not multi_gpu and not vllm and not trtllm"


class Outcomes:
    """A plugin of pytest that counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("paths", nargs="+")
    options = parser.parse_args()
    record = {"kind": "tests", **origin(), "paths": options.paths, "marks": MARKS}
    outcomes, start_s = Outcomes(), time.perf_counter()
    words = [
        *(str(ROOT / path) for path in options.paths),
        "-m",
        MARKS,
        "-q",
        "-p",
        "no:cacheprovider",
        "-rfE",
    ]
    if options.processes > 1:
        words += ["-n", str(options.processes)]
    status = pytest.main([*words, f"--rootdir={ROOT}"], plugins=[outcomes])
    record |= {"status": int(status), "seconds": time.perf_counter() - start_s, "failed": outcomes.failed}
    record["counts"] = dict(outcomes.counts)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
