"""How good the completions were: their rewards, compared over all ranks, become the advantages of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from colocate.algorithms.advantages import AdvantageOptions, Advantages, compute_advantages, nanstd
from colocate.algorithms.masks import is_truncated
from colocate.data.prompts import decode_completions
from colocate.experience import ranks
from colocate.experience.requests import RolloutRequest
from colocate.reporting.completions import CompletionTable
from colocate.rewards.base import RewardFunctions, RewardTable
from colocate.rewards.errors import RewardError
from colocate.types import Completion, Prompt, Sample


@dataclass(frozen=True)
class Group:
    """The completions of one prompt. Every rank has all groups of a rollout, and samples of its own in some.

    So each rank can choose among groups by their numbers, and all ranks come to one choice.
    """

    key: int
    """The prompt's number, `Prompt.key`."""
    rewards: Tensor  # [G, F] float64, NaN where a function returned None
    advantages: Tensor  # [G] float64
    samples: list[Sample]
    """This rank's samples of the group: the whole group, a part of it, or none."""


@dataclass(frozen=True)
class Rollout:
    """A scored generation batch. The samples in its groups are this rank's, all else covers all ranks."""

    groups: list[Group]
    metrics: dict[str, float]
    table: CompletionTable
    num_tokens: int
    """The number of prompt and completion tokens, over all ranks."""

    @property
    def samples(self) -> list[Sample]:
        """This rank's samples, in the order in which the engine returned their completions."""
        return [sample for group in self.groups for sample in group.samples]


