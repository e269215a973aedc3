"""From rewards to advantages: how much better a completion is than those it is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

from colocate.options.declared import choices_of
from colocate.options.requirements import IN_COMPLETIONS, OneOf, check_choice

if TYPE_CHECKING:
    from torch import Tensor

# Keeps advantages finite in a group whose completions all earn the same reward.
STD_OFFSET = 1e-4


@dataclass
class AdvantageOptions:
    """The options on which advantages depend, besides the rewards."""

    # ── Rewards ──────────────────────────────────────────────────────────────────────────────────────────

    scale_rewards: Annotated[str | bool, OneOf(ADVANTAGES), IN_COMPLETIONS] = "group"
    """The divisor of a reward's distance from its group's mean: the standard deviation of the "group" (or
    True) or of the "batch", that "mean" (MaxRL, arXiv:2602.02710), or nothing with "none" (or False)."""
    multi_objective_aggregation: Annotated[str, OneOf(AGGREGATIONS), IN_COMPLETIONS] = "sum_then_normalize"
    """Whether rewards are normalised as a weighted sum, or each reward function by itself and then summed
    (GDPO, arXiv:2601.05242)."""


@dataclass(frozen=True)
class Advantages:
    """The advantages and rewards of N completions, in the type of the rewards they come from."""

    advantages: Tensor  # [N], 0 for a completion that no reward function scored
    rewards: Tensor  # [N] weighted sum; NaN for a completion that no reward function scored
    is_std_zero: Tensor  # [N] bool, True where the rewards that were compared did not differ


def compute_advantages(
    rewards_per_func: Tensor,
    num_generations: int,
    reward_weights: Tensor,
    options: AdvantageOptions,
) -> Advantages:
    """Advantages of N completions, the G = `num_generations` of a prompt side by side.

    A reward of NaN ("this function does not apply") is left out of sums, means and deviations. Standard
    deviations are unbiased (n − 1). A completion that no function scored gets A = 0 and is part of no
    baseline; where only one of a group is scored there is nothing to compare, and its normalised reward is 0.

    Args:
        rewards_per_func: [N, F], every completion of all ranks. Give float64: then no square of a deviation
            overflows for rewards that float32 holds.
        num_generations: G; divides N.
        reward_weights: [F].

    Raises:
        ValueError: an unknown name, shapes that do not fit, or rewards that the advantage is not defined for.
    """
    for name, choices in choices_of(AdvantageOptions).items():
        check_choice(name, getattr(options, name), choices)
    num_completions, num_funcs = rewards_per_func.shape
    if num_completions % num_generations:
        raise ValueError(
            f"{num_completions} completions are not whole groups of num_generations={num_generations}: "
            f"{num_completions % num_generations} are left over."
        )
    if reward_weights.shape != (num_funcs,):
        raise ValueError(
            f"reward_weights has shape {tuple(reward_weights.shape)} for {num_funcs} reward functions: give "
            "one weight per function."
        )
    grouped = rewards_per_func.view(-1, num_generations, num_funcs)
    aggregate = AGGREGATIONS[options.multi_objective_aggregation]
    advantages, std = aggregate(grouped, reward_weights, ADVANTAGES[str(options.scale_rewards)])
    return Advantages(
        advantages=advantages.reshape(-1).nan_to_num(nan=0.0),
        rewards=_weighted_sum(grouped, reward_weights).view(-1),
        is_std_zero=std.isclose(std.new_zeros(std.shape)).reshape(-1),
    )


def compute_turn_advantages(
    rewards_per_func: Tensor,
    returns: Tensor,
    num_generations: int,
    reward_weights: Tensor,
    options: AdvantageOptions,
) -> list[Advantages]:
    """Advantages of N episodes at each of their K turns, where turns have rewards of their own.

    A turn gets no credit for what earlier turns earned. So turn k is judged by the episode's rewards plus the
    rewards of turns k to K, and compared with the same sum of the group's other episodes; those that had
    ended by then have earned 0 since. (With K = 1 the turns' reward is one more reward function of weight 1.)
    That is the policy gradient's reward-to-go, with a baseline that turn k has no part in: "Policy Gradient
    Methods for Reinforcement Learning with Function Approximation", NIPS 1999.

    Args:
        rewards_per_func, num_generations, reward_weights: as `compute_advantages` takes them.
        returns: [N, K] the summed rewards of turns k to K of each episode, in the type of the rewards.

    Returns:
        The result of `compute_advantages` for each turn; the first is that of whole episodes.

    Raises:
        ValueError: as `compute_advantages` does.
    """
    import torch  # not with the module: options are checked before it is loaded

    weights = torch.cat([reward_weights, reward_weights.new_ones(1)])
    return [
        compute_advantages(
            torch.cat([rewards_per_func, column[:, None]], dim=1), num_generations, weights, options
        )
        for column in returns.unbind(dim=1)
    ]


# ── Scaling: from rewards of P groups, [P, G], to advantages and the deviation of what was compared ──────


Advantage: TypeAlias = "Callable[[Tensor], tuple[Tensor, Tensor]]"


def unscaled(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """A = R − mean_group(R): Dr. GRPO, "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv
    2503.20783."""
    return rewards - rewards.nanmean(dim=1, keepdim=True), _spread(rewards, dim=1).expand_as(rewards)


def scaled_by_group(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """A = (R − mean_group(R)) / (std_group(R) + 1e-4): GRPO, "DeepSeekMath: Pushing the Limits of
    Mathematical Reasoning in Open Language Models", arXiv 2402.03300."""
    centred, std = unscaled(rewards)
    return centred / (std + STD_OFFSET), std


def scaled_by_batch(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """A = (R − mean_group(R)) / (std_batch(R) + 1e-4): "Part I: Tricks or Traps? A Deep Dive into RL for LLM
    Reasoning", arXiv 2508.08221."""
    std = _spread(rewards.reshape(-1), dim=0).expand(rewards.numel()).view_as(rewards)
    return unscaled(rewards)[0] / (std + STD_OFFSET), std


def scaled_by_mean(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """A = (R − mean_group(R)) / mean_group(R), and 0 in a group that earns nothing: MaxRL, "Maximum
    Likelihood Reinforcement Learning", arXiv 2602.02710.

    With rewards of 0 and 1 the mean estimates the success rate p, and E[Σ_i A_i ∇log π(y_i) / G] is not the
    gradient of p but that of log p = −Σ_k (1 − p)^k / k with the first G − 1 terms.

    Raises:
        ValueError: a reward below 0, with which the mean is no rate of success.
    """
    if (rewards < 0).any():
        lowest = rewards[rewards < 0].min().item()
        raise ValueError(
            f"scale_rewards='mean' divides by the mean reward of a group, but a reward is {lowest:g}: MaxRL "
            "is defined for rewards of 0 or more. Shift them, or set scale_rewards='group'."
        )
    centred, std = unscaled(rewards)
    mean = rewards.nanmean(dim=1, keepdim=True)
    return (centred / mean).where(mean > 0, 0.0), std


ADVANTAGES: dict[str, Advantage] = {
    "group": scaled_by_group,
    "batch": scaled_by_batch,
    "none": unscaled,
    "mean": scaled_by_mean,
}


# ── Several reward functions: from [P, G, F] to advantages and deviations [P, G] ─────────────────────────


def sum_then_normalize(rewards: Tensor, weights: Tensor, advantage: Advantage) -> tuple[Tensor, Tensor]:
    """The advantage of R = Σ_f w_f R_f."""
    return advantage(_weighted_sum(rewards, weights))


def normalize_then_sum(rewards: Tensor, weights: Tensor, advantage: Advantage) -> tuple[Tensor, Tensor]:
    """R = Σ_f w_f (R_f − mean_group) / (std_group + 1e-4), then normalised in the batch without `advantage`.

    "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization", arXiv
    2601.05242.
    """
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    summed = _weighted_sum(centred / (_spread(rewards, dim=1) + STD_OFFSET), weights, like=rewards)
    std = _spread(summed.view(-1), dim=0).expand(summed.numel()).view_as(summed)
    return (summed - summed.nanmean()) / (std + STD_OFFSET), std


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Advantage], tuple[Tensor, Tensor]]] = {
    "sum_then_normalize": sum_then_normalize,
    "normalize_then_sum": normalize_then_sum,
}


def _weighted_sum(values: Tensor, weights: Tensor, like: Tensor | None = None) -> Tensor:
    """Weighted sums [P, G] over the functions' values [P, G, F]; NaN where `like` (by default `values`) is
    NaN for every function."""
    # nansum makes 0 of a row without any reward, which would distort the baseline.
    unscored = (values if like is None else like).isnan().all(dim=-1)
    return (values * weights).nansum(dim=-1).masked_fill(unscored, math.nan)


def nanstd(values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Unbiased standard deviation of the values that are not NaN; NaN where fewer than two are left."""
    known = ~values.isnan()
    squares = (values - values.nanmean(dim=dim, keepdim=True)).square().where(known, 0.0)
    # 0 / 0 for a single value: its deviation is unknown.
    degrees_of_freedom = (known.sum(dim=dim, keepdim=keepdim) - 1).clamp(min=0)
    return (squares.sum(dim=dim, keepdim=keepdim) / degrees_of_freedom).sqrt()


def _spread(values: Tensor, dim: int) -> Tensor:
    # Groups of one completion occur in evaluation only: their deviation is 0, not NaN.
    if values.shape[dim] == 1:
        return values.new_zeros(values.shape)
    return nanstd(values, dim=dim, keepdim=True)
