"""Correction for the mismatch between the engine that samples and the trainer that learns.

The same weights give different log-probabilities in different kernels. Ratios π_old / π_rollout restore the
expectation under the trainer's policy; they are bounded because their product over a sequence has a heavy
tail.

- truncation: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025,
  fengyao.notion.site/off-policy-rl.
- masking: "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model" (IcePop),
  arXiv 2510.18855.
- one ratio for a whole sequence: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
  Training-Inference Mismatch", 2025, yingru.notion.site.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from colocate.algorithms.reductions import masked_max, masked_min
from colocate.reporting.metrics import Metrics
from colocate.reporting.run_log import reserve_metrics

reserve_metrics(
    *(f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max")),
    *(f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max")),
)


@torch.no_grad()
def correction_ratios(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """Bounded ratios ρ = π_old / π_rollout to multiply the policy loss with.

    `token_*` modes have one ratio per token; `sequence_*` modes have the product over the unmasked tokens
    of a sequence (log-differences are summed, not averaged). `*_truncate` clamps ρ to [clip_min, clip_max];
    `*_mask` sets ρ to 0 outside. A token whose rollout log-probability is NaN counts as ρ = 1: no evidence,
    no correction.

    Args:
        old_logprobs, rollout_logprobs, mask: [B, T].
        mode: one of `objective_params.IMPORTANCE_SAMPLING_MODES`.
        clip_min, clip_max: bounds of ρ; None is unbounded.

    Returns:
        [B, T] for token modes, [B, 1] for sequence modes.
    """
    granularity, constraint = mode.split("_")
    log_ratios = torch.nan_to_num((old_logprobs - rollout_logprobs) * mask, nan=0.0)
    if granularity == "sequence":
        log_ratios = log_ratios.sum(dim=-1, keepdim=True)
    ratios = torch.exp(log_ratios)
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    if constraint == "truncate":
        return ratios.clamp(low, high)
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)


@torch.no_grad()
def record_sampling_metrics(
    metrics: Metrics, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, ratios: Tensor
) -> None:
    """Add `sampling/sampling_logp_difference/*` and `sampling/importance_sampling_ratio/*`.

    As TRL defines them: the difference is |log π_old − log π_rollout| over the unmasked tokens whose
    rollout log-probability is known; the ratio is the bounded one, over unmasked tokens (token modes) or
    over sequences (sequence modes).

    Args:
        old_logprobs, rollout_logprobs, mask: [B, T].
        ratios: [B, T] or [B, 1] from `correction_ratios`.
    """
    difference = (old_logprobs - rollout_logprobs).abs()
    known = mask.bool() & ~difference.isnan()
    name = "sampling/sampling_logp_difference"
    metrics.add_mean(f"{name}/mean", difference.where(known, 0.0).sum(), known.sum())
    metrics.add_max(f"{name}/max", masked_max(difference, known))

    counted = mask.bool() if ratios.shape == mask.shape else torch.ones_like(ratios, dtype=torch.bool)
    name = "sampling/importance_sampling_ratio"
    metrics.add_min(f"{name}/min", masked_min(ratios, counted))
    metrics.add_mean(f"{name}/mean", ratios.where(counted, 0.0).sum(), counted.sum())
    metrics.add_max(f"{name}/max", masked_max(ratios, counted))
