"""reasoning_gym's chain_sum, with running totals before the answer.

    user        State the final answer to the following arithmetic problem: 4 - 7 + 9 =
    assistant   4-7=-3,-3+9=6<answer>6</answer>

Problems and verdicts are reasoning_gym's, but for partial credit; what a demonstrator writes is made here.
"""

from __future__ import annotations

import random
from typing import Any

from colocate.rewards import reasoning_gym_reward

TASK = "chain_sum"
PARAMETERS = {"min_terms": 5, "max_terms": 6, "min_digits": 1, "max_digits": 1}
"""The parameters of the recipe."""
PHRASES = [
    "State the final answer to the following arithmetic problem: ",
    *("<answer>", "</answer>", " + ", " - ", " =", "+", "-", "=", ","),
]
"""The tokens of the task beside digits."""
CARELESSNESS = 0.2
"""How often the demonstrator is off by one in a total."""
SEED = 2_000_000
"""The demonstrations' seed. reasoning_gym draws its problem i by seed + i, so seeds must be further apart
than there are problems; the recipe trains on those of seed 0 and evaluates on those of seed 1,000,000."""

Message = dict[str, Any]


def worked(expression: str, rng: random.Random, carelessness: float = CARELESSNESS) -> str:
    """The totals after each term, and the last of them as the answer."""
    first, *others = expression.split()
    total, lines = int(first), []
    for sign, term in zip(others[::2], others[1::2], strict=True):
        slip = rng.choice((-1, 1)) if rng.random() < carelessness else 0
        now = total + int(sign + term) + slip
        lines.append(f"{total}{sign}{term}={now}")
        total = now
    return f"{','.join(lines)}<answer>{total}</answer>"


class Demonstrations:
    """Draws problems and shows how they are worked."""

    def __init__(self, num_problems: int = 20_000) -> None:
        import reasoning_gym

        self._problems = reasoning_gym.create_dataset(TASK, size=num_problems, seed=SEED, **PARAMETERS)

    def __call__(self, rng: random.Random) -> list[Message]:
        entry = self._problems[rng.randrange(len(self._problems))]
        said = worked(entry["metadata"]["expression"], rng)
        return [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": said}]


def solved(completions: list[list[Message]], entry: list[str], **columns: Any) -> list[float]:
    """The reward: 1 for the right number, else 0. reasoning_gym gives 16 half a point where 6 is right."""
    return [float(score == 1.0) for score in reasoning_gym_reward(completions, entry)]
