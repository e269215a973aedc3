"""What the memory benchmark runs: models by their published shapes, made of random numbers on the GPU.

Memory does not depend on the values. Nothing is downloaded, and no second copy of the weights is ever on the
device: layers are made one by one, quantised as soon as they are there where that is asked for, and the
projections that read the same input lie in one storage from the beginning, as training and engine want them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.rollout.cases import SHAPES

Method = Literal["full", "lora", "qlora"]
LORA_RANK = 32
FUSED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
"""Projections of a layer that share one storage."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of the benchmark.

    A run is a few steps of the library's `GRPOTrainer` with one prompt and `num_generations` completions.
    """

    model: str
    method: Method
    num_generations: int
    cap_bytes: int | None = None
    """Memory of the device that the process may use, CUDA context included; None: all there is."""


CAP_80GB = 80 * 10**9

CONTEXT_CASES = {
    "8b-qlora": Case("llama-3.1-8b", "qlora", 2, CAP_80GB),
    "32b-lora": Case("qwen3-32b", "lora", 2, CAP_80GB),
    # What is claimed is the peak; where memory is to spare, the engine and PyTorch would keep it.
    "14b-lora": Case("qwen2.5-14b", "lora", 8, 40 * 2**30),
}

PLAN_CASES: tuple[tuple[Case, int], ...] = (
    (Case("1.5b", "full", 8), 1024),
    (Case("1.5b", "full", 8), 4096),
    (Case("1.5b", "lora", 8), 4096),
    (Case("1.5b", "lora", 8), 16384),
    (Case("7b", "lora", 8), 2048),
    (Case("7b", "lora", 8), 8192),
    (Case("llama-3.1-8b", "qlora", 4), 4096),
    (Case("llama-3.1-8b", "qlora", 4), 16384),
)
"""(case, tokens of prompt and completion) whose predicted peak is compared with the measured one."""


def config_of(model: str) -> PretrainedConfig:
    """The configuration as its authors published it; Qwen2.5's smaller ones as the other benchmarks have
    them."""
    ends: dict[str, Any] = dict(bos_token_id=0, eos_token_id=1, pad_token_id=2, dtype="bfloat16")
    if model == "llama-3.1-8b":
        return LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
            rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                high_freq_factor=4.0, original_max_position_embeddings=8192,
            ),
            **ends,
        )  # fmt: skip
    if model == "qwen3-32b":
        return Qwen3Config(
            vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
            num_attention_heads=64, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
            rms_norm_eps=1e-6, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=1e6), **ends,
        )  # fmt: skip
    if model == "qwen2.5-14b":
        return Qwen2Config(
            vocab_size=152064, hidden_size=5120, intermediate_size=13824, num_hidden_layers=48,
            num_attention_heads=40, num_key_value_heads=8, max_position_embeddings=131072,
            rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=1e6), **ends,
        )  # fmt: skip
    if model == "qwen2.5-72b":
        return Qwen2Config(
            vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80,
            num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=131072,
            rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=1e6), **ends,
        )  # fmt: skip
    return Qwen2Config(
        **SHAPES[model], max_position_embeddings=131072, rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1e6), **ends,
    )  # fmt: skip


def make_model(config: PretrainedConfig, method: Method, device: torch.device) -> PreTrainedModel:
    """A model of random weights in bf16 on `device`; with "qlora" its layers' projections in 4 bits (nf4)."""
    classes = {LlamaConfig: LlamaForCausalLM, Qwen2Config: Qwen2ForCausalLM, Qwen3Config: Qwen3ForCausalLM}
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        model = classes[type(config)](config).to(torch.bfloat16)
    decoder: Any = model.model
    # Its frequencies are no parameters: they are computed when it is made.
    with device:
        decoder.rotary_emb = type(decoder.rotary_emb)(config)
    for layer in decoder.layers:
        _fill(layer, device, generator)
        if method == "qlora":
            _quantize(layer)
        else:
            for parent, names in FUSED:
                _fuse([getattr(getattr(layer, parent), name) for name in names])
    for module in (decoder.embed_tokens, decoder.norm):
        _fill(module, device, generator)
    if config.tie_word_embeddings:
        model.lm_head.weight = decoder.embed_tokens.weight
    else:
        _fill(model.lm_head, device, generator)
    if method == "qlora":
        model.config.quantization_config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
        # What PEFT asks before it wraps a 4-bit layer.
        model.is_loaded_in_4bit, model.quantization_method = True, "bitsandbytes"
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was fused or quantised, once more
    return model.train()


@torch.no_grad()
def _fill(module: nn.Module, device: torch.device, generator: torch.Generator) -> None:
    module.to_empty(device=device)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.02, generator=generator)
        else:
            parameter.fill_(0.0)
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.weight.fill_(1.0)  # type: ignore[operator, union-attr]


@torch.no_grad()
def _fuse(linears: list[nn.Linear]) -> None:
    """One storage for the weights of all, in rows, and one for their biases."""
    for name in ("weight", "bias"):
        parameters = [getattr(linear, name) for linear in linears]
        if parameters[0] is None:
            continue
        fused, row = torch.cat(parameters), 0
        for parameter in parameters:
            parameter.data = fused[row : row + len(parameter)]
            row += len(parameter)


def _quantize(layer: nn.Module) -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit

    for parent in (layer.self_attn, layer.mlp):
        for name, linear in list(parent.named_children()):  # type: ignore[union-attr]
            if not isinstance(linear, nn.Linear):
                continue
            quantized = Linear4bit(
                linear.in_features, linear.out_features, bias=False,
                compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=True, device="meta",
            )  # fmt: skip
            device = linear.weight.device
            # Quantising is what moving such a parameter to a device does, the first time.
            weight = Params4bit(
                linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True,
                module=quantized,
            )  # fmt: skip
            quantized.weight, quantized.bias = weight.to(device), linear.bias
            setattr(parent, name, quantized)
