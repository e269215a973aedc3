"""Programs that Triton's interpreter, or one version of it, gets wrong: `interpreter.py` mends it.

On a GPU they show that what the mended interpreter does is what happens there.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def count_to_loaded(x, number):
    """Triton 3.6 with numpy 2.4: TypeError, "only 0-dimensional arrays can be converted"."""
    for i in range(tl.load(number)):
        tl.store(x + i, i + 1.0)


@triton.jit
def store_by_scalars(x, number):
    """Triton 3.9: ValueError, "mask has unsupported dtype"."""
    places = tl.arange(0, 8)
    tl.store(x + places, places + 1.0, mask=(places < 5) & (tl.load(number) >= 0))


@triton.jit
def load_by_scalars(x, number):
    """Triton 3.9: ValueError, "mask has unsupported dtype"."""
    places = tl.arange(0, 8)
    ones = tl.load(x + places, mask=(tl.load(number) < 0) & (places < 5), other=1.0)
    tl.store(x + places, tl.cumsum(ones, 0), mask=places < 5)


@pytest.mark.parametrize(
    "kernel", [count_to_loaded, store_by_scalars, load_by_scalars], ids=["count", "store", "load"]
)
def test_one_to_five(device, kernel):
    x, number = torch.zeros(8, device=device), torch.tensor([5], dtype=torch.int32, device=device)
    kernel[(1,)](x, number)
    assert x.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


@triton.jit
def rows_maxima(x, maxima, places):
    """Triton 3.8 and 3.9, where a row is NaN: ValueError, "All-NaN slice encountered"."""
    rows = tl.arange(0, 4)
    values = tl.load(x + rows[:, None] * 8 + tl.arange(0, 8)[None, :])
    tl.store(maxima + rows, tl.max(values, axis=1))
    tl.store(places + rows, tl.argmax(values, axis=1))


def test_maxima_of_rows_one_of_them_nan(device):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(device)
    x[2], x[3, :3] = torch.nan, -torch.inf
    maxima, places = torch.zeros(4, device=device), torch.zeros(4, dtype=torch.int32, device=device)
    rows_maxima[(1,)](x, maxima, places)
    others = [0, 1, 3]
    assert torch.equal(maxima[others], x[others].amax(1))
    assert torch.equal(places[others].long(), x[others].argmax(1))
    assert maxima[2].isnan() and 0 <= places[2] < 8


@triton.jit
def rounded_to_e4m3(x, out):
    """Triton 3.6: 1.96875, whose rounding carries into the exponent, becomes 1."""
    places = tl.arange(0, 8)
    tl.store(out + places, tl.load(x + places).to(tl.float8e4nv))


def test_what_rounds_to_the_next_power_of_two(device):
    x = torch.tensor([1.96875, -3.9, 255.0, 0.0155, 1.0625, 1.1875, 448.0, 0.0], device=device)
    out = torch.empty(8, dtype=torch.float8_e4m3fn, device=device)
    rounded_to_e4m3[(1,)](x, out)
    assert out.float().tolist() == [2.0, -4.0, 256.0, 2.0**-6, 1.0, 1.25, 448.0, 0.0]
