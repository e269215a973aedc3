"""How much likelier a completion became since the policy that generated it."""

from __future__ import annotations

import torch
from torch import Tensor

from colocate.algorithms.choices import IMPORTANCE_SAMPLING_LEVELS, check_choice


def importance_ratios(log_ratios: Tensor, mask: Tensor, level: str) -> Tensor:
    """Ratios between the policy and the old policy, one per token or one per sequence.

    - `"token"`: r_t = exp(log π_θ(y_t) − log π_old(y_t)), as in GRPO ("DeepSeekMath: Pushing the Limits of
      Mathematical Reasoning in Open Language Models", arXiv 2402.03300).
    - `"sequence"`: s = exp(1/|y| Σ_t (log π_θ(y_t) − log π_old(y_t))), the length-normalised ratio of "Group
      Sequence Policy Optimization" (arXiv 2507.18071, equation 7). Lengths count unmasked tokens.

    Args:
        log_ratios: [B, T] differences of log-probabilities.
        mask: [B, T], 1 where the token counts.
        level: `"token"` or `"sequence"`.

    Returns:
        [B, T] at token level, [B, 1] at sequence level (1 for a sequence without unmasked tokens).

    Raises:
        ValueError: the level is unknown.
    """
    check_choice("importance_sampling_level", level, IMPORTANCE_SAMPLING_LEVELS)
    if level == "token":
        return torch.exp(log_ratios)
    num_tokens = mask.sum(dim=-1, keepdim=True).clamp(min=1.0)
    return torch.exp((log_ratios * mask).sum(dim=-1, keepdim=True) / num_tokens)
