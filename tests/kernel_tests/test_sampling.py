"""The GPU's sampler against the CPU's, whose definition it shares, and against softmax."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from rounding import examples

from colocate.engines.native import sampler
from colocate.engines.native.sampler import BLOCK_SIZE, Sampler, gumbel_noise, philox
from colocate.kernels.decode import sampling
from colocate.kernels.decode.sampling import choose, draw_candidates, sample
from colocate.types import SamplingParams

pytestmark = pytest.mark.usefixtures("poisoned_memory")
few = examples(25)
WORD = 0xFFFFFFFF


@triton.jit
def _noise_kernel(
    output,
    keys,
    members,
    positions,
    seed_low: tl.uint32,
    seed_high: tl.uint32,
    FIRST: tl.constexpr,
    QUADS: tl.constexpr,
):
    row = tl.program_id(0)
    key, member, position = tl.load(keys + row), tl.load(members + row), tl.load(positions + row)
    noise = sampling.gumbel_noise(key, member, position, seed_low, seed_high, FIRST, QUADS)
    tl.store(output + row * (4 * QUADS) + tl.arange(0, 4 * QUADS), noise)


def rows_of(generator: torch.Generator, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, members and positions over their whole ranges."""

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (num_rows,), generator=generator)

    return draw(-(2**63), 2**63 - 1), draw(0, 2**16), draw(0, 2**31 - 1)


@pytest.mark.parametrize("seed", [0, 1, 0x123456789ABCDEF0, 2**64 - 1, -5])
def test_noise_is_the_samplers(device, seed):
    """The same Philox words, and an error below 3e-6 against the formula in float64."""
    num_rows, first, num_quads = 40, 64, 256
    keys, members, positions = rows_of(torch.Generator().manual_seed(3), num_rows)
    output = torch.empty(num_rows, 4 * num_quads, device=device)
    _noise_kernel[(num_rows,)](
        output,
        keys.to(device),
        members.int().to(device),
        positions.int().to(device),
        seed & WORD,
        (seed >> 32) & WORD,
        FIRST=first,
        QUADS=num_quads,
    )
    quads = first + torch.arange(num_quads)[None] + (members[:, None] << 16)
    counters = keys[:, None] & WORD, (keys[:, None] >> 32) & WORD, positions[:, None], quads
    words = torch.broadcast_tensors(*philox(counters, (seed & WORD, (seed >> 32) & WORD)))
    bits = torch.stack(words, dim=-1).flatten(1)
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    exact = -(-(-uniform).log1p()).log()
    torch.testing.assert_close(output.cpu().double(), exact, rtol=2.0**-23, atol=3e-6)
    block_noise, _ = gumbel_noise(seed, keys, members, positions, num_blocks=4 * num_quads)
    torch.testing.assert_close(output.cpu(), block_noise, rtol=2.0**-22, atol=4e-6)


def clear_rows(logits: torch.Tensor, block_noise: torch.Tensor, token_noise: torch.Tensor) -> torch.Tensor:
    """[B] bool: neither of the two draws is so near a tie (1e-4) that rounding decides it. In float64."""
    padded = torch.nn.functional.pad(
        logits.double(), (0, -logits.shape[1] % BLOCK_SIZE), value=-torch.inf
    ).unflatten(1, (-1, BLOCK_SIZE))
    block_scores = padded.logsumexp(-1) + block_noise
    chosen = padded[torch.arange(len(padded)), block_scores.argmax(-1)] + token_noise
    clear = torch.ones(len(padded), dtype=torch.bool)
    for scores in (block_scores, chosen):
        if scores.shape[1] > 1:
            best = scores.topk(2).values
            clear &= best[:, 0] - best[:, 1] > 1e-4
    return clear


