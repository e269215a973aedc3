"""reasoning-gym's problems with several attempts and feedback; with one attempt the reward function
`reasoning_gym_reward` does as well, without tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from colocate.data.reasoning_gym import import_reasoning_gym, score_answer
from colocate.episodes.adapters.base import TextEnvironment


class ReasoningGymEnvironment(TextEnvironment):
    """A problem, which the model may answer a number of times until the answer is right.

    Rows are those of `load_prompts("reasoning_gym:<task>")`: `entry` has the problem. The question is the
    first observation unless the row has a `prompt`, which then asks it. An answer that scores more than all
    before it earns the difference, so that the sum is the best answer's score.

    Args:
        num_attempts: how many answers the model may give.
        per_turn: whether turns have rewards of their own; otherwise the episode has their sum.

    Raises:
        ImportError: reasoning_gym is not installed.
    """

    def __init__(self, num_attempts: int = 1, *, per_turn: bool = False) -> None:
        super().__init__(per_turn)
        import_reasoning_gym()
        self._num_attempts = num_attempts
        self._entry = ""

    def _open(self, row: Mapping[str, Any]) -> str | None:
        if "entry" not in row:
            raise ValueError(
                f"A row of reasoning_gym needs the column 'entry'; it has {', '.join(map(repr, row))}. "
                'Load the dataset by load_prompts("reasoning_gym:<task>").'
            )
        self._entry = row["entry"]
        return None if "prompt" in row else json.loads(self._entry)["problem"]["question"]

    def _step(self, action: str) -> tuple[str, float, bool]:
        score = score_answer(action.strip(), self._entry)
        earned = max(score - sum(self.rewards), 0.0)
        num_left = self._num_attempts - len(self.rewards) - 1
        if score >= 1.0:
            return "That is right.", earned, True
        return f"That is not right. Attempts left: {num_left}.", earned, num_left <= 0
