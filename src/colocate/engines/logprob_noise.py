"""How far log-probs of the same weights may lie apart when other kernels, or other batches, computed them."""

from __future__ import annotations

import torch

_MEAN_NOISE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
_TF32_NOISE = 1e-2


def largest_mean_noise(dtype: torch.dtype, device: torch.device, temperature: float = 1.0) -> float:
    """The mean |difference| of log-probs, in nats per token, beyond which rounding does not explain it.

    In bfloat16, engines and trainer were measured 0.01 to 0.05 apart, in float32 on a CPU 1e-6 to 1e-5: the
    bounds are twice the largest, and far more for float32. On a GPU float32 may be multiplied with the 10
    bits of TF32, as many as float16 has. Errors of logits grow as a temperature under 1 divides them. What
    makes another model of it (padding that is seen, an adapter left out, weights of another run) moves them
    by 0.3 and more.

    Args:
        dtype: the model computes in.
        device: it computes on.
        temperature: of the log-probs.
    """
    noise = _MEAN_NOISE.get(dtype, _MEAN_NOISE[torch.bfloat16])
    if dtype == torch.float32 and device.type != "cpu":
        noise = _TF32_NOISE
    return noise / min(temperature or 1.0, 1.0)
