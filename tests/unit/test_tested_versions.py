"""The list of tested releases is what the published runs had, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colocate.kernels.checks.fallbacks import TESTED, is_tested, release

RESULT = Path(__file__).parents[2] / "benchmarks/results/today-h100.json"


def test_the_list_is_that_of_the_published_runs():
    versions = [record["versions"] for record in json.loads(RESULT.read_text())["repetitions"]]
    for package, releases in TESTED.items():
        assert set(releases) == {
            release(of_run[package.replace("PyTorch", "torch").lower()]) for of_run in versions
        }


def test_the_newest_release_has_run_the_tests_of_the_kernels():
    tests = json.loads(RESULT.read_text())["setup"]["tests"]
    newest = f"PyTorch {TESTED['PyTorch'][-1]}.0, Triton {TESTED['Triton'][-1]}.0"
    passed = [
        of_run["counts"]["passed"]
        for of_run in tests
        if of_run["stack"] == newest and of_run["paths"] == ["tests/kernel_tests"]
    ]
    assert passed and passed[-1] >= 300


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("3.9.0", "3.9"),
        ("3.10.1+git1234", "3.10"),
        ("2.15.0.dev20261101+cu132", "2.15"),
        ("nightly", "nightly"),
    ],
)
def test_release(version, found):
    assert release(version) == found
    assert is_tested("Triton", version) is (found in TESTED["Triton"])
