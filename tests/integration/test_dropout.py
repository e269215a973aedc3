"""Dropout acts in the trainer alone. A comparison of policy and engine, which have equal weights here, must
find no difference: a step is the step without any correction, as TRL takes it with its default engine."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tiny import logged, make_model, make_trainer

LENGTH = 64


def with_own_dropout():
    """A GPT-2 with its default rates of 0.1; it runs padded, through transformers."""
    return make_model("gpt2", n_embd=32, n_layer=4, n_head=4)


def with_lora_dropout():
    """A LoRA that has been trained, so that dropping its inputs shows; it runs packed, natively."""
    model = get_peft_model(make_model(), LoraConfig(r=8, lora_dropout=0.3, target_modules="all-linear"))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


MODELS = pytest.mark.parametrize("make", [with_own_dropout, with_lora_dropout])
OPTIONS = dict(
    per_device_train_batch_size=8,
    num_generations=8,
    max_completion_length=LENGTH,
    temperature=1.0,
    optim="sgd",
)


def trained(tmp_path, make, **options):
    trainer = make_trainer(tmp_path, model=make(), **{**OPTIONS, **options})
    trainer.train()
    return trainer


VESPO, MASK = {"loss_type": "vespo"}, {"off_policy_mask_threshold": 0.01}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (with_own_dropout, {}),
        (with_lora_dropout, {}),
        (with_own_dropout, VESPO),
        (with_lora_dropout, MASK),
        pytest.param(with_lora_dropout, VESPO, marks=pytest.mark.slow),
        pytest.param(with_own_dropout, MASK, marks=pytest.mark.slow),
    ],
)
@pytest.mark.share(2)
def test_dropout_is_not_taken_for_a_mismatch(tmp_path, make, options, caplog):
    compared = trained(tmp_path / "compared", make, **options)
    plain = {"vllm_importance_sampling_correction": False}
    alone = trained(tmp_path / "alone", make, **{**options, "off_policy_mask_threshold": None, **plain})
    assert logged(compared, "grad_norm") == pytest.approx(logged(alone, "grad_norm"), rel=1e-4)
    for part in ("min", "mean", "max"):
        ratios = logged(compared, f"sampling/importance_sampling_ratio/{part}")
        assert ratios == pytest.approx([1.0, 1.0], abs=1e-3)
    torch.testing.assert_close(compared.model.state_dict(), alone.model.state_dict(), rtol=0, atol=1e-6)
    told = [message for message in caplog.messages if "is trained with dropout" in message]
    assert len(told) == 1 and "without dropout" in told[0]


@MODELS
def test_the_trust_region_does_not_see_dropout(tmp_path, make):
    trainer = trained(tmp_path, make, loss_type="dppo", epsilon=1e-4, epsilon_high=1e-4)
    assert logged(trainer, "clip_ratio/region_mean") == [0.0, 0.0]


def test_every_pass_and_slice_is_corrected_without_dropout(tmp_path):
    """Two passes over two slices: only the first step is on-policy, and the weights stay."""
    options = dict(steps_per_generation=2, num_iterations=2, max_steps=4, learning_rate=0.0)
    trainer = trained(tmp_path, with_own_dropout, **options)
    ratios = logged(trainer, "sampling/importance_sampling_ratio/mean")
    assert ratios == pytest.approx([1.0] * 4, abs=1e-3)


def test_without_dropout_nothing_is_evaluated_for_it(tmp_path, caplog):
    trainer = make_trainer(tmp_path, model=with_own_dropout(), disable_dropout=True)
    logprobs, evaluated = trainer.policy.logprobs, []
    trainer.policy.logprobs = lambda samples: evaluated.append(len(samples)) or logprobs(samples)
    trainer.train()
    assert evaluated == [4], "the first rollout's check"
    assert "dropout" not in caplog.text
