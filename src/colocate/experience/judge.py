"""Judging completions: their rewards, compared over all ranks, become the advantages of samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from colocate.algorithms.advantages import AdvantageOptions
from colocate.data.prompts import decode_completions
from colocate.episodes.episode import Episode, Row, num_shared
from colocate.experience import ranks
from colocate.experience.comparison import Comparison
from colocate.experience.requests import RolloutRequest
from colocate.reporting.completions import CompletionTable
from colocate.reporting.metrics import Metrics
from colocate.reporting.run_log import reserve_metrics
from colocate.rewards.base import RewardFunctions, RewardTable
from colocate.types import Prompt, Sample

reserve_metrics(
    "rank_wait_s", "episodes/forks", "episodes/cached_tokens", "policy_lag/mean", "policy_lag/stale_tokens",
    *(f"tools/{name}" for name in ("call_frequency", "failure_frequency", "timeouts", "seconds")),
    *(f"completions/{name}_length" for name in ("mean", "min", "max")),
    *(f"completions/{name}_terminated_length" for name in ("mean", "min", "max")),
    "completions/clipped_ratio",
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """The episodes of one prompt. Every rank has all groups of a rollout, and members of its own in some.

    So each rank can choose among groups by their numbers, and all ranks come to one choice.
    """

    key: int
    """The prompt's number, `Prompt.key`."""
    rewards: Tensor  # [G, F] float64, the group's part of `Comparison.rewards`
    advantages: Tensor  # [G] float64, of whole episodes
    members: list[list[Sample]]
    """This rank's members of the group, all of them, some or none. A member has a sample for each row of its
    episode, so a single one unless histories forked."""

    @property
    def samples(self) -> list[Sample]:
        """The samples of this rank's members."""
        return [sample for member in self.members for sample in member]


@dataclass(frozen=True)
class Rollout:
    """A scored generation batch. Members are this rank's, all else covers all ranks."""

    groups: list[Group]
    members: list[list[Sample]]
    """The samples of each of this rank's episodes, in the order in which these were played."""
    metrics: dict[str, float]
    table: CompletionTable
    num_tokens: int
    """The number of prompt tokens and of sampled tokens, over all ranks."""
    num_loss_tokens: int
    """The number of tokens that the loss counts, over all ranks."""

    @property
    def samples(self) -> list[Sample]:
        """This rank's samples, episode by episode."""
        return [sample for member in self.members for sample in member]


class EpisodeFacts(NamedTuple):
    """The facts of an episode that all ranks learn, for their metrics."""

    key: int
    """`Prompt.key`."""
    num_prompt: int
    num_sampled: int
    is_truncated: bool
    tool_calls: int
    tool_failures: int
    tool_timeouts: int
    tool_s: float
    num_forks: int
    """The number of its rows, but the first."""
    has_turn_rewards: bool
    returns: tuple[float, ...]
    """`Episode.returns`."""
    lag: int = 0
    """The sum over its sampled tokens of the updates that the weights have had since they were sampled."""
    num_stale: int = 0
    """The number of its sampled tokens that older weights have sampled."""
    context_tokens: tuple[int, int] = (0, 0)
    """`Episode.context_tokens`."""


@dataclass(frozen=True)
class RankShare:
    """A rank's message to all others about its episodes, in the one exchange that scoring has."""

    scores: RewardTable
    facts: list[EpisodeFacts]
    prompts: list[Any]
    """The prompts as reward functions see them; so are the texts."""
    texts: list[Any]


