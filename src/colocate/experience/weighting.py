"""Each sample's share in the loss of its optimizer step, fixed before the step is cut into micro-batches.

Members of groups are counted and weighed: an episode whose history forked has several samples, which together
have the share of a single one. Every sampled token is in one of them only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from colocate.algorithms.losses import loss_weights
from colocate.algorithms.masks import entropy_threshold
from colocate.algorithms.normalization import entropy_weights, mean_tokens_per_step
from colocate.experience import ranks
from colocate.experience.options import SelectionOptions
from colocate.policy.policy import Policy
from colocate.types import Sample

Member = Sequence[Sample]
"""The samples of one episode."""


def shuffled_slices(
    members: Sequence[Member], options: SelectionOptions, batch_number: int, num_loss_tokens: int
) -> list[list[Sample]]:
    """Cut this rank's members into slices of `per_device_train_batch_size`, in random order, and weigh them.

    The order depends on the seed and the batch's number alone, so a resumed run cuts its batches alike.

    Args:
        num_loss_tokens: tokens of the batch that the loss counts, over all ranks.
    """
    generator = torch.Generator().manual_seed(options.seed + batch_number)
    order = torch.randperm(len(members), generator=generator).tolist()
    size = options.per_device_train_batch_size
    slices = [order[start : start + size] for start in range(0, len(order), size)]
    counts = _token_counts(members)
    tokens_per_step = mean_tokens_per_step(
        num_loss_tokens,
        num_processes=options.world_size,
        num_accumulated=options.gradient_accumulation_steps,
        steps_per_generation=options.steps_per_generation,
    )
    num_accumulated = options.gradient_accumulation_steps
    return [
        _with_weights(
            [members[i] for i in part],
            *_weights([counts[i] for i in part], options, tokens_per_step, num_accumulated),
        )
        for part in slices
    ]


def weighted_for_evaluation(members: Sequence[Member], options: SelectionOptions) -> list[Sample]:
    """This rank's samples, weighed as one slice that holds the whole evaluation, all ranks together.

    As in training, the mean of the ranks' losses is the loss; ranks may have unequal shares.
    """
    counts_of_ranks = ranks.of_all_ranks([_token_counts(members)])
    counts = [count for own in counts_of_ranks for count in own]
    part = ranks.own_part([len(own) for own in counts_of_ranks], options.process_index)
    weights = _weights(counts, options, tokens_per_step=max(sum(counts), 1.0), num_accumulated=1)
    losses, bonuses = ([options.world_size * weight for weight in values[part]] for values in weights)
    return _with_weights(members, losses, bonuses)


def with_entropy_threshold(
    samples: Sequence[Sample], policy: Policy, options: SelectionOptions, num_accumulated: int
) -> list[Sample]:
    """The samples of one slice, each with the entropy below which `top_entropy_quantile` leaves tokens out.

    The quantile needs the entropies of the slice on all ranks before the first loss: one more forward,
    without gradient, that runs with this option only.

    Args:
        num_accumulated: the number of slices whose entropy bonuses are added up.
    """
    masks = [sample.completion_mask.bool() for sample in samples]
    entropies = [entropy for _, entropy in policy.logprobs(samples)]
    local = [x for entropy, mask in zip(entropies, masks, strict=True) for x in entropy[mask].tolist()]
    threshold = float(
        entropy_threshold(torch.tensor(ranks.of_all_ranks(local)), options.top_entropy_quantile)
    )
    kept = [float((mask & (x >= threshold)).sum()) for x, mask in zip(entropies, masks, strict=True)]
    # Over all ranks, because which of them has a sample is a matter of speed.
    num_kept = torch.tensor([sum(ranks.of_all_ranks(kept))])
    bonus = options.world_size * entropy_weights(num_kept, num_accumulated=num_accumulated).item()
    return [replace(sample, entropy_threshold=threshold, entropy_weight=bonus) for sample in samples]


def _token_counts(members: Sequence[Member]) -> list[float]:
    sums = [sample.completion_mask.sum() for member in members for sample in member]
    # In one transfer: the host would wait for the device at each sample.
    counts = iter(torch.stack(sums).tolist() if sums else [])
    return [sum(next(counts) for _ in member) for member in members]


def _weights(
    token_counts: list[float], options: SelectionOptions, tokens_per_step: float, num_accumulated: int
) -> tuple[list[float], list[float]]:
    """Loss weights and entropy weights of the members of one slice."""
    counts = torch.tensor(token_counts)
    losses = loss_weights(
        options.loss_type,
        counts,
        num_accumulated=num_accumulated,
        tokens_per_step=tokens_per_step,
        max_completion_length=options.max_completion_length,
    )
    return losses.tolist(), entropy_weights(counts, num_accumulated=num_accumulated).tolist()


def _with_weights(members: Sequence[Member], losses: list[float], bonuses: list[float]) -> list[Sample]:
    # A weight is a factor on a sum over tokens, and a member's sum is that of its samples' sums.
    return [
        replace(sample, loss_weight=loss, entropy_weight=bonus)
        for member, loss, bonus in zip(members, losses, bonuses, strict=True)
        for sample in member
    ]
