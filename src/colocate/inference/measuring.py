"""Measures a model on prompts: completions, their rewards, how many are right, and how sure that is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from transformers import TrainerState

from colocate.data.first_prompt import tell_first_prompt
from colocate.data.prompts import check_context_length, decode_completions, tokenize_prompts
from colocate.engines.base import RolloutEngine
from colocate.inference.loading import LoadedModel
from colocate.inference.statistics import Estimate, mean, pass_at_k, share
from colocate.rewards.base import RewardFunctions
from colocate.types import Completion, Prompt, SamplingParams

Row = dict[str, Any]


@dataclass(frozen=True)
class Scores:
    """The results of one model on N prompts with n completions each.

    Attributes:
        name: the model, as the user has named it.
        engine: the class of the engine that generated.
        num_correct: [N] completions of each prompt that are right.
        num_unjudged: completions that the first reward function has returned None for; none counts as right.
        rewards: [N] mean reward of each prompt by each function, by its name; NaN where it returned None.
        mean_length: tokens of a completion, the stop token included.
        truncated: share of the completions that reached their limit.
    """

    name: str
    engine: str
    num_samples: int
    num_correct: list[int]
    num_unjudged: int
    rewards: dict[str, list[float]]
    mean_length: float
    truncated: float
    seconds: float

    @property
    def shares(self) -> list[float]:
        """[N] the share of each prompt's completions that are right."""
        return [count / self.num_samples for count in self.num_correct]

    @property
    def accuracy(self) -> Estimate:
        """The share of completions that are right."""
        return share(self.shares, self.num_samples)

    def pass_at(self, k: int) -> Estimate:
        """The share of prompts with at least one right completion among k; see `statistics.pass_at_k`."""
        values = [pass_at_k(self.num_samples, count, k) for count in self.num_correct]
        return share(values, self.num_samples)

    def mean_reward(self, name: str) -> Estimate | None:
        """The mean of one reward function; None if it has judged nothing."""
        judged = [value for value in self.rewards[name] if not math.isnan(value)]
        if judged and min(judged) >= 0 and max(judged) <= 1:  # a normal interval could leave the range
            return share(judged, self.num_samples)
        return mean(judged) if judged else None

    def as_json(self, ks: Sequence[int]) -> dict[str, Any]:
        """The scores as plain values, with those of every prompt, from which all others can be computed."""
        means = {name: self.mean_reward(name) for name in self.rewards}
        return {
            "model": self.name,
            "engine": self.engine,
            "num_prompts": len(self.num_correct),
            "num_samples": self.num_samples,
            "num_unjudged": self.num_unjudged,
            "accuracy": asdict(self.accuracy),
            "pass_at_k": {str(k): asdict(self.pass_at(k)) for k in ks},
            "rewards": {name: value and asdict(value) for name, value in means.items()},
            "mean_completion_length": self.mean_length,
            "truncated": self.truncated,
            "seconds": self.seconds,
            "num_correct": self.num_correct,
        }


def score_model(
    loaded: LoadedModel,
    rows: Sequence[Row],
    rewards: RewardFunctions,
    sampling: SamplingParams,
    *,
    num_samples: int,
    correct_at: float,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Scores:
    """Complete every prompt `num_samples` times and judge the completions.

    Args:
        rows: with the column `prompt` and those that the reward functions need.
        rewards: a completion is right if the first of them gives it at least `correct_at`.
        on_progress: told how many completions are done.
    """
    token_ids = tokenize_prompts(
        rows, loaded.tokenizer, chat_template_kwargs=loaded.config.chat_template_kwargs
    )
    if rows:
        tell_first_prompt(rows[0], token_ids[0], loaded.tokenizer, loaded.config, rewards.names)
    for ids in token_ids:
        check_context_length(len(ids), sampling.max_tokens, loaded.context_length)
    prompts = [Prompt(ids, key, range(num_samples)) for key, ids in enumerate(token_ids)]
    start_s = time.monotonic()
    engine = loaded.make_engine(sampling)
    try:
        completions = _complete(engine, prompts, sampling, on_progress)
    finally:
        engine.close()
    seconds = time.monotonic() - start_s
    of_rows = [row for row in rows for _ in range(num_samples)]
    asked = [row["prompt"] for row in of_rows]
    token_ids_drawn = [list(completion.token_ids) for completion in completions]
    columns = {name: [row[name] for row in of_rows] for name in rows[0]}
    answers = decode_completions(token_ids_drawn, asked, loaded.tokenizer)
    judged = rewards.score(asked, answers, token_ids_drawn, columns, TrainerState()).rewards
    table = judged.view(len(rows), num_samples, -1)
    by_prompt = table.nanmean(dim=1).T.tolist()
    return Scores(
        name=loaded.saved.name,
        engine=type(engine).__name__,
        num_samples=num_samples,
        num_correct=(table[:, :, 0] >= correct_at).sum(dim=1).tolist(),
        num_unjudged=int(table[:, :, 0].isnan().sum()),
        rewards=dict(zip(rewards.names, by_prompt, strict=True)),
        mean_length=fmean(len(c.token_ids) for c in completions),
        truncated=fmean(c.finish_reason == "length" for c in completions),
        seconds=seconds,
    )


def _complete(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    on_progress: Callable[[int], None],
) -> list[Completion]:
    """The completions, prompt by prompt, as `engine.generate` returns them."""
    numbers = engine.submit(prompts, sampling)
    done: dict[int, Completion] = {}
    while len(done) < len(numbers):
        done.update(engine.poll())
        on_progress(len(done))
    return [done[number] for number in numbers]
