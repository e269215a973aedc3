"""Architectures without a layout: they start, train a step and are saved whole, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file
from test_policy import make_samples
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from vision_configs import LINEAR_ATTENTION, MROPE, QWEN_VISION, VISION

from colocate.commands.run_options import require
from colocate.policy.model.precision import check_types
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
    # Their logits have a factor of their own.
    "FalconH1": dict(
        **SIZES, lm_head_multiplier=0.3, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1,
        mamba_d_state=8, mamba_chunk_size=8,
    ),
    "HyperCLOVAX": dict(**SIZES, logits_scaling=0.3),
    # A divisor, and rows of padding in its head.
    "InklingText": dict(
        **SIZES, unpadded_vocab_size=VOCAB_SIZE - 3, logits_mup_width_multiplier=3.0, d_rel=4, rel_extent=16,
        swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=16,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    ),
    # No configuration of a padding token.
    "CodeGen": dict(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, eos_token_id=EOS,
        bos_token_id=2,
    ),
    # Dropout by a rate of its layers' own, and of whole layers.
    "BioGpt": dict(**SIZES, layerdrop=0.5),
}  # fmt: skip


def config_of(name: str, **options: Any):
    return getattr(transformers, f"{name}Config")(**options)


def make_model(config) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.share(2)
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
@pytest.mark.share(3)
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


def qwen3_5():
    return config_of(
        "Qwen3_5",
        text_config=SIZES | LINEAR_ATTENTION,
        vision_config=QWEN_VISION,
    )


def qwen2_5_vl():
    text = {**SIZES, "rope_parameters": MROPE}
    del text["head_dim"]
    return config_of(
        "Qwen2_5_VL", text_config=text, vision_config=dict(**QWEN_VISION, fullatt_block_indexes=[0])
    )


def llava():
    return config_of(
        "Llava",
        text_config=dict(model_type="llama", **SIZES),
        vision_config=dict(model_type="clip_vision_model", **VISION),
    )


def saved(config, directory) -> dict[str, torch.Tensor]:
    """A checkpoint with random weights: its tensors."""
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def qwen3_vl_moe():
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return config_of(
        "Qwen3VLMoe",
        text_config=SIZES | experts | {"rope_parameters": MROPE},
        vision_config=dict(**QWEN_VISION, deepstack_visual_indexes=[0]),
    )


def mistral3():
    """Mistral Small 3.x; Ministral 3 has this class, too."""
    return config_of(
        "Mistral3",
        text_config=dict(model_type="ministral3", **SIZES),
        vision_config=dict(model_type="pixtral", head_dim=8, **VISION),
    )


@pytest.mark.parametrize("is_adapted", [False, True], ids=["whole", "LoRA"])
@pytest.mark.parametrize("config", [qwen3_5, qwen2_5_vl, qwen3_vl_moe, mistral3, llava])
@pytest.mark.share(3)
def test_a_vision_language_checkpoint_trained_on_text_is_saved_whole(tmp_path, caplog, config, is_adapted):
    before = saved(config(), tmp_path / "base")
    options: dict[str, Any] = dict(max_steps=1, weight_decay=0.1, processing_class=make_tokenizer())
    if is_adapted:
        options["peft_config"] = LoraConfig(target_modules="all-linear", r=2)
    trainer = make_trainer(tmp_path / "run", model=str(tmp_path / "base"), **options)
    start = weights_of(trainer.model)
    trainer.train()
    trainer.save_model()
    assert "outside its language model" in caplog.text
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-4
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert len(held) == len([p for p in trainer.model.parameters() if p.requires_grad])
    moved = changed_weights(trainer.model, start)
    assert moved and not [name for name in moved if "visual" in name or "vision" in name]
    if is_adapted:
        trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
        assert trained and not [name for name in trained if "visual" in name or "vision" in name]
        return
    after = load_file(tmp_path / "run" / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    tower = ("visual", "vision", "projector")
    text = {name for name in before if not any(part in name for part in tower)}
    # An expert that no token was sent to stays as it is.
    assert changed <= text < before.keys() and len(changed) > 0.7 * len(text)


def test_llama_4_by_name_is_refused_in_words(tmp_path):
    config = config_of(
        "Llama4",
        text_config=STARTS["Llama4Text"],
        vision_config=dict(hidden_size=16, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                           image_size=28, patch_size=14, vision_output_dim=16, projector_input_dim=16,
                           projector_output_dim=16, pixel_shuffle_ratio=0.5),
    )  # fmt: skip
    saved(config, tmp_path)
    with pytest.raises(
        ValueError, match=r"transformers .* cannot compute Llama4For.* on text alone \(.*text model"
    ):
        make_trainer(tmp_path / "run", model=str(tmp_path))


def test_all_linear_leaves_out_a_router_that_returns_scores(tmp_path, caplog):
    model = make_model(config_of("Llama4Text", **STARTS["Llama4Text"]))
    lora = LoraConfig(target_modules="all-linear", r=2)
    trainer = make_trainer(tmp_path, model=model, peft_config=lora, max_steps=1)
    trainer.train()
    assert "leaves out router: Llama4Router returns more than a product" in caplog.text
    assert not [name for name, _ in trainer.model.named_parameters() if "router.lora" in name]
    assert trainer.state.log_history[0]["grad_norm"] > 0 and lora.exclude_modules is None


def test_what_peft_refuses_is_said_with_what_to_set(tmp_path):
    model = make_model(config_of("FalconH1", **STARTS["FalconH1"]))
    lora = LoraConfig(target_modules="all-linear", r=2)
    with pytest.raises(
        ValueError,
        match=r"PEFT cannot put LoraConfig\(target_modules=.*FalconH1ForCausalLM: .*Name the modules",
    ):
        make_trainer(tmp_path, model=model, peft_config=lora)


def test_a_format_of_torchao_is_refused_by_name(tmp_path):
    kind = type("Int8Tensor", (torch.Tensor,), {"__module__": "torchao.quantization"})
    model = make_model(config_of("Qwen3", **SIZES))
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(kind))
    with pytest.raises(
        ValueError, match=r"layers.0.mlp.up_proj.weight of Qwen3.* torchao's format Int8Tensor"
    ):
        check_types(model)


@pytest.mark.parametrize("name", ["/models/tiny/q8.gguf", "q8.GGUF"])
def test_the_path_of_a_gguf_file_is_told_how_to_be_given(tmp_path, name):
    directory, file = ("/models/tiny", "q8.gguf") if "/" in name else (".", name)
    message = rf"is a GGUF file.*Give '{directory}' as the model.*model_init_kwargs={{'gguf_file': '{file}'}}"
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, model=name)
    with pytest.raises(ValueError, match=message):
        require({"model_name_or_path": name}, "model_name_or_path")


def test_what_is_no_causal_language_model(tmp_path):
    config_of("T5", d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, **ENDS).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a t5, which is no causal language model"):
        make_trainer(tmp_path / "run", model=str(tmp_path))
