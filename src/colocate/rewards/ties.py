"""Finds rewards that differ, but not in float32, in which they are compared."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

_ROUNDING = 1e-14
"""A relative difference that sums of the same numbers in another order may have in float64."""
_INTEGERS_END = 2.0**24
"""From here on float32 does not hold every integer."""


def lost_difference(
    prompts: Sequence[Any], values: Sequence[Any], rewards: Sequence[float]
) -> tuple[Any, Any] | None:
    """Return two rewards of one prompt that differ, if all of that prompt's are equal in float32.

    Args:
        prompts: N prompts; those of a group come one after the other.
        values: N rewards as a function has returned them.
        rewards: N rewards as float64.
    """
    exact = [value if type(value) is int else reward for value, reward in zip(values, rewards, strict=True)]
    rounded = np.asarray(rewards, np.float32).tolist()
    # A function that rewards a group alike, or rewards that float32 tells apart: nearly always.
    if len(set(rounded)) == len(rewards) or len(set(exact)) == 1:
        return None
    start = 0
    for _, same in itertools.groupby(prompts):
        group = slice(start, start := start + len(list(same)))
        if len(set(rounded[group])) > 1:
            continue
        low, high = min(exact[group]), max(exact[group])
        if _is_real(low, high):
            return low, high
    return None


def _is_real(low: Any, high: Any) -> bool:
    """Whether two numbers differ by more than rounding."""
    if low == high or high != high:
        return False
    if type(low) is type(high) is int:
        return True
    both_whole = float(low).is_integer() and float(high).is_integer() and abs(high) > _INTEGERS_END
    return both_whole or high - low > _ROUNDING * max(abs(low), abs(high))
