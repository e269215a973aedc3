"""`StepEstimate`: how long a step will take, before the first one is done."""

from __future__ import annotations

import math
import time

_SMALLEST_SHARE = 0.02
"""The part of a phase below which its length is not guessed: its beginning is unlike the rest."""


class StepEstimate:
    """Adds up the phases of the step that runs, and guesses at the rest of the present one.

    Args:
        rollouts_per_step: below 1 where a rollout feeds several steps.
    """

    def __init__(self, rollouts_per_step: float = 1.0) -> None:
        self._rollouts_per_step = rollouts_per_step
        self._begun_s: float | None = None
        self.end_step()

    def end_step(self) -> None:
        """Begin with the next step."""
        self._seconds: dict[str, float] = {}
        self._num_rollouts = 0
        self._phase, self._since_s = "", time.monotonic()
        self._begun_s = None

    def set_phase(self, name: str) -> None:
        """Note that a phase begins; an empty name: the present one has ended."""
        now_s = time.monotonic()
        if self._begun_s is None:
            self._begun_s = now_s
        if self._phase:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now_s - self._since_s
            self._num_rollouts += self._phase == "rollout"
        self._phase, self._since_s = name, now_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step's first phase began."""
        return 0.0 if self._begun_s is None else time.monotonic() - self._begun_s

    @property
    def knows_training(self) -> bool:
        """Whether the estimate includes training, and not only the phases before."""
        return self._phase in ("train", "publish") or "train" in self._seconds

    def seconds(self, share: float) -> float:
        """Seconds that a step will take; NaN before there is anything to go by.

        Args:
            share: the part of the present phase that is done; NaN: it is not known.
        """
        now_s = time.monotonic() - self._since_s
        present = now_s / share if share >= _SMALLEST_SHARE else math.nan
        known = dict(self._seconds)
        if self._phase == "rollout" and not self._num_rollouts:
            known["rollout"] = present
        elif self._phase == "train":
            known["train"] = known.get("train", 0.0) + (present if math.isfinite(present) else now_s)
        num_rollouts = max(1, self._num_rollouts)
        of_rollouts = sum(known.get(name, 0.0) for name in ("offload", "rollout", "score"))
        of_steps = sum(known.get(name, 0.0) for name in ("train", "publish"))
        total = of_rollouts / num_rollouts * self._rollouts_per_step + of_steps
        return total if total > 0 else math.nan
