"""Numbers in 8 bits against the format itself: the list of all that there are."""

from __future__ import annotations

import pytest
import torch
from eight_bit_models import power_for, rounded, vectors_in_8bit
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.kernels.fp8 import e4m3


def dequantize(values: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype) * e4m3.factors(exponents[..., None]).to(dtype)


SIZES = st.floats(-1e6, 1e6, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32)


@settings(max_examples=200, derandomize=True)
@given(st.lists(SIZES, min_size=1, max_size=9))
def test_a_vector_is_rounded_to_the_nearest_numbers(values):
    x = torch.tensor(values)
    stored, exponent = e4m3.quantize(x)
    assert float(e4m3.factors(exponent)) == float(power_for(x.abs().max()))
    assert torch.equal(stored.double(), rounded(x / power_for(x.abs().max())))
    assert torch.equal(dequantize(*e4m3.quantize(x), x.dtype), vectors_in_8bit(x))


@settings(max_examples=100, derandomize=True)
@given(st.lists(SIZES, min_size=1, max_size=9))
def test_what_is_read_back_is_exact_in_bfloat16(values):
    stored = e4m3.quantize(torch.tensor(values))
    assert torch.equal(dequantize(*stored, torch.bfloat16).double(), dequantize(*stored, torch.float64))


def test_relative_errors_are_at_most_a_sixteenth():
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    error = (dequantize(*e4m3.quantize(x), x.dtype) - x).abs()
    is_normal = x.abs() >= 2**-14 * x.abs().amax(-1, keepdim=True)
    assert (error <= x.abs() / 16)[is_normal].all()
    assert float((error / x.abs())[is_normal].max()) == pytest.approx(1 / 17, rel=0.01)
