"""The training stack's gate, forward and backward, against PyTorch and against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rounding import ULP, assert_rounded_once, assert_rounds_like, draw, dtypes, few, strided

from colocate.policy.kernels.gate import silu_mul, silu_mul_backward

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def assert_gradients(grad, gate_up, grad_gate_up) -> None:
    """Against autograd of the plain formula in float64."""
    leaf = gate_up.double().requires_grad_()
    gates, up = leaf.chunk(2, dim=1)
    (gates * gates.sigmoid() * up).backward(grad.double())
    exact_gates, exact_up = leaf.grad.chunk(2, dim=1)
    grad_gates, grad_up = grad_gate_up.chunk(2, dim=1)
    gates, up = gates.detach(), up.detach()
    terms = gates.sigmoid() * (1 + gates.abs() * (-gates).sigmoid())
    # float32's exp(x) is off by |x| last bits.
    scale = (grad.double() * up).abs() * terms * (1 + gates.abs() / 16)
    assert_rounded_once(grad_gates, exact_gates, scale)
    # silu(gate) is rounded before the product, as the forward pass multiplies it.
    rtol = 1.01 * ULP[grad.dtype] + 64 * ULP[torch.float32]
    torch.testing.assert_close(grad_up.double(), exact_up, rtol=rtol, atol=1e-6)


@few
@given(
    num_tokens=st.integers(0, 4),
    width=st.sampled_from([1, 100, 1024, 2500]),
    dtype=dtypes,
    seed=st.integers(0, 2**31),
)
def test_silu_mul(device, num_tokens, width, dtype, seed):
    generator = torch.Generator(device).manual_seed(seed)
    gate_up = 6 * draw(generator, num_tokens, 2 * width, dtype=dtype)
    grad = draw(generator, num_tokens, width, dtype=dtype)
    gates, up = gate_up.chunk(2, dim=1)
    output = silu_mul(strided(gate_up))
    assert_rounds_like(output, F.silu(gates) * up, num_float32_ulps=16)
    grad_gate_up, again = silu_mul_backward(strided(grad), strided(gate_up))
    assert torch.equal(again, output)
    assert_gradients(grad, gate_up, grad_gate_up)


def test_large_gates(device):
    """exp overflows where sigmoid is 0; neither the product nor its gradient may turn into NaN."""
    gates = torch.tensor([[-1e4, -200.0, -89.0, 0.0, 89.0, 200.0, 1e4]], device=device)
    grad_gate_up, output = silu_mul_backward(torch.ones_like(gates), torch.cat((gates, 0 * gates + 1), dim=1))
    torch.testing.assert_close(output, F.silu(gates), rtol=1e-6, atol=1e-30)
    grad_gates, grad_up = grad_gate_up.chunk(2, dim=1)
    torch.testing.assert_close(grad_up, output)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]], device=device)
    torch.testing.assert_close(grad_gates, expected, rtol=1e-6, atol=1e-30)


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
