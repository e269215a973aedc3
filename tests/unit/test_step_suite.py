"""The step benchmark: arithmetic against counted operations, claims from records with known ratios."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from benchmarks.rollout import cases as rollout_cases
from benchmarks.step import cases as step_cases
from benchmarks.step import commits, profile
from benchmarks.step import cpu as step_cpu
from benchmarks.step import run as step
from benchmarks.step import suite as step_suite
from tiny import StubEngine

CLAIMS = {  # as the project's table names them
    "step_1p5b_vs_trl",
    "step_1p5b_longprompt_vs_trl",
    "step_7b_lora_vs_trl",
    "train_mfu_1p5b",
    "standby_slowdown",
}


def counted_forward_flop(num_tokens: int, num_scored: int) -> tuple[int, int]:
    """(layers, head) of one sequence, token by token against a cache: every query meets its own keys only."""
    model = Qwen2ForCausalLM(Qwen2Config(**rollout_cases.SHAPES["tiny"], attn_implementation="eager")).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        with FlopCounterMode(display=False) as layers:
            for token in range(num_tokens):
                model.model(input_ids=torch.tensor([[token]]), past_key_values=cache)
        with FlopCounterMode(display=False) as head:
            model.lm_head(torch.zeros(num_scored, model.config.hidden_size))
    return layers.get_total_flops(), head.get_total_flops()


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_flop_of_a_step_are_three_times_those_counted_forward(shares_prompts: bool) -> None:
    prompt, new, generations = 7, 5, 3
    work = step_cases.Work("tiny", 2, generations, prompt, new)
    flop = step_cases.training_flop(work, shares_prompts=shares_prompts)
    whole, head = counted_forward_flop(prompt + new, new)
    prompt_alone, _ = counted_forward_flop(prompt, new)
    group = prompt_alone + generations * (whole - prompt_alone) if shares_prompts else generations * whole
    assert flop["layers"] + flop["attention"] == 3 * work.num_prompts * group
    assert flop["head"] == 3 * work.num_prompts * generations * head
    assert flop["adapters"] == 0
    assert flop["total"] == sum(value for name, value in flop.items() if name != "total")


def test_frozen_weights_have_no_gradient_and_adapters_do() -> None:
    whole = step_cases.training_flop(step_cases.Work("tiny", 1, 2, 3, 4), shares_prompts=False)
    lora = step_cases.training_flop(step_cases.Work("tiny", 1, 2, 3, 4, lora_rank=8), shares_prompts=False)
    for name in ("layers", "head"):
        assert 6 * lora[name] == 4 * whole[name]
    assert lora["attention"] == whole["attention"]
    hidden, mlp, kv = 64, 128, 32
    sides = 2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + mlp)
    assert lora["adapters"] == 6 * 2 * 8 * sides * (2 * (3 + 4))


def test_of_the_1p5b_shape_six_flop_per_parameter_and_token() -> None:
    work = step_cases.COMPARISONS["1p5b"].work
    flop = step_cases.training_flop(work, shares_prompts=False)
    # Qwen2.5-1.5B has 1.54 billion parameters, of which 0.23 are the head (they are the embedding's, too).
    per_token = flop["layers"] / work.num_tokens / 6
    assert per_token == pytest.approx(1.31e9, rel=0.01)
    assert flop["head"] / (256 * 512) / 6 == 151936 * 1536
    assert work.num_processed_tokens(shares_prompts=True) == 32 * 256 + 256 * 512


def record(framework: str, label: str, *steps: dict[str, Any] | float, warm_up: int = 0) -> dict[str, Any]:
    made = [
        step if isinstance(step, dict) else {"step_s": step, "phases_s": {"train": step / 2}}
        for step in steps
    ]
    process = dict(kind="step", framework=framework, label=label, num_warm_up=warm_up)
    return process | {"steps": made, "flop": {"total": 990e12}}


def test_names_are_those_of_the_table() -> None:
    claims = step_suite.compute_claims([])
    assert set(claims) == CLAIMS and set(claims.values()) == {None}


def test_ratio_is_of_medians_after_the_warm_up_over_all_rounds() -> None:
    records = [
        record("trl", "1p5b", 99.0, 15.0, 16.0, warm_up=1),
        record("colocate", "1p5b", 99.0, 4.0, 5.0, 8.0, warm_up=1),
        record("trl", "1p5b", 99.0, 17.0, warm_up=1),
        record("trl", "7b_lora", 30.0, 30.0),
    ]
    claims = step_suite.compute_claims(records)
    assert claims["step_1p5b_vs_trl"] == 16.0 / 5.0
    assert claims["step_7b_lora_vs_trl"] is None and claims["step_1p5b_longprompt_vs_trl"] is None
    # Fewer steps than the case asks for make no claim.
    few = [record("trl", "1p5b", 15.0, 16.0), record("colocate", "1p5b", 4.0, 5.0, 6.0)]
    assert step_suite.compute_claims(few)["step_1p5b_vs_trl"] is None
    # One second's work of the GPU in 2, 2.5 and 4 seconds.
    assert claims["train_mfu_1p5b"] == pytest.approx(1 / 2.5)


def test_standby_leaves_out_the_first_step_of_each_block() -> None:
    block = step_suite.STANDBY_BLOCK

    def steps(first_s: float, others_s: float, keeps: bool) -> list[dict[str, Any]]:
        seconds = [first_s] + [others_s] * (block - 1)
        return [{"step_s": s, "keeps_kv_cache": keeps} for s in seconds]

    with_handover, without = steps(50.0, 5.1, False), steps(70.0, 5.0, True)
    warm_up: list[dict[str, Any]] = [{"step_s": 90.0, "keeps_kv_cache": False}]
    records = [record("colocate", "standby", *warm_up, *with_handover, *without, warm_up=1)]
    assert step_suite.compute_claims(records)["standby_slowdown"] == pytest.approx(5.1 / 5.0)
    half = [record("colocate", "standby", *warm_up, *with_handover, warm_up=1)]
    assert step_suite.compute_claims(half)["standby_slowdown"] is None


def test_trl_runs_with_what_was_fastest() -> None:
    first = step_cases.COMPARISONS["1p5b"].candidates[0]
    assert step_suite.best_settings([], "1p5b") == first
    tuned = [
        record("trl", "tune-1p5b", 90.0, 3.0, warm_up=1)
        | {"micro_batch": micro_batch, "gradient_checkpointing": not liger, "liger": liger}
        for micro_batch, liger in ((16, True), (64, False))
    ]
    tuned[1]["steps"][1]["step_s"] = 2.5
    assert step_suite.best_settings(tuned, "1p5b") == step_cases.PeerSettings(64, True, False)
    assert step_suite.best_settings(tuned, "7b_lora") == step_cases.COMPARISONS["7b_lora"].candidates[0]


@pytest.mark.parametrize("name", list(step_cases.COMPARISONS))
def test_every_candidate_divides_its_work_and_its_tuning(name: str) -> None:
    comparison = step_cases.COMPARISONS[name]
    share = comparison.work.num_prompts // step_cases.TUNING_SHARE * comparison.work.num_generations
    for candidate in comparison.candidates:
        assert comparison.work.num_completions % candidate.micro_batch == 0
        assert share % candidate.micro_batch == 0


def test_nested_seconds_count_only_where_they_are_innermost(monkeypatch) -> None:
    now_s = 0

    class Owner:
        def outer(self) -> None:
            nonlocal now_s
            now_s += 2
            self.inner()

        def inner(self) -> None:
            nonlocal now_s
            now_s += 5

    monkeypatch.setattr(step.time, "perf_counter", lambda: now_s)
    owner, stopwatch = Owner(), step.Stopwatch()
    stopwatch.watch(owner, "outer")
    stopwatch.watch(owner, "inner")
    owner.outer()
    owner.inner()
    assert stopwatch.seconds == {"inner": 10, "outer": 2}


def test_handover_that_is_fixed_goes_on_learning() -> None:
    handover = step.FixedHandover(StubEngine(lambda prompt, member: []))
    assert handover.keep_bytes == 0
    span = {"phase": "train", "before_bytes": 10, "after_bytes": 10, "peak_bytes": 20, "categories": {}}
    handover.fixed_bytes = 1000
    handover.learn({"device": "cuda:0", "limit_bytes": 100, "spans": [span]})
    assert handover.keep_bytes == 1000
    handover.fixed_bytes = None
    assert handover.keep_bytes == 90 - 25


def test_on_a_cpu_training_is_what_generation_leaves_of_a_step() -> None:
    def of(framework: str, phase: str, rollout_s: float, *steps_s: float) -> dict[str, Any]:
        steps = [{"step_s": s, "phases_s": {phase: rollout_s}} for s in steps_s]
        return record(framework, "cpu", *steps, warm_up=1) | {"work": vars(step_cpu.WORK)}

    ours = of("colocate", "rollout", 2.0, 99.0, 4.0, 6.0, 5.0)
    theirs = of("trl", "_generate_single_turn", 3.0, 99.0, 9.0, 9.0, 9.0)
    claims = step_cpu.compute_claims([ours, theirs])
    assert claims["rollout_tokens_per_s"] == 64 * 128 / 2 and claims["rollout_vs_trl"] == 1.5
    assert claims["training_tokens_per_s"] == 64 * (64 + 128) / 3 and claims["training_vs_trl"] == 2.0
    assert claims["step_vs_trl"] == 9 / 5
    assert step_cpu.compute_claims([ours]) == {}


def test_a_commit_is_compared_with_the_one_before_it(tmp_path) -> None:
    records = [
        record("colocate", "", 9.0, seconds, seconds, warm_up=1) | {"commit": commit}
        for commit, seconds in (("old", 3.0), ("new", 2.0), ("old", 3.2), ("new", 2.0))
    ]
    assert commits.compute_claims(records) == {"rollout_ratio": None, "step_ratio": 1.55}
    assert commits.program(tmp_path, "step") == ["-m", "benchmarks.step.run"]
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/step.py").touch()
    assert commits.program(tmp_path, "step") == ["benchmarks/step.py"]


def test_a_profile_has_every_kernel_under_one_role() -> None:
    kernels = {
        "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NTN": 1.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma": 2.0,
        "_rms_norm_backward_kernel": 4.0,
        "_gradient_kernel": 8.0,
        "void at::native::multi_tensor_apply_kernel<FusedOptimizer>": 16.0,
        "Memcpy DtoD (Device -> Device)": 32.0,
    }
    roles = (*(role for role, _ in profile.ROLES), profile.OTHER)
    assert [profile.seconds_of(role, kernels) for role in roles] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
