"""The memory of a training step as planned against what PyTorch's allocator handed out."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, TrainingArguments

from colocate.memory.rows import Moment
from colocate.memory.train_plan import ACTIVATION_POLICIES, TrainPlan
from colocate.memory.workload import Workload
from colocate.policy.attention.cudnn_attention import has_cudnn
from colocate.policy.footprint import train_rows
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.reporting.metrics import Metrics
from colocate.types import Sample
from colocate.weights.shapes import ModelShapes
from tiny import make_trainer

pytestmark = pytest.mark.gpu

SHAPE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, max_position_embeddings=32768)
MODELS = {
    "grouped-tied": Qwen2Config(
        **SHAPE, vocab_size=32000, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "mha-untied": LlamaConfig(
        **SHAPE, vocab_size=32000, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False
    ),
}
TOLERANCE = 0.04


def objective(logprobs: Tensor, entropies: Tensor, batch: Any) -> tuple[Tensor, Metrics]:
    return -(logprobs * batch.mask).sum() * 1e-3, Metrics()


objective.has_entropy_bonus = False  # type: ignore[attr-defined]  # as that of the trainer's objective


def make_samples(num_prompts: int, generations: int, prompt: int, completion: int) -> list[Sample]:
    torch.manual_seed(0)

    def ids(length: int) -> Tensor:
        return torch.randint(32000, (length,), device="cuda")

    samples = []
    for key in range(num_prompts):
        prompt_ids = ids(prompt)
        samples += [
            Sample(prompt_ids, ids(completion), torch.ones(completion, device="cuda"), 1.0, prompt_key=key)
            for _ in range(generations)
        ]
    return samples


def measured_bytes(policy: Policy, samples: list[Sample]) -> int:
    policy.update(samples, objective)  # makes the moments, compiles kernels
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    policy.update(samples, objective)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("num_prompts", [1, 3], ids=["one micro-batch", "three"])
@pytest.mark.parametrize("lengths", [(512, 1024), (8192, 1024), (1024, 4096)], ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_a_steps_peak_is_as_planned(name, lora, lengths, num_prompts, tmp_path):
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(MODELS[name]).to("cuda", torch.bfloat16)
    if lora:
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    args = TrainingArguments(output_dir=str(tmp_path), bf16=True, report_to=[], learning_rate=1e-6)
    samples = make_samples(num_prompts, 4, *lengths)
    optimizer = PolicyOptimizer(model, args, 100)
    shapes = ModelShapes.of(model)
    workload = Workload(
        torch.bfloat16, *lengths, num_generations=4, num_step_sequences=len(samples),
        num_rollout_sequences=len(samples),
        has_cudnn=has_cudnn(torch.device("cuda"), torch.bfloat16, shapes.head_size),
    )  # fmt: skip
    errors = {}
    for activation_policy in ACTIVATION_POLICIES:
        plan = TrainPlan(activation_policy, lengths[0] + 4 * lengths[1], logprob_chunk_size=512)
        policy = Policy(model, optimizer, temperature=1.0, plan=plan, max_grad_norm=1.0)
        rows = train_rows(shapes, workload, plan)
        moments = {
            moment: sum(row.size_bytes for row in rows if row.moment in (None, moment))
            for moment in get_args(Moment)
        }
        predicted, measured = max(moments.values()), measured_bytes(policy, samples)
        errors[activation_policy] = predicted / measured - 1
        sizes = ", ".join(f"{moment} {size / 2**20:.0f}" for moment, size in moments.items())
        print(
            f"{activation_policy}: measured {measured / 2**20:.0f} MiB, planned {predicted / 2**20:.0f} "
            f"({errors[activation_policy]:+.1%}): {sizes}"
        )
    assert all(abs(error) <= TOLERANCE for error in errors.values()), errors


def test_a_training_run_follows_its_planner(tmp_path):
    """The planner is made from the real device, its plan is the policy's, and steps refine it."""

    trainer = make_trainer(tmp_path, use_cpu=False, bf16=True, max_steps=4)
    planner: Any = trainer.policy.planner
    plan = planner.plan()
    assert plan.fits and trainer.policy.plan == plan.train_plan
    assert plan.train_plan.activation_policy == "keep"  # a tiny model on a large device
    trainer.train()
    assert trainer.policy.plan.activation_policy == "keep"
