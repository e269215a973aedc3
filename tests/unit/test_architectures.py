"""Architectures without a layout: they start, train a step and are saved whole, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_policy import make_samples
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from colocate.reporting.metrics import Metrics
from tiny import EOS, PAD, VOCAB_SIZE, changed_weights, make_tokenizer, make_trainer, weights_of

ENDS: dict[str, Any] = dict(vocab_size=VOCAB_SIZE, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=2)
SIZES: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    **ENDS,
)
EXPERTS: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2)
STARTS: dict[str, dict[str, Any]] = {
    # Its head reads from a part of what is called its base.
    "OPT": dict(
        hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32, **ENDS
    ),
    # No gradient checkpointing, which is on by default.
    "JetMoe": dict(**SIZES | dict(num_attention_heads=2, kv_channels=8, num_hidden_layers=1), **EXPERTS),
    # The name of its base leads to itself.
    "Llama4Text": dict(**SIZES, **EXPERTS, intermediate_size_mlp=48),
    # Its soft cap is called `logits_soft_cap`.
    "RecurrentGemma": dict(
        **SIZES | dict(num_key_value_heads=1, num_hidden_layers=3), lru_width=32, attention_window_size=32
    ),
    # Dropout by a rate of its layers' own, and of whole layers.
    "BioGpt": dict(**SIZES, layerdrop=0.5),
}


def config_of(name: str, **options: Any):
    return getattr(transformers, f"{name}Config")(**options)


def make_model(config) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", STARTS)
def test_it_trains_a_step_on_its_own_rollout(tmp_path, name):
    model = make_model(config_of(name, **STARTS[name]))
    before = weights_of(model)
    trainer = make_trainer(tmp_path, model=model, max_steps=1, disable_dropout=True)
    trainer.train()
    assert changed_weights(trainer.model, before)
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("XLNet", dict(d_model=32, n_layer=2, n_head=4, d_inner=48, **ENDS), "LMHeadModel is not causal"),
        ("RemBert", dict(**SIZES, is_decoder=True, output_embedding_size=48), "RemBertForCausalLM computes"),
        ("Roberta", dict(**SIZES, is_decoder=True), "RobertaForCausalLM computes its logits"),
    ],
)  # fmt: skip
def test_it_is_refused_by_name(tmp_path, name, options, reason):
    with pytest.raises(ValueError, match=reason):
        make_trainer(tmp_path, model=make_model(config_of(name, **options)))


# ── Mixtures of experts ──────────────────────────────────────────────────────────────────────────────────


def test_the_routers_loss_of_a_step_counts_each_micro_batch_by_its_sequences(tmp_path):
    """By hand: the mean over single sequences, and over a micro-batch of three and one of one."""
    config = config_of("Mixtral", **SIZES | dict(vocab_size=61), **EXPERTS, router_aux_loss_coef=0.25)
    model = make_model(config)
    samples = make_samples([(3, 5), (2, 4), (4, 4), (1, 9)])

    def by_module(part) -> torch.Tensor:
        rows = [torch.cat([s.prompt_ids, s.completion_ids]) for s in part]
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        ids = pad_sequence(rows, batch_first=True)
        return model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss.detach()

    def nothing(logprobs, entropies, batch):
        return 0.0 * logprobs.sum(), Metrics()

    longest = [samples[3], samples[0], samples[2]]
    for tokens, parts in ((1, [[s] for s in samples]), (30, [longest, [samples[1]]])):
        policy = make_trainer(tmp_path, model=model, max_tokens_per_microbatch=tokens).policy
        assert sorted(map(len, policy._microbatches(samples, packed=False))) == sorted(map(len, parts))
        want = sum(len(part) * by_module(part) for part in parts) / len(samples)
        metrics = policy.evaluate(samples, nothing).compute()
        assert metrics["aux_loss"] == pytest.approx(want.item(), rel=1e-5)
        assert metrics["loss"] == pytest.approx(0.25 * want.item(), rel=1e-5)
    update = policy.update(samples, nothing).metrics.compute()
    assert update["loss"] == pytest.approx(metrics["loss"], rel=1e-5) and update["grad_norm"] > 0


def test_a_routers_loss_that_the_model_does_not_have(tmp_path, caplog):
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.1, but Qwen3ForCausalLM is not a mixture"):
        make_trainer(tmp_path, router_aux_loss_coef=0.1)
    make_trainer(tmp_path, model=make_model(config_of("Llama4Text", **STARTS["Llama4Text"])))
    assert "Llama4ForCausalLM is trained without an auxiliary loss of its routers" in caplog.text


@pytest.mark.parametrize(
    "options", [dict(optim="lion_8bit"), dict(optim="adagrad"), dict(optim="adafactor")], ids=str
)
def test_a_resumed_run_has_the_optimizers_state(tmp_path, options):
    options = dict(
        options, learning_rate=1e-2, save_strategy="steps", save_steps=1, lr_scheduler_type="constant"
    )
    whole = make_trainer(tmp_path / "whole", max_steps=2, **options)
    whole.train()
    make_trainer(tmp_path / "cut", max_steps=1, **options).train()
    resumed = make_trainer(tmp_path / "cut", max_steps=2, **options)
    resumed.train(resume_from_checkpoint=True)
    assert not changed_weights(resumed.model, weights_of(whole.model))


# ── Vision-language checkpoints ──────────────────────────────────────────────────────────────────────────

ROPE: dict[str, Any] = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
QWEN_VISION: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=16, num_heads=2, depth=1, out_hidden_size=32, num_position_embeddings=16
)


def qwen3_5():
    return config_of(
        "Qwen3_5",
        text_config=dict(
            **SIZES,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        vision_config=QWEN_VISION,
    )


def qwen2_5_vl():
    text = {**SIZES, "rope_parameters": ROPE}
    del text["head_dim"]
    return config_of(
        "Qwen2_5_VL", text_config=text, vision_config=dict(**QWEN_VISION, fullatt_block_indexes=[0])
    )


def llava():
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    return config_of(
        "Llava",
        text_config=dict(model_type="llama", **SIZES),
        vision_config=dict(model_type="clip_vision_model", patch_size=14, **vision),
    )


def saved(config, directory) -> dict[str, torch.Tensor]:
    """A checkpoint with random weights: its tensors."""
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def test_a_vision_language_checkpoint_trained_on_text_is_saved_whole(tmp_path, caplog):
    before = saved(qwen3_5(), tmp_path / "base")
    options = dict(max_steps=1, weight_decay=0.1, processing_class=make_tokenizer())
    trainer = make_trainer(tmp_path / "run", model=str(tmp_path / "base"), **options)
    trainer.train()
    trainer.save_model()
    after = load_file(tmp_path / "run" / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    text = {name for name in before if not name.startswith("model.visual.")}
    assert changed == text and len(text) < len(before)
    assert "outside its language model" in caplog.text
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-4
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert len(held) == len([p for p in trainer.model.parameters() if p.requires_grad])


@pytest.mark.parametrize("config", [qwen2_5_vl, llava])
def test_images_are_not_supported_yet(tmp_path, config):
    saved(config(), tmp_path)
    with pytest.raises(
        ValueError, match="a vision-language model, and images are not supported yet"
    ) as error:
        make_trainer(tmp_path / "run", model=str(tmp_path))
    assert len(str(error.value)) < 500  # transformers would list every class there is


def test_what_is_no_causal_language_model(tmp_path):
    config_of("T5", d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, **ENDS).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a t5, which is no causal language model"):
        make_trainer(tmp_path / "run", model=str(tmp_path))
