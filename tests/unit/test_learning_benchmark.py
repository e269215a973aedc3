"""The learning benchmark: every filter, loss and optimizer has a run, and all that could run have learnt."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.curves import learning

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

NOT_INSTALLED = {
    *("adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "grokadamw", "stable_adamw"),
    *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw"),
}
"""Optimizers whose packages were not there."""


def test_the_published_runs_have_all_learnt():
    result = json.loads((BENCHMARKS / "results" / "learning-cpu.json").read_text())
    assert set(result["setup"]["failed"]) == NOT_INSTALLED
    records = {record["variant"]: record for record in result["repetitions"]}
    assert records.keys() | NOT_INSTALLED == learning.variants().keys()
    for name, record in records.items():
        assert record["options"] == learning.variants()[name]
        assert result["claims"][f"rise_{name}"] == learning.rise(record) > 0.1
