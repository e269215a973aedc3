"""A decoder layer's operations: forward as transformers' modules store it, backward as autograd has it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from colocate.kernels.train import operations
from colocate.weights.low_rank import LowRank

EPS = 1e-6
exactly = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
few = settings(max_examples=30, derandomize=True)
seeds = st.integers(0, 2**31)
activations = sorted(set(ACT2FN) - {"prelu", "xielu"})  # those two have parameters of their own


def normal(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def tables(num_tokens: int, head_dim: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Rotary tables as a model's module gives them: both halves equal, YaRN's scale on them."""
    frequencies = 100.0 ** -torch.linspace(0, 1, head_dim // 2, dtype=torch.float64)
    angles = (torch.arange(num_tokens)[:, None] * frequencies).repeat(1, 2)
    return (1.2 * angles.cos()).to(dtype), (1.2 * angles.sin()).to(dtype)


@few
@given(
    shape=st.sampled_from([(5, 16), (1, 33), (0, 8), (4, 3, 8)]),
    has_residual=st.booleans(),
    has_out=st.booleans(),
    seed=seeds,
)
def test_rms_norm_backward(shape, has_residual, has_out, seed):
    x, weight, grad, residual = normal(seed, shape, shape[-1:], shape, shape)
    leaves = x.requires_grad_(), weight.requires_grad_()
    normed = F.rms_norm(x, shape[-1:], weight, EPS)
    expected_x, expected_weight = torch.autograd.grad(normed, leaves, grad)
    exactly(operations.rms_norm(x, weight, EPS), normed)
    with torch.no_grad():
        out = torch.empty_like(x) if has_out else None
        grad_x, grad_weight = operations.rms_norm_backward(
            grad, x, weight, EPS, residual if has_residual else None, out=out
        )
    assert out is None or grad_x is out
    exactly(grad_x, expected_x + residual if has_residual else expected_x)
    exactly(grad_weight, expected_weight)


@few
@given(
    num_tokens=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    head_dim=st.sampled_from([2, 8]),
    has_norms=st.booleans(),
    seed=seeds,
)
def test_rotate_backward(num_tokens, heads, head_dim, has_norms, seed):
    num_heads, num_kv_heads = heads
    num_parts = num_heads + 2 * num_kv_heads
    split = [num_heads, num_kv_heads, num_kv_heads]
    wide, q_norm, k_norm, cos, sin, grad = normal(
        seed,
        (num_tokens, num_parts * head_dim + 3),
        *[(head_dim,)] * 2,
        *[(num_tokens, head_dim)] * 2,
        (num_tokens, num_parts, head_dim),
    )
    qkv = wide[:, : num_parts * head_dim].unflatten(1, (num_parts, head_dim)).requires_grad_()
    weights = (q_norm.requires_grad_(), k_norm.requires_grad_()) if has_norms else (None, None)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = F.rms_norm(x, (head_dim,), weight, EPS)
        (a, b), (c, d), (s, t) = (x.chunk(2, -1), cos[:, None].chunk(2, -1), sin[:, None].chunk(2, -1))
        return torch.cat((a * c - b * s, b * d + a * t), dim=-1)

    q, k, v = qkv.split(split, dim=1)
    expected = turned(q, weights[0]), turned(k, weights[1])
    for actual, part in zip(
        operations.rotate(qkv, cos, sin, num_heads, *weights, EPS), expected, strict=True
    ):
        exactly(actual, part)
        assert actual.is_contiguous()
    grads = grad.split(split, dim=1)
    leaves = [qkv, *(weight for weight in weights if weight is not None)]
    expected_grads = torch.autograd.grad((*expected, v), leaves, grads)
    with torch.no_grad():
        grad_qkv, *grad_norms = operations.rotate_backward(*grads, qkv, cos, sin, *weights, EPS)
    exactly(grad_qkv, expected_grads[0])
    if has_norms:
        exactly(grad_norms, list(expected_grads[1:]))
    else:
        assert grad_norms == [None, None]


@few
@given(
    shape=st.sampled_from([(5, 8), (1, 1), (0, 3)]),
    name=st.sampled_from(activations),
    adapted=st.tuples(st.booleans(), st.booleans()),
    seed=seeds,
)
def test_gate_backward(shape, name, adapted, seed):
    activation = ACT2FN[name].double() if isinstance(ACT2FN[name], nn.Module) else ACT2FN[name]
    gate_up, grad = normal(seed, (shape[0], 2 * shape[1]), shape)
    low_rank = grad_low_rank = None
    whole, whole_grad = gate_up, grad
    if adapted[0]:
        t, b_gate, b_up = normal(seed, (shape[0], 3), (shape[1], 2), (shape[1], 1))
        low_rank = LowRank(
            tuple(t.split([b_gate.shape[1], b_up.shape[1]], dim=1)), (b_gate, b_up), (0.5, 3.0)
        )
        whole = gate_up + torch.cat((0.5 * t[:, :2] @ b_gate.T, 3.0 * t[:, 2:] @ b_up.T), dim=1)
    if adapted[1]:
        t, a = normal(seed, (shape[0], 3), (3, shape[1]))
        grad_low_rank = LowRank((t,), (a.T,), (2.0,))
        whole_grad = grad + 2.0 * t @ a
    leaf = whole.clone().requires_grad_()
    gates, up = leaf.chunk(2, dim=1)
    output = activation(gates) * up
    (expected,) = torch.autograd.grad(output, leaf, whole_grad)
    exactly(operations.gate(activation, gate_up, low_rank), output.detach())
    with torch.no_grad():
        grad_gate_up, again = operations.gate_backward(grad, activation, gate_up, low_rank, grad_low_rank)
    exactly(grad_gate_up, expected)
    exactly(again, output.detach())


@few
@given(num_tokens=st.integers(0, 6), num_keys=st.integers(1, 6), cut=st.integers(0, 6), seed=seeds)
def test_merge_attention(num_tokens, num_keys, cut, seed):
    """Attention over all keys from that over those before and those from `cut` on; some tokens see none."""
    q, k, v = normal(seed, (num_tokens, 2, 4), (num_keys, 2, 4), (num_keys, 2, 4))
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(num_tokens, num_keys, generator=generator) < 0.5
    scores = torch.einsum("thd,shd->hts", q, k).masked_fill(~visible, -torch.inf)

    def attention(keys: slice) -> tuple[Tensor, Tensor]:
        weights = scores[..., keys].softmax(-1).nan_to_num(0.0)
        return torch.einsum("hts,shd->thd", weights, v[keys]), scores[..., keys].logsumexp(-1)

    out, lse = operations.merge_attention(*attention(slice(0, cut)), *attention(slice(cut, None)))
    expected_out, expected_lse = attention(slice(None))
    exactly(out, expected_out)
    exactly(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@torch.no_grad()
def test_forward_is_that_of_transformers_modules_bit_for_bit(dtype):
    num_tokens, num_heads, num_kv_heads, head_dim, hidden_size = 37, 6, 2, 16, 96
    x, qkv, weight, q_weight, k_weight, gate_up = normal(
        0,
        (num_tokens, hidden_size),
        (num_tokens, num_heads + 2 * num_kv_heads, head_dim),
        (hidden_size,),
        (head_dim,),
        (head_dim,),
        (num_tokens, 2 * hidden_size),
        dtype=dtype,
    )
    norm, q_norm, k_norm = (
        module(w.shape[0], EPS).to(dtype)
        for module, w in ((LlamaRMSNorm, weight), (Qwen3RMSNorm, q_weight), (Qwen3RMSNorm, k_weight))
    )
    for module, w in ((norm, weight), (q_norm, q_weight), (k_norm, k_weight)):
        module.weight.copy_(w)
    assert torch.equal(operations.rms_norm(x, weight, EPS), norm(x))

    cos, sin = tables(num_tokens, head_dim, dtype)
    q, k, _ = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    plain = operations.rotate(qkv, cos, sin, num_heads, None, None, EPS)
    for actual, expected in zip(plain, apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert torch.equal(actual, expected)
    normed = operations.rotate(qkv, cos, sin, num_heads, q_weight, k_weight, EPS)
    for actual, expected in zip(normed, apply_rotary_pos_emb(q_norm(q), k_norm(k), cos, sin), strict=True):
        assert torch.equal(actual, expected)

    gates, up = gate_up.chunk(2, dim=1)
    silu = ACT2FN["silu"]
    mlp = SimpleNamespace(
        act_fn=silu, gate_proj=lambda _: gates, up_proj=lambda _: up, down_proj=lambda activated: activated
    )
    assert torch.equal(operations.gate(silu, gate_up), LlamaMLP.forward(mlp, x))


@torch.no_grad()
def test_gradients_of_sixteen_bit_values_are_rounded_once():
    num_tokens, num_heads, head_dim, width = 23, 3, 8, 40
    angles = tables(num_tokens, head_dim, torch.bfloat16)
    x, grad, weight, gate_up = normal(
        0, *[(num_tokens, width)] * 2, (width,), (num_tokens, 2 * width), dtype=torch.bfloat16
    )
    parts = normal(1, *[(num_tokens, num_heads, head_dim)] * 3, dtype=torch.bfloat16)
    qkv, *norms = normal(2, (num_tokens, 3 * num_heads, head_dim), *[(head_dim,)] * 2, dtype=torch.bfloat16)
    for backward, arguments, num_columns in (
        (operations.rms_norm_backward, [grad, x, weight, EPS, x], width),
        (operations.rotate_backward, [*parts, qkv, *angles, None, None, EPS], head_dim),
        (operations.rotate_backward, [*parts, qkv, *angles, *norms, EPS], head_dim),
        # The other half of this one multiplies silu(gate), rounded before.
        (operations.gate_backward, [grad, F.silu, gate_up], width),
    ):
        actual, *_ = backward(*arguments)
        exact, *_ = backward(*(a.double() if isinstance(a, Tensor) else a for a in arguments))
        assert actual.dtype == torch.bfloat16
        actual, exact = actual[..., :num_columns].double(), exact[..., :num_columns]
        torch.testing.assert_close(actual, exact, rtol=0.5001 * 2**-7, atol=1e-5)
