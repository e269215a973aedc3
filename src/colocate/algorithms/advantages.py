"""From rewards to advantages: how much better a completion is than its group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from colocate.algorithms.choices import AGGREGATIONS, REWARD_SCALES, check_choice

# Keeps advantages finite in a group whose completions all earn the same.
STD_OFFSET = 1e-4


@dataclass(frozen=True)
class Advantages:
    """Shapes: N completions. Floats have the type of the rewards they come from."""

    advantages: Tensor  # [N], 0 for a completion that no reward function scored
    rewards: Tensor  # [N] weighted sum; NaN for a completion that no reward function scored
    is_std_zero: Tensor  # [N] bool, True where the rewards that were compared did not differ


def compute_advantages(
    rewards_per_func: Tensor,
    num_generations: int,
    reward_weights: Tensor,
    scale_rewards: str,
    multi_objective_aggregation: str,
) -> Advantages:
    """Advantages of N completions, the G = `num_generations` of a prompt side by side.

    - `sum_then_normalize`: R = Σ_f w_f R_f, then A = R − mean_group(R), divided by std + 1e-4 of the group
      (`scale_rewards="group"`: GRPO, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open
      Language Models", arXiv 2402.03300), of the batch (`"batch"`: "Part I: Tricks or Traps? A Deep Dive
      into RL for LLM Reasoning", arXiv 2508.08221) or by nothing (`"none"`: Dr. GRPO, "Understanding
      R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783).
    - `normalize_then_sum`: each R_f is normalised in its group, R = Σ_f w_f (R_f − mean) / (std + 1e-4),
      then R in the batch; `scale_rewards` has no say. "GDPO: Group reward-Decoupled Normalization Policy
      Optimization for Multi-reward RL Optimization", arXiv 2601.05242.

    A reward of NaN ("this function does not apply") is left out of sums, means and deviations. Deviations are
    unbiased (n − 1). A completion that no function scored gets A = 0 and is part of no baseline; where only
    one of a group is scored there is nothing to compare, and its normalised reward is 0.

    Args:
        rewards_per_func: [N, F], every completion of all ranks; in float64 no square of a deviation overflows
            if float32 holds the rewards.
        num_generations: G; divides N.
        reward_weights: [F].
        scale_rewards: group, batch or none.
        multi_objective_aggregation: sum_then_normalize or normalize_then_sum.

    Raises:
        ValueError: an unknown name, or shapes that do not fit.
    """
    check_choice("scale_rewards", scale_rewards, REWARD_SCALES)
    check_choice("multi_objective_aggregation", multi_objective_aggregation, AGGREGATIONS)
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

    # nansum makes 0 of a row without any reward, which would pull the baseline.
    unscored = rewards_per_func.isnan().all(dim=1)
    rewards = (rewards_per_func * reward_weights).nansum(dim=1).masked_fill(unscored, torch.nan)
    if multi_objective_aggregation == "normalize_then_sum":
        grouped = rewards_per_func.view(-1, num_generations, num_funcs)
        centred = grouped - grouped.nanmean(dim=1, keepdim=True)
        normalized = (centred / (_spread(grouped, dim=1) + STD_OFFSET)).view_as(rewards_per_func)
        objective = (normalized * reward_weights).nansum(dim=1).masked_fill(unscored, torch.nan)
        std = _spread(objective, dim=0).expand_as(objective)
        advantages = (objective - objective.nanmean()) / (std + STD_OFFSET)
    else:
        grouped = rewards.view(-1, num_generations)
        if scale_rewards == "batch":
            std = _spread(rewards, dim=0).expand_as(rewards)
        else:
            std = _spread(grouped, dim=1).expand_as(grouped).reshape(-1)
        advantages = (grouped - grouped.nanmean(dim=1, keepdim=True)).view(-1)
        if scale_rewards != "none":
            advantages = advantages / (std + STD_OFFSET)
    return Advantages(
        advantages=advantages.nan_to_num(nan=0.0),
        rewards=rewards,
        is_std_zero=torch.isclose(std, torch.zeros_like(std)),
    )


def nanstd(values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Unbiased standard deviation of the values that are not NaN; NaN where fewer than two are left."""
    known = ~values.isnan()
    squares = (values - values.nanmean(dim=dim, keepdim=True)).square().where(known, 0.0)
    # 0 / 0 for a single value: its deviation is unknown.
    degrees_of_freedom = (known.sum(dim=dim, keepdim=keepdim) - 1).clamp(min=0)
    return (squares.sum(dim=dim, keepdim=keepdim) / degrees_of_freedom).sqrt()


def _spread(values: Tensor, dim: int) -> Tensor:
    # One completion per prompt happens in evaluation only: nothing differs, rather than nothing is known.
    if values.shape[dim] == 1:
        return torch.zeros_like(values)
    return nanstd(values, dim=dim, keepdim=True)
