"""A request for a completion and its result, in TensorRT-LLM's terms.

The half that reads results runs where TensorRT-LLM is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from colocate.types import SamplingParams

RAW, PROCESSED = "RAW", "PROCESSED"
"""TensorRT-LLM's names of log-probs before temperature, penalties and filters, and after them."""

Finish = Literal["stop", "length", "cancelled"]


class SamplingRequest(NamedTuple):
    """A request for one completion."""

    ticket: int
    """The number that the caller has given the request."""
    token_ids: Sequence[int]
    arguments: Mapping[str, Any]
    """The arguments of TensorRT-LLM's `SamplingParams`."""


class DrawnTokens(NamedTuple):
    """The tokens drawn for a request, all or those that there were when it was cancelled."""

    ticket: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """[C] one for each token."""
    finish: Finish
    version: int
    """The version of the weights that drew all of it."""


def sampling_arguments(
    sampling: SamplingParams, *, max_tokens: int, seed: int, logprobs_mode: str | None
) -> dict[str, Any]:
    """The arguments of TensorRT-LLM's `SamplingParams` for one completion.

    Args:
        max_tokens: completion tokens at most.
        logprobs_mode: `RAW` or `PROCESSED`; None: the release has `RAW` alone and no name for it.
    """
    arguments: dict[str, Any] = {
        "max_tokens": max_tokens,
        "end_id": -1,  # stop_token_ids alone say which tokens end a completion
        "pad_id": 0,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "include_stop_str_in_output": True,
        "detokenize": False,
        "logprobs": 1,  # 0 means none in older releases
        "repetition_penalty": sampling.repetition_penalty,
    }
    if logprobs_mode is not None:
        arguments["logprobs_mode"] = logprobs_mode
    if sampling.temperature == 0:
        return arguments | {"top_k": 1}
    # Without any of them TensorRT-LLM takes the arg max.
    return arguments | {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
        "seed": seed,
    }


def drawn(ticket: int, output: Any, version: int) -> DrawnTokens:
    """A `CompletionOutput` as it is told to the trainer.

    Raises:
        ValueError: it ended in an unknown way, or lacks log-probs of tokens that it has.
    """
    token_ids, logprobs = list(output.token_ids), list(output.logprobs or ())
    finish = output.finish_reason
    if finish == "cancelled":
        # Tokens and log-probs come apart, so that one of them may be ahead when a request is cut short.
        whole = min(len(token_ids), len(logprobs))
        token_ids, logprobs = token_ids[:whole], logprobs[:whole]
    elif finish not in ("stop", "length"):
        raise ValueError(f"it ended with finish_reason={finish!r} after {len(token_ids)} tokens")
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(logprobs)} log-probs came for {len(token_ids)} tokens")
    told = tuple(_logprob_of(token, entry) for token, entry in zip(token_ids, logprobs, strict=True))
    return DrawnTokens(ticket, tuple(token_ids), told, finish, version)


def _logprob_of(token: int, entry: Any) -> float:
    """The log-prob of the token drawn: alone, or by its id among those of likelier ones."""
    return float(entry[token].logprob if isinstance(entry, Mapping) else entry)
