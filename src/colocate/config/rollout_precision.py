"""Rollouts in 8 bits need an engine that has them, and a correction token by token.

A rollout in 8 bits draws from a policy that is near the trainer's. Let the log-ratio of a token's two
probabilities have a standard deviation of s. The log-ratio of C tokens then has s √C, and of the samples'
weights exp(log-ratio) a share of about exp(-s² C) is left to count. SmolLM2-135M has s = 0.08 with "fp8_kv"
and 0.26 with "fp8" (docs/benchmarks.md): of 64 tokens 66 % and 1 %. A ratio of its own for each token does
not grow with the length.
"""

from __future__ import annotations

import math
from typing import Any

ASSUMED_SPREAD = {"fp8_kv": 0.08, "fp8": 0.26}
"""Standard deviation of a token's log-ratio that the arithmetic in messages takes: a real model's."""


def check_precision(config: Any, engine: str) -> None:
    """Refuse engines that compute in a precision of their own."""
    if config.rollout_precision != "bf16" and engine not in ("native", "auto"):
        raise ValueError(
            f"rollout_precision={config.rollout_precision!r} is not read with engine={engine!r}: only the "
            "native engine stores and multiplies in 8 bits. Set engine='native', or rollout_precision='bf16'."
        )


def resolve_correction(config: Any) -> list[str]:
    """Correct token by token what is rolled out in 8 bits; returns lines that say so."""
    mode = config.vllm_importance_sampling_mode
    if config.rollout_precision not in ASSUMED_SPREAD:  # bf16, or what is refused as none of the choices
        return []
    precision = f"rollout_precision={config.rollout_precision!r}"
    if not config.vllm_importance_sampling_correction:
        return [
            f"{precision} without vllm_importance_sampling_correction trains on completions of another "
            "policy as if they were this one's."
        ]
    if not mode.startswith("sequence_"):
        return []
    length = config.max_completion_length
    s = ASSUMED_SPREAD[config.rollout_precision]
    arithmetic = (
        f"{precision} may move a token's log-probability by {s} (standard deviation), a sequence's of "
        f"{length:,} tokens by {s} · √{length} = {s * math.sqrt(length):.2g}, and weights of whole sequences "
        f"then leave exp(-{s}² · {length}) = {math.exp(-(s**2) * length):.0%} of the samples to count"
    )
    if mode != "sequence_mask":  # its default, which does not show whether it was asked for
        raise ValueError(
            f"vllm_importance_sampling_mode={mode!r} weighs whole sequences: {arithmetic}. Set "
            "'token_truncate' or 'token_mask', or rollout_precision='bf16'."
        )
    config.vllm_importance_sampling_mode = "token_truncate"
    return [f"{arithmetic}: vllm_importance_sampling_mode='token_truncate' takes the place of {mode!r}."]
