"""Dynamic sampling: groups that teach nothing are replaced until the batch is full (DAPO, arXiv 2503.14476).

A group whose members all have one reward has no advantages. With `max_refill_rounds` R its place is filled
from up to R more rollouts, of at most R batches' prompts together:

    first step    64 prompts, 30 groups dull  →  30 prompts, 13 dull  →  13 prompts, 6 dull  →  …
    later ones   121 prompts, 55 groups dull: the first 64 of the other 66 are trained on

A rollout takes as long as its longest completion, whichever number of prompts it has. So each one asks for as
many as are expected to fill the batch, by the share of groups that were dull in the steps before. The batch
takes groups that are not dull in the order of the prompts, which favours none; further ones are not used.
Places still empty after the last round get dull groups, so that a batch has its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from colocate.data.sampler import PromptBatch, PromptBatches
from colocate.experience import ranks
from colocate.experience.dealing import spread
from colocate.experience.judge import Group, Rollout
from colocate.experience.options import SelectionOptions
from colocate.experience.select import Selector
from colocate.policy.policy import Policy
from colocate.reporting.run_log import reserve_metrics
from colocate.types import Sample

reserve_metrics("refill/dull_groups", "refill/unused_groups", "refill/rounds")


class RefillingSelector(Selector):
    """Trains on groups whose rewards differ.

    All ranks know the rewards of all groups, so they agree on the kept groups and the next rollout's size
    without communicating. No group is pending when a step is taken, so checkpoints know nothing of rounds.
    """

    is_resumable = True

    def __init__(self, policy: Policy, options: SelectionOptions) -> None:
        super().__init__(policy, options)
        self._kept: list[Group] = []
        self._dull: list[Group] = []
        self._rollouts: list[Rollout] = []
        self._num_wanted = 0
        self._dull_share: float | None = None
        """The share of groups that is expected to be dull; None before the first step."""

    def next_batch(self, batches: PromptBatches) -> PromptBatch:
        """The prompts that are expected to fill the batch; a few more where ranks could not share them
        equally, and fewer at an epoch's end."""
        if not self._rollouts:
            self._num_wanted = batches.num_prompts
        missing = self._num_wanted - len(self._kept)
        expected = math.ceil(missing / (1 - min(self._dull_share or 0.0, self._most_expected)))
        together = self._options.world_size // math.gcd(
            self._options.world_size, self._options.num_generations
        )
        at_least, at_most = (
            -(-number // together) * together for number in (min(missing, self._num_left), self._num_left)
        )
        number = -(-min(expected, at_most) // together) * together
        return batches.take(number, at_least, multiple_of=together)

    @property
    def _most_expected(self) -> float:
        """The share of dull groups at which one rollout has all prompts that a batch may have."""
        return self._options.max_refill_rounds / (self._options.max_refill_rounds + 1)

    @property
    def _num_left(self) -> int:
        """The prompts that may still be asked for, to fill this batch."""
        most = (self._options.max_refill_rounds + 1) * self._num_wanted
        return most - sum(len(rollout.groups) for rollout in self._rollouts)

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """The metrics of the batch so far, each the mean over its rollouts by their groups, and the shares of
        groups that were dull and that differed but were not needed."""
        rollouts = [*self._rollouts, rollout]
        names = dict.fromkeys(name for one in rollouts for name in one.metrics)
        means = {name: _mean(name, rollouts) for name in names}
        num_groups = sum(len(one.groups) for one in rollouts)
        num_dull = len(self._dull) + sum(self._is_dull(group, rollout) for group in rollout.groups)
        num_unused = max(0, num_groups - num_dull - self._num_wanted)
        return {
            **means,
            "refill/dull_groups": num_dull / num_groups,
            "refill/unused_groups": num_unused / num_groups,
            "refill/rounds": len(rollouts) - 1.0,
        }

    def slices(self, rollout: Rollout, number: int) -> list[list[Sample]]:
        """The slices of `Selector.slices`; none while groups are missing and rounds and prompts are left."""
        for group in rollout.groups:
            (self._dull if self._is_dull(group, rollout) else self._kept).append(group)
        self._rollouts.append(rollout)
        return [] if self._needs_more() else super().slices(self._batch(rollout, self._taken()), number)

    def _needs_more(self) -> bool:
        is_short = len(self._kept) < self._num_wanted and self._num_left > 0
        return is_short and len(self._rollouts) <= self._options.max_refill_rounds

    def _taken(self) -> list[Group]:
        """The batch's groups; the next batch begins with none."""
        share = len(self._dull) / (len(self._dull) + len(self._kept))
        self._dull_share = share if self._dull_share is None else (share + self._dull_share) / 2
        groups = [*self._kept, *self._dull][: self._num_wanted]
        self._kept, self._dull, self._rollouts = [], [], []
        return groups

    def _batch(self, rollout: Rollout, groups: list[Group]) -> Rollout:
        """The last rollout with the batch's groups, and an equal share of their members on each rank."""
        members = spread(
            [member for group in groups for member in group.members],
            rank=self._options.process_index,
            num_ranks=self._options.world_size,
            device=self._policy.device,
        )
        masks = [sample.completion_mask for member in members for sample in member]
        num_tokens = sum(ranks.of_all_ranks([int(torch.cat(masks).sum())]))
        return replace(rollout, groups=groups, members=members, num_loss_tokens=num_tokens)

    def state_dict(self) -> dict[str, Any]:
        """The share of dull groups, on which the next rollout's size depends."""
        return {"dull_share": self._dull_share}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dull_share = state["dull_share"]

    def _is_dull(self, group: Group, rollout: Rollout) -> bool:
        """Whether no member is better than another: by the reward that the option names, or by advantages."""
        name = self._options.refill_reward
        if name is None:
            return not bool(group.advantages.any())
        rewards = group.rewards[:, list(rollout.table.rewards).index(name)]
        rewards = rewards[~torch.isnan(rewards)]
        return len(rewards) == 0 or bool((rewards == rewards[0]).all())


def _mean(name: str, rollouts: Sequence[Rollout]) -> float:
    pairs = [(len(one.groups), one.metrics[name]) for one in rollouts if name in one.metrics]
    return sum(count * value for count, value in pairs) / sum(count for count, _ in pairs)
