"""The claims of the rollout benchmark, from records whose ratios are known."""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import pytest

from benchmarks.common import results as results_file
from benchmarks.common import runner
from benchmarks.rollout import cases as rollout_cases
from benchmarks.rollout import suite as rollout_suite

CLAIMS = {  # as the project's table names them
    "rollout_1p5b_512seq_vs_vllm",
    "rollout_1p5b_512seq_vs_vllm_nologprobs",
    "rollout_1p5b_128seq_vs_vllm",
    "rollout_7b_256seq_vs_vllm",
    "rollout_1p5b_longprompt_vs_vllm",
    "rollout_1p5b_ragged_vs_vllm",
    "decode_fraction_of_floor",
    "start_cold_s",
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


def test_a_later_run_is_added_to_the_result_and_one_given_again_replaces_itself(
    tmp_path, monkeypatch
) -> None:
    around = {"hardware": {"num_cores": 16}, "python": "3.12", "versions": {}}
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path))

    def merge(number: int, machine: str, ours: float) -> dict[str, Any]:
        records = tmp_path / str(number)
        records.mkdir()
        where = around | {"machine": machine}
        measured = [
            *(rollout(name, "native", *[ours] * 3) for name in rollout_cases.CASES),
            *(rollout(name, "in-process", *[10.0] * 3) for name in rollout_cases.CASES),
            {"kind": "floor", "floor_s": 0.005, "commit": "c"},
            *[{"kind": "cold_start", "seconds": 9.0, "commit": "c"}] * 3,
            {"kind": "logprobs", "commit": "c", "native_gap": 1.0}
            | {"vllm_gap_sampling": 2.0, "vllm_gap_same_completions": 2.0},
        ]
        for i, one in enumerate(measured):
            (records / f"{i:02}.json").write_text(json.dumps(one | where))
        rollout_suite.merge(argparse.Namespace(records=records, tiny=False, hardware="h200"))
        return json.loads((tmp_path / "rollout-h200.json").read_text())

    first, second, third = merge(1, "m", 10.0), merge(2, "n", 20.0), merge(3, "m", 15.0)
    ratios = [result["claims"]["rollout_7b_256seq_vs_vllm"] for result in (first, second, third)]
    assert ratios == pytest.approx([1.0, 1.5, 1.75])
    assert len(third["setup"]["runs"]) == 2 and len(third["repetitions"]) == len(second["repetitions"])
    assert third["setup"]["origins"].keys() == third["setup"]["runs"].keys() == {"c on m", "c on n"}


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


def test_records_of_two_commits_are_refused() -> None:
    first, second = (rollout("7b_256seq", "native", 1.0) for _ in range(2))
    with pytest.raises(ValueError, match=r"more than one commit: \['c', 'd'\]"):
        runner.check_same_origin([first, second | {"commit": "d"}])


def test_ragged_lengths_are_log_normal_and_the_same_each_time() -> None:
    case = rollout_cases.CASES["1p5b_ragged"]
    limits = [limit for some in case.limits() for limit in some]
    assert case.limits() == case.limits()
    assert len(limits) == 512 and min(limits) >= 1 and max(limits) == 2048
    # The median of 512 draws: standard error 300 * 0.8 * 1.25 / sqrt(512) = 13.
    assert abs(statistics.median(limits) - rollout_cases.MEDIAN_TOKENS) < 4 * 13
