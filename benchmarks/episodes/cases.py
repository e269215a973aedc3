"""What the benchmarks of episodes run: prompts, how long the turns are, and what tools answer."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from benchmarks.rollout.cases import SIGMA, TOKEN_RANGE, Case

CASE = Case("1.5b", 64, 8, 256, 2048, lengths="lognormal")

LEAST_TOKENS = 3
"""Tokens of the shortest turn: one that is drawn, a call and the stop token."""


@dataclass(frozen=True)
class Turns:
    """How long the turns of each episode are, and what tools answer."""

    num_turns: int = 4
    median_tokens: int = 200
    answer_tokens: int = 50
    """What is read between two turns: what the tool has answered, and the chat template's part of it."""
    most_tokens: int = 800

    def lengths(self, num_episodes: int) -> list[list[int]]:
        """Tokens of each turn of each episode, the same in every process."""
        rng = random.Random(2)
        return [
            [
                min(
                    max(LEAST_TOKENS, round(rng.lognormvariate(math.log(self.median_tokens), SIGMA))),
                    self.most_tokens,
                )
                for _ in range(self.num_turns)
            ]
            for _ in range(num_episodes)
        ]

    def answer(self, model: str, number: int) -> list[int]:
        """The tokens that follow turn `number`."""
        rng = random.Random(number)
        return [rng.randrange(*TOKEN_RANGE[model]) for _ in range(self.answer_tokens)]

    @property
    def max_tokens(self) -> int:
        return self.num_turns * (self.most_tokens + self.answer_tokens)


TINY_TURNS = Turns(3, 5, 6, 9)
"""For any machine."""
