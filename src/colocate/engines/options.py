"""`EngineOptions`: the options that several engines read; every engine's record extends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from colocate.engines.registry import ENGINE_CHOICES
from colocate.options.requirements import AT_LEAST_ONE, FEW, IN_COMPLETIONS, OneOf


@dataclass
class EngineOptions:
    """The choice of an engine, and the sizes that several engines take."""

    # ── Rollout ──────────────────────────────────────────────────────────────────────────────────────────

    engine: Annotated[str, OneOf(names=ENGINE_CHOICES)] = "auto"
    """What generates the completions. "native": decodes with the trainer's own parameters (supported
    natively: Llama, Mistral, Qwen2, Qwen3, Phi-3). "vllm": vLLM in the trainer's process. "rollout_server": a
    server on other GPUs or machines, of the native engine or of vLLM (`colocate rollout-serve`); also written
    "vllm_server". "trtllm": TensorRT-LLM on the ranks' GPUs, with
    --launcher ray. "transformers": `model.generate`, which is slow and runs any architecture. "auto": the
    server with use_vllm=True and vllm_mode="server"; else "native" if the model is supported natively, "vllm"
    if not and use_vllm=True, and "transformers" in all other cases."""
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
    engine_kwargs: dict[str, Any] | None = None
    """Options of an engine that another distribution brings, by their names; the engines named above have
    theirs among the options of a run."""
