"""The benchmark of episodes, tiny: this library and TRL play the same turns, with slow and fast tools."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.episodes import run
from benchmarks.episodes.cases import TINY_TURNS

NUM_EPISODES = 2 * 4
TOOL_S = 0.25


def record_of(framework: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    out = directory / f"{framework}.json"
    words = ["run", "--framework", framework, "--tiny", "--warm-up", "1", "--steps", "2"]
    words += ["--tool-s", "0", str(TOOL_S), "--model-dir", str(directory), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(run, "origin", lambda: {"commit": "of a test"})
    run.main()
    return json.loads(out.read_text())


def test_both_libraries_play_the_same_turns(tmp_path, monkeypatch):
    records = {name: record_of(name, tmp_path, monkeypatch) for name in ("colocate", "trl")}
    lengths = TINY_TURNS.lengths(NUM_EPISODES)
    num_calls = NUM_EPISODES * (TINY_TURNS.num_turns - 1)
    for name, record in records.items():
        assert [step["tool_s"] for step in record["steps"]] == [0.0, 0.0, TOOL_S]
        for step in record["steps"]:
            assert step["num_prompt"] == NUM_EPISODES * 256, name
            assert step["num_sampled"] == sum(map(sum, lengths)), name
            assert step["num_given"] == num_calls * TINY_TURNS.answer_tokens, name
            assert 0 < step["rollout_s"] < step["step_s"]
            assert sum(step["phases_s"].values()) <= step["step_s"] + 1e-6
        # The tool of one episode sleeps while those of others do, or in TRL after them.
        num_waits = {"colocate": TINY_TURNS.num_turns - 1, "trl": num_calls}[name]
        slow, fast = record["steps"][2]["rollout_s"], record["steps"][1]["rollout_s"]
        assert slow > num_waits * TOOL_S
        assert slow - fast < (num_waits + 3) * TOOL_S
    trained = [step["num_trained"] for step in records["colocate"]["steps"]]
    assert trained == [sum(map(sum, lengths))] * 3
