"""Means and extremes over the tokens or sequences that a mask selects."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from colocate.reporting.metrics import Metrics


def record_mean(metrics: Metrics, name: str, values: Tensor, mask: Tensor) -> None:
    """Add the mean of `values`, over unmasked tokens if they are [B, T], over sequences if [B, 1]."""
    if values.shape != mask.shape:
        mask = mask.new_ones(values.shape)
    metrics.add_mean(name, (values.detach() * mask).sum(), mask.sum())


def masked_min(values: Tensor, mask: Tensor) -> Tensor:
    """The minimum of the values where `mask` is nonzero, a scalar; NaN if the mask is zero everywhere."""
    return _or_nan(values.masked_fill(~mask.bool(), math.inf).amin(), mask)


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """The maximum of the values where `mask` is nonzero, a scalar; NaN if the mask is zero everywhere."""
    return _or_nan(values.masked_fill(~mask.bool(), -math.inf).amax(), mask)


def _or_nan(extreme: Tensor, mask: Tensor) -> Tensor:
    # No Python `if`: the host does not wait for the device.
    return extreme.where(mask.bool().any(), math.nan)
