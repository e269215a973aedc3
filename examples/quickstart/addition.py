"""The quickstart's task: add two two-digit numbers, column by column.

    prompt      47+85=
    completion  7+5+0=12,4+8+1=13;132

Each column is written as digit + digit + carry = sum, units first; the answer follows the semicolon. Only
the answer is rewarded. A tenth of the problems is held out: a problem and its mirror image (47+85, 85+47)
are on the same side, so a held-out sum has not been seen in either order.
"""

from __future__ import annotations

import zlib

NUMBERS = range(10, 100)


def is_held_out(a: int, b: int) -> bool:
    """Decided by the problem itself, so that no seed and no order of drawing can let one leak."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 == 0


def problems(held_out: bool) -> list[tuple[int, int]]:
    """Every problem of one side of the split: 7,290 or so to train on, 810 or so held out."""
    return [(a, b) for a in NUMBERS for b in NUMBERS if is_held_out(a, b) == held_out]


def as_prompt(a: int, b: int) -> str:
    return f"{a}+{b}="


def demonstration(a: int, b: int) -> str:
    """The completion that the warm start imitates."""
    columns, carry = [], 0
    for digit_a, digit_b in ((a % 10, b % 10), (a // 10, b // 10)):
        column = digit_a + digit_b + carry
        columns.append(f"{digit_a}+{digit_b}+{carry}={column}")
        carry = column // 10
    return f"{','.join(columns)};{a + b}"


def as_row(a: int, b: int) -> dict[str, str]:
    """A row of the data set: `prompt`, and the column `answer` that the reward compares with."""
    return {"prompt": as_prompt(a, b), "answer": str(a + b)}


def correct(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """The reward: 1 for exactly the right sum after exactly one semicolon, else 0."""
    return [float(text.split(";")[1:] == [right]) for text, right in zip(completions, answer, strict=True)]
