"""The benchmark of open rollouts, tiny: all ways draw as many tokens, and turns read each token once."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.episodes import engine


@pytest.mark.slow
def test_all_ways_draw_as_many_tokens(tmp_path, monkeypatch):
    out = tmp_path / "record.json"
    arguments = ["engine", "--tiny", "--repetitions", "1", "--model-dir", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(engine, "origin", lambda: {"commit": "of a test"})
    prefill = engine.ModelRunner.prefill
    try:
        engine.main()
    finally:
        engine.ModelRunner.prefill = prefill
    record = json.loads(out.read_text())
    found = {name: repetitions[0] for name, repetitions in record["repetitions"].items()}
    assert found["generate"]["num_tokens"] == found["open"]["num_tokens"]
    assert len({found[name]["num_tokens"] for name in found if "0." in name}) == 1
    assert (
        found["turns 0.0"]["num_prefilled"]
        == record["least_prefilled"]
        < found["lockstep 0.0"]["num_prefilled"]
    )
