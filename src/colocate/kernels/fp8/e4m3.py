"""Vectors of numbers in 8 bits: e4m3 values with a power of two for each vector, in PyTorch operations.

e4m3 has 3 bits of mantissa and reaches from 2^-6 (2^-9 with fewer bits) to 448 (Micikevicius et al. 2022,
arXiv:2209.05433). A vector is divided by the smallest power of two that lets its largest value fit, as in the
OCP Microscaling formats (2023, section 5.2), whose e8m0 the stored exponents are. Another factor would give
little more precision, because the mantissa's step is relative; a power of two makes what is read back exact
in bfloat16, so that the same number is read whether a kernel multiplies it in bfloat16, float16 or float32.
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


def dequantize(values: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that `quantize` has stored, [..., D] in `dtype`; exact in bfloat16 and float32."""
    return values.to(dtype) * factors(exponents[..., None]).to(dtype)


def factors(exponents: Tensor, sign: int = 1) -> Tensor:
    """2^(sign · (exponents - 127)) in float32."""
    return torch.exp2(sign * (exponents.float() - BIAS))


def head_block_size(page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Elements from one head's part of a page to the next: the values of its tokens, in 8 bits followed by
    their exponents."""
    return page_size * (head_dim + 1 if dtype == DTYPE else head_dim)


def exponents_of(cache: Tensor) -> Tensor:
    """The exponents [num_pages, K, page_size] uint8 behind the values of a layer's keys or values.

    Args:
        cache: [num_pages, K, page_size, D] e4m3, heads `head_block_size` apart.
    """
    num_pages, num_kv_heads, page_size, head_dim = cache.shape
    strides = (cache.stride(0), head_block_size(page_size, head_dim, cache.dtype), 1)
    behind = cache.storage_offset() + page_size * head_dim
    return cache.view(torch.uint8).as_strided((num_pages, num_kv_heads, page_size), strides, behind)


def is_8bit(cache: Tensor) -> bool:
    """Whether keys or values are in 8 bits, with exponents behind them."""
    return cache.dtype == DTYPE