@few
@given(
    num_rows=st.integers(1, 6),
    vocab_size=st.sampled_from([2, 100, 256, 257, 1000, 4096, 5000, 8600]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    temperature=st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.7]),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
    data_seed=st.integers(0, 2**31),
)
def test_draws_are_the_samplers(device, num_rows, vocab_size, dtype, temperature, scale, seed, data_seed):
    generator = torch.Generator().manual_seed(data_seed)
    wide = torch.full((num_rows, vocab_size + 3), torch.nan, dtype=dtype)
    wide[:, :vocab_size] = scale * torch.randn(num_rows, vocab_size, generator=generator)
    logits = wide[:, :vocab_size].float()
    rows = rows_of(generator, num_rows)
    tokens, logprobs = sample(
        wide.to(device)[:, :vocab_size],
        seed=seed,
        temperature=temperature,
        prompt_keys=rows[0].to(device),
        samples=rows[1].int().to(device),
        positions=rows[2].int().to(device),
    )
    params = SamplingParams(max_tokens=1, temperature=temperature, seed=seed)
    expected_tokens, expected_logprobs = Sampler(params)(logits, *rows, None)
    if temperature > 0:
        noise = gumbel_noise(seed, *rows, num_blocks=-(-vocab_size // BLOCK_SIZE))
        clear = clear_rows(logits / temperature, *noise)
    else:
        clear = torch.ones(num_rows, dtype=torch.bool)
    assert torch.equal(tokens.cpu()[clear].long(), expected_tokens[clear])
    # The sums differ in the order of addition: a few last bits of values as large as the logits are.
    largest = float(logits.abs().max()) / (temperature or 1.0)
    torch.testing.assert_close(
        logprobs.cpu()[clear], expected_logprobs[clear], rtol=1e-5, atol=1e-5 + 5e-7 * largest
    )


def test_greedy_takes_the_first_of_equals(device):
    logits = torch.zeros(3, 1000)
    logits[1, [999, 300, 700]] = 2.0
    logits[2, [5, 4]] = 1.0
    zeros = torch.zeros(3, dtype=torch.long, device=device)
    tokens, logprobs = sample(
        logits.to(device), seed=0, temperature=0, prompt_keys=zeros, samples=zeros, positions=zeros
    )
    assert tokens.tolist() == [0, 300, 4]
    expected = logits.double().log_softmax(-1)[torch.arange(3), torch.tensor([0, 300, 4])]
    torch.testing.assert_close(logprobs.cpu().double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_impossible_tokens_and_huge_logits(device, temperature):
    """Whole blocks of -inf stay out; logits of 1e4 neither overflow nor drown the rest of their block."""
    num_rows = 8
    logits = torch.full((num_rows, 1300), -torch.inf)
    logits[:, 600:603] = torch.tensor([1e4, 1e4 - 1, 1e4 - 2])
    logits[:, 1299] = -1e4
    index = torch.arange(num_rows, device=device)
    tokens, logprobs = sample(
        logits.to(device), seed=7, temperature=temperature, prompt_keys=index, samples=index, positions=index
    )
    assert set(tokens.tolist()) <= {600, 601, 602}
    expected = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    expected = expected.gather(1, tokens.cpu().long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs.cpu().double(), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_finished_rows_are_skipped_and_nan_stays_in_the_vocabulary(device, temperature):
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(0))
    logits[1::2] = torch.nan
    logits[4] = torch.nan
    rows = [row.to(device) for row in rows_of(torch.Generator().manual_seed(1), 6)]
    options = dict(seed=3, temperature=temperature)
    keys = dict(prompt_keys=rows[0], samples=rows[1], positions=rows[2])
    finished = torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.int32, device=device)
    tokens, logprobs = sample(logits.to(device), **options, **keys, finished=finished)
    assert (tokens[1::2] == -1).all() and (logprobs[1::2] == 0).all()
    assert 0 <= tokens[4] < 700 and logprobs[4].isnan()
    every_token, every_logprob = sample(logits.to(device), **options, **keys)
    live = [0, 2]
    assert torch.equal(tokens[live], every_token[live])
    assert torch.equal(logprobs[live], every_logprob[live])
    assert ((every_token >= 0) & (every_token < 700)).all()


def of_parts(logits: torch.Tensor, num_parts: int, finished: torch.Tensor | None = None, **options):
    """What `num_parts` ranks draw together, each from its own columns of the logits [B, V]."""
    parts = enumerate(logits.chunk(num_parts, dim=1))
    candidates = [draw_candidates(part, part=i, finished=finished, **options) for i, part in parts]
    return choose(torch.stack(candidates), finished)


@examples(10)
@given(
    num_rows=st.integers(1, 4),
    num_parts=st.sampled_from([2, 4, 8]),
    part_size=st.sampled_from([256, 512, 1280]),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    scale=st.sampled_from([0.0, 3.0, 30.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
    data_seed=st.integers(0, 2**31),
)
def test_ranks_of_whole_blocks_draw_what_one_draws(
    device, num_rows, num_parts, part_size, temperature, scale, seed, data_seed
):
    """Every token is the same, also where ties are near: blocks are reduced alike and have the same noise."""
    generator = torch.Generator().manual_seed(data_seed)
    logits = (scale * torch.randn(num_rows, num_parts * part_size, generator=generator)).to(device)
    keys = dict(zip(("prompt_keys", "samples", "positions"), rows_of(generator, num_rows), strict=True))
    options = dict(seed=seed, temperature=temperature, **{name: row.to(device) for name, row in keys.items()})
    tokens, logprobs = of_parts(logits, num_parts, **options)
    expected_tokens, expected_logprobs = sample(logits, **options)
    assert torch.equal(tokens, expected_tokens)
    # A sum of the parts' sums: a few last bits of values as large as the logits are.
    largest = float(logits.abs().max()) / (temperature or 1.0)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5 + 5e-7 * largest)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_candidates_are_the_samplers(device, temperature):
    """Ranks with a block and 44 tokens each, and noise that begins in the middle of four columns."""
    generator = torch.Generator().manual_seed(2)
    logits, rows = 3 * torch.randn(8, 900, generator=generator), rows_of(generator, 8)
    params = SamplingParams(max_tokens=1, temperature=temperature, seed=77)
    options = dict(seed=77, temperature=temperature)
    keys = dict(zip(("prompt_keys", "samples", "positions"), (row.to(device) for row in rows), strict=True))
    both = []
    for part, own in enumerate(logits.chunk(3, dim=1)):
        expected = Sampler(params).candidates(own, *rows, part=part)
        candidates = draw_candidates(own.to(device), part=part, **options, **keys)
        assert torch.equal(candidates[:, 1].cpu(), expected[:, 1])
        torch.testing.assert_close(candidates.cpu(), expected, rtol=1e-5, atol=1e-5)
        both.append((candidates, expected))
    found, expected = (torch.stack(side) for side in zip(*both, strict=True))
    tokens, logprobs = choose(found)
    expected_tokens, expected_logprobs = sampler.choose(expected)
    assert torch.equal(tokens.cpu().long(), expected_tokens) and expected_tokens.max() > 600
    torch.testing.assert_close(logprobs.cpu(), expected_logprobs, rtol=1e-5, atol=1e-5)


def test_finished_rows_of_ranks_are_skipped_and_nan_stays_in_the_vocabulary(device):
    logits = torch.randn(12, 600, generator=torch.Generator().manual_seed(0)).to(device)
    logits[4] = torch.nan
    logits[5, :300] = -torch.inf
    index = torch.arange(12, device=device)
    finished = (index % 2).int() * (index > 5)
    options = dict(seed=3, temperature=1.0, prompt_keys=index, samples=index, positions=index)
    tokens, logprobs = of_parts(logits, 2, finished, **options)
    is_dead = finished != 0
    assert (tokens[is_dead] == -1).all() and (logprobs[is_dead] == 0).all()
    assert ((tokens[~is_dead] >= 0) & (tokens[~is_dead] < 600)).all()
    assert logprobs[4].isnan() and tokens[5] >= 300
    expected = logits.double().log_softmax(1).gather(1, tokens.clamp(min=0).long()[:, None])[:, 0].float()
    live = ~is_dead & (index != 4)
    torch.testing.assert_close(logprobs[live], expected[live], rtol=1e-5, atol=1e-5)


def test_candidates_of_many_rows(device):
    """More rows than one program chooses for, the ranks' candidates of a row side by side."""
    candidates = torch.randn(300, 4, 4, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    candidates[..., 1] = torch.arange(1200).view(4, 300)
    tokens, logprobs = choose(candidates.to(device))
    expected_tokens, expected_logprobs = sampler.choose(candidates)
    assert torch.equal(tokens.cpu().long(), expected_tokens)
    torch.testing.assert_close(logprobs.cpu(), expected_logprobs, rtol=1e-5, atol=1e-5)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """Pearson's statistic of `counts`, and the value that it exceeds once in a million times.

    Tokens are taken in order of probability and joined until 8 of them are expected: the statistic of rarer
    ones is not chi-square distributed. Wilson & Hilferty (1931): the cube root of chi-square over its degrees
    of freedom is normal; 4.753 is the normal's quantile.
    """
    num_draws = float(counts.sum())
    order = probabilities.argsort()
    expected = (probabilities[order] * num_draws).cumsum(0)
    bins = (expected / 8).floor().clamp(max=math.floor(num_draws / 8) - 1).long()
    _, bins = bins.unique_consecutive(return_inverse=True)
    num_bins = int(bins.max()) + 1
    joined = torch.zeros(2, num_bins, dtype=torch.float64)
    joined[0].index_add_(0, bins, counts[order].double())
    joined[1].index_add_(0, bins, probabilities[order] * num_draws)
    statistic = float(((joined[0] - joined[1]).square() / joined[1]).sum())
    freedom = num_bins - 1
    spread = 2 / (9 * freedom)
    return statistic, freedom * (1 - spread + 4.753 * math.sqrt(spread)) ** 3


def draw_counts(
    logits: torch.Tensor, num_draws: int, temperature: float, device: torch.device
) -> torch.Tensor:
    """How often each token comes up, [V]; a row per draw, all reading the same logits."""
    index = torch.arange(num_draws, device=device)
    tokens, _ = sample(
        logits.to(device).expand(num_draws, -1),
        seed=11,
        temperature=temperature,
        prompt_keys=index // 64,
        samples=index % 8,
        positions=index // 8 % 8,
    )
    return tokens.long().bincount(minlength=logits.shape[0]).cpu()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.share(3)
def test_distribution_is_softmax(device, temperature):
    """Three blocks, the last one cut off. The test would notice a temperature that is half of what it was."""
    logits = 2.5 * torch.randn(600, generator=torch.Generator().manual_seed(5))
    assert_softmax(draw_counts(logits, 300, temperature, device), logits, temperature, 2 * temperature)


def assert_softmax(counts: torch.Tensor, logits: torch.Tensor, temperature: float, other: float) -> None:
    """The counts fit the temperature, and not the other one."""
    statistic, critical = chi_square(counts, (logits.double() / temperature).softmax(0))
    assert statistic < critical
    statistic, critical = chi_square(counts, (logits.double() / other).softmax(0))
    assert statistic > critical


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_distribution_is_softmax_in_a_million_draws(temperature):
    logits = 1.5 * torch.randn(20000, generator=torch.Generator().manual_seed(5)).bfloat16()
    counts = draw_counts(logits, 2**20, temperature, torch.device("cuda"))
    assert_softmax(counts, logits, temperature, 1.15 * temperature)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_beyond_two_to_the_31_logits(temperature):
    """A real vocabulary, bfloat16, more logits than 32 bits count: the last rows are the CPU's."""
    num_rows, vocab_size = 2**31 // 151936 + 64, 151936
    logits = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    logits[-32:] = 3 * torch.randn(32, vocab_size, generator=generator, device="cuda").bfloat16()
    index = torch.arange(num_rows, device="cuda")
    tokens, logprobs = sample(
        logits, seed=5, temperature=temperature, prompt_keys=index, samples=index % 8, positions=index % 1000
    )
    last = logits[-32:].float().cpu()
    rows = [values[-32:].cpu() for values in (index, index % 8, index % 1000)]
    expected_tokens, expected_logprobs = Sampler(
        SamplingParams(max_tokens=1, temperature=temperature, seed=5)
    )(last, *rows, None)
    clear = torch.ones(32, dtype=torch.bool)
    if temperature > 0:
        clear = clear_rows(last, *gumbel_noise(5, *rows, num_blocks=-(-vocab_size // BLOCK_SIZE)))
    assert clear.sum() > 28
    assert torch.equal(tokens[-32:].cpu()[clear].long(), expected_tokens[clear])
    torch.testing.assert_close(logprobs[-32:].cpu()[clear], expected_logprobs[clear], rtol=1e-5, atol=1e-5)
