"""Per-token policy losses, before masks, corrections, KL and normalisation.

Shapes: ratios [B, T] (token level) or [B, 1] (sequence level), advantages [B, 1], log-probabilities [B, T].
What is [B, 1] broadcasts: a sequence-level loss counts once for every token of its sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_LOG_WEIGHT = math.log(1e-8)
MAX_LOG_WEIGHT = 20.0


def clipped_surrogate(
    ratios: Tensor, advantages: Tensor, *, epsilon_low: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """The clipped surrogate −min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A), optionally bounded on both sides.

    Shared by these loss types, which differ in normalisation only (`normalization.loss_weights`):

    - `grpo`: "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv
      2402.03300; with sequence-level ratios, "Group Sequence Policy Optimization", arXiv 2507.18071.
    - `dapo`: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476, which also
      introduces ε_high > ε_low.
    - `dr_grpo`: "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783.
    - `bnpo`: the mean over the tokens of a micro-batch, TRL's first token-level normalisation.
    - `luspo`: "Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length
      Variation in RLVR", arXiv 2602.05261, with sequence-level ratios.

    For A < 0 the surrogate grows without bound in r; δ caps r there, −min(min(r, δ)·A, clip(r)·A), as in
    "INTELLECT-2: A Reasoning Model Trained Through Globally Decentralized Reinforcement Learning", arXiv
    2505.07291.

    Returns:
        The broadcast shape of `ratios` and `advantages`.
    """
    clipped = ratios.clamp(1 - epsilon_low, 1 + epsilon_high)
    if delta is not None:
        ratios = ratios.clamp(max=delta)
    return -torch.min(ratios * advantages, clipped * advantages)


def cispo(ratios: Tensor, advantages: Tensor, policy_logprobs: Tensor, *, epsilon_high: float) -> Tensor:
    """−sg(min(r, ε_high))·A·log π_θ: the ratio is clipped as a weight, so no token loses its gradient.

    `sg` stops the gradient. CISPO, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning
    Attention", arXiv 2506.13585. ε_high bounds r itself, not r − 1: "The Art of Scaling Reinforcement
    Learning Compute for LLMs" (arXiv 2510.13786) recommends 5. Normalised by the tokens of the step.

    Returns:
        [B, T].
    """
    return -ratios.clamp(max=epsilon_high).detach() * advantages * policy_logprobs


def sapo(ratios: Tensor, advantages: Tensor, *, temperature_pos: float, temperature_neg: float) -> Tensor:
    """−4/τ·σ(τ(r − 1))·A, τ = τ_pos where A > 0 and τ_neg elsewhere: a soft gate instead of a clip.

    The gate's slope at r = 1 is 1, so on-policy the gradient is the policy gradient. "Soft Adaptive Policy
    Optimization", arXiv 2511.20347. Normalised as `grpo`.

    Returns:
        The broadcast shape of `ratios` and `advantages`.
    """
    temperatures = _where(advantages > 0, temperature_pos, temperature_neg, dtype=ratios.dtype)
    return -torch.sigmoid(temperatures * (ratios - 1)) * 4 / temperatures * advantages


@torch.no_grad()
def vespo_weights(
    log_ratios: Tensor,
    mask: Tensor,
    advantages: Tensor,
    correction_ratios: Tensor | None,
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> Tensor:
    """φ(w) = e^λ · w^k · e^(−λw), the Gamma-shaped weight of a sequence; φ(1) = 1, no gradient flows
    through it.

    w = Π_t π_θ(y_t)/π_old(y_t) · π_old(y_t)/π_rollout(y_t) is the ratio of the whole sequence, not
    length-normalised; k and λ depend on the sign of A. "VESPO: Variational Sequence-Level Soft Policy
    Optimization for Stable Off-Policy LLM Training", arXiv 2602.10693.

    Args:
        log_ratios: [B, T] log π_θ − log π_old.
        mask: [B, T].
        advantages: [B, 1].
        correction_ratios: of `importance_sampling.correction_ratios`: [B, T] by token, whose product is
            taken, [B, 1] by sequence, or None.

    Returns:
        [B, 1].
    """
    log_weights = (log_ratios.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT) * mask).sum(dim=-1, keepdim=True)
    if correction_ratios is not None:
        # A ratio masked to 0 has no logarithm; the lower bound makes its whole sequence negligible instead.
        log_corrections = correction_ratios.log().clamp(MIN_LOG_WEIGHT, MAX_LOG_WEIGHT)
        if log_corrections.shape == mask.shape:
            log_corrections = (log_corrections * mask).sum(dim=-1, keepdim=True)
        log_weights = log_weights + log_corrections
    log_weights = log_weights.clamp(MIN_LOG_WEIGHT, MAX_LOG_WEIGHT)
    k = _where(advantages >= 0, k_pos, k_neg, dtype=log_weights.dtype)
    decay = _where(advantages >= 0, lambda_pos, lambda_neg, dtype=log_weights.dtype)
    return torch.exp(decay + k * log_weights - decay * log_weights.exp())


def vespo(weights: Tensor, advantages: Tensor, policy_logprobs: Tensor) -> Tensor:
    """−φ(w)·A·log π_θ with `vespo_weights`. Normalised by the tokens of the step.

    Returns:
        [B, T].
    """
    return -weights * advantages * policy_logprobs


def _where(condition: Tensor, if_true: float, if_false: float, dtype: torch.dtype) -> Tensor:
    # torch.where rounds two Python floats to the default dtype first.
    return torch.full_like(condition, if_false, dtype=dtype).masked_fill(condition, if_true)
