"""The draw of `sampler.py` on the GPU, in one pass over the logits.

The two-level Gumbel-max needs only each block's log-sum-exp to pick the block and 256 logits to pick the
token. So the pass over the logits (B * V * itemsize bytes: nearly all of the time) reduces halves of blocks
to maximum and sum of exponentials and does nothing else, and a second, tiny kernel draws: V / 256 + 256
noises a row, where one noise per token would cost several times what reading the logits does. For many rows
the product that makes the logits has done this pass's work already (`head.py`).

Where ranks split the vocabulary, each draws a candidate from its own tokens (`draw_candidates`), and `choose`
picks one of the ranks' candidates. That is `sample` with the blocks of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocate.kernels.definitions import BLOCK_SIZE

PART_SIZE = BLOCK_SIZE // 2
"""Tokens that are reduced together, the columns of a tile of `head.py`'s product. A block is two parts."""
LOG2_E = 1.4426950408889634
_CHOOSE_ROWS = 128
_TILE_PARTS = 32
"""Parts that one program of the pass over the logits reduces. A part is what one warp loads at once (128
values of 4 bytes), so its sums need no exchange between warps."""


class Parts(NamedTuple):
    """Compute of each part, 128 tokens, the largest logit m, and the sum of exp((logit - m) /
    temperature)."""

    maxima: Tensor  # [B, ceil(V / 128)] float32
    sums: Tensor  # [B, ceil(V / 128)] float32

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device) -> Parts:
        shape = num_rows, triton.cdiv(vocab_size, PART_SIZE)
        return cls(*(torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)))


