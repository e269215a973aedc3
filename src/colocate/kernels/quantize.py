"""Quantisation to 8 bits inside Triton kernels, as `e4m3` defines it."""

from __future__ import annotations

import triton
import triton.language as tl

from colocate.kernels.e4m3 import BIAS, LEAST_EXPONENT

_LEAST = tl.constexpr(BIAS + LEAST_EXPONENT)


@triton.jit
def exponents_for(largest):
    """The biased exponents, int32, of the smallest powers of two that bring float32 `largest` to 448 or less.

    448 is 1.75 * 2^8: what is above 1.75 in a mantissa is carried into the exponent.
    """
    bits = largest.to(tl.int32, bitcast=True)
    return tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, _LEAST)


@triton.jit
def power(exponents):
    """2^(exponents - 127) in float32, of biased exponents below 255."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(exponents):
    """2^(127 - exponents) in float32, of biased exponents below 254."""
    return power(254 - exponents.to(tl.int32))
