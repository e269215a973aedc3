"""The types of a policy's weights: asked for by either name, never float16, and what stays in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from colocate.commands.run_options import with_model_options
from colocate.config.run_config import RunConfig
from colocate.policy.head.logprobs import token_logprobs
from colocate.policy.head.output_head import OutputHead
from colocate.policy.model.loading import load_model
from colocate.policy.model.precision import cast_to_bf16
from tiny import EOS, PAD, VOCAB_SIZE, logged, make_config, make_model, make_tokenizer, make_trainer

SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, vocab_size=VOCAB_SIZE,
    pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
)  # fmt: skip
MLA: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
KEEPS_FLOAT32: dict[str, dict[str, Any]] = {
    "DeepseekV3": MLA,
    "Glm4Moe": dict(
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "Ernie4_5_Moe": dict(moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_num_shared_experts=1),
    # Nothing of these: gpt-oss names modules for float16 alone.
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "Qwen3": dict(head_dim=8),
}


def saved(directory, name: str = "Qwen3", dtype: torch.dtype = torch.float32) -> str:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **KEEPS_FLOAT32[name]})
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return str(directory)


# ── The name of the type ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", ["bfloat16", torch.bfloat16], ids=str)
def test_the_older_name_of_the_type_means_the_same_at_every_door(tmp_path, value):
    path, older = saved(tmp_path / "base"), {"torch_dtype": value}
    assert load_model(path, bf16=False, model_init_kwargs=older).dtype == torch.bfloat16
    config = make_config(tmp_path, model_init_kwargs=older)
    assert config.model_init_kwargs == {"dtype": value}
    trainer = make_trainer(tmp_path / "run", model=path, model_init_kwargs=older)
    assert trainer.model.dtype == torch.bfloat16
    run_file = with_model_options(RunConfig(dtype="float32"), {"model_init_kwargs": older})
    assert (
        run_file["model_init_kwargs"]["dtype"] == value and "torch_dtype" not in run_file["model_init_kwargs"]
    )


def test_two_names_with_two_values_are_refused(tmp_path):
    both = {"torch_dtype": "bfloat16", "dtype": "float32"}
    with pytest.raises(ValueError, match=r"torch_dtype='bfloat16' and dtype='float32'.*Set dtype alone"):
        make_config(tmp_path, model_init_kwargs=both)
    assert make_config(tmp_path, model_init_kwargs=both | {"dtype": torch.bfloat16}).model_init_kwargs


# ── float16 ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("door", ["asked for", "as stored", "object"])
def test_float16_is_refused_at_every_door(tmp_path, door, architecture):
    model: Any = make_model(architecture, initializer_range=0.02).half()
    options: dict[str, Any] = {}
    if door != "object":
        model.save_pretrained(tmp_path / "base")
        make_tokenizer().save_pretrained(tmp_path / "base")
        model = str(tmp_path / "base")
        options["model_init_kwargs"] = {"dtype": "float16" if door == "asked for" else "auto"}
    with pytest.raises(ValueError, match=r"would be trained in float16.*loss scaling") as error:
        make_trainer(tmp_path / "run", model=model, **options)
    assert "bf16=True" in str(error.value) and "report this" not in str(error.value)


# ── float32 within bfloat16 ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KEEPS_FLOAT32)
def test_a_cast_leaves_the_types_that_transformers_gives_a_model_of_bfloat16(tmp_path, name, stored):
    path = saved(tmp_path, name, stored)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    ours = load_model(path, bf16=True)
    originals = cast_to_bf16(ours)
    types = {name: p.dtype for name, p in ours.named_parameters()}
    assert types == {name: p.dtype for name, p in theirs.named_parameters()}
    assert (torch.float32 in types.values()) == (name not in ("GptOss", "Qwen3"))
    assert not originals.keys() & {name for name, dtype in types.items() if dtype == torch.float32}
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_a_router_in_float32_is_trained_and_saved_so(tmp_path):
    path = saved(tmp_path / "base", "DeepseekV3")
    before = load_file(tmp_path / "base" / "model.safetensors")
    trainer = make_trainer(tmp_path / "run", model=path, bf16=True, max_steps=1)
    trainer.train()
    trainer.save_model()
    after = load_file(tmp_path / "run" / "model.safetensors")
    name = "model.layers.1.mlp.gate.weight"
    assert {n for n, x in after.items() if x.dtype == torch.float32} == {
        name,
        "model.layers.1.mlp.gate.e_score_correction_bias",
    }
    # A step at a learning rate of 0.01 is no multiple of bfloat16's distances.
    assert not torch.equal(after[name], before[name])
    assert not torch.equal(after[name], after[name].bfloat16().float())
    assert logged(trainer, "sampling/sampling_logp_difference/mean")[0] < 0.03


def test_a_head_in_float32_reads_hidden_states_in_bfloat16():
    """As HY-V4's does; against the product in float32."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(11, 8, requires_grad=True)
    targets = torch.arange(5)
    logprobs, _ = token_logprobs(hidden, targets, OutputHead(weight), temperature=1.0, chunk_size=2)
    exact = (hidden.float() @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, exact)
    for leaf, other in zip(
        torch.autograd.grad(logprobs.sum(), (hidden, weight)),
        torch.autograd.grad(exact.sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(leaf, other, rtol=1e-2, atol=1e-2)
