"""The numbers of a chart, from which the page's script draws a part of the steps anew, or smoothed."""

from __future__ import annotations

import base64
import math
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from colocate.reporting.axes import compact

_LARGEST = 3e38  # of float32
_KEPT_BITS = np.uint32(0xFFFFFF80)


@dataclass(frozen=True)
class Series:
    """One mark of a chart over the steps.

    Kinds: a "line"; a "band" between two columns, lowest first; "dots"; a part of stacked "bars", whose parts
    stand on one another in the order of the series.
    """

    kind: Literal["line", "band", "dots", "bars"]
    label: str
    color: str
    xs: Sequence[float]
    columns: tuple[Sequence[float], ...]
    """One column of values, or a band's two; NaN is a gap."""
    window: int = 1
    """Steps of the running mean that is drawn unless a reader asks for something else; 1: none; 0: none, not
    if a reader asks for one either, since the values are a setting."""
    weights: Sequence[float] | None = None
    """Weights of the values in means; None: all the same."""
    is_raw: bool = True
    """Whether the values are drawn in addition to their running mean; a band that is not raw is smoothed like
    the lines."""

    def text_at(self, x: float) -> str:
        """The label and the values at x; empty if there are none."""
        row = bisect_left(self.xs, x)
        if row == len(self.xs) or self.xs[row] != x:
            return ""
        return f"{self.label} {' to '.join(compact(column[row], 4) for column in self.columns)}"

    def as_data(self) -> dict[str, Any]:
        """The series as plain data, which the page's script reads."""
        return {
            "kind": self.kind,
            "label": self.label,
            "color": self.color,
            "x": packed_steps(self.xs),
            "columns": [packed(column) for column in self.columns],
            "weights": packed(self.weights) if self.weights is not None else None,
            "window": self.window,
            "raw": self.is_raw,
        }


def packed_steps(xs: Sequence[float]) -> str | dict[str, float]:
    """Numbers of steps: the first and the count where each is one more than the one before, as in most runs;
    else `packed`."""
    if xs and all(x == xs[0] + i for i, x in enumerate(xs)):
        return {"first": xs[0], "count": len(xs)}
    return packed(xs, is_exact=True)


def packed(values: Sequence[float], *, is_exact: bool = False) -> str:
    """Numbers as text: base64 of zlib of float32, first all lowest bytes, then all second bytes and so on,
    since bytes of one place are alike.

    Numbers keep 17 significant bits (five digits), unless `is_exact`; those beyond float32 become its
    extremes.
    """
    floats = np.clip(np.asarray(values, dtype=np.float64), -_LARGEST, _LARGEST).astype("<f4")
    bits = floats.view("<u4")
    if not is_exact:
        # To the nearest: half of what is cut off is added. NaN stays NaN, its first bit is kept.
        bits = np.where(np.isnan(floats), bits, bits + np.uint32(0x40)) & _KEPT_BITS
    planes = np.ascontiguousarray(bits.astype("<u4").view(np.uint8).reshape(-1, 4).T)
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode()


def extent(series: Sequence[Series]) -> tuple[float, float]:
    """The first and the last step of all series; NaN twice if there is none."""
    ends = [x for one in series if len(one.xs) for x in (one.xs[0], one.xs[-1])]
    return (min(ends), max(ends)) if ends else (math.nan, math.nan)
