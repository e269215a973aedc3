"""The quickstart's task: add two two-digit numbers, column by column.

    prompt      47+85=
    completion  7+5=12,4+8=12+1=13;132

Units come first, then tens with the carry; the answer follows the semicolon, and only the answer is rewarded.
A tenth of the problems is held out. A problem and its mirror image (47+85, 85+47) are on the same side, so a
held-out sum was seen in neither order.
"""

from __future__ import annotations

import random
import zlib

NUMBERS = range(10, 100)
CARELESSNESS = 0.2
"""How often the demonstrator miscounts a column by one, which leaves 36 % of the demonstrations wrong."""


def is_held_out(a: int, b: int) -> bool:
    """Decided by the problem itself, so that no seed and no order of drawing can let one leak."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 == 0


def problems(held_out: bool) -> list[tuple[int, int]]:
    """Every problem of one side of the split."""
    return [(a, b) for a in NUMBERS for b in NUMBERS if is_held_out(a, b) == held_out]


def as_prompt(a: int, b: int) -> str:
    return f"{a}+{b}="


def as_row(a: int, b: int) -> dict[str, str]:
    """A row of the dataset: `prompt`, and the column `answer`, which reaches the reward function."""
    return {"prompt": as_prompt(a, b), "answer": str(a + b)}


def demonstration(a: int, b: int, rng: random.Random, carelessness: float = CARELESSNESS) -> str:
    """A completion by somebody who gets the method right but miscounts now and then."""

    def count(x: int, y: int) -> int:
        return max(0, x + y + (rng.choice((-1, 1)) if rng.random() < carelessness else 0))

    (tens_a, units_a), (tens_b, units_b) = divmod(a, 10), divmod(b, 10)
    units = count(units_a, units_b)
    carry = units // 10
    tens = count(tens_a, tens_b)
    return (
        f"{units_a}+{units_b}={units},"
        f"{tens_a}+{tens_b}={tens}+{carry}={tens + carry};"
        f"{10 * (tens + carry) + units % 10}"
    )


def correct(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """The reward: 1 if there is one semicolon and exactly the right sum follows it, else 0."""
    return [float(text.split(";")[1:] == [right]) for text, right in zip(completions, answer, strict=True)]
