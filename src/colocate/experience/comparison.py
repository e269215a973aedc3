"""The rewards of all ranks' episodes, compared: their advantages and metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colocate.algorithms.advantages import (
    AdvantageOptions,
    Advantages,
    compute_advantages,
    compute_turn_advantages,
    nanstd,
)
from colocate.reporting.run_log import reserve_metrics
from colocate.rewards.logs import TURN_REWARDS
from colocate.users_code.errors import RewardError

reserve_metrics("reward", "reward_std", "frac_reward_zero_std")


@dataclass(frozen=True)
class Comparison:
    """N episodes of all ranks, rewarded by F functions and compared within their groups.

    If turns have rewards of their own, their sum over each episode is the last of the F.
    """

    names: list[str]
    weights: Tensor  # [F] float64
    rewards: Tensor  # [N, F] float64, NaN where a function returned None
    advantages: Tensor  # [N] float64, of whole episodes
    turn_advantages: (
        Tensor | None
    )  # [N, K] float64, for the tokens of each node; None: all have the episode's
    is_std_zero: Tensor  # [N] bool, as in `Advantages`

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        weights: Tensor,
        rewards: Tensor,
        returns: Sequence[tuple[float, ...]] | None,
        num_generations: int,
        options: AdvantageOptions,
    ) -> Comparison:
        """Compare the episodes, the G = `num_generations` of a prompt side by side.

        Args:
            names, weights, rewards: those of the reward functions.
            returns: `Episode.returns` of each episode; None if no turn of any has a reward.

        Raises:
            ValueError: as `compute_advantages` does.
            RewardError: an advantage is larger than float32 holds, or a reward function has the name under
                which the rewards of turns are logged.
        """
        names = list(names)
        if returns is None:
            turns = [compute_advantages(rewards, num_generations, weights, options)]
        elif TURN_REWARDS in names:
            raise RewardError(
                f"A reward function is called {TURN_REWARDS!r}, which is what the rewards that environments "
                "give for turns are logged as: give the function another name."
            )
        else:
            # An episode that has ended earns nothing more.
            padded = itertools.zip_longest(*returns, fillvalue=0.0)
            earned = torch.tensor(list(padded), dtype=rewards.dtype).T
            turns = compute_turn_advantages(rewards, earned, num_generations, weights, options)
            names.append(TURN_REWARDS)
            rewards = torch.cat([rewards, earned[:, :1]], dim=1)
            weights = torch.cat([weights, weights.new_ones(1)])
        for compared in turns:
            _check(compared, names, weights, rewards)
        return cls(
            names,
            weights,
            rewards,
            turns[0].advantages,
            torch.stack([compared.advantages for compared in turns], dim=1) if returns else None,
            turns[0].is_std_zero,
        )

    def metrics(self) -> dict[str, float]:
        """Means and deviations of the rewards, by function and summed up."""
        # Under GDPO advantages come from normalised rewards; what is logged is the plain weighted sum.
        total = (self.rewards * self.weights).nansum(dim=1)
        total[self.rewards.isnan().all(dim=1)] = math.nan
        metrics = {}
        for i, name in enumerate(self.names):
            metrics[f"rewards/{name}/mean"] = self.rewards[:, i].nanmean().item()
            metrics[f"rewards/{name}/std"] = nanstd(self.rewards[:, i], dim=0).item()
        metrics["reward"] = total.nanmean().item()
        metrics["reward_std"] = nanstd(total, dim=0).item()
        metrics["frac_reward_zero_std"] = self.is_std_zero.float().mean().item()
        return metrics


def _check(compared: Advantages, names: Sequence[str], weights: Tensor, rewards: Tensor) -> None:
    if compared.advantages.float().isfinite().all():
        return
    row, i = divmod(int((rewards * weights).nan_to_num().abs().argmax()), rewards.shape[1])
    raise RewardError(
        f"The reward of completion {row} (over all ranks) by {names[i]!r}, {rewards[row, i]:g} with weight "
        f"{weights[i]:g}, makes an advantage that float32 does not hold. Scale the reward down, lower its "
        "weight, or set scale_rewards='group'."
    )
