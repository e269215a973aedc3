"""The benchmarks of rollouts in 8 bits run as documented, and their claims are what they say."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.precision import ablations, curves, log_ratios, speed
from benchmarks.precision.cases import STEPS_PER_LOOK
from benchmarks.precision.suite import compute_claims
from tiny import make_model


def test_speed_is_measured_at_every_precision(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOCATE_COMMIT", "a commit")
    out = tmp_path / "speed.json"
    monkeypatch.setattr("sys.argv", ["speed", "1p5b_512seq", "--tiny", "--out", str(out)])
    speed.main()
    record = json.loads(out.read_text())
    assert set(record["runs"]) == {"bf16", "fp8_kv", "fp8"}
    sizes = {name: run["kv_cache_bytes"] for name, run in record["runs"].items()}
    assert sizes["fp8"] == sizes["fp8_kv"] == sizes["bf16"] * 33 // 64  # heads of 32 values and a scale
    claims = compute_claims([record])
    assert claims["fp8_speedup_1p5b_512seq"] > 0 and claims["fp8_speedup_7b_256seq"] is None


def test_steps_are_those_of_a_gpu():
    pytest.importorskip("triton")
    from colocate.engines.native.triton_backend import TritonBackend

    assert TritonBackend.steps_per_look == STEPS_PER_LOOK


def test_log_ratios_of_a_model_that_was_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOCATE_COMMIT", "a commit")
    out = tmp_path / "ratios.json"
    monkeypatch.setattr("sys.argv", ["log_ratios", "--tiny", "--out", str(out)])
    log_ratios.main()
    record = json.loads(out.read_text())
    spreads = {name: figures["sd"] for name, figures in record["precisions"].items()}
    assert 0 < spreads["bf16"] < spreads["fp8_kv"] < 0.1 and spreads["bf16"] < spreads["fp8"] < 0.1
    # Rounding to 4 bits of mantissa, whatever the scales; a page's scale fixed too early cuts.
    for kind in record["scales"].values():
        for way, error in kind.items():
            assert 0.02 < error < 0.03 or (way == "page_first_token_times_1" and error > 0.03)


def test_speedups_are_of_medians():
    def run(*seconds: float) -> dict:
        repetitions = [{"seconds": s, "decode_s_per_look": s / 100} for s in seconds]
        return {"repetitions": repetitions, "kv_cache_bytes": 3e9, "weight_bytes": 1e9}

    record = {"kind": "speed", "case": "7b_256seq", "runs": {"bf16": run(3, 9, 4), "fp8": run(2, 2, 8)}}
    claims = compute_claims([record])
    assert claims["fp8_speedup_7b_256seq"] == 2
    assert claims["step_ms_7b_256seq_bf16"] == pytest.approx(40 / 8)
    assert claims["kv_cache_gb_7b_256seq_fp8"] == 3 and claims["weight_gb_7b_256seq_fp8"] == 1


def test_differences_of_rewards_are_paired():
    rewards = {("bf16", 0): 0.5, ("bf16", 1): 0.9, ("fp8", 0): 0.6, ("fp8", 1): 0.8}
    records = [
        {"precision": precision, "seed": str(seed), "reward": [0.0, *[value] * 200]}
        for (precision, seed), value in rewards.items()
    ]
    claims = curves.compute_claims(records, 2)
    assert claims["final_reward_fp8"] == pytest.approx(0.7)
    assert claims["final_reward_difference_fp8"] == pytest.approx(0.0)
    assert claims["final_reward_difference_fp8_error"] == pytest.approx(0.1)
    assert claims["final_reward_fp8_kv"] is None


def test_ablations_round_what_they_say_and_leave_the_model_as_it_was():
    model = make_model(num_hidden_layers=2, head_dim=64, hidden_size=128, intermediate_size=128)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.randint(3, 40, (2, 12))
    found = ablations.measure(model.float().eval(), tokens, torch.ones_like(tokens))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    moved = {name: figures["mean_abs"] for name, figures in found.items() if name != "tokens"}
    assert all(0 < size < 1 for size in moved.values())
    # A step of int8 is 1/127 of a row's largest value, and one of e4m3 1/8 of each value.
    assert moved["keys and values int8"] < moved["keys and values e4m3"]
    assert moved["products int8, rotated"] < moved["products e4m3"]


def test_a_rotation_is_undone():
    x = torch.randn(3, 128)
    assert torch.allclose(ablations.rotated(lambda y: y)(x), x, atol=1e-6)
