"""Turns prompts into requests of `/v1/completions`, and answers into completions. Only token ids are sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from colocate.engines.requests import derived_seed
from colocate.engines.vllm.requests import sampling_fields
from colocate.rollout_server.trainer.client import MalformedResponse
from colocate.types import Completion, Prompt, SamplingParams


@dataclass(frozen=True)
class Request:
    """One HTTP request, for consecutive members of one prompt's group with equal limits of tokens."""

    body: dict[str, Any]
    num_completions: int
    max_tokens: int


def requests_of(
    prompts: Sequence[Prompt], sampling: SamplingParams, model: str, *, weights: str, is_native: bool
) -> Iterator[Request]:
    """The requests for `prompts`. Their completions, in this order, are those of the rollout.

    Args:
        model: the name under which the server offers the model.
        weights: the name of the weights that are to answer. A server that has others refuses.
        is_native: whether the native engine answers, whose draws depend on the prompt's key and the member's
            number, as in the trainer's process, and not on a seed for each request.
    """
    for prompt in prompts:
        for first, count, max_tokens in _runs(prompt, sampling):
            yield Request(
                {
                    "model": model,
                    "prompt": list(prompt.token_ids),
                    "n": count,
                    "max_tokens": max_tokens,
                    # vLLM draws the i-th of n completions with seed + i: a 63rd bit is left for the sum.
                    "seed": derived_seed(sampling.seed, prompt.key, num_bits=62) + first,
                    # Nothing is left to defaults, which may come from the model's generation_config.
                    **sampling_fields(sampling),
                    "presence_penalty": 0.0,
                    "frequency_penalty": 0.0,
                    "return_token_ids": True,
                    "return_tokens_as_token_ids": True,  # nothing to turn into text
                    # What vLLM salts its prefix cache with, so that no page outlives its weights.
                    "cache_salt": weights,
                    **({"draws": [sampling.seed, prompt.key, first]} if is_native else {}),
                },
                count,
                max_tokens,
            )


def _runs(prompt: Prompt, sampling: SamplingParams) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive members with equal limits, each (first member, number of members, limit)."""
    limits = prompt.limits(sampling.max_tokens)
    start = 0
    for end in range(1, len(limits) + 1):
        follows = (
            end < len(limits)
            and limits[end] == limits[start]
            and prompt.samples[end] == prompt.samples[end - 1] + 1
            and sampling.temperature > 0  # vLLM allows n > 1 only with random sampling
        )
        if not follows:
            yield prompt.samples[start], end - start, limits[start]
            start = end


def completions_in(
    answer: Any, request: Request, sampling: SamplingParams, policy_version: int
) -> list[Completion]:
    """The completions in the server's answer to `request`.

    Raises:
        MalformedResponse: the answer does not have each completion that was asked for, whole and once.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise MalformedResponse("it has no list of choices")
    if sorted(choice.get("index", -1) for choice in choices) != list(range(request.num_completions)):
        raise MalformedResponse(
            f"{request.num_completions} completions were asked for and {len(choices)} came, with the "
            f"indices {[choice.get('index') for choice in choices]}"
        )
    ordered = sorted(choices, key=lambda choice: choice["index"])
    num_cached = _num_cached_tokens(answer)
    return [
        replace(
            _completion(choice, request.max_tokens, sampling, policy_version), num_cached_tokens=num_cached
        )
        for choice in ordered
    ]


def _num_cached_tokens(answer: dict[str, Any]) -> int | None:
    """Tokens of the prompt that the server had in its cache; None: it does not tell (vLLM does with
    --enable-prompt-tokens-details)."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    number = details.get("cached_tokens") if isinstance(details, dict) else None
    return number if type(number) is int else None


def _completion(
    choice: dict[str, Any], max_tokens: int, sampling: SamplingParams, policy_version: int
) -> Completion:
    token_ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if not token_ids or not isinstance(token_ids, list):
        raise MalformedResponse("a completion came without token_ids, which vLLM returns since 0.11")
    if not isinstance(logprobs, list) or len(logprobs) != len(token_ids) or None in logprobs:
        num_logprobs = len(logprobs) if isinstance(logprobs, list) else 0
        raise MalformedResponse(f"{num_logprobs} log-probs came with {len(token_ids)} tokens")
    stops = [i for i, token in enumerate(token_ids) if token in sampling.stop_token_ids]
    finish_reason = choice.get("finish_reason")
    is_whole = (
        stops == [len(token_ids) - 1] and len(token_ids) <= max_tokens
        if finish_reason == "stop"
        else finish_reason == "length" and not stops and len(token_ids) == max_tokens
    )
    if not is_whole:
        raise MalformedResponse(
            f"a completion of {len(token_ids)} tokens (at most {max_tokens}; stop tokens at {stops}) ended "
            f"for the reason {finish_reason!r}"
        )
    return Completion(tuple(token_ids), tuple(logprobs), "stop" if stops else "length", policy_version)
