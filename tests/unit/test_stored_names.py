"""Adapters merged into files whose names are not the modules', and of experts, against PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from vision_configs import LINEAR_ATTENTION, MROPE, QWEN_VISION, VISION

from colocate.weights.adapter_files import note_base, read_adapter
from colocate.weights.merging import merge_adapter

ENDS: dict[str, Any] = dict(vocab_size=64, pad_token_id=0, eos_token_id=1, bos_token_id=2)
SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64, **ENDS,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16)
ROUTED: dict[str, Any] = dict(
    n_routed_experts=3, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
    moe_intermediate_size=16,
)  # fmt: skip
VISION_LANGUAGE: dict[str, dict[str, Any]] = {
    "Gemma3": dict(
        text_config=SIZES | dict(layer_types=["sliding_attention", "full_attention"]),
        vision_config=VISION,
        mm_tokens_per_image=1,
    ),
    "Mistral3": dict(
        text_config=dict(model_type="mistral", **SIZES),
        vision_config=dict(model_type="pixtral", head_dim=8, **VISION),
    ),
    "Qwen2_5_VL": dict(
        text_config={n: v for n, v in SIZES.items() if n != "head_dim"} | dict(rope_parameters=MROPE),
        vision_config=dict(fullatt_block_indexes=[0], **QWEN_VISION),
    ),
    "Qwen3_5": dict(
        text_config=SIZES | LINEAR_ATTENTION,
        vision_config=QWEN_VISION,
    ),
    "Qwen3VLMoe": dict(
        text_config=SIZES | EXPERTS | dict(rope_parameters=MROPE),
        vision_config=dict(deepstack_visual_indexes=[0], **QWEN_VISION),
    ),
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": SIZES | EXPERTS,
    "Qwen2Moe": SIZES | EXPERTS | dict(shared_expert_intermediate_size=16),
    "Mixtral": SIZES | dict(num_local_experts=3, num_experts_per_tok=2),
    "Glm4Moe": SIZES | ROUTED,
    "DeepseekV3": SIZES | ROUTED | dict(
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    # Square, and stored transposed: shapes do not tell which side is which.
    "GptOss": SIZES | dict(num_local_experts=3, num_experts_per_tok=2, intermediate_size=32),
    "KimiLinear": SIZES | dict(
        num_key_value_heads=4, num_experts=3, num_experts_per_token=2, moe_intermediate_size=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
        num_expert_group=1, topk_group=1,
        linear_attn_config=dict(
            kda_layers=[1], full_attn_layers=[2], num_heads=4, head_dim=8, short_conv_kernel_size=4
        ),
    ),
}  # fmt: skip
CASES = [
    *((name, "all-linear") for name in VISION_LANGUAGE),
    *((name, "all-linear") for name in MIXTURES),
    ("Qwen3Moe", "one of the experts' tensors"),
    ("GptOss", "experts"),
]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all-linear": dict(target_modules="all-linear"),
    "one of the experts' tensors": dict(
        target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], use_rslora=True
    ),
    "experts": dict(
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"q_proj": 3},
    ),
}


def loader_of(name: str) -> Any:
    return AutoModelForImageTextToText if name in VISION_LANGUAGE else AutoModelForCausalLM


def save_base(directory: Path, name: str, *, shard: str = "5GB") -> Path:
    torch.manual_seed(0)
    config: PretrainedConfig = getattr(transformers, f"{name}Config")(**(VISION_LANGUAGE | MIXTURES)[name])
    loader_of(name).from_config(config).save_pretrained(directory, max_shard_size=shard)
    return directory


def save_adapter(base: Path, directory: Path, loader: Any = AutoModelForCausalLM, **options: Any) -> Path:
    model = get_peft_model(loader.from_pretrained(base), LoraConfig(r=2, lora_alpha=6, **options))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(directory)
    note_base(directory, str(base))
    return directory


@pytest.mark.parametrize(("name", "adapter"), CASES)
@pytest.mark.share(3)
def test_merged_weights_are_those_of_peft(tmp_path, name, adapter):
    base, loader = save_base(tmp_path / "base", name, shard="20KB"), loader_of(name)
    saved = save_adapter(base, tmp_path / "adapter", loader, **ADAPTERS[adapter])
    (tmp_path / "merged").mkdir()
    lines = list(merge_adapter(read_adapter(str(saved)), str(base), tmp_path / "merged"))
    merged = loader.from_pretrained(tmp_path / "merged").state_dict()
    before = loader.from_pretrained(base).state_dict()
    expected = PeftModel.from_pretrained(loader.from_pretrained(base), saved).merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    changed = {key for key in expected if not torch.equal(expected[key], before[key])}
    assert any("experts" in key for key in changed) or name in VISION_LANGUAGE or adapter == "all-linear"
    for key in expected:
        torch.testing.assert_close(merged[key], expected[key], rtol=1e-6, atol=1e-6)
        assert torch.equal(merged[key], before[key]) == (key not in changed), key
    # Files keep their cut and their names, which are not the modules'.
    of_base = {key for file in base.glob("*.safetensors") for key in load_file(file)}
    assert of_base == {key for file in (tmp_path / "merged").glob("*.safetensors") for key in load_file(file)}
    assert sum(int(line.split(": ")[1].split()[0]) for line in lines) >= len(changed) > 0


def test_an_adapter_of_the_text_model_alone_merges_into_the_whole_checkpoint(tmp_path):
    """Loaded by AutoModelForCausalLM, of which another part of the names is missing."""
    base, kind = save_base(tmp_path / "base", "Qwen3_5"), transformers.Qwen3_5ForCausalLM
    saved = save_adapter(base, tmp_path / "adapter", kind, target_modules=["q_proj"])
    (tmp_path / "merged").mkdir()
    list(merge_adapter(read_adapter(str(saved)), str(base), tmp_path / "merged"))
    before = kind.from_pretrained(base).state_dict()
    expected = PeftModel.from_pretrained(kind.from_pretrained(base), saved).merge_and_unload().state_dict()
    assert any(not torch.equal(expected[key], before[key]) for key in before)
    for key, weight in kind.from_pretrained(tmp_path / "merged").state_dict().items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-6, atol=1e-6)


def test_experts_of_another_model_are_refused(tmp_path):
    base = save_base(tmp_path / "base", "Qwen3Moe")
    saved = save_adapter(base, tmp_path / "adapter", **ADAPTERS["experts"])
    other = save_base(tmp_path / "other", "GptOss")
    (tmp_path / "merged").mkdir()
    with pytest.raises(ValueError, match=r"was trained on .* and does not fit"):
        list(merge_adapter(read_adapter(str(saved)), str(other), tmp_path / "merged", is_any_base=True))
