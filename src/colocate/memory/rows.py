"""The rows of an account of a device's memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["resident", "rollout", "train"]
Moment = Literal["head", "layer", "embedding", "reduce", "step"]


@dataclass(frozen=True)
class MemoryRow:
    """One use of a device's memory and its size."""

    name: str
    phase: Phase
    size_bytes: int
    how: str
    """The arithmetic of `size_bytes`, in words."""
    moment: Moment | None = None
    """The part of a training step in which the memory is in use; None: the whole phase."""
    is_transient: bool = False
    """Whether the row grows with a micro-batch's tokens; measured steps correct the size of such rows."""


def total_bytes(rows: Iterable[MemoryRow]) -> int:
    return sum(row.size_bytes for row in rows)
