"""Where an adapter's update is rounded, against float64."""

from __future__ import annotations

import pytest
import torch

from colocate.weights.adapters import Adapter
from colocate.weights.low_rank import LowRank


@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("scaling", [0.7, -2.0])
def test_the_sum_is_rounded_once_and_so_is_the_low_rank_product(num_rows, scaling):
    generator = torch.Generator().manual_seed(num_rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    adapter = Adapter(a=normal(6, 96), b=normal(50, 6), bias=None, scaling=scaling, dropout=0.0)
    x, wide = normal(num_rows, 96).bfloat16(), (10 * normal(num_rows, 70)).bfloat16()
    before = wide.clone()
    adapter.add_to(wide[:, 10:60], x)
    a, b = adapter.a.bfloat16().double(), adapter.b.bfloat16().double()
    t = (x.double() @ a.t()).bfloat16().double()
    expected = before.double()
    expected[:, 10:60] += scaling * (t @ b.t())
    # Half a step of bfloat16, which a second rounding, of the update alone, would make more of here, where
    # both are of one size. Summed in float32, t may round the other way: rarely.
    excess = (wide.double() - expected).abs() - (2.0**-8 * expected.abs() + 1e-6)
    assert (excess > 0).double().mean() < 0.02
    assert torch.equal(wide[:, :10], before[:, :10]) and torch.equal(wide[:, 60:], before[:, 60:])


def test_a_float32_model_is_computed_in_float32_throughout():
    generator = torch.Generator().manual_seed(0)
    a, b, x, y = (torch.randn(shape, generator=generator) for shape in ((4, 32), (16, 4), (5, 32), (5, 16)))
    bias = torch.ones(16)
    expected = y.double() + 1.5 * (x.double() @ a.double().t() @ b.double().t() + 1)
    Adapter(a, b, bias, 1.5, 0.0).add_to(y, x)
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_halves_of_one_factor_are_the_sum_of_the_whole():
    whole = LowRank((torch.randn(5, 3),), (torch.randn(8, 3),), (0.7,))
    halves = LowRank(*zip(*whole.halves(), strict=True))
    product = torch.randn(5, 8)
    torch.testing.assert_close(halves.added_to(product), whole.added_to(product))
    assert halves.halves() == halves.parts() and len(halves.parts()) == 2
