"""Norms that multiply with 1 + weight, as Gemma's do: every kernel with a norm, and PyTorch's operations."""

from __future__ import annotations

import pytest
import torch
from rounding import ULP, assert_rounds_like, draw
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from colocate.kernels import definitions
from colocate.kernels.layer.norms import add_rms_norm, rms_norm, rms_norm_backward
from colocate.kernels.layer.rotary import rotate, rotate_and_store, rotate_backward
from colocate.kernels.train import operations

EPS = 1e-6
DTYPES = [torch.float16, torch.float32]


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    norm = Gemma3RMSNorm(weight.shape[0], EPS).to(x.device, x.dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        return norm(x)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_the_definition_is_gemmas(dtype):
    x, weight = draw(torch.Generator().manual_seed(0), 2, 5, 3, 64, dtype=dtype)
    assert torch.equal(definitions.rms_norm(x, weight[0, 0], EPS, 1.0), gemma_norm(x, weight[0, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [33, 1000])
def test_norms_of_rows(device, dtype, hidden_size):
    generator = torch.Generator(device).manual_seed(0)
    x, residual, grad = draw(generator, 3, 7, hidden_size, dtype=dtype)
    weight = draw(generator, hidden_size, dtype=dtype)
    normed, summed = add_rms_norm(x, residual, weight, EPS, 1.0)
    assert_rounds_like(normed, gemma_norm(summed, weight), num_float32_ulps=4)
    assert_rounds_like(rms_norm(x, weight, EPS, 1.0), gemma_norm(x, weight), num_float32_ulps=4)
    assert_gradients(rms_norm_backward(grad, x, weight, EPS, residual, 1.0), grad, x, weight, residual)
    reference = operations.rms_norm_backward(*(t.cpu() for t in (grad, x, weight)), EPS, residual.cpu(), 1.0)
    assert_gradients(reference, *(t.cpu() for t in (grad, x, weight, residual)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [None, 1.0])
def test_norms_of_what_is_added_and_no_norm_of_the_sum(device, dtype, offset):
    generator = torch.Generator(device).manual_seed(0)
    x, residual = draw(generator, 2, 7, 1000, dtype=dtype)
    own, weight = draw(generator, 2, 1000, dtype=dtype)
    added = definitions.rms_norm(x, own, EPS, offset)
    normed, summed = add_rms_norm(x, residual, weight, EPS, offset, output_weight=own)
    # A last bit of the norm is more than one of the sum where the two nearly cancel.
    loose = 4 * ULP[dtype] * float(added.abs().max())
    torch.testing.assert_close(summed, added + residual, rtol=ULP[dtype], atol=loose)
    assert_rounds_like(normed, definitions.rms_norm(summed, weight, EPS, offset), num_float32_ulps=4)
    for got in add_rms_norm(x, residual, None, EPS, offset, output_weight=own):
        assert torch.equal(got, summed)
    assert all(torch.equal(got, x + residual) for got in add_rms_norm(x, residual, None, EPS, offset))
    assert all(got is x for got in add_rms_norm(x, None, None, EPS, offset))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_gaps_are_normed_in_place(device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    whole, weight = draw(generator, 7, 5 * 24, dtype=dtype), draw(generator, 3 * 24, dtype=dtype)
    part, kept = whole[:, 24:96], whole.clone()
    expected = rms_norm(part.contiguous(), weight, EPS, 0.0)
    assert rms_norm(part, weight, EPS, 0.0, out=part) is part
    assert torch.equal(part, expected)
    assert torch.equal(whole[:, :24], kept[:, :24]) and torch.equal(whole[:, 96:], kept[:, 96:])


def assert_gradients(gradients, grad: Tensor, x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Against autograd of the plain formula in float64."""
    leaf, wide_weight = (t.double().requires_grad_() for t in (x, weight))
    normed = leaf * (leaf.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1 + wide_weight)
    normed.backward(grad.double())
    close = dict(rtol=ULP[x.dtype], atol=1e-5)
    torch.testing.assert_close(gradients[0].double(), leaf.grad + residual.double(), **close)
    torch.testing.assert_close(gradients[1].double(), wide_weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads(device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    num_tokens, num_heads, num_kv_heads, head_dim = 5, 3, 1, 24
    qkv = draw(generator, num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    cos, sin = draw(generator, 2, num_tokens, head_dim, dtype=dtype)
    norms = tuple(draw(generator, 2, head_dim, dtype=dtype))
    parts = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected = [
        definitions.rotate(gemma_norm(part, norm), cos[:, None], sin[:, None])
        for part, norm in zip(parts[:2], norms, strict=True)
    ]
    tensors = [t.cpu() for t in (qkv, cos, sin, *norms)]
    plain = operations.rotate(*tensors[:3], num_heads, *tensors[3:], EPS, 1.0)
    turned = rotate(qkv, cos, sin, num_heads, *norms, EPS, 1.0)
    stored, cache = qkv.clone(), torch.zeros(2, 1, num_kv_heads, 16, head_dim, dtype=dtype, device=device)
    tokens = torch.arange(num_tokens, device=device)
    rotate_and_store(stored, cos, sin, tokens, tokens, *norms, EPS, *cache, num_heads, num_kv_heads, 1.0)
    for got in (plain, turned, stored[:, : num_heads + num_kv_heads].split([num_heads, num_kv_heads], dim=1)):
        for one, other in zip(got, expected, strict=True):
            loose = 4 * ULP[dtype] * float(other.abs().max())
            torch.testing.assert_close(one.to(device), other, rtol=ULP[dtype], atol=loose)

    grads = draw(generator, num_tokens, qkv.shape[1], head_dim, dtype=dtype).split(
        [num_heads, num_kv_heads, num_kv_heads], dim=1
    )
    got = rotate_backward(*grads, qkv, cos, sin, *norms, EPS, 1.0)
    # Float64 without an offset, of weights that have it: `operations` are tested against autograd.
    wide = [t.cpu().double() for t in (*grads, qkv, cos, sin, *(1 + norm.double() for norm in norms))]
    for one, other in zip(got, operations.rotate_backward(*wide, EPS), strict=True):
        loose = 8 * ULP[dtype] * float(other.abs().max())
        torch.testing.assert_close(one.cpu().double(), other, rtol=ULP[dtype], atol=loose)
