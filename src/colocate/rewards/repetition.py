"""A penalty on saying the same thing again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RepetitionPenalty:
    """A penalty in proportion to the repeated n-grams of tokens: (1 - unique / all) * `max_penalty`.

    The formula is in appendix C.2 of arXiv 2502.03373; n-grams are of token ids. A completion of fewer than
    `ngram_size` tokens gets 0.0.

    Raises:
        ValueError: `max_penalty` is positive or `ngram_size` is not.
    """
    return RepetitionPenalty(ngram_size, max_penalty)


class RepetitionPenalty:
    """The reward function that `get_repetition_penalty_reward` makes; unlike a closure, a class can be
    pickled."""

    __name__ = "repetition_penalty_reward"

    def __init__(self, ngram_size: int, max_penalty: float) -> None:
        if max_penalty > 0:
            raise ValueError(f"max_penalty={max_penalty} would reward repetition: set 0 or less.")
        if ngram_size < 1:
            raise ValueError(f"ngram_size={ngram_size} is a number of tokens: set 1 or more.")
        self.ngram_size = ngram_size
        self.max_penalty = max_penalty

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self._reward(ids) for ids in completion_ids]

    def _reward(self, ids: Sequence[int]) -> float:
        ngrams = list(zip(*(ids[i:] for i in range(self.ngram_size)), strict=False))
        num_repeated = len(ngrams) - len(set(ngrams))
        return (1 - len(set(ngrams)) / len(ngrams)) * self.max_penalty if num_repeated else 0.0
