"""Add two numbers of the same number of digits, column by column from the units.

    user        4712+3985
    assistant   2+5=7,1+8=9,7+9=16,4+3+1=8;8697

A column's sum has the carry of the column before it as its third addend, where that is 1. The answer follows
the semicolon, and only the answer is rewarded. A tenth of the problems is held out; a problem and its mirror
image (3985+4712) are on the same side.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

PHRASES = ["+", "=", ",", ";"]
"""The tokens of the task beside digits."""
CARELESSNESS = 0.25
"""How often the demonstrator miscounts a column by one."""

Message = dict[str, Any]


def is_held_out(a: int, b: int) -> bool:
    """Decided by the problem itself, so that no seed and no order of drawing can let one leak."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 == 0


def problem(rng: random.Random, num_digits: int, *, held_out: bool) -> tuple[int, int]:
    """Two numbers of one side of the split."""
    while True:
        a, b = (rng.randrange(10 ** (num_digits - 1), 10**num_digits) for _ in range(2))
        if is_held_out(a, b) == held_out:
            return a, b


def as_row(a: int, b: int) -> dict[str, Any]:
    """A row of the dataset: `prompt`, and the column `answer`, which reaches the reward function."""
    return {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": str(a + b)}


def worked(a: int, b: int, rng: random.Random, carelessness: float = CARELESSNESS) -> str:
    """The working and the answer of somebody who gets the method right but miscounts now and then.

    The share of n-digit problems that come out right is (1 - carelessness)^n.
    """
    columns, digits, carry = [], "", 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        addends = f"{x}+{y}+1" if carry else f"{x}+{y}"
        slip = rng.choice((-1, 1)) if rng.random() < carelessness else 0
        total = abs(int(x) + int(y) + carry + slip)
        columns.append(f"{addends}={total}")
        carry, digit = divmod(total, 10)
        digits = str(digit) + digits
    answer = f"{carry}{digits}" if carry else digits
    return f"{','.join(columns)};{answer}"


def demonstration(rng: random.Random, num_digits: int, carelessness: float = CARELESSNESS) -> list[Message]:
    """A problem to train on, and what the demonstrator writes."""
    a, b = problem(rng, num_digits, held_out=False)
    said = {"role": "assistant", "content": worked(a, b, rng, carelessness)}
    return [*as_row(a, b)["prompt"], said]


def correct(completions: list[list[Message]], answer: list[str], **columns: Any) -> list[float]:
    """The reward: 1 if there is one semicolon and exactly the right sum follows it, else 0."""
    texts = [turns[-1]["content"] for turns in completions]
    return [float(text.split(";")[1:] == [right]) for text, right in zip(texts, answer, strict=True)]
