"""Kernels of a decoder layer against float64 and against the operations that the trainer's model runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounding import ULP, assert_rounds_like, draw, dtypes, few, strided

from colocate.kernels.definitions import rms_norm, rotate
from colocate.kernels.layer.norms import add_rms_norm
from colocate.kernels.layer.rotary import rotate_and_store

pytestmark = pytest.mark.usefixtures("poisoned_memory")
EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_elements", "num_steps"), [(103, 1), (3, 2), (1, 3)])
def test_what_counts_as_rounded_likewise(dtype, num_elements, num_steps):
    expected = torch.linspace(-4, 4, 10_000).to(dtype)
    actual = expected.clone()
    actual.view(torch.int16)[: num_elements - 1] += num_steps
    assert_rounds_like(actual, expected, 1)
    actual.view(torch.int16)[-1] += num_steps
    with pytest.raises(AssertionError, match="of 10000 elements"):
        assert_rounds_like(actual, expected, 1)


@few
@given(
    num_tokens=st.integers(1, 5),
    hidden_size=st.sampled_from([1, 33, 256, 896, 1000]),
    dtype=dtypes,
    has_residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_add_rms_norm(device, num_tokens, hidden_size, dtype, has_residual, seed):
    generator = torch.Generator(device).manual_seed(seed)
    x = draw(generator, num_tokens, hidden_size, dtype=dtype)
    residual = 3 * draw(generator, num_tokens, hidden_size, dtype=dtype) if has_residual else None
    weight = draw(generator, hidden_size, dtype=dtype)
    if residual is None:
        normed, summed = add_rms_norm(strided(x), None, weight, EPS)
        total = x
    else:
        normed, summed = add_rms_norm(strided(x), strided(residual), weight, EPS)
        total = x + residual
    assert torch.equal(summed, total)
    assert_rounds_like(normed, rms_norm(total, weight, EPS), num_float32_ulps=4)
    exact = total.double() * (total.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    torch.testing.assert_close(normed.double(), exact, rtol=2 * ULP[dtype], atol=1e-6)


@few
@given(
    num_parts=st.integers(1, 6),
    hidden_size=st.sampled_from([1, 33, 896]),
    is_8bit=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_add_rms_norm_of_parts_is_that_of_their_rounded_sum(device, num_parts, hidden_size, is_8bit, seed):
    generator = torch.Generator(device).manual_seed(seed)
    parts = draw(generator, num_parts, 3, hidden_size, dtype=torch.float32)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    residual, weight = (draw(generator, *shape, dtype=dtype) for shape in ((3, hidden_size), (hidden_size,)))
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    factor = torch.tensor(2.0**-3, device=device) if is_8bit else None
    expected = add_rms_norm(total.to(dtype), residual, weight, EPS, factor=factor)
    actual = add_rms_norm(parts, residual, weight, EPS, factor=factor)
    assert actual[0].dtype == (torch.float8_e4m3fn if is_8bit else dtype) and actual[1].dtype == dtype
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@few
@given(
    num_tokens=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (3, 1), (12, 2), (14, 2), (7, 7), (16, 8)]),
    head_dim=st.sampled_from([2, 64, 80, 96, 128, 256]),
    page_size=st.sampled_from([1, 16, 24]),
    dtype=dtypes,
    has_norms=st.booleans(),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**31),
)
def test_rotate_and_store(
    device, num_tokens, heads, head_dim, page_size, dtype, has_norms, index_dtype, seed
):
    generator = torch.Generator(device).manual_seed(seed)
    num_heads, num_kv_heads = heads
    num_pages, max_len = 5, 9
    num_rows = num_heads + 2 * num_kv_heads
    before = draw(generator, num_tokens, num_rows, head_dim, dtype=dtype)
    cos, sin = (draw(generator, max_len, head_dim, dtype=dtype) for _ in range(2))
    # One past the end of the tables is allowed, and reads their last row.
    positions = torch.randint(0, max_len + 1, (num_tokens,), generator=generator, device=device)
    slots = torch.randperm(num_pages * page_size, generator=generator, device=device)[:num_tokens]
    slots = torch.where(torch.rand(num_tokens, generator=generator, device=device) < 0.3, -1, slots)
    norms = [draw(generator, head_dim, dtype=dtype) if has_norms else None for _ in range(2)]
    storage = torch.full(
        (num_pages, 2, 3, num_kv_heads, page_size, head_dim), torch.nan, dtype=dtype, device=device
    )
    k_cache, v_cache = storage[:, 0, 1], storage[:, 1, 2]
    qkv = strided(before.flatten(1)).unflatten(1, (num_rows, head_dim))
    rotate_and_store(
        qkv,
        cos,
        sin,
        positions.to(index_dtype),
        slots.to(index_dtype),
        *norms,
        EPS,
        k_cache,
        v_cache,
        num_heads,
        num_kv_heads,
    )

    split = [num_heads, num_kv_heads, num_kv_heads]
    after_q, after_k, after_v = qkv.split(split, dim=1)
    q, k, v = before.split(split, dim=1)
    rows = positions.clamp(max=max_len - 1)
    for after, x, norm in ((after_q, q, norms[0]), (after_k, k, norms[1])):
        angles = cos[rows][:, None], sin[rows][:, None]
        normed = x if norm is None else rms_norm(x, norm, EPS)
        # Where the two products nearly cancel, a last bit of either is more than one of the sum.
        expected = rotate(normed, *angles)
        loose = 4 * ULP[dtype] * float(normed.abs().max() * cos.abs().max().clamp(min=1))
        torch.testing.assert_close(after, expected, rtol=ULP[dtype], atol=loose)
        if norm is None and dtype != torch.float32:
            assert torch.equal(after, expected)
        exact = x.double()
        if norm is not None:
            exact = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
        exact = rotate(exact, *(angle.double() for angle in angles))
        torch.testing.assert_close(after.double(), exact, rtol=4 * ULP[dtype], atol=loose)
    assert torch.equal(after_v, v)

    expected_storage = torch.full_like(storage, torch.nan)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, page_size)
            expected_storage[page, 0, 1, :, offset] = after_k[token]
            expected_storage[page, 1, 2, :, offset] = v[token]
    torch.testing.assert_close(storage, expected_storage, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_a_page_beyond_two_to_the_31_elements():
    num_heads, num_kv_heads, head_dim, page_size = 2, 1, 64, 16
    page_stride = (
        2**30
    )  # elements: page 3 starts beyond a 32-bit offset; 6 GiB are taken, 4 pages are touched
    storage = torch.empty(3 * page_stride + 4096, dtype=torch.bfloat16, device="cuda")
    shape = (4, num_kv_heads, page_size, head_dim)
    cache = storage.as_strided(shape, (page_stride, page_size * head_dim, head_dim, 1))
    v_cache = storage.as_strided(shape, (page_stride, page_size * head_dim, head_dim, 1), storage_offset=2048)
    qkv = torch.randn(1, 4, head_dim, device="cuda").bfloat16()
    values = qkv[0, 3].clone()
    table = torch.ones(1, head_dim, dtype=torch.bfloat16, device="cuda")
    position = torch.zeros(1, dtype=torch.int32, device="cuda")
    slot = torch.full((1,), 3 * page_size + 7, dtype=torch.int32, device="cuda")
    rotate_and_store(
        qkv, table, table, position, slot, None, None, EPS, cache, v_cache, num_heads, num_kv_heads
    )
    assert torch.equal(cache[3, 0, 7], qkv[0, 2])
    assert torch.equal(v_cache[3, 0, 7], values)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1536, 12, 2), (3584, 28, 4)], ids=["1.5B", "7B"])
@pytest.mark.parametrize("num_tokens", [1, 512, 16384])
def test_model_shapes(shape, num_tokens):
    """Real sizes in bfloat16, bit for bit but for a few last bits: what the trainer's model would compute."""
    hidden_size, num_heads, num_kv_heads = shape
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    dtype = torch.bfloat16
    x, residual = (draw(generator, num_tokens, hidden_size, dtype=dtype) for _ in range(2))
    weight = draw(generator, hidden_size, dtype=dtype)
    normed, summed = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(summed, x + residual)
    assert_rounds_like(normed, rms_norm(summed, weight, EPS), num_float32_ulps=4)
    qkv = draw(generator, num_tokens, num_heads + 2 * num_kv_heads, 128, dtype=dtype)
    q, k, v = qkv.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = (draw(generator, 4096, 128, dtype=dtype) for _ in range(2))
    positions = torch.randint(0, 4096, (num_tokens,), generator=generator, device="cuda")
    num_pages = -(-num_tokens // 64)
    slots = torch.randperm(num_pages * 64, generator=generator, device="cuda")[:num_tokens].int()
    k_cache, v_cache = torch.full(
        (2, num_pages, num_kv_heads, 64, 128), torch.nan, dtype=dtype, device="cuda"
    )
    rotate_and_store(
        qkv, cos, sin, positions, slots, None, None, EPS, k_cache, v_cache, num_heads, num_kv_heads
    )
    angles = cos[positions][:, None], sin[positions][:, None]
    assert torch.equal(qkv[:, :num_heads], rotate(q, *angles))
    assert torch.equal(k_cache[slots // 64, :, slots % 64], rotate(k, *angles))
    assert torch.equal(v_cache[slots // 64, :, slots % 64], v)
