"""Products with weights in 8 bits, on a GPU cuBLAS's, against float64."""

from __future__ import annotations

import pytest
import torch
from engine_models import make_model

from colocate.engines.native.eight_bit_weights import EightBitWeights
from colocate.engines.native.rollout_weights import RolloutWeights
from colocate.engines.native.triton_backend import TritonBackend
from colocate.kernels.fp8 import e4m3
from colocate.weights.adapters import AdaptedLinear, EightBitWeight, ScaledRows
from colocate.weights.layouts import layout_for
from colocate.weights.shared_views import fuse_parameters

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("num_rows", [1, 7, 16, 65])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product(device, dtype, by_row, num_rows):
    """With rows whose sums float16 could not hold before their factors."""
    torch.manual_seed(num_rows)
    values = torch.randn(num_rows, 128).to(device) * 100
    row_factors = torch.exp2(-4.0 - torch.arange(num_rows) % 9).to(device) if by_row else None
    weight = torch.randn(48, 128).to(device) * 100
    factors = torch.tensor([2.0**-6, 0, 0, 0, 1.0 if by_row else 2.0**-3], device=device)
    rounded = [x.clamp(-448, 448).to(e4m3.DTYPE) for x in (values, weight)]
    in_8bit = EightBitWeight(rounded[1], factors[0], factors[4], by_row, dtype)
    rows = ScaledRows(rounded[0], factors[4].expand(num_rows) if row_factors is None else row_factors)
    bias = (50 * torch.randn(48)).to(dtype).to(device)
    x, w = (
        r.double() * f for r, f in zip(rounded, (rows.factors[:, None].double(), factors[0]), strict=True)
    )
    for added in (None, bias):
        actual = TritonBackend().product_8bit(rows, in_8bit, added)
        assert actual.dtype == dtype and actual.shape == (num_rows, 48)
        product = x @ w.t()
        exact = product if added is None else product + added.double()
        # A GPU adds products in 8 bits to some 14 bits of the largest (DeepSeek-V3, arXiv:2412.19437, section
        # 3.5.2); the sum is rounded to bfloat16, and what a bias is added to afterwards once more.
        largest = x.abs().amax(1)[:, None] * w.abs().amax(1)
        loose = 2.0**-8 * (product.abs() + exact.abs()) + 16 * 2.0**-13 * largest
        if dtype == torch.float32:
            loose = 1e-6 * 128 * largest
        assert ((actual.double() - exact).abs() <= loose).all()
        out = torch.full_like(actual, torch.nan)
        assert TritonBackend().product_8bit(rows, in_8bit, added, out) is out and torch.equal(out, actual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_may_multiply_the_rows_by_their_factors(device, dtype):
    torch.manual_seed(0)
    values, weights = (
        (100 * torch.randn(n, 128)).clamp(-448, 448).to(e4m3.DTYPE).to(device) for n in (20, 48)
    )
    factor, input_factor = (torch.tensor(power, device=device) for power in (2.0**-6, 1.0))
    in_8bit = EightBitWeight(weights, factor, input_factor, True, dtype)
    rows = ScaledRows(values, torch.exp2(-4.0 - torch.arange(20) % 9).to(device))
    adapted, backend = AdaptedLinear(weights, None, [], None, in_8bit=in_8bit), TritonBackend()
    residual, weight = (torch.randn(*shape).to(dtype).to(device) for shape in ((20, 48), (48,)))
    later, at_once = (
        backend.add_rms_norm(x, residual, weight, 1e-6)
        for x in (backend.linear_for_norm(rows, adapted), backend.linear(rows, adapted))
    )
    assert all(map(torch.equal, later, at_once))


def test_weights_and_factors_are_aligned(device):
    """As tensors of their own would be."""
    layout = layout_for(make_model("qwen3", head_dim=16, hidden_size=64).to(device))
    source, weights = RolloutWeights(stacks_adapters=True), EightBitWeights()
    fuse_parameters(layout, room_for_adapters=True)
    source.prepare(layout)
    weights.allocate(layout)
    start = weights._storage.data_ptr()
    weights.prepare(layout, source)
    made = list(weights._places.values())
    assert len(made) == 3 * len(layout.layers)
    for tensor in (t for one in made for t in (one.values, one.factor, one.input_factor)):
        assert (tensor.data_ptr() - start) % 256 == 0
    weights.close()
