"""The benchmark of starts: claims from records whose seconds are known, and one start of a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.common.results import ROOT
from benchmarks.start import cpu
from benchmarks.start.cases import BEFORE, CASES

ENVIRONMENT = os.environ | {"COLOCATE_COMMIT": "under test"}  # whatever differs from the commit


def record(case: str, commit: str, wall_s: float) -> dict[str, Any]:
    return {"case": case, "commit": commit, "wall_s": wall_s, "cpu_s": wall_s / 2}


def test_claims_are_medians_of_each_commit():
    records = [record("help", "after", s) for s in (1.0, 9.0, 2.0)]
    claims = cpu.compute_claims([*records, record("help", BEFORE, 6.0), record("plan", BEFORE, 7.0)])
    assert (claims["help_wall_s"], claims["help_cpu_s"]) == (2.0, 1.0)
    assert (claims["help_before_wall_s"], claims["help_before_cpu_s"]) == (6.0, 3.0)
    assert claims["plan_before_wall_s"] == 7.0 and claims["plan_wall_s"] is None
    assert len(claims) == 4 * len(CASES)


@pytest.mark.parametrize("case", ["help", "wrong_option"])
def test_a_start_is_timed_until_its_process_has_ended(case, tmp_path):
    (tmp_path / "wrong.yaml").write_text("learning_rat: 1\n")
    words = [case, "--source", ROOT / "src", "--directory", tmp_path, "--out", tmp_path / "record.json"]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.start.run", *words], cwd=ROOT, env=ENVIRONMENT, check=True
    )
    found = json.loads((tmp_path / "record.json").read_text())
    assert found["case"] == case and found["cpu_s"] > 0 and found["wall_s"] > 0


def test_a_case_that_ends_otherwise_than_it_should_leaves_no_record(tmp_path):
    words = ["report", "--source", ROOT / "src", "--directory", tmp_path, "--out", tmp_path / "record.json"]
    command = [sys.executable, "-m", "benchmarks.start.run", *words]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1 and "report ended with 1" in done.stderr
    assert not (tmp_path / "record.json").exists()
