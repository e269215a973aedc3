"""The claims of the rollout benchmark, from records whose ratios are known."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from benchmarks.rollout import cases as rollout_cases
from benchmarks.rollout import suite as rollout_suite

CLAIMS = {  # as the project's table names them
    "rollout_1p5b_512seq_vs_vllm",
    "rollout_1p5b_512seq_vs_vllm_nologprobs",
    "rollout_1p5b_128seq_vs_vllm",
    "rollout_1p5b_8seq_vs_vllm",
    "rollout_7b_256seq_vs_vllm",
    "rollout_1p5b_longprompt_vs_vllm",
    "rollout_1p5b_ragged_vs_vllm",
    "decode_fraction_of_floor",
    "logprob_gap_vs_vllm",
}


def rollout(case: str, variant: str, *rates: float) -> dict[str, Any]:
    return {
        "kind": "rollout",
        "engine": "native" if variant == "native" else "vllm",
        "variant": variant,
        "commit": "c",
        "machine": "m",
        "cases": {case: {"repetitions": [{"tokens_per_s": rate} for rate in rates]}},
    }


def test_names_are_those_of_the_table() -> None:
    assert set(rollout_suite.compute_claims([])) == CLAIMS
    assert set(rollout_suite.compute_claims([]).values()) == {None}


def test_ratio_is_of_medians_over_all_rounds_against_vllms_best_variant() -> None:
    name = "1p5b_128seq"
    records = [
        rollout(name, "native", 10.0, 90.0),
        rollout(name, "in-process", 20.0, 30.0, 25.0),
        rollout(name, "own-process", 40.0, 10.0, 60.0),
        rollout(name, "native", 80.0),
    ]
    claims = rollout_suite.compute_claims(records)
    assert claims["rollout_1p5b_128seq_vs_vllm"] == 80.0 / 40.0
    assert sum(value is not None for value in claims.values()) == 1


def test_a_claim_is_the_median_over_runs_each_compared_with_itself() -> None:
    name, claim = "1p5b_ragged", "rollout_1p5b_ragged_vs_vllm"
    runs = [
        [rollout(name, "native", *[ours] * 3) | where, rollout(name, "in-process", *[10.0] * 3) | where]
        for ours, where in ((15.0, {}), (18.0, {"machine": "n"}), (40.0, {"commit": "d"}))
    ]
    assert rollout_suite.compute_claims(runs[0] + runs[1])[claim] == pytest.approx(1.65)
    assert rollout_suite.compute_claims([*runs[0], *runs[1], *runs[2]])[claim] == pytest.approx(1.8)
    assert rollout_suite.compute_claims([runs[0][0], runs[1][1]])[claim] is None


def test_two_repetitions_make_no_claim() -> None:
    records = [rollout("7b_256seq", "native", 1.0, 2.0, 3.0), rollout("7b_256seq", "in-process", 1.0, 2.0)]
    assert rollout_suite.compute_claims(records)["rollout_7b_256seq_vs_vllm"] is None


def test_without_log_probs_the_native_side_is_the_one_with_them() -> None:
    records = [
        rollout("1p5b_512seq", "native", 6.0, 6.0, 6.0),
        rollout("1p5b_512seq_nologprobs", "in-process", 4.0, 4.0, 4.0),
    ]
    claims = rollout_suite.compute_claims(records)
    assert claims["rollout_1p5b_512seq_vs_vllm_nologprobs"] == 1.5
    assert claims["rollout_1p5b_512seq_vs_vllm"] is None


def test_fraction_of_floor() -> None:
    seconds = 8.192  # of 1,024 steps: 8 ms each
    records = [
        rollout("1p5b_512seq", "native", *[512 * 1024 / seconds] * 3),
        {"kind": "floor", "floor_s": 0.005, "commit": "c", "machine": "m"},
    ]
    claims = rollout_suite.compute_claims(records)
    assert claims["decode_fraction_of_floor"] == pytest.approx(5 / 8)


def test_the_larger_of_the_two_log_prob_ratios_counts() -> None:
    gaps = {"native_gap": 0.01, "vllm_gap_sampling": 0.05, "vllm_gap_same_completions": 0.02}
    claims = rollout_suite.compute_claims([{"kind": "logprobs", "commit": "c", "machine": "m", **gaps}])
    assert claims["logprob_gap_vs_vllm"] == 0.5


def test_ragged_lengths_are_log_normal_and_the_same_each_time() -> None:
    case = rollout_cases.CASES["1p5b_ragged"]
    limits = [limit for some in case.limits() for limit in some]
    assert case.limits() == case.limits()
    assert len(limits) == 512 and min(limits) >= 1 and max(limits) == 2048
    # The median of 512 draws: standard error 300 * 0.8 * 1.25 / sqrt(512) = 13.
    assert abs(statistics.median(limits) - rollout_cases.MEDIAN_TOKENS) < 4 * 13
