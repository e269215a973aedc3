"""Parts of Triton kernels that write and read keys and values in 8 bits, as `int8` defines them."""

from __future__ import annotations

import triton
import triton.language as tl

from colocate.kernels.fp8 import int8

_PER_LARGEST = tl.constexpr(1 / int8.LARGEST)
_STEPS = tl.constexpr(int8.STEPS_PER_OCTAVE)
_LEAST_EXPONENT = tl.constexpr(int8.LEAST_EXPONENT)
_NOT_A_NUMBER = tl.constexpr(int8.NOT_A_NUMBER)
_ZERO = tl.constexpr(int8.ZERO)
_WITHIN_OCTAVE = tl.constexpr(
    tuple(2 ** (step / int8.STEPS_PER_OCTAVE) for step in range(int8.STEPS_PER_OCTAVE))
)
UNIT = tl.constexpr(-int8.LEAST_EXPONENT * int8.STEPS_PER_OCTAVE)
"""The scale of 1."""
# From here on float32 has whole numbers alone: what is added to one ends up in its last bits.
_WHOLE = tl.constexpr(2.0**23)


@triton.jit
def largest_of(x):
    """The largest size [R] of float32 vectors [R, D]; NaN is larger than any number."""
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def scales_for(largest):
    """`int8.scales_for`, int32."""
    bits = tl.minimum((largest * _PER_LARGEST).to(tl.int32, bitcast=True), 0x7F800000)  # of infinity
    scales = ((bits >> 23) - (127 + _LEAST_EXPONENT)) * _STEPS
    mantissas = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    for step in tl.static_range(_STEPS):
        scales += (mantissas > _WITHIN_OCTAVE[step]).to(tl.int32)
    return tl.minimum(tl.maximum(scales, 0), _NOT_A_NUMBER)


@triton.jit
def factors(scales):
    """`int8.factors` of int32 scales, to the last bit."""
    octaves = ((scales // _STEPS + (127 + _LEAST_EXPONENT)) << 23).to(tl.float32, bitcast=True)
    values = octaves
    for step in tl.static_range(1, _STEPS):
        values = tl.where(scales % _STEPS == step, octaves * _WITHIN_OCTAVE[step], values)
    return tl.where(scales == _NOT_A_NUMBER, float("nan"), values)


@triton.jit
def exponents(scales):
    """log2 of the factors of int32 scales, `NOT_A_NUMBER` taken for a number.

    It takes two instructions; a conversion alone would take one at a quarter of the speed.
    """
    above_whole = (scales | 0x4B000000).to(tl.float32, bitcast=True)
    return above_whole * (1 / _STEPS) - (_WHOLE / _STEPS - _LEAST_EXPONENT)


@triton.jit
def quantized(x, scales):
    """float32 vectors [R, D] as bytes, given their scales [R] int32.

    Products are rounded before anything is added, in kernels with fused products and sums, too.
    """
    quotients = tl.fma(x, tl.div_rn(1.0, factors(scales))[:, None], 0.0)
    return (quotients + (1.5 * _WHOLE + _ZERO)).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def numbers(stored):
    """Bytes as the numbers that they stand for, float32."""
    return stored.to(tl.float32) - _ZERO
