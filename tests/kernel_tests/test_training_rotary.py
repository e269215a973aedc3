"""The training stack's rotary embedding and head norms against transformers' and against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounding import ULP, assert_rounded_once, draw, dtypes, few, strided
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from colocate.kernels import definitions
from colocate.kernels.layer.rotary import rotate, rotate_backward

pytestmark = pytest.mark.usefixtures("poisoned_memory")
EPS = 1e-6
Norms = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]


def strided_heads(x: torch.Tensor) -> torch.Tensor:
    """The same [T, heads, D], a token's part of it contiguous, in rows of a wider tensor of NaN."""
    return strided(x.flatten(1)).unflatten(1, x.shape[1:])


def places_of_halves(head_dim: int, pair_distance: int | None) -> list[int]:
    """Where the first values of a head's pairs are, then where the second are."""
    half, size = range(head_dim // 2), pair_distance or head_dim // 2
    if pair_distance == 1:
        return [2 * i for i in half] + [2 * i + 1 for i in half]
    rest = [2 * size + i for i in range(head_dim - 2 * size)]
    firsts, seconds = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    return [*range(size), *firsts, *range(size, 2 * size), *seconds]


def module_norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        return x
    norm = Qwen3RMSNorm(weight.shape[0], EPS).to(x.device, x.dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        return norm(x)


def exact_rotate(qkv, cos, sin, num_heads: int, norms: Norms) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain formula, pair by pair: (a, b) -> (a cos - b sin, b cos + a sin)."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    half = qkv.shape[2] // 2
    outputs = []
    for part, norm in zip(qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)[:2], norms, strict=True):
        x = part
        if norm is not None:
            x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm
        a, b = x[..., :half], x[..., half:]
        c, s = cos[:, None], sin[:, None]
        first, second = a * c[..., :half] - b * s[..., :half], b * c[..., half:] + a * s[..., half:]
        outputs.append(torch.cat((first, second), dim=-1))
    return outputs[0], outputs[1]


def assert_rotated(q, k, qkv, cos, sin, norms: Norms) -> None:
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    assert q.is_contiguous() and k.is_contiguous()
    parts = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    normed = [module_norm(part, norm) for part, norm in zip(parts[:2], norms, strict=True)]
    expected = apply_rotary_pos_emb(*normed, cos, sin)
    exact = exact_rotate(*(t.double() for t in (qkv, cos, sin)), num_heads, _double(norms))
    for actual, like_module, true, x in zip((q, k), expected, exact, normed, strict=True):
        if norms[0] is None:
            assert torch.equal(actual, like_module)
        # Norms sum in another order. Where the two products nearly cancel, a last bit of either is more than
        # one of their difference.
        loose = 4 * ULP[q.dtype] * float(x.abs().max() * torch.stack((cos, sin)).abs().max()) if len(x) else 0
        torch.testing.assert_close(actual, like_module, rtol=ULP[q.dtype], atol=loose)
        torch.testing.assert_close(actual.double(), true, rtol=4 * ULP[q.dtype], atol=loose)


def assert_gradients(grads, qkv, cos, sin, norms: Norms, grad_qkv, grad_norms) -> None:
    """Against autograd of the plain formula in float64."""
    leaf, weights = qkv.double().requires_grad_(), _double(norms)
    for weight in weights:
        if weight is not None:
            weight.requires_grad_()
    wide = [grad.double() for grad in grads]
    q, k = exact_rotate(leaf, cos.double(), sin.double(), grads[0].shape[1], weights)
    torch.autograd.backward((q, k), (wide[0], wide[1]))
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    split = [num_heads, num_kv_heads, num_kv_heads]
    exact, parts, actual = (t.split(split, dim=1) for t in (leaf.grad, qkv.double(), grad_qkv))
    assert torch.equal(actual[2], grads[2])
    largest_angle = torch.maximum(cos.abs(), sin.abs()).double().amax(-1)[:, None, None]
    for i in range(2):
        turned = 2 * largest_angle * wide[i].abs().amax(-1, keepdim=True)
        weight, grad_norm = weights[i], grad_norms[i]
        if weight is None:
            assert grad_norm is None
            assert_rounded_once(actual[i], exact[i], turned)
            continue
        inverse = (parts[i].square().mean(-1, keepdim=True) + EPS).rsqrt()
        normed = (parts[i] * inverse).abs()
        scale = inverse * turned * weight.detach().abs().max() * (1 + normed.amax(-1, keepdim=True))
        assert_rounded_once(actual[i], exact[i], scale)
        # The normed values are rounded before they are summed, as the forward pass multiplies them.
        assert grad_norm is not None and grad_norm.dtype == torch.float32
        off = (grad_norm.double() - weight.grad).abs()
        allowed = (0.5001 * ULP[qkv.dtype] + 16 * ULP[torch.float32]) * (turned * normed).sum((0, 1))
        assert bool((off <= allowed).all())


def _double(norms: Norms) -> Norms:
    first, second = norms
    return (None, None) if first is None else (first.double(), second.double())


@few
@given(
    num_tokens=st.integers(0, 6),
    heads=st.sampled_from([(1, 1), (3, 1), (12, 2), (14, 2), (7, 7), (16, 8)]),
    head_dim=st.sampled_from([2, 64, 80, 96, 128, 256]),
    dtype=dtypes,
    has_norms=st.booleans(),
    pairs=st.sampled_from(["halves", "neighbours", "part"]),
    seed=st.integers(0, 2**31),
)
def test_rotate(device, num_tokens, heads, head_dim, dtype, has_norms, pairs, seed):
    generator = torch.Generator(device).manual_seed(seed)
    num_heads, num_kv_heads = heads
    qkv = draw(generator, num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    # Not cos and sin of anything: whatever the tables hold, the backward pass is the transpose.
    cos, sin = (draw(generator, num_tokens, head_dim, dtype=dtype) for _ in range(2))
    norms: Norms = (None, None)
    if has_norms:
        norms = draw(generator, head_dim, dtype=dtype), draw(generator, head_dim, dtype=dtype)
    distance = {"halves": None, "neighbours": 1, "part": max(head_dim // 8, 1)}[pairs]
    if pairs == "part":
        sin[:, 2 * distance :] = 0
    q, k = rotate(strided_heads(qkv), cos, sin, num_heads, *norms, EPS, None, distance)
    # Any pairing is the usual one of the values in another order.
    order = places_of_halves(head_dim, distance)
    angles = cos[:, order], sin[:, order]
    ordered_norms = norms if norms[0] is None else tuple(norm[order] for norm in norms)
    heads_in_order = [x[..., order].contiguous() for x in (q, k, qkv)]
    assert q.is_contiguous() and k.is_contiguous()
    assert_rotated(*heads_in_order, *angles, ordered_norms)

    grads = [draw(generator, num_tokens, n, head_dim, dtype=dtype) for n in (num_heads, *[num_kv_heads] * 2)]
    grad_qkv, *grad_norms = rotate_backward(
        *(strided_heads(grad) for grad in grads), strided_heads(qkv), cos, sin, *norms, EPS, None, distance
    )
    assert grad_qkv.is_contiguous()
    grads = [grad[..., order] for grad in grads]
    grad_norms = [None if grad is None else grad[order] for grad in grad_norms]
    assert_gradients(grads, heads_in_order[2], *angles, ordered_norms, grad_qkv[..., order], grad_norms)


@pytest.mark.parametrize("pair_distance", [None, 1, 6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norms_after_the_rotation(device, dtype, pair_distance):
    generator = torch.Generator(device).manual_seed(0)
    num_heads, num_kv_heads, head_dim = 3, 1, 24
    split = [num_heads, num_kv_heads, num_kv_heads]
    qkv, grad = draw(generator, 2, 5, sum(split), head_dim, dtype=dtype)
    cos, sin = draw(generator, 2, 5, head_dim, dtype=dtype)
    norms = tuple(draw(generator, 2, head_dim, dtype=dtype))
    if pair_distance == 6:
        sin[:, 12:] = 0
    constants = EPS, None, pair_distance, True
    grads = grad.split(split, dim=1)
    turned = rotate(strided_heads(qkv), cos, sin, num_heads, *norms, *constants)
    grad_qkv, *grad_norms = rotate_backward(*grads, qkv, cos, sin, *norms, *constants)

    leaf, *weights = (x.double().requires_grad_() for x in (qkv, *norms))
    for x, norm, wide, exact_norm, part, of_part in zip(
        turned, norms, leaf.split(split, dim=1), weights, qkv.split(split, dim=1), grads, strict=False
    ):
        expected = definitions.norm_and_rotate(part, norm, cos, sin, *constants)
        loose = 4 * ULP[dtype] * float(expected.abs().max())
        torch.testing.assert_close(x, expected, rtol=ULP[dtype], atol=loose)
        heads = definitions.rotate(wide, *(t.double()[:, None] for t in (cos, sin)), pair_distance)
        (heads * (heads.square().mean(-1, keepdim=True) + EPS).rsqrt() * exact_norm).backward(
            of_part.double()
        )
    close = dict(rtol=8 * ULP[dtype], atol=16 * ULP[dtype] * float(leaf.grad.abs().max()))
    torch.testing.assert_close(grad_qkv[:, :-num_kv_heads].double(), leaf.grad[:, :-num_kv_heads], **close)
    assert torch.equal(grad_qkv[:, -num_kv_heads:], grads[2])
    for grad_norm, weight in zip(grad_norms, weights, strict=True):
        torch.testing.assert_close(grad_norm.double(), weight.grad, **close)


@pytest.mark.gpu
@pytest.mark.parametrize("has_norms", [False, True], ids=["", "head norms"])
@pytest.mark.parametrize("heads", [(12, 2, 128), (28, 4, 128), (64, 8, 128), (32, 8, 64), (32, 32, 80)])
def test_model_shapes(heads, has_norms):
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator("cuda").manual_seed(num_heads)
    num_tokens, dtype = 4099, torch.bfloat16
    qkv = draw(generator, num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles = 2 * torch.pi * torch.rand(num_tokens, head_dim // 2, generator=generator, device="cuda")
    cos, sin = (table(angles).repeat(1, 2).to(dtype) for table in (torch.cos, torch.sin))
    norms: Norms = (None, None)
    if has_norms:
        norms = draw(generator, head_dim, dtype=dtype), draw(generator, head_dim, dtype=dtype)
    q, k = rotate(qkv, cos, sin, num_heads, *norms, EPS)
    assert_rotated(q, k, qkv, cos, sin, norms)
    grads = [draw(generator, num_tokens, n, head_dim, dtype=dtype) for n in (num_heads, *[num_kv_heads] * 2)]
    first, again = (rotate_backward(*grads, qkv, cos, sin, *norms, EPS) for _ in range(2))
    assert_gradients(grads, qkv, cos, sin, norms, first[0], first[1:])
    for one, two in zip(first, again, strict=True):
        assert (one is None and two is None) or torch.equal(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize("has_norms", [False, True], ids=["", "head norms"])
def test_more_than_two_to_the_31_elements(has_norms):
    num_heads, num_kv_heads, head_dim = 28, 4, 128
    num_parts = num_heads + 2 * num_kv_heads
    num_tokens = 2**31 // (num_parts * head_dim) + 3
    few_rows = torch.randn(64, num_parts, head_dim, device="cuda").bfloat16()
    qkv = few_rows.repeat(num_tokens // 64 + 1, 1, 1)[:num_tokens]
    cos, sin = torch.randn(2, num_tokens, head_dim, device="cuda", dtype=torch.bfloat16)
    norms = tuple(torch.randn(2, head_dim, device="cuda").bfloat16()) if has_norms else (None, None)
    last = slice(num_tokens - 2, None)
    q, k = rotate(qkv, cos, sin, num_heads, *norms, EPS)
    last_q, last_k = rotate(qkv[last], cos[last], sin[last], num_heads, *norms, EPS)
    assert torch.equal(q[last], last_q) and torch.equal(k[last], last_k)
    grads = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    grad_qkv, *_ = rotate_backward(*grads, qkv, cos, sin, *norms, EPS)
    expected, *_ = rotate_backward(
        *(grad[last] for grad in grads), qkv[last], cos[last], sin[last], *norms, EPS
    )
    assert torch.equal(grad_qkv[last], expected)
