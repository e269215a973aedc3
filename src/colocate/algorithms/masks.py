"""Masks of the policy loss: off-policy sequences, and tokens of low entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def off_policy_sequence_mask(
    policy_logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, threshold: float
) -> Tensor:
    """1 for the sequences to keep, 0 for those with A < 0 that the policy has moved away from.

    A sequence is dropped if A < 0 and 1/|y| Σ_t (log π_behaviour(y_t) − log π_θ(y_t)) > threshold: bad
    samples that the policy would hardly draw any more. "DeepSeek-V3.2: Pushing the Frontier of Open Large
    Language Models", arXiv 2512.02556, equation 9. Tokens with a NaN log-probability are no evidence of
    drift and count as 0.

    Args:
        policy_logprobs, mask: [B, T].
        behaviour_logprobs: [B, T], under the policy that sampled; best taken from the engine.
        advantages: [B, 1], or [B, T] to drop or keep each token by its own.

    Returns:
        [B, 1] in the mask's dtype, or [B, T] with such advantages.
    """
    drift = torch.nan_to_num((behaviour_logprobs - policy_logprobs) * mask, nan=0.0)
    mean_drift = drift.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1.0)
    return ((advantages >= 0) | (mean_drift <= threshold)).to(mask.dtype)


def entropy_threshold(entropies: Tensor, top_entropy_quantile: float) -> Tensor:
    """The entropy that the `top_entropy_quantile` most uncertain tokens reach.

    "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for LLM
    Reasoning", arXiv 2506.01939: only forking tokens get a policy gradient. The (1 − ρ)-quantile, linearly
    interpolated.

    Args:
        entropies: [N] entropies in nats of all unmasked tokens of one micro-batch over all ranks.
        top_entropy_quantile: ρ in [0, 1]; 0 keeps the token of highest entropy only, 1 keeps all.

    Returns:
        Scalar in float32; infinite if there are no tokens.

    Raises:
        ValueError: ρ is outside [0, 1].
    """
    if not 0.0 <= top_entropy_quantile <= 1.0:
        raise ValueError(
            f"top_entropy_quantile={top_entropy_quantile} is not a fraction: set it between 0 (train only "
            "the token of highest entropy) and 1 (train all)."
        )
    if entropies.numel() == 0:
        return torch.tensor(math.inf, device=entropies.device)
    return torch.quantile(entropies.float(), 1 - top_entropy_quantile)
