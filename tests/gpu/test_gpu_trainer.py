"""GRPO runs on CUDA: the quickstart's task is learnt in bf16; the engine sleeps while the trainer works."""

from __future__ import annotations

import importlib
import json
import math
import random
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset

from colocate import GRPOConfig, GRPOTrainer
from tiny import make_trainer

pytestmark = pytest.mark.gpu

SCRIPTS = Path(__file__).parents[2] / "examples" / "quickstart"
MARGIN = 0.2
"""By which the reward has to rise in 100 steps. On a CPU it rises from 0.38 to 0.80, and the mean of 20 steps
of 128 completions has a standard error of 0.01."""


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def script(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return importlib.import_module(name)


def test_the_quickstarts_reward_rises_in_100_steps(tmp_path):
    addition, warm_start = script("addition"), script("warm_start")
    torch.manual_seed(0)
    tokenizer = warm_start.build_tokenizer()
    model = warm_start.build_model(tokenizer)
    warm_start.train(model, tokenizer, random.Random(0))
    rows = [addition.as_row(*problem) for problem in addition.problems(held_out=False)]
    args = GRPOConfig(
        output_dir=str(tmp_path), num_generations=4, per_device_train_batch_size=128,
        gradient_accumulation_steps=1, max_steps=100, max_completion_length=32, max_num_seqs=128,
        learning_rate=8e-4, warmup_steps=10, adam_beta2=0.95, scale_rewards="none", bf16=True,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(model, addition.correct, args, Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    trainer.engine.close()
    assert next(trainer.model.parameters()).dtype == torch.bfloat16
    assert next(trainer.model.parameters()).is_cuda
    steps = records(tmp_path)
    rewards = [step["reward"] for step in steps]
    assert len(rewards) == 100
    assert statistics.mean(rewards[-20:]) > statistics.mean(rewards[:20]) + MARGIN
    # What the engine said of its draws is what the trainer thinks of them, all along.
    gaps = [step["sampling/sampling_logp_difference/mean"] for step in steps]
    assert max(gaps) < 0.02


def test_the_engine_sleeps_while_the_trainer_works(tmp_path):
    trainer = make_trainer(
        tmp_path, use_cpu=False, bf16=True, max_steps=4, kv_cache_tokens=2**20, gradient_checkpointing=False
    )
    trainer.train()
    trainer.engine.close()
    steps = records(tmp_path)
    assert len(steps) == 4
    for number, step in enumerate(steps):
        assert step["memory"]["device"].startswith("cuda")
        spans = {span["phase"]: span for span in step["memory"]["spans"]}
        awake, asleep = (spans[name]["categories"]["kv_cache"] for name in ("rollout", "train"))
        # 2 layers, keys and values, 2 heads of size 8, 2 bytes each
        assert awake >= 2**20 * 2 * 2 * 2 * 8 * 2
        # In the first step nothing is known of what training needs, so it is given everything.
        assert asleep <= (0 if number == 0 else awake)
        assert spans["train"]["peak_bytes"] <= step["memory"]["limit_bytes"]
        assert math.isfinite(step["loss"])
