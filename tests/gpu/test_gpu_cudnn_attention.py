"""cuDNN's attention over runs, forward and backward, against plain products in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.policy.attention import cudnn_attention, padded_attention
from colocate.policy.attention.pack import Runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="other GPUs do not run it; on Hopper a missing nvidia-cudnn-frontend is an error",
    ),
]
LENGTHS = st.integers(1, 300)
ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def distance(got: torch.Tensor, want: torch.Tensor, grad: torch.Tensor) -> float:
    """Relative; where all is near 0, as with a single key, to the gradient that came in."""
    return float((got.double() - want).norm() / max(want.norm(), 0.05 * grad.norm()))


@settings(max_examples=25)
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1), (28, 4)]),
    head_size=st.sampled_from([64, 128]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    query_lengths=st.lists(LENGTHS, min_size=1, max_size=9),
    key_lengths=st.one_of(st.none(), st.lists(LENGTHS, min_size=9, max_size=9)),
    first_is_empty=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_runs(heads, head_size, dtype, query_lengths, key_lengths, first_is_empty, seed):
    torch.manual_seed(seed)
    (num_heads, num_kv_heads), device = heads, torch.device("cuda")
    if key_lengths is not None:
        key_lengths = key_lengths[: len(query_lengths)]
        if first_is_empty and len(query_lengths) > 1:
            query_lengths = [0, *query_lengths[1:]]
    runs = Runs.of(query_lengths, key_lengths, device)
    num_queries, num_keys = sum(runs.query_lengths), sum(runs.key_lengths)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    q, grad = draw(num_queries, num_heads, head_size), draw(num_queries, num_heads, head_size)
    # As in the stack: v lies beside others.
    k, v = (
        draw(num_keys, num_kv_heads, head_size),
        draw(num_keys, 3 * num_kv_heads, head_size)[:, num_kv_heads:],
    )
    v = v[:, :num_kv_heads]
    scale = head_size**-0.5
    exact = [tensor.double() for tensor in (q, k, v)]
    want_out, want_lse = padded_attention.forward(*exact, runs, scale, None)
    out, lse = cudnn_attention.forward(q, k, v, runs, scale)
    assert distance(out, want_out, grad) < ULP[dtype]
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-5)
    wants = padded_attention.backward(grad.double(), *exact, want_out, want_lse, runs, scale, None)
    gradients = cudnn_attention.backward(grad, q, k, v, out, lse, runs, scale)
    for got, want in zip(gradients, wants, strict=True):
        assert distance(got, want, grad) < 3 * ULP[dtype]


@pytest.mark.parametrize("num_kv_heads", [2, 8])
@pytest.mark.parametrize("num_queries, num_keys", [(1, 1), (700, 130), (17408, 1024)])
def test_workspace_is_as_planned(num_kv_heads, num_queries, num_keys):
    q = torch.zeros(num_queries, 8, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(num_keys, num_kv_heads, 128, dtype=torch.bfloat16, device="cuda")
    runs = Runs.of([num_queries], [num_keys], q.device)
    graph = cudnn_attention._backward_graph(
        cudnn_attention._AttentionCase.of(q, k, runs, 1.0, has_workspace=True)
    )
    planned = cudnn_attention.workspace_bytes(8, num_kv_heads, 128, num_queries, num_keys)
    assert graph.workspace_bytes == pytest.approx(planned, rel=0.02, abs=4096)
