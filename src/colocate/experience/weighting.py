"""Each sample's share in the loss of its optimizer step, fixed before the step is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from accelerate.utils import gather_object

from colocate.algorithms.losses import loss_weights
from colocate.algorithms.masks import entropy_threshold
from colocate.algorithms.normalization import entropy_weights, mean_tokens_per_step
from colocate.config import GRPOConfig
from colocate.policy.policy import Policy
from colocate.types import Sample


def shuffled_slices(samples: Sequence[Sample], args: GRPOConfig, batch_number: int) -> list[list[Sample]]:
    """Cut this rank's samples into slices of `per_device_train_batch_size`, in random order, and weigh them.

    The order depends on the seed and the batch alone, so a resumed run cuts alike.
    """
    assert args.steps_per_generation is not None, "GRPOConfig derives it"
    generator = torch.Generator().manual_seed(args.seed + batch_number)
    order = torch.randperm(len(samples), generator=generator).tolist()
    size = args.per_device_train_batch_size
    slices = [[samples[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
    tokens_per_step = mean_tokens_per_step(
        sum(gather_object(_token_counts(samples))),
        num_processes=args.world_size,
        num_accumulated=args.gradient_accumulation_steps,
        steps_per_generation=args.steps_per_generation,
    )
    return [weighted(part, args, tokens_per_step, args.gradient_accumulation_steps) for part in slices]


def weighted(
    samples: Sequence[Sample], args: GRPOConfig, tokens_per_step: float, num_accumulated: int
) -> list[Sample]:
    """The samples of one slice with the loss weights of `args.loss_type`.

    Args:
        tokens_per_step: from `normalization.mean_tokens_per_step`.
        num_accumulated: slices in an optimizer step.
    """
    return _with_weights(samples, *_weights(_token_counts(samples), args, tokens_per_step, num_accumulated))


def weighted_for_evaluation(samples: Sequence[Sample], args: GRPOConfig) -> list[Sample]:
    """This rank's samples, weighed as one slice that holds the whole evaluation, all ranks together.

    As in training, the mean of the ranks' losses is the loss; ranks may have unequal shares.
    """
    own = _token_counts(samples)
    counts = gather_object(own)
    first = sum(gather_object([len(own)])[: args.process_index])
    weights = _weights(counts, args, tokens_per_step=max(sum(counts), 1.0), num_accumulated=1)
    losses, bonuses = (
        [args.world_size * weight for weight in part[first : first + len(own)]] for part in weights
    )
    return _with_weights(samples, losses, bonuses)


def with_entropy_threshold(
    samples: Sequence[Sample], policy: Policy, args: GRPOConfig, num_accumulated: int
) -> list[Sample]:
    """The samples of one slice with the entropy below which `top_entropy_quantile` leaves tokens out.

    The quantile needs the entropies of the slice on all ranks before the first loss: one more forward,
    without gradient, that runs with this option only.

    Args:
        num_accumulated: slices whose entropy bonuses are added up to one.
    """
    masks = [sample.completion_mask.bool() for sample in samples]
    entropies = [entropy for _, entropy in policy.logprobs(samples)]
    local = [x for entropy, mask in zip(entropies, masks, strict=True) for x in entropy[mask].tolist()]
    threshold = float(entropy_threshold(torch.tensor(gather_object(local)), args.top_entropy_quantile))
    kept = [int((mask & (x >= threshold)).sum()) for x, mask in zip(entropies, masks, strict=True)]
    bonuses = entropy_weights(torch.tensor(kept), num_accumulated=num_accumulated).tolist()
    return [
        replace(sample, entropy_threshold=threshold, entropy_weight=bonus)
        for sample, bonus in zip(samples, bonuses, strict=True)
    ]


def _token_counts(samples: Sequence[Sample]) -> list[float]:
    return [float(sample.completion_mask.sum()) for sample in samples]


def _weights(
    token_counts: list[float], args: GRPOConfig, tokens_per_step: float, num_accumulated: int
) -> tuple[list[float], list[float]]:
    """Loss weights and entropy weights of the sequences of one slice."""
    counts = torch.tensor(token_counts)
    losses = loss_weights(
        args.loss_type,
        counts,
        num_accumulated=num_accumulated,
        tokens_per_step=tokens_per_step,
        max_completion_length=args.max_completion_length,
    )
    return losses.tolist(), entropy_weights(counts, num_accumulated=num_accumulated).tolist()


def _with_weights(samples: Sequence[Sample], losses: list[float], bonuses: list[float]) -> list[Sample]:
    return [
        replace(sample, loss_weight=loss, entropy_weight=bonus)
        for sample, loss, bonus in zip(samples, losses, bonuses, strict=True)
    ]
