"""Logits with what the sampler's pass would find in them."""

from __future__ import annotations

import pytest
import torch
from hopper import compile_all, needs_hopper
from hypothesis import given
from hypothesis import strategies as st
from rounding import ULP, draw, few

from colocate.kernels.decode import head, sampling
from colocate.kernels.matmul import ping_pong

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def reduced(logits: torch.Tensor, temperature: float) -> sampling.Parts:
    """By the definition, in float64."""
    num_rows, vocab_size = logits.shape
    padding = -vocab_size % sampling.PART_SIZE
    padded = torch.nn.functional.pad(logits.double(), (0, padding), value=-torch.inf)
    parts = padded.view(num_rows, -1, sampling.PART_SIZE)
    maxima = parts.amax(dim=2)
    sums = ((parts - maxima[..., None]) / temperature).exp().sum(dim=2)
    return sampling.Parts(maxima.float(), sums.float())


def rows_to_draw(num_rows: int, device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(num_rows)

    def integers(high: int, dtype) -> torch.Tensor:
        return torch.randint(0, high, (num_rows,), generator=generator, device=device, dtype=dtype)

    return dict(
        prompt_keys=integers(2**62, torch.int64),
        samples=integers(8, torch.int32),
        positions=integers(1000, torch.int32),
    )


@few
@given(
    vocab_size=st.sampled_from([5, 128, 200, 256, 300, 600]),
    temperature=st.sampled_from([0.0, 0.5, 1.7]),
    seed=st.integers(0, 2**31),
)
def test_a_draw_from_known_parts_is_the_draw_after_the_pass(device, vocab_size, temperature, seed):
    generator = torch.Generator(device).manual_seed(seed)
    logits = 4 * draw(generator, 6, vocab_size, dtype=torch.float32)
    options = dict(seed=seed, temperature=temperature, **rows_to_draw(6, device))
    tokens, logprobs = sampling.sample(logits, **options)
    parts = reduced(logits, temperature or 1.0)
    known_tokens, known_logprobs = sampling.sample(logits, **options, parts=parts)
    assert torch.equal(tokens, known_tokens)
    torch.testing.assert_close(known_logprobs, logprobs, rtol=1e-5, atol=2e-6)


@pytest.mark.gpu
@needs_hopper
@few
@given(
    num_rows=st.sampled_from([1, 100, 128, 129, 300, 512]),
    vocab_size=st.sampled_from([8, 128, 1000, 1001, 6000]),
    depth=st.sampled_from([8, 72, 520]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_logits_and_parts(num_rows, vocab_size, depth, temperature, dtype, seed):
    check(num_rows, vocab_size, depth, temperature, dtype, seed)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("num_rows", "vocab_size", "depth"), [(512, 151_936, 1536), (200, 50_257, 768)])
def test_logits_and_parts_of_model_shapes(num_rows, vocab_size, depth):
    check(num_rows, vocab_size, depth, 1.0, torch.bfloat16, 0)


def check(num_rows, vocab_size, depth, temperature, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = draw(generator, num_rows, depth, dtype=dtype)
    weight = 3 * draw(generator, vocab_size, depth, dtype=dtype) / depth**0.5
    # What is behind the last row stays as it is.
    memory = hidden.new_full((num_rows + 1, vocab_size), torch.nan, dtype=torch.float32)
    logits = memory[:-1]
    parts = head.logits_and_parts(hidden, weight, temperature, logits)
    assert memory[-1].isnan().all()
    exact = hidden.double() @ weight.double().T
    terms = hidden.double().abs() @ weight.double().abs().T
    assert ((logits - exact).abs() <= 8 * ULP[torch.float32] * terms + 1e-6).all()
    expected = reduced(logits, temperature or 1.0)
    assert torch.equal(parts.maxima, expected.maxima)
    torch.testing.assert_close(parts.sums, expected.sums, rtol=2e-5, atol=0)
    options = dict(seed=seed, temperature=temperature, **rows_to_draw(num_rows, "cuda"))
    tokens, logprobs = sampling.sample(logits, **options)
    known_tokens, known_logprobs = sampling.sample(logits, **options, parts=parts)
    # Sums differ in their last bits, which moves a draw only where two are as near as that.
    assert (tokens != known_tokens).sum() <= 1
    same = tokens == known_tokens
    torch.testing.assert_close(known_logprobs[same], logprobs[same], rtol=1e-5, atol=1e-5)


def test_the_kernel_compiles_without_a_gpu(tmp_path):
    jobs = [
        dict(
            module=head.__name__,
            kernel="head_kernel",
            dtype=dtype,
            blocks=dict(
                hidden=(ping_pong.ROW_TILE, ping_pong.DEPTH),
                weight=(ping_pong.COLUMN_TILE, ping_pong.DEPTH),
            ),
            constants=dict(IS_WHOLE=is_whole),
            types=dict(logits="*fp32", maxima="*fp32", sums="*fp32", scale="fp32"),
        )
        for dtype, is_whole in [("bf16", True), ("fp16", False)]
    ]
    for compiled in compile_all(jobs, tmp_path):
        # Two groups of warps, 2 x 64 rows and 4 times 16 along the sum.
        assert compiled["num_products"] == 2 * 2 * 4
