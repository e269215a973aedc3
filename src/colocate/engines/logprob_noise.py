"""How far two log-probs of equal weights may lie apart because different kernels or batches computed them."""

from __future__ import annotations

import torch

_MEAN_NOISE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
_TF32_NOISE = 1e-2
_8BIT_NOISE = 0.1
"""What rollouts in 8 bits may be off: with a small model they were 0.008 ("fp8_kv") and 0.015 ("fp8") apart
from its trainer."""


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