@dataclass(frozen=True)
class _Entry:
    """An episode of this rank, with the fields that it is judged by."""

    row: dict[str, Any]
    """The row of the dataset."""
    prompt: Prompt
    number: int
    """The episode's number in its group."""
    episode: Episode
    rows: list[Row]
    shown_prompt: Any
    """The prompt as reward functions see it."""
    text: Any
    """The completion as reward functions see it: text or messages."""

    def has_prompt(self, row: Row) -> bool:
        """Whether a row begins with the group's prompt, to which an environment may have added."""
        return row.prompt_ids == self.prompt.token_ids

    @property
    def fork(self) -> tuple[int, int, int] | None:
        """`Sample.fork` of the episode's rows, if training computes fewer tokens with it than without.

        Without it, each row shares the prompt with the group, which has it once in any case. With it, the K
        rows share L tokens that are computed once more.
        """
        if len(self.rows) == 1:
            return None
        longest = num_shared(self.rows)
        saved_without = sum(len(row.prompt_ids) for row in self.rows if self.has_prompt(row))
        is_less = (len(self.rows) - 1) * longest > saved_without
        return (self.prompt.key, self.number, longest) if is_less else None

    def facts(self, policy_version: int | None) -> EpisodeFacts:
        """The facts of the episode that all ranks learn.

        Args:
            policy_version: the present version; None: it has sampled all tokens.
        """
        rows = [] if policy_version is None else self.rows
        lags = [lag for row in rows for lag in row.lags(policy_version or 0) if lag]
        return EpisodeFacts(
            self.prompt.key,
            len(self.rows[0].prompt_ids),
            sum(row.num_sampled for row in self.rows),
            self.episode.is_truncated,
            self.episode.tool_calls,
            self.episode.tool_failures,
            self.episode.tool_timeouts,
            self.episode.tool_s,
            len(self.rows) - 1,
            bool(self.episode.turn_rewards),
            self.episode.returns(),
            sum(lags),
            len(lags),
            self.episode.context_tokens(),
        )


