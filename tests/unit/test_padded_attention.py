"""Attention in padded batches, compared with each run computed alone by autograd in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.policy.attention import padded_attention
from colocate.policy.attention.pack import Runs

HEADS, KV_HEADS, HEAD_SIZE, SCALE = 4, 2, 8, 0.3


def alone(q, k, v, *, is_causal, window):
    """Output and log-sum-exp of one run."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    if is_causal:
        distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
        scores = scores.masked_fill((distance < 0) | (distance >= (window or len(k))), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.fixture(params=["flash", "plain"])
def operations(request, monkeypatch):
    """What a CPU runs, and what runs elsewhere."""
    if request.param == "plain":
        monkeypatch.setattr(padded_attention, "_flash_forward", padded_attention._plain_forward)
        monkeypatch.setattr(padded_attention, "_flash_backward", padded_attention._plain_backward)


@pytest.mark.usefixtures("operations")
@settings(deadline=None, max_examples=40)
@given(
    query_lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    key_lengths=st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 9),
    max_scores=st.sampled_from([1, 300, 2**25]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_runs_are_as_if_alone(query_lengths, key_lengths, window, max_scores, dtype, seed):
    if key_lengths is not None:
        count = min(len(query_lengths), len(key_lengths))
        query_lengths, key_lengths, window = query_lengths[:count], key_lengths[:count], None
    else:
        query_lengths = [length or 1 for length in query_lengths]
    runs = Runs.of(query_lengths, key_lengths, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)

    def draw(length, heads):
        return torch.randn(length, heads, HEAD_SIZE, generator=generator).to(dtype)

    num_queries, num_keys = sum(runs.query_lengths), sum(runs.key_lengths)
    q, grad = draw(num_queries, HEADS), draw(num_queries, HEADS)
    k, v = draw(num_keys, KV_HEADS), draw(num_keys, KV_HEADS)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    parts = [
        x.split(list(n)) for x, n in zip(exact, [runs.query_lengths, *[runs.key_lengths] * 2], strict=True)
    ]
    wanted = [alone(*run, is_causal=key_lengths is None, window=window) for run in zip(*parts, strict=True)]
    want_out, want_lse = torch.cat([out for out, _ in wanted]), torch.cat([lse for _, lse in wanted], dim=1)
    want_grads = torch.autograd.grad(want_out, exact, grad.double())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded_attention, "_MAX_SCORES", max_scores)
        out, lse = padded_attention.forward(q, k, v, runs, SCALE, window)
        grads = padded_attention.backward(grad, q, k, v, out, lse, runs, SCALE, window)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(lse.double(), want_lse, atol=tolerance, rtol=tolerance)
    for got, want in zip((out, *grads), (want_out, *want_grads), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want.detach(), atol=tolerance, rtol=tolerance)
