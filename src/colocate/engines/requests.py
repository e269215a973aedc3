"""The checks of a rollout's prompts and sampling parameters, and the seeds that engines pass on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from colocate.options.requirements import LEAST_TEMPERATURE
from colocate.types import Prompt, SamplingParams


def check_requests(
    prompts: Sequence[Prompt], sampling: SamplingParams, *, max_len: int, max_len_reason: str, vocab_size: int
) -> None:
    """Refuse what cannot be generated, before any work is done.

    Raises:
        ValueError: an option out of its range, an empty prompt, a token outside the vocabulary, limits of a
            prompt that are not one per sample and 1 to `max_tokens`, or prompt + completion beyond `max_len`
            tokens.
    """
    _check_sampling(sampling)
    for prompt in prompts:
        _check_draws(prompt)
        length = len(prompt.token_ids)
        if length == 0:
            raise ValueError(
                f"Prompt {prompt.key} is empty; a completion needs at least one token to start from."
            )
        check_token_ids(f"Prompt {prompt.key} has", prompt.token_ids, vocab_size)
        limits = prompt.limits(sampling.max_tokens)
        _check_limits(prompt, limits, sampling.max_tokens)
        max_tokens = max(limits, default=0)
        if length + max_tokens > max_len:
            raise ValueError(
                f"Prompt {prompt.key} has {length} tokens; with max_tokens={max_tokens} that makes "
                f"{length + max_tokens}, more than the engine's context of {max_len} tokens "
                f"({max_len_reason}). Shorten the prompt to {max(max_len - max_tokens, 0)} tokens "
                "or lower max_completion_length."
            )


def derived_seed(*numbers: int, num_bits: int) -> int:
    """A seed for an engine with its own random generator: a hash of the numbers that the draw depends on.

    Args:
        numbers: the rollout's seed, the prompt's key and, for a single completion, its number in the group.
        num_bits: bits of the seed, at most 64.
    """
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - num_bits)


def turn_key(key: int, turn: int) -> int:
    """A stand-in for a prompt's key in the draws of a turn, so that each turn of an episode has its own.

    The first turn (0) has the prompt's key itself.
    """
    return key if turn == 0 else derived_seed(key, turn, num_bits=63)


def check_token_ids(what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError if a token id is outside the vocabulary; `what` begins the message."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise ValueError(
            f"{what} token ids from {min(token_ids)} to {max(token_ids)}; the model's vocabulary has "
            f"{vocab_size} tokens."
        )


def unextendable(sequence: int) -> ValueError:
    """The error for an extension of a sequence that has a turn under way, or is not there."""
    return ValueError(
        f"Sequence {sequence} cannot be extended: it has a turn under way, or it was aborted, ended or never "
        "submitted. Extend a sequence submitted with keep=True once `poll` has returned its turn."
    )


def _check_draws(prompt: Prompt) -> None:
    """Raises ValueError if a draw's numbers are beyond 64 bits, with which engines compute."""
    numbers = (prompt.key, *(number for number in prompt.samples[:: max(1, len(prompt.samples) - 1)]))
    if not all(-(2**63) <= number < 2**63 for number in numbers):
        raise ValueError(f"The key {prompt.key} or a sample of {prompt.samples} has more than 64 bits.")


def _check_limits(prompt: Prompt, limits: Sequence[int], max_tokens: int) -> None:
    if len(limits) != len(prompt.samples):
        raise ValueError(
            f"Prompt {prompt.key} asks for {len(prompt.samples)} samples and its max_tokens has "
            f"{len(limits)} limits; it needs one for each."
        )
    for limit in limits:
        if not 1 <= limit <= max_tokens:
            raise ValueError(
                f"Prompt {prompt.key} limits a completion to {limit} tokens, but the rollout's "
                f"max_tokens={max_tokens} allows 1 to {max_tokens}. Raise SamplingParams.max_tokens or lower "
                "the limit."
            )


def _check_sampling(sampling: SamplingParams) -> None:
    checks = (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("repetition_penalty", sampling.repetition_penalty > 0, "positive"),
        (
            "temperature",
            sampling.temperature == 0 or LEAST_TEMPERATURE <= sampling.temperature < math.inf,
            f"0 (greedy), or at least {LEAST_TEMPERATURE:g} and finite",
        ),
        ("top_k", sampling.top_k >= 0, "0 (keep all) or positive"),
        ("top_p", 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("min_p", 0 <= sampling.min_p <= 1, "in [0, 1]"),
        ("stop_token_ids", all(-1 <= i < 2**31 for i in sampling.stop_token_ids), "token ids"),
    )
    for name, is_valid, rule in checks:
        if not is_valid:
            raise ValueError(f"{name}={getattr(sampling, name)}, but it must be {rule}.")
