"""Episodes that a function of the user's plays: `rollout_func`, as in TRL."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from colocate.data.prompts import tokenize_prompts
from colocate.engines.base import RolloutEngine
from colocate.engines.requests import turn_key
from colocate.episodes.episode import Episode
from colocate.experience.players.play import Player
from colocate.experience.requests import RolloutRequest
from colocate.options.values import shown
from colocate.types import Completion, Prompt, SamplingParams
from colocate.users_code.errors import words_of

RolloutFunc = Callable[[list[Any]], dict[str, Any]]
"""Prompts, one for each completion -> columns: see `FunctionPlayer`."""

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


class FunctionPlayer(Player):
    """Lets a function complete prompts, by the engine or in any other way.

    The function gets a prompt for each completion: each one as often as its group has members on this rank.
    It returns lists with one entry for each: `prompt_ids`, `completion_ids`, `logprobs` of the completion's
    tokens (numbers, or lists whose first one counts; None: there are none), maybe `env_mask`, 1 where a token
    was sampled and 0 where it was given, and further columns for reward functions.

    Args:
        func: the function.
        sampling: how `generate` draws tokens.
    """

    words = "a rollout_func of yours plays the episodes"

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingParams,
        func: RolloutFunc,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._engine = engine
        self.sampling = sampling
        self._func = func
        self._tokenizer = tokenizer
        self._first_key = 0
        self._num_asked = itertools.count(1)

    def play(self, request: RolloutRequest) -> list[Episode]:
        """Return the episodes of a request, prompt by prompt; the engine must be awake.

        Raises:
            ValueError: the function has returned too few or too many entries, or tokens, log-probs and masks
                of different lengths.
        """
        pairs = request.per_completion()
        if not pairs:
            return []
        self._first_key, self._num_asked = pairs[0][1].key, itertools.count(1)
        columns = self._call([row["prompt"] for row, _ in pairs])
        _check_columns(columns, len(pairs))
        masks = columns.pop("env_mask", None)
        prompt_ids, completion_ids, logprobs = (columns.pop(name) for name in REQUIRED)
        episodes = []
        for n in range(len(pairs)):
            own = None if logprobs is None or logprobs[n] is None else [_number(x) for x in logprobs[n]]
            mask = [1] * len(completion_ids[n]) if masks is None else list(masks[n])
            _check_lengths(n, len(completion_ids[n]), own, mask)
            episode = self._episode(prompt_ids[n], completion_ids[n], own, mask)
            episode.extra = {name: values[n] for name, values in columns.items()}
            episodes.append(episode)
        return episodes

    def _call(self, prompts: list[Any]) -> dict[str, Any]:
        """The function's columns. Its exceptions are raised as they are, except those that would end the
        interpreter."""
        name = getattr(self._func, "__name__", type(self._func).__name__)
        try:
            columns = self._func(prompts)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise RuntimeError(f"rollout_func {name!r} raised {words_of(error)}") from error
        if not isinstance(columns, Mapping):
            raise TypeError(
                f"rollout_func {name!r} has returned {shown(columns)}, a {type(columns).__name__}: it must "
                f"return a mapping with {', '.join(map(repr, REQUIRED))}."
            )
        return dict(columns)

    def generate(self, prompts: Sequence[Any]) -> list[tuple[tuple[int, ...], Completion]]:
        """Complete prompts, text or messages, with the run's engine: the tokens of each prompt, and a
        completion. Called by the function, any number of times; each call draws with noise of its own."""
        token_ids = tokenize_prompts([{"prompt": prompt} for prompt in prompts], self._tokenizer)
        keys = [turn_key(self._first_key, next(self._num_asked)) for _ in prompts]
        requests = [Prompt(ids, key) for ids, key in zip(token_ids, keys, strict=True)]
        return list(zip(token_ids, self._engine.generate(requests, self.sampling), strict=True))

    def _episode(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        logprobs: list[float] | None,
        mask: Sequence[int],
    ) -> Episode:
        """A node for each stretch of sampled tokens, with what was given before it."""
        episode, node, given = Episode(), None, tuple(prompt_ids)
        version = self._engine.policy_version
        for is_sampled, stretch in itertools.groupby(range(len(mask)), key=lambda n: bool(mask[n])):
            part = list(stretch)
            ids = tuple(completion_ids[part[0] : part[-1] + 1])
            if not is_sampled:
                given = (*(given if node is None else ()), *ids)
                continue
            own = None if logprobs is None else tuple(logprobs[part[0] : part[-1] + 1])
            reason = "stop" if ids[-1] in self.sampling.stop_token_ids else "length"
            node = episode.add(node, given, Completion(ids, own, reason, version))  # type: ignore[arg-type]
            given = ()
        return episode


def generate_rollout_completions(trainer: Any, prompts: Sequence[Any]) -> list[dict[str, Any]]:
    """Complete prompts with the engine of a run, within a `rollout_func`.

    Args:
        trainer: what the function was given.
        prompts: text or messages, any number of them.

    Returns:
        For each prompt `prompt_ids`, `completion_ids`, `logprobs` (None if the engine knows none), and the
        completion's `text`.

    Raises:
        RuntimeError: the run has no `rollout_func`.
    """
    player = trainer.run.player
    if not isinstance(player, FunctionPlayer):
        raise RuntimeError(
            "generate_rollout_completions is for a rollout_func, and this trainer has none: its engine "
            "generates while the trainer has given it the device's memory."
        )
    return [
        {
            "prompt_ids": list(prompt_ids),
            "completion_ids": list(completion.token_ids),
            "logprobs": None if completion.logprobs is None else list(completion.logprobs),
            "text": trainer.processing_class.decode(completion.token_ids, skip_special_tokens=True),
        }
        for prompt_ids, completion in player.generate(prompts)
    ]


def _check_columns(columns: dict[str, Any], num_prompts: int) -> None:
    if missing := [name for name in REQUIRED if name not in columns]:
        raise ValueError(
            f"rollout_func must return {', '.join(map(repr, REQUIRED))}; {', '.join(map(repr, missing))} is "
            f"missing among {', '.join(map(repr, columns))}."
        )
    for name, values in columns.items():
        if values is None and name in ("logprobs", "env_mask"):
            continue
        if len(values) != num_prompts:
            raise ValueError(
                f"rollout_func was given {num_prompts} prompts, one for each completion (a prompt of a group "
                f"comes as often as the group has members here), and has returned {len(values)} entries in "
                f"{name!r}: it needs one for each prompt, in their order."
            )


def _check_lengths(number: int, num_tokens: int, logprobs: list[float] | None, mask: Sequence[int]) -> None:
    for name, values in (("logprobs", logprobs), ("env_mask", mask)):
        if values is not None and len(values) != num_tokens:
            raise ValueError(
                f"rollout_func has returned {num_tokens} completion_ids and {len(values)} {name} for prompt "
                f"{number} (from 0): it needs one for each token."
            )
    if not any(mask):
        raise ValueError(
            f"rollout_func has returned no sampled token for prompt {number} (from 0): completion_ids is "
            "empty, or env_mask is 0 everywhere. An episode needs one at least."
        )


def _number(logprob: Any) -> float:
    return float(logprob[0] if isinstance(logprob, (list, tuple)) else logprob)
