"""Drawing the next token, reproducibly, whatever else is in the batch.

Noise comes from a counter-based generator (Philox-4x32-10, Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3"). It is a pure function of (seed, prompt key, member, position), so there is no state that
other sequences of the batch could advance.

Tokens are drawn by the Gumbel-max trick: arg max over tokens of (logit + Gumbel noise) is a sample from
softmax(logits). It is applied twice. The largest noisy logit of a block of 256 tokens is itself
Gumbel-distributed, around the block's log-sum-exp. So one noise per block picks the block, and one noise per
token picks the token within it, which is exact and needs V / 256 + 256 noises instead of V. On a CPU
generating the noise takes far longer than computing the logits.

Where ranks split the vocabulary, each draws a candidate from its own blocks, and the candidate of the block
with the largest noise of all wins: four numbers per rank and row travel, and no logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from colocate.kernels.definitions import BLOCK_SIZE
from colocate.types import SamplingParams

_WORD = 0xFFFFFFFF


class Sampler:
    """Draws tokens for a batch of sequences with one set of sampling parameters."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling

    @property
    def needs_seen_tokens(self) -> bool:
        return self.sampling.repetition_penalty != 1.0

    @property
    def is_plain(self) -> bool:
        """Whether temperature is the only sampling parameter in use: no filter and no penalty."""
        return self.sampling.is_plain

    def __call__(
        self, logits: Tensor, prompt_keys: Tensor, samples: Tensor, positions: Tensor, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Draw one token per row.

        Args:
            logits: [B, V] float32.
            prompt_keys: [B] int64, `Prompt.key`.
            samples: [B] int64, each completion's number in its group.
            positions: [B] int64, number of completion tokens before this one.
            seen: [B, V] bool, whether a token occurs in prompt or completion; for a repetition penalty.

        Returns:
            Tokens [B] int64, and their log-probabilities [B] float32 under softmax(logits / temperature),
            without filters and penalties. With greedy decoding the temperature of the latter is 1.
        """
        processed = process_logits(logits, self.sampling, seen)
        _, tokens, total = self._drawn(processed, prompt_keys, samples, positions)
        if not self.is_plain:
            processed = policy_logits(logits, self.sampling)
            total = processed.logsumexp(dim=-1)
        return tokens, processed.gather(1, tokens[:, None])[:, 0] - total

    def candidates(
        self, logits: Tensor, prompt_keys: Tensor, samples: Tensor, positions: Tensor, *, part: int
    ) -> Tensor:
        """Draw one candidate per row from this rank's tokens, for `choose`; sampling must be plain.

        The ranks' blocks are numbered one rank after the other. Where a rank's tokens are whole blocks, they
        have the noise that they have without parts; otherwise the last block of a rank is a smaller one.

        Args:
            logits: [B, V / t], those of tokens part * V / t and following.
            part: which of the t parts of the vocabulary these are.

        Returns:
            [B, 4] float32: the noisy maximum of the blocks, the token drawn from that block (whole numbers
            below 2^24 are exact), its logit / temperature, and the log-sum-exp of all logits / temperature.
        """
        assert self.is_plain, "filters look at the logits of all ranks"
        processed = process_logits(logits, self.sampling, None)
        score, tokens, total = self._drawn(processed, prompt_keys, samples, positions, part)
        logit = processed.gather(1, tokens[:, None])[:, 0]
        return torch.stack([score, (tokens + part * logits.shape[1]).float(), logit, total], dim=-1)

    def _drawn(
        self, processed: Tensor, prompt_keys: Tensor, samples: Tensor, positions: Tensor, part: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The noisy maximum [B] of processed logits [B, V], the token there [B], and the log-sum-exp [B]."""
        if self.sampling.temperature == 0:
            score, tokens = processed.amax(dim=-1), processed.argmax(dim=-1)
            return score, tokens, processed.logsumexp(dim=-1)
        num_blocks = -(-processed.shape[1] // BLOCK_SIZE)
        block_noise, token_noise = gumbel_noise(
            self.sampling.seed,
            prompt_keys,
            samples,
            positions,
            num_blocks=(part + 1) * num_blocks,
            num_tokens=min(BLOCK_SIZE, processed.shape[1]),
        )
        return _draw(processed, block_noise[:, part * num_blocks :], token_noise)


def choose(candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Choose among the `Sampler.candidates` of all ranks, [t, B, 4], the first of equals: tokens [B] int64
    and their log-probabilities [B] float32."""
    scores, tokens, logits, totals = candidates.unbind(dim=-1)
    winner = scores.argmax(dim=0, keepdim=True)
    logprobs = logits.gather(0, winner)[0] - totals.logsumexp(dim=0)
    return tokens.gather(0, winner)[0].long(), logprobs


def policy_logits(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The logits of the policy's own distribution, [B, V]: at the temperature, before filters and penalties.

    Training computes log-probabilities from these logits. Greedy decoding counts as temperature 1.
    """
    return logits if sampling.temperature in (0, 1.0) else logits / sampling.temperature


def process_logits(logits: Tensor, sampling: SamplingParams, seen: Tensor | None) -> Tensor:
    """The logits of the distribution to draw from, [B, V]; those of tokens that are filtered out are -inf.

    The steps, their meaning and their order are those of transformers' `generate`: repetition penalty,
    temperature, top-k, top-p, min-p. Greedy decoding (temperature 0) applies the penalty alone. Tokens whose
    logits equal the k-th largest are kept.
    """
    if sampling.repetition_penalty != 1.0:
        assert seen is not None, "a repetition penalty needs the tokens seen so far"
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if sampling.temperature == 0:
        return logits
    logits = policy_logits(logits, sampling)
    if 0 < sampling.top_k < logits.shape[1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(dim=-1)
        # In ascending order: drop the least likely tokens, whose probabilities add up to at most 1 - p, but
        # never the most likely token.
        drop = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        drop[:, -1] = False
        logits = logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)
    if sampling.min_p > 0:
        # p < min_p * max p, in logs; the most likely token stays because min_p <= 1.
        probabilities = logits.softmax(dim=-1)
        smallest = sampling.min_p * probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(probabilities < smallest, -torch.inf)
    return logits


def _draw(logits: Tensor, block_noise: Tensor, token_noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw by Gumbel-max a block and then its token. Returns the largest noisy log-sum-exp of a block, the
    token, and the log-sum-exp of all logits, each [B]."""
    num_rows, vocab_size = logits.shape
    num_blocks, block_size = block_noise.shape[1], token_noise.shape[1]
    padding = num_blocks * block_size - vocab_size
    if padding:
        logits = F.pad(logits, (0, padding), value=-torch.inf)
    blocks = logits.view(num_rows, num_blocks, block_size)
    block_totals = blocks.logsumexp(dim=-1)
    scores = block_totals + block_noise
    block = scores.argmax(dim=-1)
    chosen = blocks[torch.arange(num_rows, device=logits.device), block]
    tokens = block * BLOCK_SIZE + (chosen + token_noise).argmax(dim=-1)
    return scores.amax(dim=-1), tokens, block_totals.logsumexp(dim=-1)


def gumbel_noise(
    seed: int,
    prompt_keys: Tensor,
    samples: Tensor,
    positions: Tensor,
    *,
    num_blocks: int,
    num_tokens: int = BLOCK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Standard Gumbel noise for the blocks, [B, num_blocks], and a block's first tokens, [B, num_tokens].

    Philox's key is the low and the high word of the seed. Its counter is the low and the high word of the
    prompt key, the position, and column // 4 + 2^16 * member, because each call makes the words of four
    columns. Columns 0 .. BLOCK_SIZE - 1 are the tokens of a block, columns from BLOCK_SIZE on are the blocks.
    All blocks can share the token noise, because the choice of the block does not depend on it.
    """
    device = prompt_keys.device
    num_token_quads, first_block_quad = -(-num_tokens // 4), BLOCK_SIZE // 4
    quads = torch.arange(num_token_quads + -(-num_blocks // 4), device=device)[None]
    quads = torch.where(quads < num_token_quads, quads, quads - num_token_quads + first_block_quad)
    keys = prompt_keys[:, None]
    counters = keys & _WORD, (keys >> 32) & _WORD, positions[:, None], quads + (samples[:, None] << 16)
    words = philox(counters, (seed & _WORD, (seed >> 32) & _WORD))
    bits = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)
    # With u uniform in (0, 1), e = -log(1 - u) is exponential and -log e is Gumbel. Its upper tail comes from
    # small u, where float32 is finest: u goes down to 2^-33. At the other end 1 - u must not round to 0.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    noise = uniform.neg_().log1p_().neg_().log_().neg_()
    return noise[:, 4 * num_token_quads :][:, :num_blocks], noise[:, :num_tokens]


def philox(
    counters: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10: four random 32-bit words per counter. Words are non-negative int64 and broadcast."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(10):
        # The 64-bit product wraps in int64, but its bits are right: shift and mask give the unsigned words.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((product1 >> 32) & _WORD) ^ c1 ^ k0, ((product0 >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = product1 & _WORD, product0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
