"""Curves as numbers: thinned, smoothed, and in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from colocate.reporting.axes import compact

MAX_POINTS = 500  # per line: more than the pixels of a small plot, few enough to keep a page light


def smoothing_window(num_steps: int) -> int:
    """Steps that a running mean spans: none for a short run, a twenty-fifth of a long one."""
    return 1 if num_steps < 30 else num_steps // 25 | 1


def decimate(
    xs: Sequence[float], ys: Sequence[float], max_points: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """Keep at most about `max_points`: the two ends, and the lowest and highest point of each bucket.

    A stretch of NaN is kept as a single point, which draws the gap.
    """
    if len(xs) <= max_points:
        return list(xs), list(ys)
    bucket = math.ceil(len(xs) / (max_points // 4))
    keep: list[int] = []
    for start in range(0, len(xs), bucket):
        rows = range(start, min(start + bucket, len(xs)))
        finite = [i for i in rows if math.isfinite(ys[i])]
        if finite:
            lowest, highest = min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)
            keep += sorted({finite[0], lowest, highest, finite[-1]})
        else:
            keep.append(start)
    return [xs[i] for i in keep], [ys[i] for i in keep]


def smooth(ys: Sequence[float], window: int, weights: Sequence[float] | None = None) -> list[float]:
    """Running mean over `window` values centred on each value, over fewer at the ends. NaN does not count,
    and stays NaN.

    Args:
        weights: positive weights of the values in the mean; None: all are equal.
    """
    if window <= 1:
        return list(ys)
    values = np.asarray(ys, dtype=np.float64)
    is_known = np.isfinite(values)
    counted = np.where(is_known, np.ones(len(values)) if weights is None else np.asarray(weights), 0.0)
    sums = np.cumsum(np.concatenate([[0.0], np.where(is_known, values, 0.0) * counted]))
    totals = np.cumsum(np.concatenate([[0.0], counted]))
    rows = np.arange(len(values))
    first, last = np.maximum(0, rows - window // 2), np.minimum(len(values), rows + window // 2 + 1)
    total = totals[last] - totals[first]
    has_mean = is_known & (total > 0)
    means = np.full(len(values), np.nan)
    means[has_mean] = (sums[last] - sums[first])[has_mean] / total[has_mean]
    return means.tolist()


def ends(ys: Sequence[float]) -> tuple[float, float, int]:
    """(mean of the first n finite values, mean of the last n, n), where n is a tenth of them, ten at most."""
    finite = [y for y in ys if math.isfinite(y)]
    if not finite:
        return math.nan, math.nan, 0
    count = max(1, min(10, len(finite) // 10))
    return sum(finite[:count]) / count, sum(finite[-count:]) / count, count


def course(name: str, ys: Sequence[float], *, percent: bool = False) -> str:
    """A sentence that says what a curve does: "reward rises from 0.42 to 0.92, between 0.4 and 0.95"."""
    first, last, count = ends(ys)
    if not count:
        return f"{name} has no values"

    def text(y: float) -> str:
        return f"{compact(100 * y)}%" if percent else compact(y)

    finite = [y for y in ys if math.isfinite(y)]
    low, high = min(finite), max(finite)
    if text(low) == text(high):
        return f"{name} stays at {text(low)}"
    if abs(last - first) <= 0.1 * (high - low) or text(first) == text(last):
        way = f"begins at {text(first)} and ends at {text(last)}"
    else:
        way = f"{'rises' if last > first else 'falls'} from {text(first)} to {text(last)}"
    return f"{name} {way}, between {text(low)} and {text(high)}"
