"""The options of the objective, checked when they are set."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from colocate.algorithms.choices import (
    CLIPPED_LOSSES,
    IMPORTANCE_SAMPLING_LEVELS,
    IMPORTANCE_SAMPLING_MODES,
    LOSS_TYPES,
    check_choice,
)

_UPPER_BOUNDS = ("epsilon_high", "delta", "off_policy_mask_threshold", "vllm_importance_sampling_clip_max")
"""Infinite they bound nothing."""


@dataclass(frozen=True)
class ObjectiveParams:
    """Names and defaults are those of `GRPOConfig`, which documents them.

    Raises:
        ValueError: an unknown loss type, level or mode, or numbers that contradict each other.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    off_policy_mask_threshold: float | None = None
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_choice("importance_sampling_level", self.importance_sampling_level, IMPORTANCE_SAMPLING_LEVELS)
        check_choice(
            "vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, IMPORTANCE_SAMPLING_MODES
        )
        self._check_numbers()
        self._check_clipping()
        self._check_coefficients()
        self._check_importance_sampling()

    @property
    def upper_epsilon(self) -> float:
        """`epsilon_high`, which defaults to `epsilon`."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether gradients flow through the entropies; under adaptive control always."""
        return self.entropy_coef != 0.0 or self.use_adaptive_entropy

    def _check_numbers(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, float) or math.isfinite(value):
                continue
            if math.isnan(value) or field.name not in _UPPER_BOUNDS:
                raise ValueError(
                    f"{field.name}={value} makes a loss that is not finite: set a finite number."
                )

    def _check_clipping(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise ValueError(
                f"epsilon={self.epsilon} lets ratios fall to 1 - epsilon = {1 - self.epsilon}, but they are "
                "positive and start at 1: set it between 0 and 1 (0.2 is common)."
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
        if self.delta is not None and self.loss_type not in CLIPPED_LOSSES:
            raise ValueError(
                f"delta={self.delta} has no effect with loss_type={self.loss_type!r}, only with "
                f"{', '.join(CLIPPED_LOSSES)}: set it to None or change the loss type."
            )

    def _check_coefficients(self) -> None:
        if self.beta < 0:
            raise ValueError(
                f"beta={self.beta} would drive the policy away from the reference: set it to 0 or more."
            )
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_lambda_pos", "vespo_lambda_neg"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive.")
        for name in ("vespo_k_pos", "vespo_k_neg"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
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
        """One line for each two options that are allowed but seldom meant, in the words of TRL's warnings."""
        level, lines = self.importance_sampling_level, []
        if self.loss_type == "luspo" and level != "sequence":
            lines.append(
                "loss_type='luspo' is defined with sequence-level ratios: `importance_sampling_level` should "
                "be set to `'sequence'`, not 'token'."
            )
        if self.loss_type == "vespo" and level != "token":
            lines.append(
                "loss_type='vespo' computes sequence-level importance weights internally: "
                "`importance_sampling_level` should be set to `'token'`."
            )
        if self.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo") and level == "sequence":
            lines.append(
                f"loss_type={self.loss_type!r} sums over tokens, which with importance_sampling_level="
                "'sequence' effectively weights each sequence by its completion length. GSPO as published is "
                "loss_type='grpo'."
            )
        if self.loss_type == "cispo" and self.upper_epsilon < 1:
            lines.append(
                f"loss_type='cispo' caps the ratio itself at epsilon_high={self.upper_epsilon}, so even "
                f"unchanged tokens weigh {self.upper_epsilon} instead of 1. ScaleRL recommends 5."
            )
        return lines
