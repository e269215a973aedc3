"""Bounds of the difference between log-probs of equal weights from different kernels or batches."""

from __future__ import annotations

from typing import NamedTuple

import torch

_MEAN_NOISE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
_LEAST_NOISE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 0.02}
_TF32_NOISE = 1e-2
_8BIT_NOISE = 0.1
"""The distance by which rollouts in 8 bits may be off: with a small model they were 0.008 ("fp8_kv") and
0.015 ("fp8") apart from its trainer."""


class Rounding(NamedTuple):
    """Bounds of a mean |difference| of log-probs in nats per token."""

    least: float
    """The distance that rounding explains, however little was measured of it."""
    most: float
    """The distance that rounding never exceeds."""


def rounding_of(dtype: torch.dtype, device: torch.device) -> Rounding:
    """The bounds for two computations of one model in `dtype`, between which a measurement decides.

    Transformers' own batches were 0.018 apart from single sequences in bfloat16, with a model of 135 million
    parameters.
    """
    return Rounding(_LEAST_NOISE.get(dtype, _LEAST_NOISE[torch.bfloat16]), largest_mean_noise(dtype, device))


def largest_mean_noise(
    dtype: torch.dtype, device: torch.device, temperature: float = 1.0, *, is_8bit: bool = False
) -> float:
    """The largest mean |difference| of log-probs, in nats per token, that rounding explains.

    Engines and trainer were measured 0.01 to 0.05 apart in bfloat16, and 1e-6 to 1e-5 apart in float32 on a
    CPU: the bound is twice the largest for bfloat16, and far more for float32. On a GPU float32 products may
    be computed in TF32, whose mantissa has 10 bits like float16's. Dividing logits by a temperature under 1
    enlarges their errors. A real fault (padding that is read, an adapter left out, weights of another run)
    moves log-probs by 0.3 and more.

    Args:
        dtype: the type that the model computes in.
        device: the device that it computes on.
        temperature: the temperature of the log-probs.
        is_8bit: whether one of them is of a rollout in 8 bits (`rollout_precision`).
    """
    noise = _MEAN_NOISE.get(dtype, _MEAN_NOISE[torch.bfloat16])
    if dtype == torch.float32 and device.type != "cpu":
        noise = _TF32_NOISE
    if is_8bit:
        noise = max(noise, _8BIT_NOISE)
    return noise / min(temperature or 1.0, 1.0)
