"""An account of a device's memory, row by row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["resident", "rollout", "train"]
Moment = Literal["head", "layer", "embedding", "step"]


@dataclass(frozen=True)
class Row:
    name: str
    phase: Phase
    size_bytes: int
    how: str
    """The arithmetic, in words."""
    moment: Moment | None = None
    """Of training; None: all of the phase."""
    is_transient: bool = False
    """Grows with the micro-batch's tokens: what a measured step corrects."""


def total_bytes(rows: Iterable[Row]) -> int:
    return sum(row.size_bytes for row in rows)
