"""The training stack's gate, forward and backward, against PyTorch and against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rounding import ULP, assert_rounded_once, assert_rounds_like, draw, dtypes, few, strided

from colocate.kernels.matmul.gate import (
    silu_mul,
    silu_mul_backward,
    silu_mul_low_rank,
    silu_mul_low_rank_backward,
)
from colocate.weights.low_rank import MAX_RANK, LowRank

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def activated(gates, *, is_gelu: bool):
    return F.gelu(gates, approximate="tanh") if is_gelu else F.silu(gates)


def gelu_argument(gates):
    """The argument of the logistic function, as GELU is x sigmoid(2 u): torch's 1 + tanh(u) keeps fewer
    digits far below 0."""
    return (8 / torch.pi) ** 0.5 * (gates + 0.044715 * gates**3)


def assert_gradients(grad, gate_up, grad_gate_up, *, is_gelu: bool = False) -> None:
    """Against autograd of the plain formula in float64."""
    leaf = gate_up.double().requires_grad_()
    gates, up = leaf.chunk(2, dim=1)
    argument = gelu_argument(gates) if is_gelu else gates
    (gates * argument.sigmoid() * up).backward(grad.double())
    exact_gates, exact_up = leaf.grad.chunk(2, dim=1)
    grad_gates, grad_up = grad_gate_up.chunk(2, dim=1)
    gates, up = gates.detach(), up.detach()
    argument, slope = argument.detach(), torch.ones_like(gates)
    if is_gelu:
        slope = (8 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * gates**2)
    terms = argument.sigmoid() * (1 + gates.abs() * slope * (-argument).sigmoid())
    # float32's exp(x) is off by |x| last bits, and GELU's x has roundings of its own.
    scale = (grad.double() * up).abs() * terms * (1 + argument.abs() / (2 if is_gelu else 16))
    if is_gelu:  # whose slopes get so small that float32 keeps few digits of them
        scale = scale + 1e-28
    assert_rounded_once(grad_gates, exact_gates, scale)
    # silu(gate) is rounded before the product, as the forward pass multiplies it.
    rtol = 1.01 * ULP[grad.dtype] + 64 * ULP[torch.float32]
    torch.testing.assert_close(grad_up.double(), exact_up, rtol=rtol, atol=1e-6)


@few
@given(
    num_tokens=st.integers(0, 4),
    width=st.sampled_from([1, 100, 1024, 2500]),
    dtype=dtypes,
    is_gelu=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_silu_mul(device, num_tokens, width, dtype, is_gelu, seed):
    generator = torch.Generator(device).manual_seed(seed)
    gate_up = 6 * draw(generator, num_tokens, 2 * width, dtype=dtype)
    grad = draw(generator, num_tokens, width, dtype=dtype)
    gates, up = gate_up.chunk(2, dim=1)
    output = silu_mul(strided(gate_up), is_gelu=is_gelu)
    # Far below 0 torch's 1 + tanh(u) keeps no digit in float32.
    close = gates.float() > -3 if is_gelu else torch.ones_like(gates, dtype=torch.bool)
    expected = activated(gates, is_gelu=is_gelu) * up
    assert_rounds_like(output[close], expected[close], num_float32_ulps=256 if is_gelu else 16)
    torch.testing.assert_close(output, expected, rtol=ULP[dtype], atol=2e-5)
    grad_gate_up, again = silu_mul_backward(strided(grad), strided(gate_up), is_gelu=is_gelu)
    assert torch.equal(again, output)
    assert_gradients(grad, gate_up, grad_gate_up, is_gelu=is_gelu)


def test_large_gates(device):
    """exp overflows where sigmoid is 0; neither the product nor its gradient may turn into NaN."""
    gates = torch.tensor([[-1e4, -200.0, -89.0, 0.0, 89.0, 200.0, 1e4]], device=device)
    grad_gate_up, output = silu_mul_backward(torch.ones_like(gates), torch.cat((gates, 0 * gates + 1), dim=1))
    torch.testing.assert_close(output, F.silu(gates), rtol=1e-6, atol=1e-30)
    grad_gates, grad_up = grad_gate_up.chunk(2, dim=1)
    torch.testing.assert_close(grad_up, output)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]], device=device)
    torch.testing.assert_close(grad_gates, expected, rtol=1e-6, atol=1e-30)


def make_low_rank(
    generator, num_tokens: int, width: int, ranks: list[int], dtype, *, turned=False
) -> LowRank:
    factors = [draw(generator, width, rank, dtype=dtype) for rank in ranks]
    return LowRank(
        draw(generator, num_tokens, sum(ranks), dtype=dtype).split(ranks, dim=1),
        tuple(factor.T.contiguous().T if turned else factor for factor in factors),
        tuple(0.5 + number for number in range(len(ranks))),
    )


def assert_near_sum(got, base, low_rank: LowRank) -> None:
    """`got` is base + low_rank in its type, but for the last bit where the sum lies between two values."""
    # float32's own roundings are of the largest terms.
    atol = (
        16 * ULP[torch.float32] * float(base.abs().max() + max(part.abs().max() for part in low_rank.reduced))
    )
    exact = base.double()
    for block, (reduced, factor, scaling) in zip(
        exact.chunk(len(low_rank.factors), dim=1), low_rank.parts(), strict=True
    ):
        block += scaling * reduced.double() @ factor.double().T
    torch.testing.assert_close(got.double(), exact, rtol=1.02 * ULP[base.dtype], atol=atol)


@few
@given(
    num_tokens=st.sampled_from([1, 5, 70]),
    width=st.sampled_from([1, 100, 130]),
    ranks=st.lists(st.sampled_from([1, 8, 32, MAX_RANK]), min_size=3, max_size=3),
    dtype=dtypes,
    is_gelu=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_adapters_are_added_on_the_way(device, num_tokens, width, ranks, dtype, is_gelu, seed):
    generator = torch.Generator(device).manual_seed(seed)
    gate_up = 3 * draw(generator, num_tokens, 2 * width, dtype=dtype)
    grad = draw(generator, num_tokens, width, dtype=dtype)
    low_rank = make_low_rank(generator, num_tokens, width, ranks[:2], dtype)
    grad_low_rank = make_low_rank(generator, num_tokens, width, ranks[2:], dtype, turned=True)
    whole, whole_grad = low_rank.added_to(gate_up), grad_low_rank.added_to(grad)
    assert_near_sum(whole, gate_up, low_rank)
    assert_near_sum(whole_grad, grad, grad_low_rank)
    # One last bit of a sum moves what follows by its slope: |d silu| < 1.1, |d gelu| < 1.13.
    loose = dict(rtol=4 * ULP[dtype], atol=4 * ULP[dtype] * float(whole.abs().max()) ** 2)
    output, kind = silu_mul_low_rank(gate_up, low_rank, is_gelu=is_gelu), dict(is_gelu=is_gelu)
    torch.testing.assert_close(output.double(), silu_mul(whole, **kind).double(), **loose)
    grad_gate_up, again = silu_mul_low_rank_backward(grad, gate_up, low_rank, grad_low_rank, **kind)
    want_grad, _ = silu_mul_backward(whole_grad, whole, **kind)
    torch.testing.assert_close(again.double(), output.double(), **loose)
    loose["atol"] *= max(1.0, float(whole_grad.abs().max()))
    torch.testing.assert_close(grad_gate_up.double(), want_grad.double(), **loose)


@pytest.mark.gpu
def test_adapters_at_model_shapes():
    generator = torch.Generator("cuda").manual_seed(0)
    num_tokens, width = 4099, 18944
    gate_up = draw(generator, num_tokens, 2 * width, dtype=torch.bfloat16)
    grad = draw(generator, num_tokens, width, dtype=torch.bfloat16)
    low_rank = make_low_rank(generator, num_tokens, width, [32, 32], torch.bfloat16)
    grad_low_rank = make_low_rank(generator, num_tokens, width, [32], torch.bfloat16, turned=True)
    output = silu_mul_low_rank(gate_up, low_rank)
    grad_gate_up, again = silu_mul_low_rank_backward(grad, gate_up, low_rank, grad_low_rank)
    assert (again == output).float().mean() > 0.98
    # Of sums in float32 nearly all round to what those in float64 round to. (PyTorch's own product rounds the
    # adapters' part before it is added.)
    rows = torch.tensor([0, 1, 15, 16, 255, 256, 2048, num_tokens - 2, num_tokens - 1], device="cuda")
    whole, whole_grad = exact_sum(gate_up, low_rank, rows), exact_sum(grad, grad_low_rank, rows)
    assert (output[rows] == silu_mul(whole)).float().mean() > 0.98
    want_grad, _ = silu_mul_backward(whole_grad, whole)
    assert (grad_gate_up[rows] == want_grad).float().mean() > 0.95


def exact_sum(base, low_rank: LowRank, rows):
    """Some rows of base + low_rank, summed in float64, rounded once."""
    blocks = [
        block[rows].double() + scaling * reduced[rows].double() @ factor.double().T
        for block, (reduced, factor, scaling) in zip(
            base.chunk(len(low_rank.factors), dim=1), low_rank.parts(), strict=True
        )
    ]
    return torch.cat(blocks, dim=1).to(base.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8960, 18944])
def test_model_shapes(width):
    generator = torch.Generator("cuda").manual_seed(width)
    gate_up = draw(generator, 4099, 2 * width, dtype=torch.bfloat16)
    grad = draw(generator, 4099, width, dtype=torch.bfloat16)
    gates, up = gate_up.chunk(2, dim=1)
    output = silu_mul(gate_up)
    assert_rounds_like(output, F.silu(gates) * up, num_float32_ulps=4)
    grad_gate_up, again = silu_mul_backward(grad, gate_up)
    assert torch.equal(again, output)
    assert_gradients(grad, gate_up, grad_gate_up)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    width = 18944
    num_tokens = 2**31 // (2 * width) + 3
    gate_up = torch.randn(64, 2 * width, device="cuda").bfloat16().repeat(num_tokens // 64 + 1, 1)
    gate_up = gate_up[:num_tokens]
    grad, last = gate_up[:, :width], slice(num_tokens - 2, None)
    assert torch.equal(silu_mul(gate_up)[last], silu_mul(gate_up[last]))
    grad_gate_up, output = silu_mul_backward(grad, gate_up)
    expected_grad, expected = silu_mul_backward(grad[last], gate_up[last])
    assert torch.equal(grad_gate_up[last], expected_grad) and torch.equal(output[last], expected)
