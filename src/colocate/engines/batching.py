"""Batches for `model.generate` in which sequences do not change each other's log-probs.

Most architectures heed the attention mask, so that shorter prompts can be padded on the left. Recurrent
models and some with linear attention (MiniMax) read padding like any token, and transformers' RWKV mixes the
sequences of a batch when it uses a cache. No attribute of a model says so: `choose_batching` tries it out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colocate.engines.logprob_noise import Rounding
from colocate.parallel.verdict import first_line
from colocate.types import Completion, Prompt

logger = logging.getLogger(__name__)

PADDED = "padded batches"
EQUAL_LENGTHS = "batches of prompts of one length"
ALONE = "batches of one"

_PROBED_LENGTHS = {PADDED: (3, 8), EQUAL_LENGTHS: (6, 6), ALONE: (7,)}
"""Lengths of the prompts that try each batching out, the quickest batching first."""
_TIMES_OWN_NOISE = 3.0
"""The factor by which rounding may set log-probs further apart in a larger batch than in batches of one."""


@dataclass(frozen=True)
class _Tried:
    """The result of one batching: the mean |difference| in nats per token, or why there is none."""

    difference: float
    error: Exception | None = None

    def __str__(self) -> str:
        return f"{self.difference:.2g}" if self.error is None else f"nothing ({first_line(self.error)})"


def choose_batching(
    generate: Callable[[Sequence[Prompt]], Sequence[Completion]],
    score: Callable[[Prompt, Completion], Tensor],
    *,
    vocab_size: int,
    rounding: Rounding,
    name: str,
) -> str:
    """The quickest batching that leaves a model's log-probs as they are in batches of one.

    Batches of one show the difference that rounding alone makes; larger batches are judged by that.

    Args:
        generate: completes prompts in one batch.
        score: log-probs [C] of a completion of C tokens, by a forward pass of this sequence alone, uncached.
        vocab_size: the token ids of the prompts to try are below it.
        rounding: bounds of the mean |difference|, between which the measurement decides.
        name: the architecture, for the log.
    """
    alone = _try(ALONE, generate, score, vocab_size)
    if alone.error is not None:
        raise RuntimeError(
            f"{name} cannot generate, not even for one prompt: {first_line(alone.error)}."
        ) from alone.error
    bound = min(rounding.most, max(rounding.least, _TIMES_OWN_NOISE * alone.difference))
    measured: list[str] = []
    for batching in _PROBED_LENGTHS:
        tried = alone if batching == ALONE else _try(batching, generate, score, vocab_size)
        measured.append(f"{tried} in {batching}")
        if tried.difference <= bound:
            break
    if len(measured) > 1:
        logger.warning(
            f"{name} generates in {batching}, which takes longer: from its own log-probs model.generate's "
            f"differ by {', '.join(measured)} (nats per token, of which rounding explains {bound:.2g})."
        )
    return batching


def _try(
    batching: str,
    generate: Callable[[Sequence[Prompt]], Sequence[Completion]],
    score: Callable[[Prompt, Completion], Tensor],
    vocab_size: int,
) -> _Tried:
    prompts = [
        Prompt(tuple((31 * key + 7 * position + 1) % vocab_size for position in range(length)), key)
        for key, length in enumerate(_PROBED_LENGTHS[batching])
    ]
    try:
        completions = generate(prompts)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return _Tried(math.inf, error)
    differences = [
        (score(prompt, completion) - torch.tensor(completion.logprobs)).abs()
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return _Tried(float(torch.cat(differences).mean()))


def batches(lengths: Sequence[int], batching: str, max_num_seqs: int) -> Iterator[list[int]]:
    """Indices of the sequences of each batch.

    Args:
        lengths: tokens of each sequence's prompt.
        batching: `PADDED`, `EQUAL_LENGTHS` or `ALONE`.
        max_num_seqs: sequences in a batch at most.
    """
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length if batching == EQUAL_LENGTHS else 0, []).append(index)
    size = 1 if batching == ALONE else max_num_seqs
    for group in groups.values():
        yield from (group[start : start + size] for start in range(0, len(group), size))
