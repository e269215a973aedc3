"""From prompts to samples the policy can train on: who completes what, and what each completion was worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from colocate.algorithms.advantages import AdvantageOptions, Advantages, compute_advantages, nanstd
from colocate.algorithms.masks import is_truncated
from colocate.config import GRPOConfig
from colocate.data.prompts import (
    all_prompts,
    check_context_length,
    decode_completions,
    row_name,
    tokenize_prompts,
)
from colocate.data.sampler import PromptBatch, rank_slice
from colocate.reporting.completions import CompletionTable
from colocate.reporting.journal import Journal
from colocate.rewards.base import RewardFunctions, RewardTable
from colocate.rewards.errors import RewardError
from colocate.types import Completion, Prompt, Sample


@dataclass(frozen=True)
class RolloutRequest:
    """This rank's share of a generation batch."""

    rows: list[dict[str, Any]]
    """Dataset row of each prompt."""
    prompts: list[Prompt]
    num_generations: int
    """G, over all ranks: a prompt here may ask for a part of its group only."""

    def per_completion(self) -> list[tuple[dict[str, Any], Prompt]]:
        """Row and prompt of each completion, in the engine's order."""
        pairs = zip(self.rows, self.prompts, strict=True)
        return [(row, prompt) for row, prompt in pairs for _ in prompt.samples]


class RequestBuilder:
    """Tokenizes dataset rows into this rank's requests.

    Args:
        context_length: tokens that prompt and completion may have together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, args: GRPOConfig, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._args = args
        self._context_length = context_length

    def training(self, batch: PromptBatch) -> RolloutRequest:
        """This rank's equal share of the batch's completions; a group may span ranks.

        Raises:
            ValueError: a prompt cannot be tokenized, or leaves no room for `max_completion_length`.
        """
        args = self._args
        share = rank_slice(len(batch.rows), args.num_generations, args.process_index, args.world_size)
        rows = [batch.rows[index] for index, _ in share]
        keys = [batch.keys[index] for index, _ in share]
        # The dataset's own row numbers are gone by now: a stream has none, and the order is random.
        names = [f"The run's prompt {key} (from 0)" for key in keys]
        return self._request(rows, keys, [members for _, members in share], args.num_generations, names)

    def evaluation(self, rows: Sequence[dict[str, Any]]) -> RolloutRequest:
        """This rank's share of all held-out prompts, with their whole groups.

        Raises:
            ValueError: as for `training`.
        """
        args = self._args
        num_generations = args.num_generations_eval or args.num_generations
        per_rank = math.ceil(len(rows) / args.world_size)
        share = range(len(rows))[args.process_index * per_rank :][:per_rank]
        # Negative keys: a held-out prompt never shares its random numbers with a training prompt.
        keys = [-1 - index for index in share]
        members = [range(num_generations)] * len(share)
        names = [row_name(index) for index in share]
        return self._request([rows[index] for index in share], keys, members, num_generations, names)

    def check_extremes(self, dataset: datasets.Dataset | datasets.IterableDataset) -> None:
        """Find prompts too long for the context, or without a token, before anything is generated.

        Tokenizing a large dataset takes minutes. Its longest and shortest prompts by characters take
        milliseconds, and hold the longest and shortest by tokens in all but odd cases, which are found when
        their batch comes, as those of a stream are.

        Raises:
            ValueError: prompt and completion do not fit the context together, or there is no prompt.
        """
        if isinstance(dataset, datasets.IterableDataset):
            return
        lengths = [len(str(prompt)) for prompt in all_prompts(dataset)]
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        extremes = sorted({*by_length[:16], *by_length[-16:]})
        self._tokenize([dataset[row] for row in extremes], [row_name(row) for row in extremes])

    def _request(
        self,
        rows: list[dict[str, Any]],
        keys: list[int],
        members: list[range],
        num_generations: int,
        names: list[str],
    ) -> RolloutRequest:
        parts = zip(self._tokenize(rows, names), keys, members, strict=True)
        return RolloutRequest(
            rows, [Prompt(ids, key, samples) for ids, key, samples in parts], num_generations
        )

    def _tokenize(self, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[tuple[int, ...]]:
        args = self._args
        token_ids = tokenize_prompts(
            rows,
            self._tokenizer,
            chat_template_kwargs=args.chat_template_kwargs,
            max_prompt_length=args.max_prompt_length,
            names=names,
        )
        for ids in token_ids:
            check_context_length(len(ids), args.max_completion_length, self._context_length)
        return token_ids


@dataclass(frozen=True)
class Rollout:
    """A scored generation batch: `samples` are this rank's, all else covers all ranks."""

    samples: list[Sample]
    metrics: dict[str, float]
    table: CompletionTable
    num_tokens: int
    """Prompt and completion tokens."""