class Judge:
    """Rewards completions, and compares the rewards across ranks.

    Args:
        device: the device that samples are put on.
        stop_token_ids: a completion whose last token is none of these, and no padding, was cut off.
        trainer_state: called for the value that reward functions receive as `trainer_state`.
        rank: this process's number.
    """

    def __init__(
        self,
        reward_functions: RewardFunctions,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        *,
        stop_token_ids: Sequence[int],
        advantage_options: AdvantageOptions | None = None,
        mask_truncated_completions: bool = False,
        trainer_state: Callable[[], TrainerState] = TrainerState,
        rank: int = 0,
    ) -> None:
        self.reward_functions = reward_functions
        self._tokenizer = tokenizer
        self._device = device
        self._trainer_state = trainer_state
        self._rank = rank
        self._weights = reward_functions.weights.double()
        self._advantage_options = advantage_options or AdvantageOptions()
        self._mask_truncated = mask_truncated_completions
        self._end_token_ids = {*stop_token_ids, tokenizer.pad_token_id}

    def score(self, request: RolloutRequest, completions: Sequence[Completion]) -> Rollout:
        """Turn completions into samples with advantages.

        Raises:
            RewardError: a reward function raised, did not return a number or None per completion, or returned
                one that makes an advantage larger than float32 holds.
        """
        pairs = request.per_completion()
        completion_ids = [list(completion.token_ids) for completion in completions]
        texts = decode_completions(completion_ids, [row["prompt"] for row, _ in pairs], self._tokenizer)
        scores = self._rewards_of(pairs, texts, completion_ids)

        own = ranks.own_part(len(completions), self._rank)
        # In float64, because float32 may hold the rewards but not the squares of their deviations.
        rewards = torch.tensor(ranks.of_all_ranks(scores.rewards.tolist()), dtype=torch.float64)  # [N, F]
        compared = compute_advantages(
            rewards, request.num_generations, self._weights, self._advantage_options
        )
        self._check_advantages(rewards, compared)
        cut = [is_truncated(ids, self._end_token_ids) for ids in completion_ids]
        samples = [
            self._sample(prompt, completion, advantage, masked=is_cut and self._mask_truncated)
            for (_, prompt), completion, advantage, is_cut in zip(
                pairs, completions, compared.advantages[own].tolist(), cut, strict=True
            )
        ]
        facts = ranks.of_all_ranks(
            [
                (prompt.key, len(prompt.token_ids), len(ids), is_cut)
                for (_, prompt), ids, is_cut in zip(pairs, completion_ids, cut, strict=True)
            ]
        )
        metrics = {
            **_length_metrics([n for *_, n, _ in facts], [is_cut for *_, is_cut in facts]),
            **self._reward_metrics(rewards, compared),
            **ranks.means(scores.metrics),
        }
        table = CompletionTable(
            prompts=ranks.of_all_ranks([row["prompt"] for row, _ in pairs]),
            completions=ranks.of_all_ranks(list(texts)),
            rewards={name: rewards[:, i].tolist() for i, name in enumerate(self.reward_functions.names)},
            advantages=compared.advantages.tolist(),
            extra=ranks.columns(scores.extra_columns, len(completions)),
        )
        size = request.num_generations
        keys = [key for key, *_ in facts[::size]]
        groups = [
            Group(key, rewards[n * size :][:size], compared.advantages[n * size :][:size], members)
            for n, (key, members) in enumerate(
                zip(keys, ranks.by_group(samples, own.start, len(keys), size), strict=True)
            )
        ]
        return Rollout(groups, metrics, table, num_tokens=sum(p + c for _, p, c, _ in facts))

    def _rewards_of(
        self, pairs: Sequence[tuple[dict[str, Any], Prompt]], texts: Any, completion_ids: list[list[int]]
    ) -> RewardTable:
        """The rewards of this rank's completions, [n, F]."""
        if not pairs:  # more ranks than held-out prompts: without a row there are no columns
            return RewardTable(torch.empty(0, len(self.reward_functions.names)))
        columns = {name: [row[name] for row, _ in pairs] for name in pairs[0][0]}
        return self.reward_functions.score(
            columns["prompt"], texts, completion_ids, columns, trainer_state=self._trainer_state()
        )

    def _sample(self, prompt: Prompt, completion: Completion, advantage: float, masked: bool) -> Sample:
        device = self._device
        completion_ids = torch.tensor(completion.token_ids, device=device)
        logprobs = completion.logprobs
        return Sample(
            prompt_ids=torch.tensor(prompt.token_ids, device=device),
            completion_ids=completion_ids,
            completion_mask=torch.full_like(completion_ids, 0.0 if masked else 1.0, dtype=torch.float32),
            advantage=advantage,
            rollout_logprobs=None if logprobs is None else torch.tensor(logprobs, device=device),
            prompt_key=prompt.key,
        )

    def _check_advantages(self, rewards: Tensor, compared: Advantages) -> None:
        if compared.advantages.float().isfinite().all():
            return
        row, i = divmod(int((rewards * self._weights).nan_to_num().abs().argmax()), rewards.shape[1])
        raise RewardError(
            f"The reward of completion {row} (over all ranks) by {self.reward_functions.names[i]!r}, "
            f"{rewards[row, i]:g} with weight {self._weights[i]:g}, makes an advantage that float32 does not "
            "hold. Scale the reward down, lower its weight, or set scale_rewards='group'."
        )

    def _reward_metrics(self, rewards: Tensor, compared: Advantages) -> dict[str, float]:
        # Under GDPO advantages come from normalised rewards; what is logged is the plain weighted sum.
        total = (rewards * self._weights).nansum(dim=1)
        total[rewards.isnan().all(dim=1)] = math.nan
        metrics = {}
        for i, name in enumerate(self.reward_functions.names):
            metrics[f"rewards/{name}/mean"] = rewards[:, i].nanmean().item()
            metrics[f"rewards/{name}/std"] = nanstd(rewards[:, i], dim=0).item()
        metrics["reward"] = total.nanmean().item()
        metrics["reward_std"] = nanstd(total, dim=0).item()
        metrics["frac_reward_zero_std"] = compared.is_std_zero.float().mean().item()
        return metrics


def _length_metrics(lengths: list[int], cut: list[bool]) -> dict[str, float]:
    terminated = [n for n, is_cut in zip(lengths, cut, strict=True) if not is_cut] or [0]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(cut) / len(cut),
        "completions/mean_terminated_length": sum(terminated) / len(terminated),
        "completions/min_terminated_length": float(min(terminated)),
        "completions/max_terminated_length": float(max(terminated)),
    }
