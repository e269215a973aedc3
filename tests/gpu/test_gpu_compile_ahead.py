"""What is compiled ahead of a run's first step is all that the run launches, and it changes no number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

WORKER = Path(__file__).with_name("compile_ahead_worker.py")


def run(directory: Path, *options: str):
    """What the worker prints; a process has one cache of compiled kernels, so each run has its own."""
    words = [str(directory / "cache"), str(directory / "run"), *options]
    done = subprocess.run([sys.executable, str(WORKER), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_is_left_to_compile_and_no_number_changes(tmp_path):
    ahead, as_needed = run(tmp_path / "ahead"), run(tmp_path / "as_needed", "--as-needed")
    assert ahead["compiled"]["as needed"] == [] and as_needed["compiled"]["ahead"] == []
    # Nothing is compiled that no launch has asked for, but for what steps of fewer rows than the rollout had
    # would launch: they cut keys into parts, which are merged.
    extra = set(ahead["compiled"]["ahead"]) - set(as_needed["compiled"]["as needed"])
    assert extra <= {"merge_kernel"}
    assert ahead["captured"] == ahead["kept"] == as_needed["captured"] > 0
    # Two runs of one kind have gradients that differ by 2e-5, too, and so other tokens from the next step on.
    assert ahead["first"].pop("grad_norm") == pytest.approx(as_needed["first"].pop("grad_norm"), rel=1e-4)
    assert ahead["first"] == as_needed["first"]
