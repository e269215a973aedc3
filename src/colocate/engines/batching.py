"""Which sequences `model.generate` may have in one batch without one changing what another says.

Most architectures look at the attention mask, and shorter prompts are padded on the left. Recurrent ones and
some with linear attention read padding like any token (MiniMax), and with a cache RWKV mixes the sequences of
a batch in transformers. No attribute of a model tells, so it is tried out.
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
"""The prompts' lengths, the quickest batching first."""


def choose_batching(
    generate: Callable[[Sequence[Prompt]], Sequence[Completion]],
    score: Callable[[Prompt, Completion], Tensor],
    *,
    vocab_size: int,
    largest_difference: float,
    name: str,
) -> str:
    """The quickest batching in which a model generates with the log-probs that it has by itself.

    Args:
        generate: completes prompts in one batch.
        score: log-probs [C] of a completion by an uncached forward pass of this sequence alone.
        vocab_size: tokens of the prompts to try are below.
        largest_difference: of log-probs, on average, that rounding explains.
        name: of the architecture, for the log.
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
    """Indices of the sequences that are generated together.

    Args:
        lengths: of the prompts.
        max_num_seqs: in a batch.
    """
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length if batching == EQUAL_LENGTHS else 0, []).append(index)
    size = 1 if batching == ALONE else max_num_seqs
    for group in groups.values():
        yield from (group[start : start + size] for start in range(0, len(group), size))
