"""The reward curves: claims from curves of known noise, what a record takes from a run, and both pictures."""

from __future__ import annotations

import json
import math
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks.curves import run as curves_run
from benchmarks.curves import suite as curves
from benchmarks.pages import pictures
from tiny import make_trainer


def record(mode: str, seed: int, final: float, gap: float = 0.001) -> dict[str, Any]:
    """Fifteen rollouts that start at 0.3 and end with `NUM_FINAL` of the reward given on average."""
    end = [final - 0.05, final + 0.05] * (curves.NUM_FINAL // 2)
    reward = [0.3] * 5 + end
    gaps = {"gap_mean": [gap] * len(reward), "gap_max": [10 * gap] * len(reward)}
    steps = [1 + 4 * i for i in range(len(reward))]
    return {"mode": mode, "seed": seed, "step": steps, "reward": reward, "total_s": 60.0, **gaps}


def records(finals: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [record(mode, seed, final) for mode in finals for seed, final in enumerate(finals[mode])]


FINALS = {"native": [0.8, 0.9, 0.85], "colocate": [0.84, 0.88, 0.86], "server": [0.9, 0.8, 0.88]}


def test_difference_and_noise_are_of_the_final_rewards() -> None:
    claims = curves.compute_claims(records(FINALS), 3)
    means = [statistics.mean(values) for values in FINALS.values()]
    assert claims["final_reward_difference"] == pytest.approx(max(means) - min(means))
    pooled = math.sqrt(statistics.mean(statistics.variance(values) for values in FINALS.values()))
    assert claims["final_reward_seed_std"] == pytest.approx(pooled)
    # The difference of two means of three has twice the variance of one, which is a third of a run's.
    assert claims["final_reward_difference_std"] == pytest.approx(pooled * math.sqrt(2 / 3))
    assert {claims[f"logprob_gap_{mode}"] for mode in FINALS} == {0.001}


def test_a_missing_run_makes_no_claim_of_rewards() -> None:
    claims = curves.compute_claims(records(FINALS)[:-1], 3)
    assert claims["final_reward_difference"] is None and claims["final_reward_seed_std"] is None
    assert set(curves.compute_claims([], 3).values()) == {None}


def test_a_record_has_the_rollouts_of_its_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=4, steps_per_generation=2, gradient_accumulation_steps=1)
    trainer.train()
    found = curves_run.curves(tmp_path / "metrics.jsonl")
    assert found["step"] == [1, 3]  # each feeds two steps
    logged = {entry["step"]: entry["reward"] for entry in trainer.state.log_history if "reward" in entry}
    assert dict(zip(found["step"], found["reward"], strict=True)) == pytest.approx(logged)
    assert all(
        0 <= mean <= most < 1e-3 for mean, most in zip(found["gap_mean"], found["gap_max"], strict=True)
    )


def drawn(svg: str) -> tuple[ElementTree.Element, list[str]]:
    """The picture, and the classes of its lines."""
    picture = ElementTree.fromstring(svg)
    return picture, [e.get("class", "") for e in picture.iter() if e.tag.endswith("path")]


def test_the_picture_of_the_curves_has_a_line_for_each_run_and_mode() -> None:
    result = json.loads(json.dumps({"repetitions": records(FINALS)}))
    _, lines = drawn(pictures.picture(pictures.curves_panels(result)))
    assert sum(line.startswith("faint") for line in lines) == 2 * 9
    assert sum(line.startswith("curve") for line in lines) == 2 * (3 + 3)  # and the legend's


def test_the_picture_of_the_modes_has_a_panel_for_each_model() -> None:
    plain = {"tensor_parallel_size": 1, "weights": "auto"}
    rows = [
        plain | {"model": model, "mode": mode, "num_completions": size, "completions_per_s": size / 10}
        for model in ("1p5b", "7b")
        for mode in FINALS
        for size in (64, 256)
    ]
    rows += [rows[2] | {"tensor_parallel_size": 2}, rows[2] | {"weights": "buckets"}]
    panels = pictures.modes_panels({"setup": {"num_gpus": 2, "summary": rows}})
    picture, lines = drawn(pictures.picture(panels))
    titles = {element.text for element in picture.iter() if element.get("class") == "title"}
    assert titles == {"1.5B on 2 GPUs", "7B on 2 GPUs"}
    assert sum(line.startswith("curve") for line in lines) == 2 * (3 + 3)
    dots = [e.get("class", "") for e in picture.iter() if e.tag.endswith("circle")]
    assert dots.count("dot f-green") == dots.count("dot f-purple") == 2  # one is the legend's
    assert dots.count("dot f-blue") == 2 * 2  # of each size that was measured
    texts = {element.text for element in picture.iter()}
    assert {"vLLM colocated, TP 2", "vLLM colocated, copied weights"} <= texts
