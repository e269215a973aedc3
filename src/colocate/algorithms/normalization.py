"""The factor on each sequence's summed token losses: what each loss type divides by.

Worked out over a whole optimizer step, before it is cut into micro-batches that fit memory: with

    loss = Σ_i loss_weights[i] · Σ_t token_loss[i, t] · mask[i, t]

any other cut gives the same gradient. TRL normalises micro-batch by micro-batch; to reproduce it, one call
here takes one of *its* micro-batches: `per_device_train_batch_size` sequences of one rank ("slice" below).
"""

from __future__ import annotations

import torch
from torch import Tensor

from colocate.algorithms.choices import LOSS_TYPES, SEQUENCE_MEAN_LOSSES, STEP_MEAN_LOSSES, check_choice


def loss_weights(
    loss_type: str,
    token_counts: Tensor,
    *,
    num_accumulated: int,
    tokens_per_step: float,
    max_completion_length: int,
) -> Tensor:
    """Weights of one slice's sequences. With B sequences of n_i unmasked tokens and N accumulated slices:

    - `grpo`, `sapo`: 1 / (N·B·n_i), the mean over sequences of their token means.
    - `bnpo`: 1 / (N·Σ n), the mean over the slice's tokens.
    - `dr_grpo`: 1 / (N·B·max_completion_length), a constant.
    - `luspo`: 1 / (N·B), the mean over sequences of their token sums.
    - `dapo`, `cispo`, `vespo`: 1 / tokens_per_step, the mean over the step's tokens.

    Gradients are averaged over data-parallel ranks, so the weights of one rank add up as if it were alone.

    Args:
        token_counts: [B] unmasked tokens per sequence; 0 is allowed.
        num_accumulated: N, the slices of one optimizer step on one rank.
        tokens_per_step: from `mean_tokens_per_step`.
        max_completion_length: in tokens.

    Returns:
        [B] float32.

    Raises:
        ValueError: the loss type is unknown.
    """
    check_choice("loss_type", loss_type, LOSS_TYPES)
    counts = token_counts.float()
    num_sequences = len(counts)
    if loss_type in STEP_MEAN_LOSSES:
        return torch.full_like(counts, 1 / tokens_per_step)
    if loss_type in SEQUENCE_MEAN_LOSSES:
        return 1 / (num_accumulated * num_sequences * counts.clamp(min=1))
    if loss_type == "bnpo":
        return (1 / (num_accumulated * counts.sum().clamp(min=1))).expand_as(counts)
    if loss_type == "dr_grpo":
        return torch.full_like(counts, 1 / (num_accumulated * num_sequences * max_completion_length))
    return torch.full_like(counts, 1 / (num_accumulated * num_sequences))


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
    """Weights of one slice's sequences in the entropy bonus: 1 / (N·Σ n), whatever the loss type.

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
