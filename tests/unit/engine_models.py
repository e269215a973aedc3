"""Tiny random models and prompts for engine tests.

Weights are drawn wide, so that the most likely token wins by a margin that rounding cannot close.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from colocate.types import Prompt

VOCAB_SIZE = 97
MAX_POSITION = 128

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_POSITION,
    initializer_range=0.25,
)


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1000.0, **parameters}}


_LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0, 1.2, 1.5, 2.0],
    long_factor=[2.0, 3.0, 4.0, 8.0],
    original_max_position_embeddings=64,
)

CONFIGS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama2-mha": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama-biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, _rope(rope_type="linear", factor=2.0)),
    "llama-dynamic": (LlamaConfig, LlamaForCausalLM, _rope(rope_type="dynamic", factor=2.0)),
    "llama-yarn": (
        LlamaConfig,
        LlamaForCausalLM,
        _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-longrope": (LlamaConfig, LlamaForCausalLM, _rope(**_LONGROPE)),
    "llama3": (
        LlamaConfig,
        LlamaForCausalLM,
        _rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 7}),
    "mistral-head-dim": (MistralConfig, MistralForCausalLM, {"head_dim": 12, "sliding_window": None}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": 0, "sliding_window": None}),
    "phi3-window": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": 0, "sliding_window": 7}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12}),
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
}


def make_model(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random model by the name of its configuration, in float32, evaluation mode."""
    config_class, model_class, options = CONFIGS[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_SIZES, **options, **overrides})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases start at ones and zeros, which would hide one that is left out.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def make_gpt2(seed: int = 0, **overrides: Any) -> GPT2LMHeadModel:
    """An architecture without a layout."""
    torch.manual_seed(seed)
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=MAX_POSITION)
    config = GPT2Config(vocab_size=VOCAB_SIZE, initializer_range=0.25, **{**sizes, **overrides})
    return GPT2LMHeadModel(config).eval()


def make_lora(name: str, **overrides: Any) -> Any:
    """The model of `make_model` inside PEFT, with LoRA on all projections that changes what it says."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(name, **overrides), LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:  # zero as PEFT makes it
                parameter.normal_(std=0.05)
    return model.eval()


def make_prompts(lengths: list[int], num_generations: int = 1, *, seed: int = 0) -> list[Prompt]:
    """Random prompts of the given lengths; keys 100, 101, ..."""
    rng = random.Random(seed)
    return [
        Prompt(tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)), 100 + i, range(num_generations))
        for i, length in enumerate(lengths)
    ]


@torch.no_grad()
def greedy_reference(model: Any, token_ids: tuple[int, ...], max_tokens: int, **options: Any) -> list[int]:
    """The completion by `model.generate`, of one prompt alone: no padding."""
    input_ids = torch.tensor([token_ids], device=model.device)
    sequence = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **{"eos_token_id": None, **options},
    )
    return sequence[0, len(token_ids) :].tolist()


@torch.no_grad()
def plain_logits(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> torch.Tensor:
    """[C, V] logits from which each completion token is drawn, by one uncached forward; on the CPU."""
    input_ids = torch.tensor([[*prompt, *completion]], device=model.device)
    return model(input_ids).logits[0, len(prompt) - 1 : -1].float().cpu()


def token_logprobs(logits: torch.Tensor, completion: tuple[int, ...]) -> torch.Tensor:
    """[C] log-softmax of `logits` [C, V] at the completion's tokens."""
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
