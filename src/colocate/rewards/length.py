"""Rewards that depend on how long the completion is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from colocate.rewards.accuracy import accuracy_reward
from colocate.rewards.completions import Completions


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """A reward that falls from 0 to -1 over the last `soft_punish_cache` tokens before `max_completion_len`.

    This is equation 13 of DAPO (arXiv 2503.14476). A completion of L tokens gets 0 up to L = max - cache,
    (max - cache - L) / cache up to L = max, and -1 beyond.

    Raises:
        ValueError: the cache is negative.
    """
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


# The rewards with parameters are classes rather than closures so that they can be pickled to other processes.
class SoftOverlongPunishment:
    """The reward function that `get_soft_overlong_punishment` makes."""

    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, max_completion_len: int, soft_punish_cache: int) -> None:
        if soft_punish_cache < 0:
            raise ValueError(f"soft_punish_cache={soft_punish_cache} is a number of tokens: set 0 or more.")
        self.max_completion_len = max_completion_len
        self.soft_punish_cache = soft_punish_cache

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self._reward(len(ids)) for ids in completion_ids]

    def _reward(self, length: int) -> float:
        free_length = self.max_completion_len - self.soft_punish_cache
        if length <= free_length:
            return 0.0
        if length <= self.max_completion_len:
            return (free_length - length) / self.soft_punish_cache
        return -1.0


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> CosineScaledReward:
    """A reward for accuracy, scaled by length along half a cosine: most for short right answers, least for
    short wrong ones.

    The formula is in appendix C.1 of arXiv 2502.03373. The reward of a right completion goes from
    `max_value_correct` (no token) to `min_value_correct` (`max_len` tokens or more), a wrong one from
    `min_value_wrong` to `max_value_wrong`. As with `accuracy_reward`, it is None if the solution cannot be
    parsed.

    Raises:
        ValueError: `max_len` is not positive.
    """
    return CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


class CosineScaledReward:
    """The reward function that `get_cosine_scaled_reward` makes."""

    __name__ = "cosine_scaled_reward"

    def __init__(
        self,
        max_len: int,
        min_value_wrong: float,
        max_value_wrong: float,
        min_value_correct: float,
        max_value_correct: float,
    ) -> None:
        if max_len <= 0:
            raise ValueError(
                f"max_len={max_len} is the length of the longest completion in tokens: set 1 or more."
            )
        self.max_len = max_len
        self.bounds_wrong = (min_value_wrong, max_value_wrong)  # (shortest, longest)
        self.bounds_correct = (max_value_correct, min_value_correct)

    def __call__(
        self,
        completions: Completions,
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> list[float | None]:
        correct = accuracy_reward(completions, solution)
        return [
            None if is_correct is None else self._reward(bool(is_correct), len(ids))
            for is_correct, ids in zip(correct, completion_ids, strict=True)
        ]

    def _reward(self, is_correct: bool, length: int) -> float:
        shortest, longest = self.bounds_correct if is_correct else self.bounds_wrong
        progress = min(length / self.max_len, 1.0)  # the cosine would rise again beyond
        return float(longest + 0.5 * (shortest - longest) * (1.0 + math.cos(progress * math.pi)))
