"""Keys and values in 8 bits: whole numbers up to 127 in size, and a scale for each vector, in PyTorch.

A vector is divided by its scale and rounded, so an error is at most half of the scale, whatever a number's
size: about 1/254 of the largest. The numbers that decide a score so keep 7 bits, of which e4m3 keeps 4. A
byte is 128 more than its number, so that kernels make float16 of bytes by moving them under an exponent. A
scale is a byte, too, which counts eighths of an octave: it is at most 2^(1/8) times what it need be.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from colocate.kernels.definitions import wide

DTYPE = torch.uint8
ZERO = 128
"""The byte of the number 0."""
LARGEST = 127
STEPS_PER_OCTAVE = 8
LEAST_EXPONENT = -22
"""The exponent of the least scale, for vectors up to 3e-5. The greatest, 2^9.75, takes numbers up to 109,000,
more than float16 has."""
NOT_A_NUMBER = 255
"""The scale of a vector with a number that is infinite, too large or none, all of which is read as NaN."""
FACTORS = torch.tensor([2 ** (scale / STEPS_PER_OCTAVE + LEAST_EXPONENT) for scale in range(NOT_A_NUMBER)])
FACTORS = torch.cat([FACTORS, torch.tensor([torch.nan])])
"""The float32 number that each of the 256 scales stands for."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors along the last dimension in 8 bits.

    Args:
        x: [..., D].

    Returns:
        Bytes [..., D] and scales [...], uint8: `x` is about (bytes - 128) · `factors(scales)`.
    """
    x = wide(x).float()
    scales = scales_for(x.abs().amax(-1))
    quotients = x * (1 / factors(scales))[..., None]
    return (quotients.nan_to_num(0).round() + ZERO).to(DTYPE), scales


def scales_for(largest: Tensor) -> Tensor:
    """The least scales, uint8, by which float32 `largest` become `LARGEST` or less."""
    return torch.bucketize(largest * (1 / LARGEST), _factors_on(largest.device)[:-1]).to(torch.uint8)


def factors(scales: Tensor) -> Tensor:
    """Stored scales as float32."""
    return _factors_on(scales.device)[scales.int()]


@functools.cache
def _factors_on(device: torch.device) -> Tensor:
    """`FACTORS` on a device, to which they are copied once."""
    return FACTORS.to(device)


def dequantize(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors that `quantize` has stored, [..., D] in `dtype`."""
    return ((stored.float() - ZERO) * factors(scales)[..., None]).to(dtype)


def head_block_size(page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Elements from one head's part of a page to the next: the values of its tokens, in 8 bits followed by
    their scales."""
    return page_size * (head_dim + 1 if dtype == DTYPE else head_dim)


def scales_of(cache: Tensor) -> Tensor:
    """The scales [num_pages, K, page_size] uint8 behind the bytes of a layer's keys or values.

    Args:
        cache: [num_pages, K, page_size, D] uint8, heads `head_block_size` apart.
    """
    num_pages, num_kv_heads, page_size, head_dim = cache.shape
    strides = (cache.stride(0), head_block_size(page_size, head_dim, cache.dtype), 1)
    behind = cache.storage_offset() + page_size * head_dim
    return cache.as_strided((num_pages, num_kv_heads, page_size), strides, behind)


def is_8bit(cache: Tensor) -> bool:
    """Whether keys or values are in 8 bits, with scales behind them."""
    return cache.dtype == DTYPE
