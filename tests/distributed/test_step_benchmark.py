"""The step benchmark under torchrun: each process a share of the work, one record of it all."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.step import cases as step_cases
from benchmarks.step import run as step_run
from processes import TORCHRUN, run_python


@pytest.mark.slow
def test_two_processes_leave_one_record(tmp_path: Path) -> None:
    words = ["--framework", "colocate", "--tiny", "--warm-up", "1", "--steps", "2", "--watch-engine"]
    places = ["--model-dir", str(tmp_path / "models"), "--out", str(tmp_path / "record.json")]
    words = ["-m", "benchmarks.step.run", *words, *places, "--option", "engine=native"]
    printed = run_python(*TORCHRUN, *words, timeout_s=300, COLOCATE_COMMIT="none")
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["world_size"] == 2 and record["engine"] == "NativeEngine"
    assert record["options"] == {"engine": "native"}
    num_completions = record["work"]["num_prompts"] * record["work"]["num_generations"]
    assert num_completions % (2 * record["micro_batch"]) == 0
    assert len(record["steps"]) == 3
    for step in record["steps"]:
        assert 0 < sum(step["engine_s"].values()) < step["step_s"]
        assert set(step["engine_s"]) == {"wake_up", "generate", "sleep", "update_weights"}
        first, second = step["ranks"]
        assert first["engine_s"] == step["engine_s"] and set(second["engine_s"]) == set(step["engine_s"])
        # The decoding of a tiny model on a CPU leaves its thread no time to wait for anything.
        assert 0 < second["host_s"]["generate"] <= 1.05 * second["engine_s"]["generate"]
    # Printed by one of them: a line for each step, in the form that only the benchmark has.
    assert len(re.findall(r" s \(rollout \d+\.\d\d,", printed)) == 3


@pytest.mark.parametrize(
    ("world_size", "micro_batch", "is_fine"), [("1", 16, True), ("2", 8, True), ("3", 4, False)]
)
def test_shares_that_do_not_make_up_the_work_are_refused(
    monkeypatch: pytest.MonkeyPatch, world_size: str, micro_batch: int, is_fine: bool
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    work = step_cases.Work("1.5b", 4, 8, 16, 8)
    if is_fine:
        step_run.check_division(Namespace(micro_batch=micro_batch), work)
    else:
        with pytest.raises(SystemExit, match="4 × 3 processes = 12 does not divide 32 completions"):
            step_run.check_division(Namespace(micro_batch=micro_batch), work)
