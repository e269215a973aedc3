"""Which sequences may share a batch of `model.generate` without changing each other's log-probs.

Most architectures heed the attention mask, so that shorter prompts can be padded on the left. Recurrent
models and some with linear attention (MiniMax) read padding like any token, and transformers' RWKV mixes the
sequences of a batch when it uses a cache. No attribute of a model says so: `choose_batching` tries it out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from colocate.types import Completion, Prompt

logger = logging.getLogger(__name__)

PADDED = "padded batches"
EQUAL_LENGTHS = "batches of prompts of one length"
ALONE = "batches of one"

_PROBED_LENGTHS = {PADDED: (3, 8), EQUAL_LENGTHS: (6, 6), ALONE: (7,)}
"""Lengths of the prompts that try each batching out, the quickest batching first."""


def choose_batching(
    generate: Callable[[Sequence[Prompt]], Sequence[Completion]],
    score: Callable[[Prompt, Completion], Tensor],
    *,
    vocab_size: int,
    largest_difference: float,
    name: str,
) -> str:
    """The quickest batching in which a model's log-probs are those of each sequence in a batch of one.

    Args:
        generate: completes prompts in one batch.
        score: log-probs [C] of a completion of C tokens, by a forward pass of this sequence alone, uncached.
        vocab_size: the token ids of the prompts to try are below it.
        largest_difference: the mean |difference| of log-probs, in nats per token, that rounding explains.
        name: the architecture, for the log.
    """
    measured = []
    for batching, lengths in _PROBED_LENGTHS.items():
        prompts = [
            Prompt(tuple((31 * key + 7 * position + 1) % vocab_size for position in range(length)), key)
            for key, length in enumerate(lengths)
        ]
        differences = [
            (score(prompt, completion) - torch.tensor(completion.logprobs)).abs()
            for prompt, completion in zip(prompts, generate(prompts), strict=True)
        ]
        difference = float(torch.cat(differences).mean())
        measured.append(f"{difference:.2g} in {batching}")
        if difference <= largest_difference:
            break
    if len(measured) > 1:
        logger.warning(
            f"{name} generates in {batching}, which takes longer: from its own log-probs model.generate's "
            f"differ by {', '.join(measured)} (nats per token, of which rounding explains "
            f"{largest_difference:g})."
        )
    return batching


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
