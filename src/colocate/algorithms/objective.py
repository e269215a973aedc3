"""What the objective sees of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossBatch:
    """Padded scalars of one micro-batch: B sequences, T tokens of the longest completion, right-padded."""

    mask: Tensor  # [B, T] float32
    advantages: Tensor  # [B]
    loss_weights: Tensor  # [B]
    entropy_weights: Tensor  # [B]
    old_logprobs: Tensor | None  # [B, T]; None: policy_logprobs.detach()
    rollout_logprobs: Tensor | None  # [B, T]
    reference_logprobs: Tensor | None  # [B, T]
    entropy_thresholds: Tensor | None  # [B]
