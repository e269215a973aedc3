"""Tiny random models and prompts for engine tests.

Weights are drawn wide, so that the most likely token wins by a margin that rounding cannot close.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from colocate.types import Completion, Prompt, Sample, SamplingParams
from colocate.weights.layouts import has_layout, layout_for

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
_LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "phi3": {"pad_token_id": 0, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12},
    "cwm": {"head_dim": 12, "sliding_window": 5, "eos_token_id": 2},
    "granite": dict(
        embedding_multiplier=1.7, attention_multiplier=0.3, residual_multiplier=0.45, logits_scaling=1.6
    ),
    "olmo2": {"pad_token_id": 1},
    "olmo3": dict(
        pad_token_id=1,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": dict(
                rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=32
            ),
        },
    ),
    "exaone4": dict(
        head_dim=12,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=5,
        sliding_window_pattern=2,
    ),
    "ernie4_5": {"head_dim": 12, "use_bias": True},
    "gemma3_text": dict(
        head_dim=12,
        query_pre_attn_scalar=10,
        sliding_window=5,
        pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
        },
    ),
    "glm": {"head_dim": 16, "pad_token_id": 0, "attention_bias": True},
    "glm4": {"head_dim": 16, "pad_token_id": 0, "attention_bias": True},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 12, "pad_token_id": 0},
    "smollm3": {"head_dim": 12, "no_rope_layer_interval": 2, "pad_token_id": 0},
    "ministral": {"head_dim": 12, "sliding_window": 7},
    "seed_oss": dict(head_dim=12, attention_out_bias=True, attention_dropout=0.0, residual_dropout=0.0),
}
"""Families with a layout, by transformers' `model_type`, and what their tiny models have beside `_SIZES`. One
line here brings a new family into the tests of engine, trainer, self-check and planner."""

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-linear": ("llama", _rope(rope_type="linear", factor=2.0)),
    "llama-dynamic": ("llama", _rope(rope_type="dynamic", factor=2.0)),
    "llama-yarn": ("llama", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-longrope": ("llama", _rope(**_LONGROPE)),
    "llama3": ("llama", _rope(**_LLAMA3)),
    "mistral-window": ("mistral", {"sliding_window": 4}),
    "mistral-head-dim": ("mistral", {"head_dim": 12}),
    "granite-biases": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "logits_scaling": 3, "tie_word_embeddings": True},
    ),
    "phi3-partial-rotary": (
        "phi3",
        {"num_key_value_heads": 4, **_rope(rope_type="default", partial_rotary_factor=0.75)},
    ),
    "phi3-window": ("phi3", {"sliding_window": 7}),
    "qwen2-window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 1,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
CONFIGS = [*FAMILIES, *_VARIANTS]

_WITHOUT_LAYOUT: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gemma2": dict(head_dim=8, sliding_window=4, final_logit_softcapping=5.0, attn_implementation="eager"),
}


def config_of(name: str, **overrides: Any) -> Any:
    """The configuration of a family or a variant; overrides come after all that is said above."""
    family, options = _VARIANTS.get(name, (name, {}))
    own = FAMILIES[family] if family in FAMILIES else _WITHOUT_LAYOUT[family]
    options = {**_SIZES, **own, **options, **overrides}
    if "layer_types" in own and "layer_types" not in overrides:  # the pattern of a model of any depth
        kinds = itertools.cycle(own["layer_types"])
        options["layer_types"] = list(itertools.islice(kinds, options["num_hidden_layers"]))
    return AutoConfig.for_model(family, **options)


def make_model(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random model by the name of its configuration, in float32, evaluation mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(name, **overrides)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases start at ones and zeros, which would hide one that is left out.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        embedding = model.get_input_embeddings()
        if embedding.padding_idx is not None:  # a row of zeros, whose norm divides by the root of eps
            embedding.weight[embedding.padding_idx] = embedding.weight[[-5, -6]].mean(0)
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


def randomise_adapters(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15)


def make_prompts(lengths: list[int], num_generations: int = 1, *, seed: int = 0) -> list[Prompt]:
    """Random prompts of the given lengths; keys 100, 101, ..."""
    rng = random.Random(seed)
    return [
        Prompt(tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)), 100 + i, range(num_generations))
        for i, length in enumerate(lengths)
    ]


def train_steps(model: Any, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> None:
    token_ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1)).to(model.device)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(token_ids, labels=token_ids).loss.backward()
        optimizer.step()


def addresses_of(model: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def assert_refused(model: Any, message: str) -> None:
    """The model has no layout, and says why."""
    assert not has_layout(model)
    with pytest.raises(ValueError, match=f"{message}.*Use the 'transformers' engine"):
        layout_for(model)


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


def greedy_references(model: Any, prompts: Sequence[Prompt], max_tokens: int = 20) -> list[list[int]]:
    """`greedy_reference` for every member of the prompts' groups."""
    by_key = {prompt.key: greedy_reference(model, prompt.token_ids, max_tokens) for prompt in prompts}
    return [by_key[prompt.key] for prompt in owners_of(prompts)]


def greedy_completions(engine: Any, prompts: Sequence[Prompt], max_tokens: int = 20) -> list[list[int]]:
    """What an engine that is awake completes greedily, for comparison with `greedy_references`."""
    completions = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0))
    return [list(completion.token_ids) for completion in completions]


def owners_of(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompt of each completion of a rollout."""
    return [prompt for prompt in prompts for _ in prompt.samples]


@torch.no_grad()
def plain_logits(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> torch.Tensor:
    """[C, V] logits from which each completion token is drawn, by one uncached forward; on the CPU."""
    input_ids = torch.tensor([[*prompt, *completion]], device=model.device)
    return model(input_ids).logits[0, len(prompt) - 1 : -1].float().cpu()


def token_logprobs(logits: torch.Tensor, completion: tuple[int, ...]) -> torch.Tensor:
    """[C] log-softmax of `logits` [C, V] at the completion's tokens."""
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def policy_logprobs(
    model: Any, prompt: Prompt, completion: Completion, temperature: float = 1.0
) -> torch.Tensor:
    """[C] log-probs of a completion by one uncached forward of the model; on the CPU."""
    logits = plain_logits(model, prompt.token_ids, completion.token_ids) / temperature
    return token_logprobs(logits, completion.token_ids)


def assert_logprobs_are_the_models(
    model: Any,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    atol: float,
    rtol: float = 0.0,
    temperature: float = 1.0,
) -> None:
    for prompt, completion in zip(owners_of(prompts), completions, strict=True):
        expected = policy_logprobs(model, prompt, completion, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=atol, rtol=rtol)


def rollout_samples(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    device: Any = "cpu",
    share_prompts: bool = False,
    **fields: Any,
) -> list[Sample]:
    """Samples for the trainer of what an engine generated; `fields` are the same for all of them."""
    return [
        Sample(
            prompt_ids=torch.tensor(prompt.token_ids, device=device),
            completion_ids=torch.tensor(completion.token_ids, device=device),
            completion_mask=torch.ones(len(completion.token_ids), device=device),
            rollout_logprobs=torch.tensor(completion.logprobs, device=device),
            prompt_key=prompt.key if share_prompts else None,
            **{"advantage": 0.0, **fields},
        )
        for prompt, completion in zip(owners_of(prompts), completions, strict=True)
    ]
