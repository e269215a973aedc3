"""From completions to samples the policy can train on: decode, reward, compare within the group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from colocate.algorithms.advantages import Advantages, compute_advantages, nanstd
from colocate.algorithms.masks import completion_mask
from colocate.data.prompts import PromptEncoder
from colocate.rewards import RewardFunctions
from colocate.types import Completion, Sample


@dataclass(frozen=True)
class Rollout:
    """One scored generation batch.

    `samples` are this rank's, in generation order; `metrics` and `table` cover all ranks.
    """

    samples: list[Sample]
    metrics: dict[str, float]
    table: dict[str, list[Any]]
    """Columns of the completions log: prompt, completion, one per reward function, extras, advantage."""
    num_tokens: int
    """Prompt and completion tokens over all ranks."""


@dataclass
class Scorer:
    """Turns this rank's completions into samples; rewards are compared across ranks."""

    prompts: PromptEncoder
    rewards: RewardFunctions
    reward_weights: torch.Tensor  # [F]
    scale_rewards: str
    multi_objective_aggregation: str
    mask_truncated_completions: bool
    stop_token_ids: Sequence[int]
    accelerator: Accelerator
    state: Any = field(repr=False)  # transformers' TrainerState, which reward functions may read

    def score(
        self,
        rows: Sequence[dict[str, Any]],
        prompt_ids: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        num_generations: int,
    ) -> Rollout:
        """Reward completions and turn rewards into advantages.

        Args:
            rows: the dataset row of each of this rank's completions (a row repeats for each of its members).
            prompt_ids: likewise its prompt's tokens.
            completions: this rank's completions. Over all ranks G consecutive ones share a prompt.
            num_generations: G.

        Raises:
            RewardError: a reward function raised, or returned something that is not a number per completion.
        """
        completion_ids = [list(c.token_ids) for c in completions]
        texts = self.prompts.decode(rows, completion_ids)
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
        scores = self.rewards.score(
            [row["prompt"] for row in rows], texts, completion_ids, columns, trainer_state=self.state
        )
        rewards = torch.tensor(gather_object(scores.rewards.tolist()), dtype=torch.float32)  # [N, F]
        advantages = compute_advantages(
            rewards,
            num_generations,
            self.reward_weights,
            self.scale_rewards,
            self.multi_objective_aggregation,
        )
        counts = gather_object([len(completions)])
        first = sum(counts[: self.accelerator.process_index])
        samples = [
            self._sample(prompt, completion, float(advantages.advantages[first + i]))
            for i, (prompt, completion) in enumerate(zip(prompt_ids, completions, strict=True))
        ]
        lengths = gather_object([(len(p), len(c)) for p, c in zip(prompt_ids, completion_ids, strict=True)])
        truncated = gather_object([not self._stopped(c) for c in completions])
        metrics = {
            **_length_metrics([c for _, c in lengths], truncated),
            **_reward_metrics(rewards, self.rewards.names, self.reward_weights, advantages),
            **self._logged_metrics(scores.metrics),
        }
        table = self._table(rows, texts, rewards, advantages, scores.extra_columns)
        return Rollout(samples, metrics, table, num_tokens=sum(p + c for p, c in lengths))

    def _stopped(self, completion: Completion) -> bool:
        return bool(completion.token_ids) and completion.token_ids[-1] in self.stop_token_ids

    def _sample(self, prompt: Sequence[int], completion: Completion, advantage: float) -> Sample:
        device = self.accelerator.device
        logprobs = completion.logprobs
        return Sample(
            prompt_ids=torch.tensor(prompt, device=device),
            completion_ids=torch.tensor(completion.token_ids, device=device),
            completion_mask=completion_mask(
                len(completion.token_ids), self._stopped(completion), self.mask_truncated_completions
            ).to(device),
            advantage=advantage,
            rollout_logprobs=None if logprobs is None else torch.tensor(logprobs, device=device),
        )

    def _logged_metrics(self, local: dict[str, list[float]]) -> dict[str, float]:
        # Averaged over all values of all ranks, as each rank scored its own completions.
        totals: dict[str, list[float]] = {}
        for metrics in gather_object([local]):
            for name, values in metrics.items():
                totals.setdefault(name, []).extend(values)
        return {name: sum(values) / len(values) for name, values in sorted(totals.items()) if values}

    def _table(
        self,
        rows: Sequence[dict[str, Any]],
        texts: Sequence[Any],
        rewards: torch.Tensor,
        advantages: Advantages,
        extra_columns: dict[str, list[Any]],
    ) -> dict[str, list[Any]]:
        names = sorted({name for columns in gather_object([extra_columns]) for name in columns})
        extras = {name: gather_object(extra_columns.get(name, [None] * len(rows))) for name in names}
        return {
            "prompt": gather_object([row["prompt"] for row in rows]),
            "completion": gather_object(list(texts)),
            **{name: rewards[:, i].tolist() for i, name in enumerate(self.rewards.names)},
            **extras,
            "advantage": advantages.advantages.tolist(),
        }


def _length_metrics(lengths: list[int], truncated: list[bool]) -> dict[str, float]:
    terminated = [n for n, cut in zip(lengths, truncated, strict=True) if not cut] or [0]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
        "completions/mean_terminated_length": sum(terminated) / len(terminated),
        "completions/min_terminated_length": float(min(terminated)),
        "completions/max_terminated_length": float(max(terminated)),
    }


def _reward_metrics(
    rewards: torch.Tensor, names: Sequence[str], weights: torch.Tensor, advantages: Advantages
) -> dict[str, float]:
    # Under GDPO the advantages come from normalised rewards; what is logged is the plain weighted sum.
    total = (rewards * weights).nansum(dim=1)
    total[rewards.isnan().all(dim=1)] = math.nan
    metrics = {}
    for i, name in enumerate(names):
        metrics[f"rewards/{name}/mean"] = rewards[:, i].nanmean().item()
        metrics[f"rewards/{name}/std"] = nanstd(rewards[:, i]).item()
    metrics["reward"] = total.nanmean().item()
    metrics["reward_std"] = nanstd(total).item()
    metrics["frac_reward_zero_std"] = advantages.is_std_zero.float().mean().item()
    return metrics