class Scorer:
    """Rewards completions, and compares the rewards across ranks.

    Args:
        journal: its `state` is what reward functions receive as `trainer_state`.
        stop_token_ids: a completion that ends in none of these, nor in padding, was cut off.
    """

    def __init__(
        self,
        reward_functions: RewardFunctions,
        tokenizer: PreTrainedTokenizerBase,
        accelerator: Accelerator,
        journal: Journal,
        *,
        advantage_options: AdvantageOptions,
        mask_truncated_completions: bool,
        stop_token_ids: Sequence[int],
    ) -> None:
        self.reward_functions = reward_functions
        self._tokenizer = tokenizer
        self._accelerator = accelerator
        self._journal = journal
        self._weights = reward_functions.weights.double()
        self._advantage_options = advantage_options
        self._mask_truncated = mask_truncated_completions
        self._end_token_ids = {*stop_token_ids, tokenizer.pad_token_id}

    def score(self, request: RolloutRequest, completions: Sequence[Completion]) -> Rollout:
        """Turn completions into samples with advantages.

        Raises:
            RewardError: a reward function raised, did not return a number or None per completion, or returned
                one that makes an advantage larger than float32 holds.
        """
        pairs = request.per_completion()
        prompts = [row["prompt"] for row, _ in pairs]
        completion_ids = [list(completion.token_ids) for completion in completions]
        texts = decode_completions(completion_ids, prompts, self._tokenizer)
        columns = {name: [row[name] for row, _ in pairs] for name in (pairs[0][0] if pairs else {})}
        if pairs:
            scores = self.reward_functions.score(
                prompts, texts, completion_ids, columns, trainer_state=self._journal.state
            )
        else:  # more ranks than held-out prompts; without a row the functions would miss their columns
            scores = RewardTable(torch.empty(0, len(self.reward_functions.names)))

        first = sum(gather_object([len(completions)])[: self._accelerator.process_index])
        # Float64: of rewards that float32 holds, the squares of a deviation need not fit.
        rewards = torch.tensor(gather_object(scores.rewards.tolist()), dtype=torch.float64)  # [N, F]
        compared = compute_advantages(
            rewards, request.num_generations, self._weights, self._advantage_options
        )
        self._check_advantages(rewards, compared)
        cut = [is_truncated(ids, self._end_token_ids) for ids in completion_ids]
        local_advantages = compared.advantages[first : first + len(completions)].tolist()
        samples = [
            self._sample(prompt, completion, advantage, masked=is_cut and self._mask_truncated)
            for (_, prompt), completion, advantage, is_cut in zip(
                pairs, completions, local_advantages, cut, strict=True
            )
        ]
        lengths = gather_object(
            [
                (len(p.token_ids), len(c), is_cut)
                for (_, p), c, is_cut in zip(pairs, completion_ids, cut, strict=True)
            ]
        )
        metrics = {
            **_length_metrics([n for _, n, _ in lengths], [is_cut for _, _, is_cut in lengths]),
            **self._reward_metrics(rewards, compared),
            **_mean_over_ranks(scores.metrics),
        }
        table = CompletionTable(
            prompts=gather_object(prompts),
            completions=gather_object(list(texts)),
            rewards={name: rewards[:, i].tolist() for i, name in enumerate(self.reward_functions.names)},
            advantages=compared.advantages.tolist(),
            extra=_gather_columns(scores.extra_columns, len(completions)),
        )
        return Rollout(samples, metrics, table, num_tokens=sum(p + c for p, c, _ in lengths))

    def _sample(self, prompt: Prompt, completion: Completion, advantage: float, masked: bool) -> Sample:
        device = self._accelerator.device
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

    def _check_advantages(self, rewards: torch.Tensor, compared: Advantages) -> None:
        if compared.advantages.float().isfinite().all():
            return
        row, i = divmod(int((rewards * self._weights).nan_to_num().abs().argmax()), rewards.shape[1])
        raise RewardError(
            f"The reward of completion {row} (over all ranks) by {self.reward_functions.names[i]!r}, "
            f"{rewards[row, i]:g} with weight {self._weights[i]:g}, makes an advantage that float32 does not "
            "hold. Scale the reward down, lower its weight, or set scale_rewards='group'."
        )

    def _reward_metrics(self, rewards: torch.Tensor, compared: Advantages) -> dict[str, float]:
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


def _mean_over_ranks(local: dict[str, list[float]]) -> dict[str, float]:
    totals: dict[str, list[float]] = {}
    for metrics in gather_object([local]):
        for name, values in metrics.items():
            totals.setdefault(name, []).extend(values)
    return {name: sum(values) / len(values) for name, values in totals.items() if values}


def _gather_columns(local: dict[str, list[Any]], num_rows: int) -> dict[str, list[Any]]:
    # Every rank walks the same names in the same order, or values would end up in one another's columns.
    names = sorted({name for columns in gather_object([local]) for name in columns})
    return {name: gather_object(local.get(name, [None] * num_rows)) for name in names}
