"""Vectors of numbers in 8 bits: e4m3 values with a power of two for each vector, in PyTorch operations.

Products of a rollout multiply them; keys and values are in `int8`. e4m3 has 3 bits of mantissa and reaches
from 2^-6 (2^-9 with fewer bits) to 448 (Micikevicius et al. 2022, arXiv:2209.05433). A vector is divided by
the smallest power of two that lets its largest value fit, as in the OCP Microscaling formats (2023, section
5.2), whose e8m0 the exponents are. Another factor would give little more precision, because the mantissa's
step is relative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colocate.kernels.definitions import wide

DTYPE = torch.float8_e4m3fn
BIAS = 127
"""The number added to the exponent that is stored, a byte."""
LEAST_EXPONENT = -32
"""Vectors whose largest value is below 448 · 2^-32 are stored as if it were that. So weights of 2^exponent
relative to each other stay far inside the range of float32."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors along the last dimension in 8 bits.

    Args:
        x: [..., D], finite.

    Returns:
        values [..., D] e4m3 and biased exponents [...] uint8: `x` is about values · 2^(exponent - 127).
    """
    exponents = exponents_for(wide(x).abs().amax(-1))
    return scaled(x, exponents[..., None]), exponents


def exponents_for(largest: Tensor) -> Tensor:
    """The biased exponents, uint8, of the smallest powers of two that bring `largest` to at most 448."""
    largest = wide(largest).float().clamp(min=448 * 2.0**LEAST_EXPONENT)
    mantissas, exponents = torch.frexp(largest)  # mantissas from 0.5 to below 1
    # 448 is 0.875 * 2^9.
    return (exponents - 9 + (mantissas > 0.875).int() + BIAS).to(torch.uint8)


def scaled(x: Tensor, exponents: Tensor) -> Tensor:
    """x / 2^(exponents - 127) as e4m3, rounded to the nearest, ties to even."""
    return (wide(x).float() * factors(exponents, -1)).to(DTYPE)


def factors(exponents: Tensor, sign: int = 1) -> Tensor:
    """2^(sign · (exponents - 127)) in float32."""
    return torch.exp2(sign * (exponents.float() - BIAS))


def is_8bit(x: Tensor) -> bool:
    """Whether the inputs of a product are in 8 bits already."""
    return x.dtype == DTYPE
