"""Modules that compute something else in training mode than in rollouts, or in PEFT's wrapper than inside."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, PveraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PhimoeConfig

from colocate.policy.model.training_mode import check_wrapper, training_only
from tiny import EOS, PAD, VOCAB_SIZE, logged, make_model, make_trainer, weights_of


def make_phimoe(**options):
    torch.manual_seed(0)
    config = PhimoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, pad_token_id=PAD,
        eos_token_id=EOS, bos_token_id=None,
        initializer_range=0.2, attention_dropout=0.0, **options,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def test_noise_of_a_router_is_told_by_name(tmp_path, caplog):
    trainer = make_trainer(tmp_path, model=make_phimoe(input_jitter_noise=0.1), disable_dropout=True)
    (message,) = [text for text in caplog.messages if "In training mode" in text]
    assert "Phimoe" in message and "input_jitter_noise=0.1" in message
    trainer.train()
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama"])
def test_models_with_dropout_alone_have_nothing_else(name):
    model = make_model(name).train()
    before, state = weights_of(model), torch.get_rng_state()
    assert training_only(model) == []
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_noise_of_a_new_adapter_is_found():
    """It adds nothing yet, so that it is looked at with other values, which are put back."""
    model = get_peft_model(make_model("llama"), PveraConfig(target_modules=["q_proj"]))
    before = weights_of(model)
    assert training_only(model) == ["Linear"]  # PEFT's class has this name, too
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_adapter_that_works_in_the_wrapper_is_found():
    model = get_peft_model(make_model("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    check_wrapper(model)

    @contextmanager
    def hooks(*args, **kwargs):
        layer = model.base_model.model.model.layers[0].mlp
        handle = layer.register_forward_hook(lambda module, inputs, output: 2 * output)
        yield
        handle.remove()

    model.base_model._enable_peft_forward_hooks = hooks
    with pytest.raises(ValueError, match=r"LoraConfig.*PEFT's forward"):
        check_wrapper(model)
