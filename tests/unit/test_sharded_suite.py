"""The benchmark of several GPUs: cases that divide among their processes, claims from known records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import launcher_configs
from benchmarks.sharded import cases, suite

GIB = 2**30


def step(
    label: str, *seconds: float, train: float = 0.0, rollout: float = 0.0, **more: Any
) -> dict[str, Any]:
    phases = {"train": train, "rollout": rollout}
    steps = [{"step_s": s, "phases_s": phases, "published_bytes": 0} for s in (99.0, *seconds)]
    record = {"kind": "step", "part": "p", "label": label, "num_warm_up": 1, "steps": steps}
    return record | {"commit": "c", "machine": "m"} | more


def context(claim: str, length: int, teacher_forced: bool, passed: bool) -> dict[str, Any]:
    run = {"kind": "context", "part": claim, "length": length, "teacher_forced": teacher_forced}
    return run | {
        "passed": passed,
        "predicted_peak_bytes": (15 if teacher_forced else 11) * GIB,  # of which one part never was there
        "driver_peak_bytes": [10 * GIB, 11 * GIB],
    }


def test_work_divides_among_the_processes() -> None:
    for case in (case for part in cases.STEPS.values() for case in part):
        micro_batch = case.peer.micro_batch if case.peer else case.work.num_completions // case.num_gpus
        assert case.work.num_completions % (micro_batch * case.num_gpus) == 0
        assert case.work.num_prompts % case.num_gpus == 0, "no group is cut"


def test_claims_of_steps_are_ratios_of_medians_after_the_warm_up() -> None:
    records = [
        step("1p5b-1gpu", 4.0, 4.2, 9.0),
        step("1p5b-2gpu-none", 4.0),
        step("1p5b-2gpu", 4.2),
        step("1p5b-2gpu-half", 2.8),
        step("7b-t1", 20.0, train=10.0, rollout=4.0),
        step("7b-t2", 22.0, train=10.5, rollout=5.0),
        step("7b-trl", 70.0),
    ]
    claims = suite.compute_claims(records)
    assert claims["optimizer_sharding_overhead_1p5b"] == pytest.approx(1.05)
    assert claims["weak_scaling_2gpu_1p5b"] == pytest.approx(1.0)
    assert claims["strong_scaling_2gpu_1p5b"] == pytest.approx(0.75)
    assert claims["weight_sharding_overhead_7b"] == pytest.approx(1.05)
    assert claims["tp2_decode_7b_vs_two_engines"] == pytest.approx(0.8)
    assert claims["step_7b_full_2gpu_vs_trl"] == pytest.approx(3.5)
    assert claims["publish_sharded_bytes"] == 0
    assert claims["full_14b_2xh200_context"] is None and claims["plan_error_2gpu"] is None


def test_the_fastest_peer_of_our_commit_and_machine_counts() -> None:
    records = [
        step("7b-t1", 20.0),
        step("7b-trl", 70.0),
        step("7b-trl-16", 30.0, commit="older"),
        step("7b-trl-32", 40.0, machine="another"),
        step("7b-trl-zero3", 50.0, 60.0, 50.0),
    ]
    assert suite.compute_claims(records)["step_7b_full_2gpu_vs_trl"] == pytest.approx(2.5)
    assert suite.compute_claims(records[:1] + records[2:4])["step_7b_full_2gpu_vs_trl"] is None
    assert suite.compute_claims(records[1:])["step_7b_full_2gpu_vs_trl"] is None


def test_zero3_starts_as_accelerate_starts_it(tmp_path: Path) -> None:
    found = launcher_configs.environment_of(launcher_configs.ZERO3, tmp_path)
    fields = found.pop("ACCELERATE_CONFIG_DS_FIELDS")  # read only beside a file of DeepSpeed's
    assert fields.endswith("zero_stage")
    assert {name: value for name, value in found.items() if name.startswith("ACCELERATE_")} == cases.ZERO3


def test_claims_of_decoding_together_and_of_resuming() -> None:
    together = {"kind": "tensor_parallel", "part": "tp2", "gap_of_two": 6e-4, "gap_of_one": 4e-4}
    sums = [{"checksums": {"weights/a": text}} for text in ("1", "1", "1", "2")]
    resume = {"kind": "resume", "part": "resume", "runs": sums}
    claims = suite.compute_claims([together | {"decode": {"share": 0.1}}, resume])
    assert claims["logprob_gap_tp2"] == pytest.approx(1.5) and claims["tp2_allreduce_share"] == 0.1
    assert claims["resume_other_world_size_exact"] == 0
    assert suite.compute_claims([resume | {"runs": sums[:3]}])["resume_other_world_size_exact"] is None
    exact = suite.compute_claims([resume | {"runs": [*sums[:3], sums[0]]}])
    assert exact["resume_other_world_size_exact"] == 1


def test_a_context_counts_when_both_divisions_pass() -> None:
    claim = "full_7b_2x80gb_context"
    records = [context(claim, length, forced, True) for length in (4096, 8192) for forced in (False, True)]
    records += [context(claim, 16384, False, True), context(claim, 16384, True, False)]
    claims = suite.compute_claims(records)
    assert claims[claim] == 8192
    assert claims["plan_error_2gpu"] == pytest.approx(0.1)
