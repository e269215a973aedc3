"""Keys and values in 8 bits against what the format promises, computed in float64."""

from __future__ import annotations

import math

import pytest
import torch
from eight_bit_models import heads_in_8bit
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.kernels.fp8 import int8

SIZES = st.floats(-1e5, 1e5, width=32) | st.floats(-(2.0**-14), 2.0**-14, width=32)
VECTORS = st.lists(SIZES, min_size=1, max_size=9)


@settings(max_examples=300, derandomize=True)
@given(VECTORS)
def test_errors_are_at_most_half_of_a_scale_that_is_hardly_larger_than_need_be(values):
    x = torch.tensor(values)
    stored, scale = int8.quantize(x)
    factor, largest = float(int8.factors(scale)), float(x.abs().max())
    assert int(stored.min()) >= 1 and stored.dtype == scale.dtype == torch.uint8
    assert factor == pytest.approx(2 ** (int(scale) / 8 - 22), rel=2**-24)
    assert largest <= 127 * factor * (1 + 2**-22)
    assert int(scale) == 0 or factor <= 2**0.125 * largest / 127 * (1 + 2**-22)
    error = (int8.dequantize(stored, scale, torch.float64) - x.double()).abs()
    # Quotients are rounded to float32 twice before they are rounded to whole numbers.
    assert float(error.max()) <= factor * (0.5 + 127 * 2**-22)


@settings(max_examples=100, derandomize=True)
@given(VECTORS)
def test_it_is_the_rounding_of_the_models_that_engines_are_compared_with(values):
    """But for ties, and for scales at whose edge a last bit of float32 decides."""
    x = torch.tensor(values)
    read, other = int8.dequantize(*int8.quantize(x), torch.float64), heads_in_8bit(x.double())
    assert float((read - other).abs().max()) <= 1.1 * max(float(x.abs().max()) / 127, 2**-22)


def test_zeros_stay_zeros():
    stored, scales = int8.quantize(torch.zeros(2, 3, 8))
    assert (stored == int8.ZERO).all() and not int8.dequantize(stored, scales, torch.bfloat16).any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_no_number_is_read_as_none_in_its_vector_alone(value):
    x = torch.ones(2, 4)
    x[0, 1] = value
    read = int8.dequantize(*int8.quantize(x), torch.float32)
    assert read[0].isnan().all() and torch.allclose(read[1], x[1], rtol=2**-7)


def test_the_largest_number_of_float16_is_stored():
    x = torch.tensor([65504.0, -1.0]).half()
    read = int8.dequantize(*int8.quantize(x), torch.float32)
    assert float(read[0]) == pytest.approx(65504, rel=1 / 254)
