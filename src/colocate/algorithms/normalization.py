"""The weight of each sequence's summed token losses: one over the divisor of the loss type.

The weights are computed for a whole optimizer step, before it is cut into micro-batches that fit the memory.
With

    loss = Σ_i loss_weights[i] · Σ_t token_loss[i, t] · mask[i, t]

any other cut gives the same gradient. TRL normalises micro-batch by micro-batch; to reproduce it, a
`LossSlice` is one of *its* micro-batches: `per_device_train_batch_size` sequences of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossSlice:
    """B sequences of one rank that are normalised together. The functions below weigh them, [B] float32.

    Gradients are averaged over data-parallel ranks, so the weights of one rank add up as if it were alone.
    """

    counts: Tensor
    """[B] float32, n_i: unmasked tokens of each sequence; 0 is allowed."""
    num_accumulated: int
    """N, the slices of one optimizer step on one rank."""
    tokens_per_step: float
    """Unmasked tokens of one optimizer step on one rank, from `mean_tokens_per_step`."""
    max_completion_length: int
    """The option `max_completion_length`, in tokens."""


def sequence_mean(part: LossSlice) -> Tensor:
    """1 / (N·B·n_i): the mean over sequences of their token means."""
    return 1 / (part.num_accumulated * len(part.counts) * part.counts.clamp(min=1))


def sequence_sum(part: LossSlice) -> Tensor:
    """1 / (N·B): the mean over sequences of their token sums."""
    return _constant(part, 1 / (part.num_accumulated * len(part.counts)))


def fixed_length_mean(part: LossSlice) -> Tensor:
    """1 / (N·B·max_completion_length), a constant: no sequence counts for more by being short."""
    num_tokens = part.num_accumulated * len(part.counts) * part.max_completion_length
    return _constant(part, 1 / num_tokens)


def slice_mean(part: LossSlice) -> Tensor:
    """1 / (N·Σ n): the mean over the tokens of the slice."""
    return (1 / (part.num_accumulated * part.counts.sum().clamp(min=1))).expand_as(part.counts)


def step_mean(part: LossSlice) -> Tensor:
    """1 / tokens_per_step: the mean over the tokens of the optimizer step."""
    return _constant(part, 1 / part.tokens_per_step)


def _constant(part: LossSlice, weight: float) -> Tensor:
    return part.counts.new_full(part.counts.shape, weight)


def mean_tokens_per_step(
    num_tokens: float, *, num_processes: int, num_accumulated: int, steps_per_generation: int
) -> float:
    """Unmasked tokens of one optimizer step and one rank, averaged over the generation batch.

    TRL's normaliser of the token-mean losses. It is the exact count of the step if one generation feeds one
    optimizer step; otherwise the steps of a generation share this average.

    Args:
        num_tokens: unmasked completion tokens of the generation batch, all ranks together.
        num_processes: data-parallel ranks.
        num_accumulated: slices of one optimizer step on one rank.
        steps_per_generation: slices of one generation batch on one rank.
    """
    return max(num_tokens, 1.0) / num_processes * num_accumulated / steps_per_generation


def entropy_weights(token_counts: Tensor, *, num_accumulated: int) -> Tensor:
    """The weights of one slice's sequences in the entropy bonus: 1 / (N·Σ n), whatever the loss type.

    The bonus is the mean entropy per token, so that `entropy_coef` means the same with every loss type.

    Args:
        token_counts: [B] tokens that the bonus acts on: unmasked, and above the entropy threshold if there
            is one.
        num_accumulated: N, the slices of one optimizer step on one rank.

    Returns:
        [B] float32.
    """
    counts = token_counts.float()
    return (1 / (num_accumulated * counts.sum().clamp(min=1))).expand_as(counts)
