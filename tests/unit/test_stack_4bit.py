"""Adapters on 4-bit weights: the stack against PEFT's and bitsandbytes' own modules, the trainer against the
engine."""

import pytest
import torch
from engine_models import rollout_samples
from peft import LoraConfig, get_peft_model
from quantized_models import make_4bit_model
from test_stack import GROUPS, assert_equal, by_modules, by_stack, one_at_a_time, samples_of
from transformers import TrainingArguments

from colocate.engines.native.engine import NativeEngine
from colocate.memory.train_plan import ACTIVATION_POLICIES, TrainPlan
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.reporting.metrics import Metrics
from colocate.types import Prompt, Sample, SamplingParams
from colocate.weights.layouts import causal_lm
from colocate.weights.quantized import is_4bit


def make_qlora_model(dtype: torch.dtype = torch.float32, device: str = "cpu"):
    model = make_4bit_model("qwen2", dtype=dtype, device=device, vocab_size=61)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config).train()


@pytest.mark.parametrize("policy", ACTIVATION_POLICIES)
def test_gradients_are_those_of_peft_on_bitsandbytes(policy):
    model, samples = make_qlora_model(), samples_of(GROUPS)
    want = one_at_a_time(model, samples)
    assert want[1].keys() == {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert_equal(by_stack(model, samples, policy), want, 1e-4)


def logprobs_of_both(model, device: str) -> tuple[list[Sample], torch.Tensor, torch.Tensor]:
    """What the engine draws after an update of the adapters, with its log-probs and the trainer's."""
    args = TrainingArguments(output_dir="unused", report_to=[], learning_rate=1e-2, use_cpu=device == "cpu")
    optimizer = PolicyOptimizer(model, args, 10)
    policy = Policy(
        model, optimizer, temperature=1.0, plan=TrainPlan(tokens_per_microbatch=64), max_grad_norm=1.0
    )
    engine = NativeEngine(model)
    prompts = [Prompt(tuple(range(1, 12 + key)), key, range(3)) for key in range(4)]

    def rollout() -> list[Sample]:
        engine.wake_up()
        completions = engine.generate(prompts, SamplingParams(max_tokens=20, seed=3))
        engine.sleep()
        fields = dict(advantage=1.0, loss_weight=0.1)
        return rollout_samples(prompts, completions, device=device, share_prompts=True, **fields)

    def objective(logprobs, entropies, batch):
        return -(logprobs * batch.mask).sum() * 0.01, Metrics()

    before = rollout()
    policy.update(before, objective)
    samples = rollout()
    engine.close()
    assert any(
        not torch.equal(a.completion_ids, b.completion_ids) for a, b in zip(before, samples, strict=True)
    )
    engine_logprobs = torch.cat([sample.rollout_logprobs for sample in samples])
    return samples, engine_logprobs, torch.cat([logprobs for logprobs, _ in policy.logprobs(samples)])


def peft_logprobs(model, samples: list[Sample]) -> torch.Tensor:
    """The same tokens' log-probs by PEFT's and bitsandbytes' modules, in the model's own type."""
    states = by_modules(model.train(), samples)
    logprobs = causal_lm(model).lm_head(states).float().log_softmax(-1)
    tokens = torch.cat([sample.completion_ids for sample in samples])
    return logprobs.gather(1, tokens[:, None])[:, 0].detach()


def in_float32(model):
    """The model, for good, with 4-bit weights that stay rounded to the type they had before."""
    for module in model.float().modules():
        if is_4bit(module):
            module.compute_dtype = torch.float32
    return model


def test_engine_and_trainer_agree():
    model = make_qlora_model()
    samples, engine, trainer = logprobs_of_both(model, "cpu")
    want = peft_logprobs(model, samples)
    assert (engine - want).abs().max() < 1e-4 and (trainer - want).abs().max() < 1e-4
