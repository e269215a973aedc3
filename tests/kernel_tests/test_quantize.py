"""Rounding to 8 bits in kernels against `kernels.fp8.e4m3` and `int8`, which tests/unit/test_e4m3.py and
test_int8.py hold to the formats."""

from __future__ import annotations

import pytest
import torch

from colocate.kernels.definitions import norm_and_rotate, rms_norm
from colocate.kernels.fp8 import e4m3, int8, quantize
from colocate.kernels.layer import norms, rotary
from colocate.kernels.matmul import gate


@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def dtype(request) -> torch.dtype:
    return request.param


def spread(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values of many sizes, and a row of zeros."""
    torch.manual_seed(0)
    x = torch.randn(*shape) * torch.exp2(torch.randint(-9, 9, (shape[0], *[1] * (len(shape) - 1))).float())
    x[1] = 0
    return x.to(dtype).to(device)


@pytest.mark.parametrize(
    ("width", "block"), [(7, 2**14), (4096, 2**14), (5000, 2**14), (18944, 2**14), (18944, 2**13)]
)
def test_rows(device, dtype, width, block, monkeypatch):
    monkeypatch.setattr(quantize, "_MAX_ROW_BLOCK", block)
    x = spread(5, width + 3, dtype=dtype, device=device)[:, :width]
    values, factors = quantize.rows(x)
    expected, exponents = e4m3.quantize(x)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(factors, e4m3.factors(exponents))


def test_rows_of_gate_and_up(device):
    gate_up = spread(4, 2 * 4200, dtype=torch.float32, device=device).clamp(-30, 30)
    values, factors = quantize.rows(gate_up, is_gate_up=True)
    expected, exponents = e4m3.quantize(gate.silu_mul(gate_up))
    assert torch.equal(factors, e4m3.factors(exponents))
    # The exponential's last bit may round a number the other way.
    assert (values.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs().max() <= 1


def test_scaled(device, dtype):
    x = spread(3, 1700, dtype=dtype, device=device)
    factor = e4m3.factors(e4m3.exponents_for(x.abs().amax()))
    assert torch.equal(
        quantize.scaled(x, factor).view(torch.uint8), (x.float() / factor).to(e4m3.DTYPE).view(torch.uint8)
    )


def test_norm_of_rows_with_factors(device, dtype):
    x, residual = (spread(6, 192, dtype=dtype, device=device) for _ in range(2))
    weight, factors = (
        torch.ones(192, dtype=dtype, device=device),
        torch.exp2(torch.arange(6) - 3.0).to(device),
    )
    multiplied = norms.add_rms_norm((x.float() * factors[:, None]).to(dtype), residual, weight, 1e-6)
    for unmultiplied in (x, x.float()):
        deferred = norms.add_rms_norm(unmultiplied, residual, weight, 1e-6, row_factors=factors)
        assert all(map(torch.equal, deferred, multiplied))


def test_norm(device, dtype):
    x, residual = (spread(6, 192, dtype=dtype, device=device) for _ in range(2))
    weight = (1 + torch.randn(192)).to(dtype).to(device)
    factor = torch.tensor(2.0**-3, device=device)
    values, summed = norms.add_rms_norm(x, residual, weight, 1e-6, None, factor)
    assert torch.equal(summed, (x.float() + residual.float()).to(dtype))
    plain = norms.add_rms_norm(x, residual, weight, 1e-6)[0]
    assert torch.equal(values.view(torch.uint8), (plain.float() / factor).to(e4m3.DTYPE).view(torch.uint8))
    torch.testing.assert_close(plain, rms_norm(summed, weight, 1e-6), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_prompts_keys_and_values_are_stored_and_read_back(device, dtype, num_kv_heads):
    """What attention of the prompt reads is what the pages hold; nothing else of them is touched."""
    page_size, head_dim, num_heads, num_tokens = 16, 24, 3, 9
    block = int8.head_block_size(page_size, head_dim, int8.DTYPE)
    storage = torch.full((2, 4, num_kv_heads, block), 255, dtype=torch.uint8, device=device)
    caches = storage[..., : page_size * head_dim].unflatten(-1, (page_size, head_dim))
    torch.manual_seed(1)
    sizes = torch.exp2(torch.arange(num_tokens) * 4.0 - 26)[:, None, None]  # from below the least scale on
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim) * sizes
    qkv[1], qkv[3, -1, 2], qkv[4, num_heads, 1] = 0, torch.nan, torch.inf
    qkv = qkv.to(dtype).to(device)
    angles = torch.rand(64, head_dim, device=device) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device) + 5
    slots = torch.tensor([35, 36, -1, 0, 1, 2, 47, 48, 49], dtype=torch.int32, device=device)
    turned = norm_and_rotate(qkv[:, :-num_kv_heads], None, cos[positions.long()], sin[positions.long()], 1e-6)
    k, v = turned[:, num_heads:], qkv[:, -num_kv_heads:].clone()
    rotary.rotate_and_store(
        qkv, cos, sin, positions, slots, None, None, 1e-6, caches[0], caches[1], num_heads, num_kv_heads
    )
    assert torch.equal(qkv[:, :num_heads].nan_to_num(), turned[:, :num_heads].nan_to_num())
    expected = storage.new_full(storage.shape, 255)
    for which, heads in enumerate((k, v)):
        stored, scales = int8.quantize(heads)
        first = num_heads + which * num_kv_heads
        read = int8.dequantize(stored, scales, dtype)
        torch.testing.assert_close(qkv[:, first : first + num_kv_heads], read, rtol=0, atol=0, equal_nan=True)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                page, offset = divmod(slot, page_size)
                place = slice(offset * head_dim, (offset + 1) * head_dim)
                expected[which, page, :, place] = stored[token]
                expected[which, page, :, page_size * head_dim + offset] = scales[token]
    is_nan = (expected[..., page_size * head_dim :] == int8.NOT_A_NUMBER).repeat_interleave(head_dim, -1)
    for actual in (storage, expected):  # whatever numbers go with such a scale
        actual[..., : page_size * head_dim].masked_fill_(is_nan, 0)
    assert torch.equal(storage, expected)
