"""A run that was killed and resumed is, bit for bit, the run that never was."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from small_runs import ALPHABET, make_dataset, make_model, make_trainer, read_metrics, without_timings
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from colocate import checkpoint
from colocate.checkpoint import CheckpointError, list_checkpoints

NUM_STEPS = 7


@pytest.fixture(autouse=True)
def one_thread():
    """Sums of floats depend on how many threads share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ── Every part of the state, in process ──────────────────────────────────────────────────────────────────


def moody_reward(completion_ids, **_: Any) -> list[float]:
    """A judge that draws: its generator is part of the run."""
    return [random.random() + sum(token < 12 for token in ids) / len(ids) for ids in completion_ids]


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)


def trained_adapter() -> Any:
    """A PEFT model whose adapter has learnt something, so that it is no reference-free start."""
    model = peft.get_peft_model(make_model(), lora())
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


CASES: dict[str, dict[str, Any]] = {
    "two_iterations": dict(num_iterations=2),
    "rollout_feeds_two_steps": dict(steps_per_generation=4, gradient_accumulation_steps=2, num_iterations=2),
    "step_spans_rollouts": dict(
        per_device_train_batch_size=4, steps_per_generation=3, gradient_accumulation_steps=2, num_iterations=3
    ),
    "step_needs_two_rollouts": dict(
        per_device_train_batch_size=4, steps_per_generation=2, gradient_accumulation_steps=3
    ),
    "bf16_with_masters": dict(bf16=True, learning_rate=1e-3, num_iterations=2),
    "dropout": dict(model="gpt2", num_iterations=2),
    "stream": dict(train_dataset="stream", num_iterations=2),
    "kl": dict(beta=0.1, num_iterations=2),
    "moving_reference": dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=2),
    "lora": dict(peft_config=lora(lora_dropout=0.2), beta=0.1, num_iterations=2),
    "older_adapter": dict(model="trained_adapter", beta=0.1),
    "adaptive_entropy": dict(
        use_adaptive_entropy=True, entropy_target=1.9, entropy_coef=0.02, entropy_coef_delta=0.01
    ),
    "entropy_quantile": dict(top_entropy_quantile=0.5, num_iterations=2),
    "drawing_reward_and_rare_logs": dict(reward_funcs=moody_reward, logging_steps=3, num_iterations=2),
    "weight_decay_sgd": dict(optim="sgd", weight_decay=0.1, lr_scheduler_type="constant_with_warmup"),
}


def build(output_dir: Path, case: dict[str, Any], **options: Any) -> Any:
    case = {"save_strategy": "steps", "save_steps": 1, "max_steps": NUM_STEPS, **case, **options}
    if case.get("train_dataset") == "stream":
        # A buffer smaller than the data, in shards: the order is that of reading.
        case["train_dataset"] = make_dataset().to_iterable_dataset(num_shards=2)
    if case.get("model") == "trained_adapter":
        case["model"] = trained_adapter()
    return make_trainer(output_dir, **case)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """By name of the case, a finished run with a checkpoint after every step."""
    runs: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in runs:
            runs[name] = build(tmp_path_factory.mktemp(name), CASES[name])
            runs[name].train()
        return runs[name]

    return run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("step", [1, 3, 4])
def test_resumed_equals_uninterrupted(uninterrupted, name, step, tmp_path):
    whole = uninterrupted(name)
    # As a kill leaves it: the record goes on beyond the checkpoint.
    shutil.copytree(whole.args.output_dir, tmp_path, dirs_exist_ok=True)
    for later in range(step + 1, NUM_STEPS + 1):
        shutil.rmtree(tmp_path / f"checkpoint-{later}")
    torch.manual_seed(999), random.seed(999)  # a new process starts with other random numbers

    resumed = build(tmp_path, CASES[name])
    resumed.train(resume_from_checkpoint=True)

    assert_same_run(resumed, whole)


def test_saving_does_not_change_a_run(uninterrupted, tmp_path):
    whole = uninterrupted("dropout")
    unsaved = build(tmp_path, CASES["dropout"], save_strategy="no")
    unsaved.train()
    assert not list_checkpoints(tmp_path)
    assert_same_run(unsaved, whole)


def assert_same_run(run: Any, expected: Any) -> None:
    names = [name for name, _ in run.model.named_parameters()]
    assert names == [name for name, _ in expected.model.named_parameters()]
    assert_same(dict(run.model.named_parameters()), dict(expected.model.named_parameters()))
    assert_same(run.policy.state_dict(), expected.policy.state_dict())
    assert_same(
        [without_timings(entry) for entry in run.state.log_history],
        [without_timings(entry) for entry in expected.state.log_history],
    )
    assert [r["step"] for r in read_metrics(run.args.output_dir)] == list(range(1, NUM_STEPS + 1))
    assert_same(read_metrics(run.args.output_dir), read_metrics(expected.args.output_dir))
    completions = [Path(r.args.output_dir, "completions.jsonl").read_text() for r in (run, expected)]
    assert completions[0] == completions[1] != ""


def assert_same(actual: Any, expected: Any, path: str = "") -> None:
    """Equal down to the bits, with NaN equal to itself."""
    assert type(actual) is type(expected), path
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), path
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key in expected:
            assert_same(actual[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), path
        for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, b, f"{path}/{index}")
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(actual), path
    else:
        assert actual == expected, f"{path}: {actual} != {expected}"
