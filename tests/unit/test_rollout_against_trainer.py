"""The engine's log-probs are the trainer's: two forwards written apart, one over pages, one over packs."""

from __future__ import annotations

import pytest
import torch
from engine_models import CONFIGS, make_model, make_prompts, rollout_samples
from transformers import TrainingArguments

from colocate.engines.native.engine import NativeEngine
from colocate.memory.train_plan import TrainPlan
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.types import SamplingParams


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_of_a_rollout_are_those_of_the_packed_forward(name):
    model = make_model(name)
    arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    temperature = 0.8
    policy = Policy(
        model,
        PolicyOptimizer(model, arguments, 1),
        temperature=temperature,
        plan=TrainPlan(tokens_per_microbatch=64),
        max_grad_norm=1.0,
    )
    engine = NativeEngine(model, max_num_seqs=5, page_size=4)
    prompts = make_prompts([3, 17, 9, 1], num_generations=3)
    engine.wake_up()
    completions = engine.generate(prompts, SamplingParams(max_tokens=20, temperature=temperature))
    samples = rollout_samples(prompts, completions)
    for completion, (logprobs, _) in zip(completions, policy.logprobs(samples), strict=True):
        torch.testing.assert_close(logprobs, torch.tensor(completion.logprobs), atol=1e-5, rtol=1e-5)
