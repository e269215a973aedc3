"""Options that several engines read: every engine's record extends `EngineOptions`; and those of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from colocate.engines.registry import ENGINE_CHOICES, OLDER_NAMES
from colocate.options.requirements import (
    AT_LEAST_ONE,
    FEW,
    FRACTION,
    IN_COMPLETIONS,
    POSITIVE,
    SHARE,
    TEMPERATURE,
    OneOf,
    Requirement,
)

TOP_K = Requirement("must be 0 or -1 (all tokens) or positive", lambda v: v >= -1)


@dataclass
class EngineOptions:
    """The choice of an engine, and the sizes that several engines take."""

    # ── Rollout ──────────────────────────────────────────────────────────────────────────────────────────

    engine: Annotated[str, OneOf(ENGINE_CHOICES, older=OLDER_NAMES)] = "auto"
    """The engine that generates the completions. "native": decodes with the trainer's own parameters
    (supported natively: Llama, Mistral, Ministral, Qwen2, Qwen3, Phi-3, Gemma 3, GLM, GLM-4, OLMo 2, OLMo 3,
    EXAONE 4, ERNIE 4.5, HunYuan Dense V1, SmolLM3, Granite, Helium, Seed-OSS, CWM). "vllm": vLLM in the
    trainer's process. "rollout_server": a server on other GPUs or machines, of the native engine or of vLLM
    (`colocate rollout-serve`); also written "vllm_server". "transformers": `model.generate`, which is slow
    and runs any architecture. Distributions of their own bring further engines. "auto": the server with
    use_vllm=True and vllm_mode="server"; else "native" if the model is supported natively, "vllm" if not and
    use_vllm=True, and "transformers" in all other cases."""
    max_num_seqs: Annotated[int | None, FEW] = None
    """The most sequences that are decoded at the same time. None: 512 on a GPU; on a CPU 64, or with
    engine="vllm" that engine's own default. With engine="rollout_server" it is the number of requests, for a
    prompt or a turn, that are with the server at a time (None: 512); the server's own `--max-num-seqs` says
    how many sequences that decodes."""
    page_size: Annotated[int | None, AT_LEAST_ONE] = None
    """Tokens per page of the KV cache. None: 64 on a GPU, 16 on a CPU."""
    kv_cache_tokens: Annotated[int | None, AT_LEAST_ONE] = None
    """How many tokens the KV cache holds. None: as many as a rollout can use, if memory allows."""
    vllm_max_model_length: Annotated[int | None, AT_LEAST_ONE, IN_COMPLETIONS] = None
    """The most tokens that prompt and completion may have together. None: the model's own limit."""


@dataclass
class SamplingOptions:
    """The options that `SamplingParams` are made of."""

    # ── Rollout ──────────────────────────────────────────────────────────────────────────────────────────

    # Log-probabilities divide by the temperature: at 0 the policy would be a point mass without gradient.
    temperature: Annotated[float, TEMPERATURE, IN_COMPLETIONS] = 1.0
    """The divisor of the logits, both when completions are sampled and when they are trained on."""
    top_p: Annotated[float | None, SHARE, IN_COMPLETIONS] = 1.0
    """Sample only from the smallest set of tokens whose probabilities add up to this; 1 and None sample from
    all."""
    top_k: Annotated[int | None, TOP_K, IN_COMPLETIONS] = 0
    """Sample only from this many most likely tokens; 0, -1 (as in vLLM) and None sample from all."""
    min_p: Annotated[float | None, FRACTION, IN_COMPLETIONS] = None
    """Never sample a token that is less likely than this times the most likely one."""
    repetition_penalty: Annotated[float, POSITIVE, IN_COMPLETIONS] = 1.0
    """Above 1, makes tokens that are already in the prompt or completion less likely."""
    generation_kwargs: Annotated[dict[str, Any] | None, IN_COMPLETIONS] = None
    """Arguments of generation. temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens set
    the options of these names (max_new_tokens sets max_completion_length). `stop_token_ids` lists tokens that
    end a completion in addition to the tokenizer's EOS. An argument that only transformers' `generate` knows,
    such as num_beams, makes engine="auto" choose "transformers"."""
