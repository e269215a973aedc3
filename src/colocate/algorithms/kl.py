"""The distance to the reference policy, estimated from the sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_estimate(policy_logprobs: Tensor, reference_logprobs: Tensor, ratios: Tensor | None = None) -> Tensor:
    """Estimate per token of KL(π_θ ‖ π_ref): the k3 estimator, optionally with bias correction.

    With d = log π_ref(y_t) − log π_θ(y_t), k3 = exp(d) − d − 1 ≥ 0 ("Approximating KL Divergence", John
    Schulman, 2020, joschu.net/blog/kl-approx.html; used by GRPO, arXiv 2402.03300, equation 4). Its value
    is unbiased on samples of π_θ but its gradient is not. Multiplied by the ratio r = π_θ / π_old, with the
    gradient flowing through r, both are ("DeepSeek-V3.2: Pushing the Frontier of Open Large Language
    Models", arXiv 2512.02556). That holds for token-level ratios; a [B, 1] ratio is broadcast.

    Args:
        policy_logprobs, reference_logprobs: [B, T].
        ratios: [B, T] or [B, 1] for the corrected estimate; None for plain k3.

    Returns:
        [B, T], to be multiplied by β and normalised like the policy loss.
    """
    difference = reference_logprobs - policy_logprobs
    k3 = torch.exp(difference) - difference - 1
    return k3 if ratios is None else k3 * ratios
