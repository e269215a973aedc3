"""The training stack's norm, forward and backward, against transformers' and against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounding import ULP, assert_rounded_once, assert_rounds_like, draw, dtypes, few, strided
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from colocate.kernels.layer.norms import rms_norm, rms_norm_backward

pytestmark = pytest.mark.usefixtures("poisoned_memory")
EPS = 1e-6


def module_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = LlamaRMSNorm(weight.shape[0], EPS).to(x.device, x.dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        return norm(x)


def assert_gradients(grad, x, weight, grad_residual, grad_x, grad_weight) -> None:
    """Against autograd of the plain formula in float64."""
    leaf, wide_weight = (t.double().requires_grad_() for t in (x, weight))
    inverse = (leaf.square().mean(-1, keepdim=True) + EPS).rsqrt()
    normed = leaf * inverse
    (normed * wide_weight).backward(grad.double())
    scaled = grad.double().abs() * weight.double().abs()
    normed, inverse = normed.detach().abs(), inverse.detach()
    scale = inverse * (scaled + normed * (scaled * normed).mean(-1, keepdim=True))
    exact = leaf.grad
    if grad_residual is not None:
        exact, scale = exact + grad_residual.double(), scale + grad_residual.double().abs()
    assert_rounded_once(grad_x, exact, scale)
    assert grad_weight.dtype == torch.float32
    # The normed values are rounded before they are summed, as the forward pass multiplies them.
    off = (grad_weight.double() - wide_weight.grad).abs()
    allowed = (0.5001 * ULP[x.dtype] + 16 * ULP[torch.float32]) * (grad.double().abs() * normed).sum(0)
    assert bool((off <= allowed).all())


@few
@given(
    num_tokens=st.integers(0, 7),
    hidden_size=st.sampled_from([1, 33, 64, 256, 896, 1000, 2048]),
    dtype=dtypes,
    has_residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rms_norm(device, num_tokens, hidden_size, dtype, has_residual, seed):
    generator = torch.Generator(device).manual_seed(seed)
    x = 3 * draw(generator, num_tokens, hidden_size, dtype=dtype)
    weight = draw(generator, hidden_size, dtype=dtype)
    normed = rms_norm(strided(x), weight, EPS)
    assert_rounds_like(normed, module_norm(x, weight), num_float32_ulps=4)

    grad, grad_residual = (draw(generator, num_tokens, hidden_size, dtype=dtype) for _ in range(2))
    residual = grad_residual if has_residual else None
    grad_x, grad_weight = rms_norm_backward(
        strided(grad), strided(x), weight, EPS, None if residual is None else strided(residual)
    )
    assert_gradients(grad, x, weight, residual, grad_x, grad_weight)


def test_many_rows_share_a_program(device):
    """More rows than programs hold tiles, the last tile ragged."""
    generator = torch.Generator(device).manual_seed(0)
    num_tokens = 20_003 if device.type == "cuda" else 103
    x, grad = (draw(generator, num_tokens, 64, dtype=torch.float16) for _ in range(2))
    weight = draw(generator, 64, dtype=torch.float16)
    grad_x, grad_weight = rms_norm_backward(grad, x, weight, EPS)
    assert_gradients(grad, x, weight, None, grad_x, grad_weight)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden_size", [64, 1536, 3584, 5120, 8192, 16384])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_model_shapes(hidden_size, dtype):
    generator = torch.Generator("cuda").manual_seed(hidden_size)
    x, grad, residual = (draw(generator, 4099, hidden_size, dtype=dtype) for _ in range(3))
    weight = draw(generator, hidden_size, dtype=dtype)
    assert_rounds_like(rms_norm(x, weight, EPS), module_norm(x, weight), num_float32_ulps=8)
    first, again = (rms_norm_backward(grad, x, weight, EPS, residual) for _ in range(2))
    assert_gradients(grad, x, weight, residual, *first)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    hidden_size = 8192
    num_tokens = 2**31 // hidden_size + 3
    x = torch.randn(64, hidden_size, device="cuda").bfloat16().repeat(num_tokens // 64 + 1, 1)[:num_tokens]
    weight = torch.randn(hidden_size, device="cuda").bfloat16()
    last = slice(num_tokens - 2, None)
    assert torch.equal(rms_norm(x, weight, EPS)[last], rms_norm(x[last], weight, EPS))
    grad_x, _ = rms_norm_backward(x, x, weight, EPS, x)
    assert torch.equal(grad_x[last], rms_norm_backward(x[last], x[last], weight, EPS, x[last])[0])