class Judge:
    """Rewards episodes, and compares the rewards across ranks.

    Args:
        device: the device that samples are put on.
        mask_stale_tokens: whether tokens that older weights have sampled are left out of the loss.
        policy_version: called for the version of the present weights; None: all episodes are theirs.
        has_turns: whether episodes may have several turns; then there are metrics of them.
        calls_tools: whether tools are called here; then there are metrics of them.
        trainer_state: called for the value that reward functions receive as `trainer_state`.
        rank: this process's number.
    """

    def __init__(
        self,
        reward_functions: RewardFunctions,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        *,
        advantage_options: AdvantageOptions | None = None,
        mask_truncated_completions: bool = False,
        mask_stale_tokens: bool = False,
        policy_version: Callable[[], int] | None = None,
        has_turns: bool = False,
        calls_tools: bool = False,
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
        self._mask_stale = mask_stale_tokens
        self._policy_version = policy_version
        self._has_turns, self._calls_tools = has_turns, calls_tools
        self._waited_s = 0.0
        """Seconds that this rank has waited for the others' episodes and not told yet."""

    def score(self, request: RolloutRequest, episodes: Sequence[Episode]) -> Rollout:
        """Turn episodes into samples with advantages.

        Args:
            episodes: one for each completion of `request.per_completion()`.

        Raises:
            RewardError: a reward function raised, did not return a number or None per completion, or returned
                one that makes an advantage larger than float32 holds.
        """
        entries = self._entries(request, episodes)
        version = None if self._policy_version is None else self._policy_version()
        scores = self._rewards_of(entries)
        told = (
            [entry.facts(version) for entry in entries],
            [x.shown_prompt for x in entries],
            [x.text for x in entries],
        )
        start_s = time.perf_counter()
        shares = ranks.of_all_ranks([RankShare(scores, *told)])
        if len(shares) > 1:
            self._waited_s += time.perf_counter() - start_s
        own = ranks.own_part([len(share.facts) for share in shares], self._rank)
        facts = [x for share in shares for x in share.facts]
        compared = Comparison.of(
            self.reward_functions.names,
            self._weights,
            # In float64, because float32 may hold the rewards but not the squares of their deviations.
            torch.cat([share.scores.rewards for share in shares]).double(),  # [N, F]
            [x.returns for x in facts] if any(x.has_turn_rewards for x in facts) else None,
            request.num_generations,
            self._advantage_options,
        )
        advantages = compared.advantages if compared.turn_advantages is None else compared.turn_advantages
        members = _on_device(
            [
                self._samples(entry, advantage)
                for entry, advantage in zip(entries, advantages[own].tolist(), strict=True)
            ],
            self._device,
        )
        metrics = {
            **_length_metrics([x.num_sampled for x in facts], [x.is_truncated for x in facts]),
            **(_turn_metrics(facts) if self._has_turns else {}),
            **(_tool_metrics(facts) if self._calls_tools else {}),
            **({} if version is None else _lag_metrics(facts)),
            **compared.metrics(),
            **ranks.means([share.scores.metrics for share in shares]),
        }
        return Rollout(
            _groups(compared, [x.key for x in facts], members, own.start, request.num_generations),
            members,
            metrics,
            _table(shares, compared),
            num_tokens=sum(x.num_prompt + x.num_sampled for x in facts),
            num_loss_tokens=sum(self._num_loss_tokens(x) for x in facts),
        )

    def add_waiting(self, metrics: Metrics) -> None:
        """Add to a step's metrics how long this rank has waited for others since the last time."""
        if self._waited_s:
            metrics.add_max("rank_wait_s", self._waited_s)
        self._waited_s = 0.0

    def _num_loss_tokens(self, facts: EpisodeFacts) -> int:
        if self._mask_truncated and facts.is_truncated:
            return 0
        return facts.num_sampled - (facts.num_stale if self._mask_stale else 0)

    def _entries(self, request: RolloutRequest, episodes: Sequence[Episode]) -> list[_Entry]:
        pairs = request.per_completion()
        numbers = [number for prompt in request.prompts for number in prompt.samples]
        rows = [episode.rows() for episode in episodes]
        shown = [
            row["prompt"] if episode.prompt is None else episode.prompt
            for (row, _), episode in zip(pairs, episodes, strict=True)
        ]
        texts: list[Any] = [episode.messages for episode in episodes]
        bare = [n for n, text in enumerate(texts) if text is None]
        ids = [rows[n][-1].completion_ids for n in bare]
        decoded = decode_completions(ids, [shown[n] for n in bare], self._tokenizer)
        for n, text in zip(bare, decoded, strict=True):
            texts[n] = text
        return [
            _Entry(*pair, *parts)
            for pair, *parts in zip(pairs, numbers, episodes, rows, shown, texts, strict=True)
        ]

    def _rewards_of(self, entries: Sequence[_Entry]) -> RewardTable:
        """The rewards of this rank's episodes, [n, F]."""
        if not entries:  # more ranks than held-out prompts: without a row there are no columns
            return RewardTable(torch.empty(0, len(self.reward_functions.names)))
        episodes = [entry.episode for entry in entries]
        columns = {name: [entry.row[name] for entry in entries] for name in entries[0].row}
        for name in dict.fromkeys(name for episode in episodes for name in episode.extra):
            columns[name] = [episode.extra.get(name) for episode in episodes]
        if any(episode.environment is not None for episode in episodes):
            columns["environments"] = [episode.environment for episode in episodes]
        return self.reward_functions.score(
            [entry.shown_prompt for entry in entries],
            [entry.text for entry in entries],
            [list(entry.rows[-1].completion_ids) for entry in entries],
            columns,
            trainer_state=self._trainer_state(),
        )

    def _samples(self, entry: _Entry, advantage: float | list[float]) -> list[Sample]:
        """The samples of an episode with one advantage, or one for each of its nodes; tensors on the host."""
        fork = entry.fork
        return [self._sample(entry, row, advantage, fork) for row in entry.rows]

    def _sample(
        self, entry: _Entry, row: Row, advantage: float | list[float], fork: tuple[int, int, int] | None
    ) -> Sample:
        prompt, logprobs = entry.prompt, row.logprobs
        mask = _tensor(bytearray(row.is_sampled), np.float32)
        if self._mask_truncated and entry.episode.is_truncated:
            mask = torch.zeros_like(mask)
        if self._mask_stale and self._policy_version is not None:
            mask[torch.tensor(row.lags(self._policy_version())) > 0] = 0.0
        return Sample(
            prompt_ids=_tensor(row.prompt_ids, np.int64),
            completion_ids=_tensor(row.completion_ids, np.int64),
            completion_mask=mask,
            advantage=advantage
            if isinstance(advantage, float)
            else torch.tensor([advantage[node] for node in row.nodes]),
            rollout_logprobs=None if logprobs is None else _tensor(logprobs, np.float32),
            prompt_key=prompt.key if entry.has_prompt(row) else None,
            fork=fork,
        )


def _tensor(values: Sequence[float] | bytearray, dtype: type[np.number]) -> Tensor:
    """The numbers as a tensor. NumPy reads the millions of them in a tenth of PyTorch's time."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def _on_device(members: list[list[Sample]], device: torch.device) -> list[list[Sample]]:
    """The members' samples with all tensors on the device, where they arrive in one copy for each field: the
    host waits for every copy, and a rollout has thousands of tensors."""
    samples = [sample for member in members for sample in member]
    columns: dict[str, list[Any]] = {}
    for name in (field.name for field in fields(Sample)):
        values = [getattr(sample, name) for sample in samples]
        if tensors := [value for value in values if isinstance(value, Tensor)]:
            parts = iter(torch.cat(tensors).to(device).split([len(tensor) for tensor in tensors]))
            columns[name] = [next(parts) if isinstance(value, Tensor) else value for value in values]
    moved = iter(
        replace(sample, **{name: column[number] for name, column in columns.items()})
        for number, sample in enumerate(samples)
    )
    return [[next(moved) for _ in member] for member in members]


def _groups(
    compared: Comparison, keys: Sequence[int], members: list[list[Sample]], first: int, size: int
) -> list[Group]:
    """The groups of `size` episodes each, with this rank's members; `first` is the number over all ranks of
    the first of these. `keys` has one entry for each episode of all ranks."""
    keys = keys[::size]
    return [
        Group(key, compared.rewards[n * size :][:size], compared.advantages[n * size :][:size], own)
        for n, (key, own) in enumerate(
            zip(keys, ranks.by_group(members, first, len(keys), size), strict=True)
        )
    ]


def _table(shares: Sequence[RankShare], compared: Comparison) -> CompletionTable:
    return CompletionTable(
        prompts=[prompt for share in shares for prompt in share.prompts],
        completions=[text for share in shares for text in share.texts],
        rewards={name: compared.rewards[:, i].tolist() for i, name in enumerate(compared.names)},
        advantages=compared.advantages.tolist(),
        extra=ranks.columns(
            [share.scores.extra_columns for share in shares], [len(share.facts) for share in shares]
        ),
    )


def _turn_metrics(facts: Sequence[EpisodeFacts]) -> dict[str, float]:
    num_tokens, num_cached = map(sum, zip(*(x.context_tokens for x in facts), strict=True))
    cached = {"episodes/cached_tokens": num_cached / num_tokens} if num_tokens else {}
    return {"episodes/forks": fmean(x.num_forks for x in facts), **cached}


def _tool_metrics(facts: Sequence[EpisodeFacts]) -> dict[str, float]:
    num_calls = sum(x.tool_calls for x in facts)
    return {
        "tools/call_frequency": num_calls / len(facts),
        "tools/failure_frequency": sum(x.tool_failures for x in facts) / max(num_calls, 1),
        "tools/timeouts": sum(x.tool_timeouts for x in facts) / max(num_calls, 1),
        "tools/seconds": sum(x.tool_s for x in facts) / max(num_calls, 1),
    }


def _lag_metrics(facts: Sequence[EpisodeFacts]) -> dict[str, float]:
    num_sampled = max(1, sum(x.num_sampled for x in facts))
    return {
        "policy_lag/mean": sum(x.lag for x in facts) / num_sampled,
        "policy_lag/stale_tokens": sum(x.num_stale for x in facts) / num_sampled,
    }


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