def sample(
    logits: Tensor,
    *,
    seed: int | Tensor,
    temperature: float,
    prompt_keys: Tensor,
    samples: Tensor,
    positions: Tensor,
    finished: Tensor | None = None,
    parts: Parts | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row, the same one as `Sampler` without filters, up to rounding of near-ties.

    NaN among the logits of a row gives a NaN log-prob and some token below V.

    Args:
        logits: [B, V] bfloat16, float16 or float32, rows contiguous.
        seed: 64 bits; a captured graph takes them from a tensor [1] int64, which may change between replays.
        temperature: 0: the most likely token, the first of equals, its log-prob at temperature 1.
        prompt_keys: [B] int64, `Prompt.key`.
        samples: [B] integers, the member's number in its group, below 2^16.
        positions: [B] integers, number of completion tokens before this one.
        finished: [B] int32; rows where it is not 0 are not read: token -1, log-prob 0. None: all are drawn.
        parts: what the pass over the logits would find, if it is known.

    Returns:
        Tokens [B] int32 and their log-probs [B] float32 under the distribution drawn from.
    """
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _draw(
        logits, tokens, logprobs, seed=seed, temperature=temperature, prompt_keys=prompt_keys,
        samples=samples, positions=positions, finished=finished, parts=parts,
    )  # fmt: skip
    return tokens, logprobs


def draw_candidates(
    logits: Tensor,
    *,
    part: int,
    seed: int | Tensor,
    temperature: float,
    prompt_keys: Tensor,
    samples: Tensor,
    positions: Tensor,
    finished: Tensor | None = None,
    parts: Parts | None = None,
) -> Tensor:
    """Draw one candidate per row from the tokens of this rank, for `choose`.

    The ranks' blocks are numbered one rank after the other, and a block's number decides its noise. So where
    a rank's tokens are whole blocks, the noise of each block is the one that `sample` gives it.

    Args:
        logits: [B, V / t], those of tokens part * V / t and following.
        part: which of the t parts of the vocabulary these are.

    The rest is that of `sample`.

    Returns:
        [B, 4] float32: the noisy maximum of the blocks, the token drawn from that block (whole numbers below
        2^24 are exact), its logit / temperature, and the log-sum-exp of all logits / temperature. Rows that
        have finished are undefined.
    """
    candidates = torch.empty(len(logits), 4, dtype=torch.float32, device=logits.device)
    _draw(
        logits, candidates, None, seed=seed, temperature=temperature, prompt_keys=prompt_keys,
        samples=samples, positions=positions, finished=finished, parts=parts, part=part,
    )  # fmt: skip
    return candidates


def choose(candidates: Tensor, finished: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose among the candidates of all ranks, the first of equals.

    Args:
        candidates: [t, B, 4], what `draw_candidates` returned on each rank, each four contiguous.
        finished: [B] int32; rows where it is not 0 get token -1 and log-prob 0.

    Returns:
        Tokens [B] int32 and their log-probs [B] float32, as of `sample`.
    """
    num_parts, num_rows, _ = candidates.shape
    assert candidates.stride(2) == 1, "a candidate must be contiguous"
    tokens = torch.empty(num_rows, dtype=torch.int32, device=candidates.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=candidates.device)
    _choose_kernel[(triton.cdiv(num_rows, _CHOOSE_ROWS),)](
        candidates, finished, tokens, logprobs, num_rows, candidates.stride(0), candidates.stride(1),
        NUM_PARTS=num_parts, BLOCK_ROWS=_CHOOSE_ROWS, num_warps=4,
    )  # fmt: skip
    return tokens, logprobs


def _draw(
    logits: Tensor,
    drawn: Tensor,
    logprobs: Tensor | None,
    *,
    seed: int | Tensor,
    temperature: float,
    prompt_keys: Tensor,
    samples: Tensor,
    positions: Tensor,
    finished: Tensor | None,
    parts: Parts | None,
    part: int = 0,
) -> None:
    """Write the rows' tokens to `drawn` and their log-probs, or without `logprobs` their candidates."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    greedy = temperature == 0
    temperature = 1.0 if greedy else float(temperature)
    if not isinstance(seed, Tensor):
        seed = torch.tensor([(seed + 2**63) % 2**64 - 2**63], device=logits.device)
    if parts is None:
        parts = Parts.empty(num_rows, vocab_size, logits.device)
        num_parts = parts.sums.shape[1]
        _reduce_parts_kernel[(num_rows, triton.cdiv(num_parts, _TILE_PARTS))](
            logits, finished, *parts, logits.stride(0), vocab_size, num_parts, temperature,
            PART_SIZE=PART_SIZE, TILE_PARTS=_TILE_PARTS, LOG2_E=LOG2_E, num_warps=4,
        )  # fmt: skip
    first_block = part * num_blocks
    _draw_kernel[(num_rows,)](
        logits, finished, *parts, prompt_keys, samples, positions, seed, drawn, logprobs, logits.stride(0),
        vocab_size, num_blocks, parts.sums.shape[1], temperature, part * vocab_size,
        GREEDY=greedy, BLOCK_SIZE=BLOCK_SIZE, FIRST_BLOCK=first_block,
        MAX_BLOCKS=max(triton.next_power_of_2(num_blocks + first_block % 4), 4), num_warps=4,
    )  # fmt: skip


@triton.jit
def _reduce_parts_kernel(
    logits, finished, part_maxima, part_sums, stride, vocab_size, num_parts, temperature,
    PART_SIZE: tl.constexpr, TILE_PARTS: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """Write maximum and sum of exponentials of some parts of one row (see `Parts`)."""
    row = tl.program_id(0).to(tl.int64)
    if finished is not None:  # noqa: SIM102, this one is decided at compile time
        if tl.load(finished + row) != 0:
            return
    parts = tl.program_id(1) * TILE_PARTS + tl.arange(0, TILE_PARTS)
    columns = parts[:, None] * PART_SIZE + tl.arange(0, PART_SIZE)[None, :]
    values = tl.load(logits + row * stride + columns, mask=columns < vocab_size, other=-float("inf"))
    values = values.to(tl.float32)
    maxima = tl.max(values, axis=1)
    # exp((x - m) / T) as exp2(c x - c m): one multiply-add and one instruction per logit. In a part of
    # nothing but -inf the sum is 0, where -inf - -inf would make it NaN.
    scale = LOG2_E / temperature
    shift = tl.where(maxima == -float("inf"), 0.0, maxima * scale)
    sums = tl.sum(tl.exp2(values * scale - shift[:, None]), axis=1)
    pointers = row * num_parts + parts
    tl.store(part_maxima + pointers, maxima, mask=parts < num_parts)
    tl.store(part_sums + pointers, sums, mask=parts < num_parts)


@triton.jit
def _draw_kernel(
    logits, finished, part_maxima, part_sums, prompt_keys, samples, positions, seed, drawn, logprobs, stride,
    vocab_size, num_blocks, num_parts, temperature, first_token,
    GREEDY: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST_BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Draw one row's token: pick the block by the blocks' log-sum-exps, then the token by its logits.

    Without `logprobs` what is written is the row's candidate (see `draw_candidates`).
    """
    row = tl.program_id(0).to(tl.int64)
    if finished is not None:  # noqa: SIM102, this one is decided at compile time
        if tl.load(finished + row) != 0:
            if logprobs is not None:
                tl.store(drawn + row, -1)
                tl.store(logprobs + row, 0.0)
            return
    # Noise comes in fours: the first lanes may be blocks of the rank before, which this one does not have.
    num_before: tl.constexpr = FIRST_BLOCK % 4
    parts = 2 * (tl.arange(0, MAX_BLOCKS) - num_before)[:, None] + tl.arange(0, 2)[None, :]
    pointers = row * num_parts + parts
    is_part = (parts >= 0) & (parts < num_parts)
    in_parts = tl.load(part_maxima + pointers, mask=is_part, other=-float("inf"))
    maxima = tl.max(in_parts, axis=1)
    # Sums are relative to the block's maximum; where all logits are -inf they are 0.
    below = in_parts - tl.where(maxima == -float("inf"), 0.0, maxima)[:, None]
    sums = tl.load(part_sums + pointers, mask=is_part, other=0.0) * tl.exp(below / temperature)
    totals = maxima / temperature + tl.log(tl.sum(sums, axis=1))
    highest = tl.max(totals, axis=0)
    total = highest + tl.log(tl.sum(tl.exp(totals - highest), axis=0))
    # NaN would otherwise come from -inf - -inf: a rank may have nothing but impossible tokens.
    total = tl.where(highest == -float("inf"), highest, total)
    if GREEDY:
        scores = maxima
    else:
        key = tl.load(prompt_keys + row)
        member = tl.load(samples + row)
        position = tl.load(positions + row)
        words = tl.load(seed)
        seed_low, seed_high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
        # Columns 0 .. BLOCK_SIZE - 1 of the noise are a block's tokens, those from BLOCK_SIZE on are blocks.
        scores = totals + gumbel_noise(
            key, member, position, seed_low, seed_high, (BLOCK_SIZE + FIRST_BLOCK) // 4, MAX_BLOCKS // 4
        )
    # Comparisons with NaN may choose a lane outside, and what is drawn becomes an address: here, then in the
    # embedding.
    block = tl.minimum(tl.maximum(tl.argmax(scores, axis=0) - num_before, 0), num_blocks - 1)
    score = tl.max(scores, axis=0)

    columns = tl.arange(0, BLOCK_SIZE)
    in_block = block * BLOCK_SIZE + columns < vocab_size
    pointers = logits + row * stride + block * BLOCK_SIZE + columns
    chosen = tl.load(pointers, mask=in_block, other=-float("inf")).to(tl.float32) / temperature
    scores = chosen
    if not GREEDY:
        scores = chosen + gumbel_noise(key, member, position, seed_low, seed_high, 0, BLOCK_SIZE // 4)
    column = tl.argmax(scores, axis=0)
    logit = tl.sum(tl.where(columns == column, chosen, 0.0), axis=0)
    token = first_token + tl.minimum(block * BLOCK_SIZE + column, vocab_size - 1)
    if logprobs is not None:
        tl.store(drawn + row, token)
        tl.store(logprobs + row, logit - total)
    else:
        tl.store(drawn + 4 * row, score)
        tl.store(drawn + 4 * row + 1, token.to(tl.float32))
        tl.store(drawn + 4 * row + 2, logit)
        tl.store(drawn + 4 * row + 3, total)


@triton.jit
def _choose_kernel(
    candidates, finished, tokens, logprobs, num_rows, part_stride, row_stride,
    NUM_PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """`choose` for some rows."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_batch = rows < num_rows
    pointers = candidates + rows * row_stride
    best = tl.load(pointers, mask=in_batch, other=0.0)
    token = tl.load(pointers + 1, mask=in_batch, other=0.0)
    logit = tl.load(pointers + 2, mask=in_batch, other=0.0)
    highest = tl.load(pointers + 3, mask=in_batch, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        theirs = pointers + part * part_stride
        score = tl.load(theirs, mask=in_batch, other=0.0)
        is_better = score > best  # and not as good: the first rank has the lower tokens
        best = tl.where(is_better, score, best)
        token = tl.where(is_better, tl.load(theirs + 1, mask=in_batch, other=0.0), token)
        logit = tl.where(is_better, tl.load(theirs + 2, mask=in_batch, other=0.0), logit)
        highest = tl.maximum(highest, tl.load(theirs + 3, mask=in_batch, other=0.0))
    sums = tl.zeros([BLOCK_ROWS], tl.float32)
    for part in tl.static_range(0, NUM_PARTS):
        sums += tl.exp(tl.load(pointers + part * part_stride + 3, mask=in_batch, other=0.0) - highest)
    logprob = logit - (highest + tl.log(sums))
    token = token.to(tl.int32)
    if finished is not None:
        is_dead = tl.load(finished + rows, mask=in_batch, other=0) != 0
        token, logprob = tl.where(is_dead, -1, token), tl.where(is_dead, 0.0, logprob)
    tl.store(tokens + rows, token, mask=in_batch)
    tl.store(logprobs + rows, logprob, mask=in_batch)


@triton.jit
def gumbel_noise(
    key, member, position, seed_low, seed_high, FIRST_QUAD: tl.constexpr, NUM_QUADS: tl.constexpr
):
    """The noise that `sampler.gumbel_noise` gives one row from column 4 * FIRST_QUAD on: [4 * NUM_QUADS]
    float32."""
    quads = (FIRST_QUAD + tl.arange(0, NUM_QUADS)).to(tl.uint32) + (member.to(tl.uint32) << 16)
    word0, word1, word2, word3 = tl.philox_impl(
        key.to(tl.uint32),
        (key >> 32).to(tl.uint32),
        position.to(tl.uint32),
        quads,
        seed_low.to(tl.uint32),
        seed_high.to(tl.uint32),
    )
    # A counter's four words are the noises of four neighbouring columns.
    bits = tl.reshape(tl.join(tl.join(word0, word2), tl.join(word1, word3)), [4 * NUM_QUADS])
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # exponential = -log(1 - u). Below 1/8 1 - u rounds away what decides the upper tail of the Gumbel: the
    # series, cut after u^7, is off by u^7 / 8 < 6e-8 of its value. Above, log's error near 1 (2^-22 absolute
    # for the hardware's fast one) is below 2e-6 of the value. The noise's absolute error is the relative one
    # of the exponential.
    series = 1 / 5 + uniform * (1 / 6 + uniform * (1 / 7))
    series = 1 / 2 + uniform * (1 / 3 + uniform * (1 / 4 + uniform * series))
    exponential = tl.where(uniform < 0.125, uniform * (1.0 + uniform * series), -tl.log(1.0 - uniform))
    return -tl.log(exponential)
