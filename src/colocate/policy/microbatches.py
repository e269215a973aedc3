"""Micro-batches of a step: the fields that the objective reads, and the loop in which ranks stay together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from colocate.algorithms.objective import LossBatch
from colocate.memory.recovery import free_memory
from colocate.policy.attention.pack import padded, to_device
from colocate.policy.stack.stack import DecoderStack
from colocate.types import Sample


def for_each(
    stack: DecoderStack | None,
    microbatches: Iterable[list[int]],
    work: Callable[[list[int]], None],
    *,
    has_backward: bool,
) -> None:
    """Do the work of each micro-batch.

    Where other ranks hold parts of the weights, a rank that fails, or has an empty micro-batch, goes through
    the collectives of all micro-batches nevertheless, and raises its error when they are done.
    """
    failure: Exception | None = None
    for indices in microbatches:
        if stack is None or not stack.has_parts:
            work(indices)
            continue
        stack.begin()
        if indices and failure is None:
            try:
                work(indices)
            except Exception as error:
                is_short = isinstance(error, torch.OutOfMemoryError)
                failure = error.with_traceback(None) if is_short else error
            if failure is None:
                continue
            free_memory()  # the rest takes memory, too
        stack.finish(has_backward=has_backward)
    if failure is not None:
        raise failure


def filler(device: torch.device) -> Sample:
    """A sample of two tokens without weight, for passes that a rank makes because others wait for it."""
    one = torch.zeros(1, dtype=torch.int64, device=device)
    return Sample(one, one, completion_mask=torch.zeros(1, device=device), advantage=0.0)


def vanishes(samples: Sequence[Sample], objective: object) -> bool:
    """Whether the loss of these samples and its gradient are 0, as all their advantages are."""
    if not getattr(objective, "vanishes_without_advantages", False):
        return False
    if any(sample.advantage for sample in samples if not isinstance(sample.advantage, Tensor)):
        return False
    by_token = [sample.advantage for sample in samples if isinstance(sample.advantage, Tensor)]
    return not by_token or not bool(torch.cat(by_token).any())


def loss_batch(samples: Sequence[Sample]) -> LossBatch:
    """The samples' fields that the objective reads, padded on the right, on their device."""
    device = samples[0].completion_ids.device

    def scalars(name: str) -> Tensor:
        values = torch.tensor([getattr(sample, name) for sample in samples], dtype=torch.float32)
        return to_device(values, device)

    def rows(name: str) -> Tensor | None:
        values = [getattr(sample, name) for sample in samples]
        if all(value is None for value in values):
            return None
        if any(value is None for value in values):
            raise ValueError(f"Some samples of an update have {name} and some have not; all or none must.")
        return padded(values)

    mask = rows("completion_mask")
    assert mask is not None, "every sample has a completion mask"
    if any(isinstance(sample.advantage, Tensor) for sample in samples):
        # A step may also train on an older rollout, of which no turn had a reward.
        per_token = [sample.advantage * torch.ones_like(sample.completion_mask) for sample in samples]
        advantages = padded(per_token)
    else:
        advantages = scalars("advantage")
    return LossBatch(
        mask=mask,
        advantages=advantages,
        loss_weights=scalars("loss_weight"),
        entropy_weights=scalars("entropy_weight"),
        old_logprobs=rows("old_logprobs"),
        rollout_logprobs=rows("rollout_logprobs"),
        logprobs_without_dropout=rows("logprobs_without_dropout"),
        reference_logprobs=rows("reference_logprobs"),
        entropy_thresholds=None if samples[0].entropy_threshold is None else scalars("entropy_threshold"),
    )
