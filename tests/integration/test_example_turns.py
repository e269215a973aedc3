"""examples/turns: a tiny model learns to use a calculator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from processes import run_python

CALCULATOR = Path(__file__).parents[2] / "examples" / "turns" / "calculator.py"


def shares(*options: str) -> tuple[int, int]:
    """Percent of right answers in the first five steps and in the last five."""
    printed = run_python(CALCULATOR, *options, timeout_s=400, HF_HUB_OFFLINE="1")
    found = re.search(r"right in the first five steps: (\d+)%; in the last five: (\d+)%", printed)
    assert found is not None
    return int(found[1]), int(found[2])


def test_the_calculator_runs(tmp_path):
    shares("--output_dir", str(tmp_path), "--imitation_steps", "5", "--max_steps", "5")


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_the_calculator_is_used_once_it_is_rewarded(tmp_path, seed):
    first, last = shares("--output_dir", str(tmp_path), "--seed", seed)
    assert first < 70 and last > 90
