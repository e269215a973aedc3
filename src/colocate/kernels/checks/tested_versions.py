"""Releases of PyTorch and Triton with which the kernels' tests have passed on a GPU.

A release is the first two numbers of a version: patches change no interface. The list says what was run and
nothing else: `benchmarks/results/today-h100.json` has the runs. With any other release the engine first tries
its fast kernels (`kernel_check.py`).
"""

from __future__ import annotations

import re

TESTED = {
    "PyTorch": ("2.11", "2.15"),
    "Triton": ("3.6", "3.9"),
}


def is_tested(package: str, version: str) -> bool:
    """Whether this version, such as "2.15.0+cu132", is of a release in `TESTED[package]`."""
    return release(version) in TESTED[package]


def release(version: str) -> str:
    """Major and minor number: "3.9" of "3.9.0+git1234"."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version
