"""The first rollout's log-probs against the policy's: a warning where they are not one model."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import replace

import pytest
import torch
from engine_models import make_gpt2, make_lora, make_model, make_prompts, rollout_samples
from transformers import TrainingArguments

from colocate import GRPOConfig
from colocate.engines.native.engine import NativeEngine
from colocate.engines.transformers_engine import TransformersEngine
from colocate.experience.agreement import Agreement
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.run.build import build_agreement
from colocate.types import Sample, SamplingParams
from tiny import make_trainer


def make_policy(model, temperature: float) -> Policy:
    arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    return Policy(model, PolicyOptimizer(model, arguments, 1), temperature=temperature, max_grad_norm=1.0)


def rollout(engine, sampling: SamplingParams, *, tells: bool = True) -> list[Sample]:
    prompts = make_prompts([3, 9, 5, 7], num_generations=4)
    engine.wake_up()
    samples = rollout_samples(prompts, engine.generate(prompts, sampling))
    return samples if tells else [replace(sample, rollout_logprobs=None) for sample in samples]


def with_other_weights(model, alpha: float):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=alpha)
    return other


def native(model):
    return NativeEngine(model, max_num_seqs=16, page_size=4)


def padded(model):
    return TransformersEngine(model, pad_token_id=0)


FILTERS = {"top_k": 8, "top_p": 0.8, "temperature": 0.6}


@pytest.mark.parametrize("tells", [True, False], ids=["log-probs", "tokens-alone"])
@pytest.mark.parametrize("options", [{}, FILTERS], ids=["plain", "filtered"])
@pytest.mark.parametrize(
    ("model", "make_engine"),
    [
        (make_model("qwen3"), native),
        (make_lora("qwen2"), native),
        (make_gpt2(), padded),
        (make_model("qwen3", initializer_range=0.05).bfloat16(), native),
    ],
    ids=["native", "native-lora", "transformers", "native-bfloat16"],
)
def test_one_model_is_silent(caplog, model, make_engine, options, tells):
    model = model.train()  # dropout, of which a comparison must know nothing
    sampling = SamplingParams(max_tokens=16, seed=1, **options)
    samples = rollout(make_engine(model), sampling, tells=tells)
    Agreement(make_engine(model), make_policy(model, sampling.temperature), sampling).check(samples)
    assert caplog.messages == []


@pytest.mark.parametrize(("shift", "warns"), [(0.0, False), (0.07, True)])
def test_in_bfloat16_a_models_own_noise_is_the_measure(caplog, shift, warns):
    """Below what any model in bfloat16 may show, and far above what this one does."""
    model = make_model("qwen3", initializer_range=0.05).bfloat16()
    sampling = SamplingParams(max_tokens=16, seed=1)
    samples = [
        replace(s, rollout_logprobs=s.rollout_logprobs - shift) for s in rollout(native(model), sampling)
    ]
    Agreement(native(model), make_policy(model, 1.0), sampling).check(samples)
    assert ["rounding in bfloat16 explains 0.05" in message for message in caplog.messages] == [True] * warns


@pytest.mark.parametrize("alpha", [0.0, 0.2], ids=["one model", "another"])
def test_rounding_to_8_bits_is_no_other_model(caplog, alpha, tmp_path):
    model = make_model("qwen3", initializer_range=0.05)
    options = dict(max_num_seqs=16, page_size=4, rollout_precision="fp8")
    engine, sampling = NativeEngine(with_other_weights(model, alpha), **options), SamplingParams(16, seed=1)
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], rollout_precision="fp8")
    caplog.clear()
    build_agreement(engine, make_policy(model, 1.0), sampling, args).check(rollout(engine, sampling))
    assert len(caplog.messages) == (alpha > 0)
    if alpha:
        assert "rounding to 8 bits explains 0.1" in caplog.text


@pytest.mark.parametrize("tells", [True, False], ids=["log-probs", "tokens-alone"])
def test_another_model_is_said_once_and_again_after_a_loss(caplog, tells):
    model = make_model("qwen3")
    sampling = SamplingParams(max_tokens=16, seed=1)
    engine, policy = native(with_other_weights(model, 0.2)), make_policy(model, 1.0)
    samples = rollout(engine, sampling, tells=tells)
    agreement = Agreement(engine, policy, sampling)
    agreement.check([])
    for num_warnings in (1, 1, 2):
        engine.num_restarts = num_warnings - 1
        agreement.check(samples)
        assert len(caplog.messages) == num_warnings
    # By hand from the model's own forward, for those that are compared.
    distances = []
    for sample in samples[::2]:
        ids = torch.cat([sample.prompt_ids, sample.completion_ids])
        logprobs = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
        drawn = logprobs.gather(1, sample.completion_ids[:, None])[:, 0]
        if tells:
            distances.append((drawn - sample.rollout_logprobs).abs())
        else:
            distances.append(-(drawn - (logprobs.exp() * logprobs).sum(-1)))
    expected = torch.cat(distances)
    assert f"NativeEngine{' differ from the policy' if tells else ' tells no log-probs'}" in caplog.text
    mean, largest = expected.mean(), expected.max()
    assert f"by {mean:.3g} nats per token on average and {largest:.3g} at most" in caplog.text


def test_what_a_tool_has_given_is_not_looked_at(caplog):
    """Each completion goes on with the least likely tokens. Known as given, they prove nothing."""
    model, sampling = make_model("qwen3"), SamplingParams(max_tokens=16, seed=1)
    drawn = rollout(native(model), sampling, tells=False)
    turns = []
    for sample in drawn:
        ids = torch.cat([sample.prompt_ids, sample.completion_ids])
        given = model(ids[None]).logits[0, -1].argsort()[:16]
        completion_ids = torch.cat([sample.completion_ids, given])
        mask = torch.cat([torch.ones(len(completion_ids) - 16), torch.zeros(16)])
        turns.append(replace(sample, completion_ids=completion_ids, completion_mask=mask))
    Agreement(native(model), make_policy(model, 1.0), sampling).check(turns)
    assert caplog.messages == []
    # A completion that was cut short is masked as a whole, and looked at as a whole.
    masked = [replace(turn, completion_mask=torch.zeros_like(turn.completion_mask)) for turn in turns]
    Agreement(native(model), make_policy(model, 1.0), sampling).check(masked)
    assert "tells no log-probs" in caplog.text


def test_a_penalty_makes_tokens_unlikely_and_proves_nothing(caplog):
    model, sampling = make_model("qwen3"), SamplingParams(max_tokens=16, repetition_penalty=5.0)
    samples = rollout(native(model), sampling, tells=False)
    Agreement(native(model), make_policy(model, 1.0), sampling).check(samples)
    assert caplog.messages == []


def test_nothing_is_concluded_from_tokens_that_more_than_sampling_decides(caplog):
    model, sampling = make_model("qwen3"), SamplingParams(max_tokens=16)
    other = native(with_other_weights(model, 0.2))
    samples = rollout(other, sampling, tells=False)
    Agreement(other, make_policy(model, 1.0), sampling, is_drawn_otherwise=True).check(samples)
    assert caplog.messages == []
    Agreement(other, make_policy(model, 1.0), sampling).check(samples)
    assert "tells no log-probs" in caplog.text


def test_a_run_checks_its_first_rollout(tmp_path, caplog):
    trainer = make_trainer(tmp_path)
    generate, policy_logprobs, num_scored = trainer.engine.generate, trainer.policy.logprobs, []
    trainer.policy.logprobs = lambda samples: num_scored.append(len(samples)) or policy_logprobs(samples)
    trainer.engine.generate = lambda *request: [
        dataclasses.replace(c, logprobs=tuple(x - 0.5 for x in c.logprobs)) for c in generate(*request)
    ]
    trainer.train()
    assert num_scored == [4], "a later rollout costs nothing"
    messages = [message for message in caplog.messages if "differ from the policy's" in message]
    assert len(messages) == 1 and "by 0.5 nats per token on average and 0.5 at most" in messages[0]
