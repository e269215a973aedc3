"""What vLLM's `SamplingParams` and its server's `/v1/completions` call by the same names."""

from __future__ import annotations

from typing import Any

from colocate.types import SamplingParams


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The distribution to draw from, what ends a completion, and the log-prob of each token drawn."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # which tokens end a completion is said by stop_token_ids alone
        "logprobs": 0,  # of the token drawn, and of no other
    }
