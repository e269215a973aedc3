"""The options of the objective, checked when they are set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from colocate.algorithms.losses import LOSSES, LossOptions, check_loss
from colocate.options.declared import declared
from colocate.options.requirements import IN_COMPLETIONS, MAY_BE_INFINITE, OneOf

IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass
class ObjectiveParams(LossOptions):
    """The options that `Objective` reads. `GRPOConfig` inherits them.

    Raises:
        ValueError: an unknown loss type, level or mode, or numbers that contradict each other.
    """

    # ── Loss ─────────────────────────────────────────────────────────────────────────────────────────────

    beta: Annotated[float, IN_COMPLETIONS] = 0.0
    """Weight of the KL penalty to the reference model; 0 keeps no reference."""
    use_bias_correction_kl: bool = True
    """Multiply the KL term by the importance ratio (DeepSeek-V3.2, arXiv:2512.02556)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus (mean per token, for every loss type)."""
    use_adaptive_entropy: bool = False
    """Steer `entropy_coef` towards `entropy_target` (Skywork-OR1, arXiv:2505.22312)."""
    off_policy_mask_threshold: float | None = None
    """Drop completions with negative advantage whose mean log-ratio to the old policy exceeds this."""
    vllm_importance_sampling_correction: bool = True
    """Weight tokens by policy ÷ rollout probability, whichever engine generated (the name is TRL's)."""
    vllm_importance_sampling_mode: Annotated[str, OneOf(IMPORTANCE_SAMPLING_MODES)] = "sequence_mask"
    """Whether ratios out of bounds are truncated or masked, per token or per sequence."""
    vllm_importance_sampling_clip_max: Annotated[float | None, MAY_BE_INFINITE] = 3.0
    vllm_importance_sampling_clip_min: float | None = None

    def __post_init__(self) -> None:
        for name, option in declared(ObjectiveParams).items():
            value = option.check(getattr(self, name))
            is_bound = MAY_BE_INFINITE in option.conditions and value == math.inf
            if isinstance(value, float) and not math.isfinite(value) and not is_bound:
                raise ValueError(f"{name}={value} makes a loss that is not finite: set a finite number.")
        self.check_objective()

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether gradients flow through the entropies; under adaptive control they always do."""
        return self.entropy_coef != 0.0 or self.use_adaptive_entropy

    def check_objective(self) -> None:
        """Raise ValueError for options that contradict each other."""
        self._check_clipping()
        check_loss(self)
        self._check_coefficients()
        self._check_importance_sampling()

    def _check_clipping(self) -> None:
        if self.epsilon < 0:
            raise ValueError(
                f"epsilon={self.epsilon} clips ratios at 1 - epsilon = {1 - self.epsilon}, even where the "
                "policy has not changed: set it to 0 or more (0.2 is common)."
            )
        if self.upper_epsilon < 0:
            raise ValueError(
                f"epsilon_high={self.upper_epsilon} caps ratios at 1 + epsilon_high = "
                f"{1 + self.upper_epsilon}, even where the policy has not changed: set it to 0 or more "
                "(0.28 in DAPO)."
            )
        if self.delta is not None and self.delta <= 1 + self.upper_epsilon:
            raise ValueError(
                f"delta={self.delta} must exceed 1 + epsilon_high = {1 + self.upper_epsilon}: where "
                "advantages are negative the ratio counts up to the larger of the two. Raise delta or set it "
                "to None."
            )

    def _check_coefficients(self) -> None:
        if self.beta < 0:
            raise ValueError(
                f"beta={self.beta} would drive the policy away from the reference: set it to 0 or more."
            )
        if self.off_policy_mask_threshold is not None and self.off_policy_mask_threshold <= 0:
            raise ValueError(
                f"off_policy_mask_threshold={self.off_policy_mask_threshold} would drop sequences that "
                "the policy has not moved away from: set a positive divergence in nats per token (e.g. 0.5), "
                "or None to keep all."
            )

    def _check_importance_sampling(self) -> None:
        mode = self.vllm_importance_sampling_mode
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if (low is not None and not 0 <= low <= 1) or (high is not None and high < 1) or low == high == 1:
            raise ValueError(
                f"vllm_importance_sampling_clip_min={low} and vllm_importance_sampling_clip_max={high} must "
                "differ and have 1 between them, the ratio where engine and trainer agree: set 0 <= min <= 1 "
                "<= max."
            )
        if not self.vllm_importance_sampling_correction:
            return
        if low is None and high is None and mode.endswith("_truncate"):
            raise ValueError(
                f"vllm_importance_sampling_mode={mode!r} truncates to bounds that are not set: set "
                "vllm_importance_sampling_clip_max (e.g. 3.0), vllm_importance_sampling_clip_min or both."
            )

    def unusual_pairs(self) -> list[str]:
        """A line for each pair of options that is allowed but seldom meant, in the words of TRL's
        warnings."""
        lines = [line for caution in LOSSES[self.loss_type].cautions if (line := caution(self))]
        if self.epsilon > 1:
            lines.append(
                f"epsilon={self.epsilon:g} clips ratios at 1 - epsilon = {1 - self.epsilon:g}, and they are "
                f"never below 0: from below nothing is clipped, from above at {1 + self.upper_epsilon:g}."
            )
        return lines
