"""Ratios of a completion's probability under the policy to that under the policy that generated it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def token_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """r_t = exp(log π_θ(y_t) − log π_old(y_t)), [B, T], as in GRPO ("DeepSeekMath: Pushing the Limits of
    Mathematical Reasoning in Open Language Models", arXiv 2402.03300)."""
    return log_ratios.exp()


def sequence_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """s = exp(1/|y| Σ_t (log π_θ(y_t) − log π_old(y_t))), [B, 1], the length-normalised ratio of "Group
    Sequence Policy Optimization" (arXiv 2507.18071, equation 7).

    Lengths count unmasked tokens; a sequence without any has ratio 1.
    """
    num_tokens = mask.sum(dim=-1, keepdim=True).clamp(min=1.0)
    return ((log_ratios * mask).sum(dim=-1, keepdim=True) / num_tokens).exp()


RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"token": token_ratios, "sequence": sequence_ratios}
"""Ratios between the policy and the old policy by level, from differences of log-probabilities [B, T] and a
mask [B, T] that is 1 where the token counts."""
