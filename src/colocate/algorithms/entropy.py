"""The coefficient of the entropy bonus: fixed, or raised while the policy's entropy is too low."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from colocate.options.requirements import NOT_NEGATIVE
from colocate.reporting.run_log import reserve_metrics

reserve_metrics("entropy_coef")


@dataclass
class EntropyOptions:
    """The options of adaptive control."""

    # ── Loss ─────────────────────────────────────────────────────────────────────────────────────────────

    entropy_coef_min: Annotated[float, NOT_NEGATIVE] = 0.0
    """The smallest `entropy_coef` with use_adaptive_entropy=True."""
    entropy_coef_max: Annotated[float, NOT_NEGATIVE] = 1.0
    """The largest `entropy_coef` with use_adaptive_entropy=True."""
    entropy_coef_delta: Annotated[float, NOT_NEGATIVE] = 0.005
    """How far one optimizer step moves `entropy_coef` with use_adaptive_entropy=True."""
    entropy_target: Annotated[float, NOT_NEGATIVE] = 0.2
    """Mean entropy per token, in nats, at or below which the bonus acts with use_adaptive_entropy=True."""


class EntropyController:
    """Decides how much entropy is rewarded. The loss gets −c·H with H the mean entropy per token in nats.

    Fixed: c = `entropy_coef`. Adaptive ("Skywork Open Reasoner 1 Technical Report", arXiv 2505.22312): after
        each optimizer step, c rises by `entropy_coef_delta` if H ≤ `entropy_target` and falls by
        `entropy_coef_delta` otherwise, within [`entropy_coef_min`, `entropy_coef_max`]; it is applied only
        while the last H was at or below the target.

    Raises:
        ValueError: adaptive control with bounds that are out of order or exclude the initial coefficient,
            or with a step that is not positive.
    """

    def __init__(
        self,
        entropy_coef: float = 0.0,
        options: EntropyOptions | None = None,
        *,
        use_adaptive_entropy: bool = False,
    ) -> None:
        options = options or EntropyOptions()
        if use_adaptive_entropy:
            if not options.entropy_coef_min <= entropy_coef <= options.entropy_coef_max:
                raise ValueError(
                    f"entropy_coef={entropy_coef} is where adaptive control starts and must lie between "
                    f"entropy_coef_min={options.entropy_coef_min} and "
                    f"entropy_coef_max={options.entropy_coef_max}."
                )
            if options.entropy_coef_delta <= 0:
                raise ValueError(
                    f"entropy_coef_delta={options.entropy_coef_delta} never moves the coefficient the right "
                    "way: set it above 0, or use_adaptive_entropy=False for a fixed coefficient."
                )
        self.coef = self._initial = entropy_coef
        self._adaptive = use_adaptive_entropy
        self._min = options.entropy_coef_min
        self._max = options.entropy_coef_max
        self._delta = options.entropy_coef_delta
        self._target = options.entropy_target
        # Nothing is measured yet: adaptive control grants no bonus before the first optimizer step.
        self._last_entropy = math.inf

    @property
    def applied_coef(self) -> float:
        """The coefficient for the next optimizer step, which `Objective` reads."""
        if self._adaptive and self._last_entropy > self._target:
            return 0.0
        return self.coef

    def update(self, mean_entropy: float) -> None:
        """Take note of an optimizer step's mean entropy per token, over all its micro-batches and ranks.

        The mean is the metric `entropy_trained` of `Objective`. NaN (all tokens were masked) changes nothing.
        """
        if not self._adaptive or math.isnan(mean_entropy):
            return
        if mean_entropy <= self._target:
            self.coef = min(self.coef + self._delta, self._max)
        else:
            self.coef = max(self.coef - self._delta, self._min)
        self._last_entropy = mean_entropy

    def state_dict(self) -> dict[str, Any]:
        return {
            "coef": self.coef,
            "initial": self._initial,
            "adaptive": self._adaptive,
            "last_entropy": self._last_entropy,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on adapting from a saved state; if `entropy_coef` or the kind of control has been changed since,
        the coefficient starts from `entropy_coef`."""
        self._last_entropy = state["last_entropy"]
        if self._adaptive and state["adaptive"] and state["initial"] == self._initial:
            self.coef = min(max(state["coef"], self._min), self._max)
