"""The sampler against transformers' processors, the published generator and the distribution it should
have."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from colocate.engines.native.sampler import (
    BLOCK_SIZE,
    Sampler,
    choose,
    gumbel_noise,
    philox,
    process_logits,
)
from colocate.types import SamplingParams


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known-answer vectors published with Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    words = philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(word) for word in words) == expected


@given(
    data=st.data(),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
@settings(max_examples=60)
def test_filters_are_transformers_own(data, temperature, top_k, top_p, min_p, penalty):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(4, 50, generator=generator) * 3
    input_ids = torch.randint(0, 50, (4, 12), generator=generator)
    processors = LogitsProcessorList()
    if penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        processors.append(MinPLogitsWarper(min_p))
    sampling = SamplingParams(
        max_tokens=1,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
    )
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter(1, input_ids, True)
    actual = process_logits(logits.clone(), sampling, seen)
    torch.testing.assert_close(actual, processors(input_ids, logits.clone()), atol=1e-6, rtol=1e-6)
    assert actual.isfinite().any(dim=1).all(), "every row keeps a token"


def _draw(
    logits: torch.Tensor, num_draws: int, num_parts: int = 1, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """`num_draws` tokens and log-probabilities from one row of logits [V]: draws differ in key and
    position. With `num_parts` of several ranks that split the vocabulary."""
    index = torch.arange(num_draws)
    sampler = Sampler(SamplingParams(max_tokens=1, **options))
    logits, rows = logits.expand(num_draws, -1), (index % 101, index % 7, index // 707)
    if num_parts == 1:
        return sampler(logits, *rows, None)
    parts = enumerate(logits.chunk(num_parts, dim=1))
    return choose(torch.stack([sampler.candidates(part, *rows, part=i) for i, part in parts]))


def _chi_square_deviations(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's chi-square in standard deviations; bins with fewer than 10 expected draws are pooled."""
    is_rare = expected < 10
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    observed = torch.cat([observed[~is_rare], observed[is_rare].sum()[None]])
    kept = expected > 0
    chi_square = ((observed - expected)[kept].square() / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal.
    return ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("vocab_size", [5, BLOCK_SIZE, 2 * BLOCK_SIZE + 88])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 60, "top_p": 0.9}]
)
def test_draws_follow_the_softmax(vocab_size, options):
    num_draws = 12_000
    index = torch.arange(vocab_size)
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    # Blocks of equal weight would hide a wrong choice between them.
    logits -= 1.2 * (index // BLOCK_SIZE)
    tokens, logprobs = _draw(logits, num_draws, **options)
    filtered = process_logits(logits[None], SamplingParams(max_tokens=1, **options), None)[0].double()
    expected = filtered.softmax(0) * num_draws
    observed = torch.bincount(tokens, minlength=vocab_size).double()
    assert observed[expected == 0].sum() == 0, "a filtered token was drawn"
    assert _chi_square_deviations(observed, expected) < 4
    if vocab_size > BLOCK_SIZE:
        by_block = torch.zeros(3, dtype=torch.double)
        block = index // BLOCK_SIZE
        observed, expected = (by_block.index_add(0, block, counts) for counts in (observed, expected))
        assert _chi_square_deviations(observed, expected) < 4
    policy = (logits / options.get("temperature", 1.0)).log_softmax(0)  # that nothing was filtered out of
    torch.testing.assert_close(logprobs, policy[tokens], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("vocab_size", "num_parts"), [(600, 2), (1024, 4)])
def test_draws_of_ranks_follow_the_softmax(vocab_size, num_parts):
    """Also where a rank's last block is a part of one, and where a rank has next to no probability."""
    num_draws = 12_000
    index = torch.arange(vocab_size)
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    rank = index // (vocab_size // num_parts)
    logits -= 1.2 * rank + 5 * (rank == 2)
    tokens, logprobs = _draw(logits, num_draws, num_parts)
    expected = logits.double().softmax(0) * num_draws
    observed = torch.bincount(tokens, minlength=vocab_size).double()
    assert _chi_square_deviations(observed, expected) < 4
    by_rank = torch.zeros(num_parts, dtype=torch.double)
    assert (
        _chi_square_deviations(by_rank.index_add(0, rank, observed), by_rank.index_add(0, rank, expected)) < 4
    )
    torch.testing.assert_close(logprobs, logits.log_softmax(0)[tokens], atol=1e-5, rtol=1e-5)
    if vocab_size == 1024:  # whole blocks, which have the noise that they have on one rank
        assert torch.equal(tokens, _draw(logits, num_draws)[0])


def test_greedy_takes_the_first_of_equals_on_all_ranks():
    logits = torch.zeros(3, 40)
    logits[1, [7, 25]] = 2.0
    logits[2, [39, 31]] = 1.0
    rows = torch.zeros(3, dtype=torch.long)
    sampler = Sampler(SamplingParams(max_tokens=1, temperature=0))
    parts = enumerate(logits.chunk(4, dim=1))
    tokens, logprobs = choose(
        torch.stack([sampler.candidates(p, rows, rows, rows, part=i) for i, p in parts])
    )
    assert tokens.tolist() == [0, 7, 31]
    torch.testing.assert_close(logprobs, logits.log_softmax(1).amax(1))


def test_noise_is_standard_gumbel_and_uncorrelated():
    index = torch.arange(4000)
    blocks, tokens = gumbel_noise(1, index, index * 0, index * 0, num_blocks=4)
    noise = torch.cat([tokens[:, :8], blocks], dim=1).double()
    euler = 0.5772156649
    assert abs(noise.mean() - euler) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.05
    correlation = torch.corrcoef(noise.T) - torch.eye(12)
    assert correlation.abs().max() < 0.08


def test_each_coordinate_changes_the_noise():
    base = dict(seed=1, prompt_keys=torch.tensor([2]), samples=torch.tensor([3]), positions=torch.tensor([4]))
    changed = [
        {},
        {"seed": 2},
        {"seed": 1 + 2**32},
        {"prompt_keys": torch.tensor([3])},
        {"prompt_keys": torch.tensor([2 + 2**32])},
        {"samples": torch.tensor([4])},
        {"positions": torch.tensor([5])},
    ]
    first = [gumbel_noise(**{**base, **change}, num_blocks=1)[1][0, 0].item() for change in changed]
    assert len(set(first)) == len(changed)


def test_greedy_takes_the_largest_logit_and_reports_it_at_temperature_one():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    rows = torch.zeros(3, dtype=torch.long)
    sampler = Sampler(SamplingParams(max_tokens=1, temperature=0, top_p=0.5))
    tokens, logprobs = sampler(logits, rows, rows, rows, None)
    assert torch.equal(tokens, logits.argmax(1))
    torch.testing.assert_close(logprobs, logits.log_softmax(1).amax(1))
