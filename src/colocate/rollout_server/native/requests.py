"""A trainer's request for completions, as `rollout_server.completions` sends it, and its answer."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colocate.serving.fields import Fields
from colocate.serving.refusal import Refusal
from colocate.types import Prompt, SamplingParams

_NUMBERS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The fields of `SamplingParams` that are numbers, and what they are if a request does not say."""
_MOST_MEMBERS = 4096
"""Completions of one request."""
_MOST_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class Asked:
    """Completions of one prompt that a request asks for, and the name of the weights to draw them with."""

    prompt: Prompt
    sampling: SamplingParams
    weights: str | None
    """None: whatever weights are there."""


def asked_in(content: Mapping[str, Any], model: str, max_len: int) -> Asked:
    """The completions that the body of a request asks for.

    All requests get the same `sampling.max_tokens`, since the engine draws only sequences of equal sampling
    together. A request's own limit is in its prompt.

    Args:
        content: the JSON object in the body.
        model: the name under which the server offers its model.
        max_len: tokens that a prompt and its completion may have together.

    Raises:
        Refusal: it asks for something that is not available, or has a field with a wrong value.
    """
    fields = Fields(content)
    if (name := fields.any("model")) not in (None, model):
        raise Refusal(404, f"There is no model {name!r:.200} here. The server has {model!r}.")
    if not (prompt := fields.wholes("prompt", 0, _MOST_TOKEN_ID)):
        raise Refusal(400, "A prompt must be a list of at least one token id; text is for `colocate serve`.")
    count, limit = fields.whole("n", 1, _MOST_MEMBERS) or 1, fields.whole("max_tokens", 1, 2**63 - 1) or 1
    if len(prompt) + limit > max_len:
        raise Refusal(
            400,
            f"A prompt of {len(prompt)} tokens and max_tokens={limit} make {len(prompt) + limit}, and the "
            f"server's context is {max_len} (--max_model_len).",
        )
    seed_alone = (fields.whole("seed", 0, 2**63 - 1) or 0, 0, 0)
    draws = fields.wholes("draws", -(2**63), 2**63 - 1) or seed_alone
    if len(draws) != 3 or not 0 <= draws[2] <= 2**63 - 1 - _MOST_MEMBERS:
        raise Refusal(400, "draws must be a seed, a prompt's key, and the number of a group's member.")
    seed, key, first = draws
    numbers = {name: fields.number(name, -sys.float_info.max, sys.float_info.max) for name in _NUMBERS}
    sampling = SamplingParams(
        max_tokens=max_len,
        top_k=max(0, fields.whole("top_k", -1, 2**31 - 1) or 0),
        stop_token_ids=fields.wholes("stop_token_ids", 0, _MOST_TOKEN_ID),
        seed=seed,
        **{name: _NUMBERS[name] if value is None else value for name, value in numbers.items()},
    )
    weights = fields.text("cache_salt")
    limits = (limit,) * count
    return Asked(Prompt(prompt, key, range(first, first + count), limits), sampling, weights)


@dataclass
class CompletionChoice:
    """One completion of a request, as it comes."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "abort"
    """Why it has ended, in vLLM's words: "abort" if it did not come to its end."""
    num_cached_tokens: int | None = None
    """The number that `Completion.num_cached_tokens` explains."""

    def content(self) -> dict[str, Any]:
        """The completion in an answer, in the shape that vLLM gives it."""
        return {
            "index": self.index,
            "text": "",
            "finish_reason": self.finish_reason,
            "token_ids": self.token_ids,
            "logprobs": {"token_logprobs": self.logprobs},
        }


def usage(asked: Asked, choices: Sequence[CompletionChoice]) -> dict[str, Any]:
    """How many tokens were read, found in the cache and drawn for a request, under OpenAI's names."""
    num_prompt, num_drawn = len(asked.prompt.token_ids), sum(len(choice.token_ids) for choice in choices)
    num_cached = max((choice.num_cached_tokens or 0 for choice in choices), default=0)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_drawn,
        "total_tokens": num_prompt + num_drawn,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
