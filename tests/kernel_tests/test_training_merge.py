"""Attention over two sets of keys, merged, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounding import assert_rounded_once, draw, dtypes, few

from colocate.kernels.train.attention_merge import merge_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def assert_merged(out, lse, parts) -> None:
    """Against a sum of the parts weighted by exp(lse), in float64, where nothing here overflows."""
    weights = torch.stack([part_lse.double().exp() for _, part_lse in parts])
    total = weights.sum(0)
    keys = total > 0
    assert torch.equal(lse.isneginf(), ~keys)
    scale = 1 + torch.stack([part_lse.nan_to_num(neginf=0.0).abs() for _, part_lse in parts]).amax(0).double()
    assert_rounded_once(lse[keys], total.log()[keys], scale[keys])
    shares = torch.where(keys, weights / total, 0.0).transpose(1, 2)[..., None]
    values = torch.stack([part_out.double() for part_out, _ in parts])
    # float32's exp(x) is off by |x| last bits.
    assert_rounded_once(out, (shares * values).sum(0), 4 * values.abs().sum(0))


def parts_of(generator: torch.Generator, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype):
    """Two outputs with their log-sum-exps; either may have seen no keys, and is zero then."""
    parts = []
    for _ in range(2):
        lse = 8 * draw(generator, num_heads, num_tokens, dtype=torch.float32)
        draws = torch.rand(lse.shape, generator=generator, device=generator.device)
        lse = lse.masked_fill(draws < 0.3, -torch.inf)
        out = draw(generator, num_tokens, num_heads, head_dim, dtype=dtype)
        parts.append((out.masked_fill(lse.T[..., None].isneginf(), 0.0), lse))
    return parts


@few
@given(
    num_tokens=st.integers(0, 40),
    num_heads=st.sampled_from([1, 3, 12]),
    head_dim=st.sampled_from([2, 64, 80, 96, 128, 256]),
    dtype=dtypes,
    seed=st.integers(0, 2**31),
)
def test_merge_attention(device, num_tokens, num_heads, head_dim, dtype, seed):
    generator = torch.Generator(device).manual_seed(seed)
    parts = parts_of(generator, num_tokens, num_heads, head_dim, dtype)
    (first, first_lse), (other, other_lse) = parts
    # Rows 2 to 2 + T of a longer pack, in place.
    pack = torch.full((num_tokens + 5, num_heads, head_dim), torch.nan, dtype=dtype, device=device)
    pack_lse = torch.full((num_heads, num_tokens + 5), torch.nan, device=device)
    rows = slice(2, 2 + num_tokens)
    pack[rows], pack_lse[:, rows] = first, first_lse
    merge_attention(pack[rows], pack_lse[:, rows], other, other_lse.T.contiguous().T)
    assert_merged(pack[rows], pack_lse[:, rows], parts)
    pack[rows], pack_lse[:, rows] = torch.nan, torch.nan
    assert pack.isnan().all() and pack_lse.isnan().all()


def test_far_apart(device):
    """exp of either log-sum-exp overflows or vanishes; what counts is their difference."""
    lse = torch.tensor([[1e4, -1e4, 1e4, 0.0]], device=device)
    other_lse = torch.tensor([[1e4, -1e4, -1e4, 1e4]], device=device)
    out, other = torch.ones(4, 1, 2, device=device), torch.full((4, 1, 2), 3.0, device=device)
    merge_attention(out, lse, other, other_lse)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([2.0, 2.0, 1.0, 3.0], device=device))
    expected = torch.tensor([1e4 + 0.6931, -1e4 + 0.6931, 1e4, 1e4], device=device)
    torch.testing.assert_close(lse[0], expected, rtol=2e-7, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4099, 12, 128), (4099, 28, 128), (4099, 32, 64), (4099, 32, 80)])
def test_model_shapes(shape):
    generator = torch.Generator("cuda").manual_seed(0)
    parts = parts_of(generator, *shape, torch.bfloat16)
    out, lse = (t.clone() for t in parts[0])
    merge_attention(out, lse, *parts[1])
    assert_merged(out, lse, parts)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    num_heads, head_dim = 32, 128
    num_tokens = 2**31 // (num_heads * head_dim) + 3
    few_rows = torch.randn(64, num_heads, head_dim, device="cuda").bfloat16()
    out = few_rows.repeat(num_tokens // 64 + 1, 1, 1)[:num_tokens]
    other = out.flip(1)
    lse, other_lse = torch.randn(2, num_heads, num_tokens, device="cuda")
    last = slice(num_tokens - 2, None)
    expected, expected_lse = out[last].clone(), lse[:, last].clone()
    merge_attention(out, lse, other, other_lse)
    merge_attention(expected, expected_lse, other[last], other_lse[:, last])
    assert torch.equal(out[last], expected) and torch.equal(lse[:, last], expected_lse)
