"""Calls reward functions, and checks what they return."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from colocate.reporting.work_counts import WorkCounts
from colocate.rewards.arguments import REPLACED_COLUMNS, own_arguments
from colocate.rewards.logs import FunctionLog, merge_logs
from colocate.rewards.models import RewardModel
from colocate.rewards.ties import lost_difference
from colocate.users_code.background import BackgroundLoop
from colocate.users_code.errors import RewardError, blaming, describe
from colocate.users_code.process_state import kept_trainer_state, users_code
from colocate.users_code.time_limit import TimeLimit

logger = logging.getLogger(__name__)

RewardFunc = str | nn.Module | Callable[..., Any]

_COUNTED = "reward functions"
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RewardTable:
    """The rewards of N completions by F functions, and the functions' logs."""

    rewards: Tensor
    """[N, F] rewards, float32 on the CPU; NaN where a function returned None."""
    extra_columns: dict[str, list] = field(default_factory=dict)
    """Columns of the completions table, N values each. If several functions log under one name, the columns
    of all but the first function are called `<function>/<name>`."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """All values that functions logged with `log_metric`, by name."""


class RewardFunctions:
    """The reward functions of a run, called together.

    Args:
        reward_funcs: One reward function or a list of them. Each is a function or callable object, sync or
            async; a sequence-classification model with one label; or the name or directory of such a model.
        reward_processing_classes: The models' tokenizers, one per reward function (None for functions and for
            a model whose own tokenizer is to be loaded).
        reward_weights: A weight per function; 1 by default.
        chat_template_kwargs: Arguments of the chat template for conversations that reward models read.
        model_init_kwargs: Arguments of `from_pretrained` for reward models given by name.
        timeout_s: Seconds that each function may take for its completions; None: no limit.
        counts: Where functions are counted that have answered.

    Attributes:
        names: [F] names for metrics, as in TRL; a second function of the same name is called `<name>_2`.
        weights: [F] float32.
        models: The reward models among the functions, to be placed on a device.

    Raises:
        ValueError: there is no reward function, or the number of tokenizers or weights is not that of
            functions.
        TypeError: something in `reward_funcs` is not a reward function.
    """

    def __init__(
        self,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        reward_processing_classes: PreTrainedTokenizerBase
        | Sequence[PreTrainedTokenizerBase | None]
        | None = None,
        *,
        reward_weights: Sequence[float] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        counts: WorkCounts | None = None,
    ) -> None:
        funcs = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        if not funcs:
            raise ValueError("No reward function: pass at least one in `reward_funcs`.")
        if reward_processing_classes is None:
            tokenizers: list = [None] * len(funcs)
        elif isinstance(reward_processing_classes, (list, tuple)):
            tokenizers = list(reward_processing_classes)
        else:
            tokenizers = [reward_processing_classes]
        _check_length("reward_processing_classes", tokenizers, len(funcs))
        self._funcs: list[Callable[..., Any]] = []
        for func, tokenizer in zip(funcs, tokenizers, strict=True):
            if isinstance(func, (str, nn.Module)):
                func = RewardModel(
                    func,
                    tokenizer,
                    chat_template_kwargs=chat_template_kwargs,
                    model_init_kwargs=model_init_kwargs,
                )
            elif not callable(func):
                raise TypeError(f"A reward function is a callable, a model or a model id; got {func!r:.100}")
            self._funcs.append(func)
        self.names = _unique_names(self._funcs)
        self.weights = torch.ones(len(funcs))
        if reward_weights is not None:
            _check_length("reward_weights", reward_weights, len(funcs))
            self.weights = torch.tensor(reward_weights, dtype=torch.float32)
        self.models: list[nn.Module] = [func.model for func in self._funcs if isinstance(func, RewardModel)]
        self._counts = counts or WorkCounts()
        self._limit = TimeLimit(timeout_s)
        self._tied: set[str] = set()
        self._loop = BackgroundLoop(timeout_s)

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        columns: Mapping[str, list],
        trainer_state: Any,
    ) -> RewardTable:
        """Reward N completions by every function.

        Async functions run concurrently in a background thread while the others run here. Each function gets
        keyword arguments: `prompts`, `completions`, `completion_ids`, each of the `columns` but `prompt`,
        `completion` and `completion_ids`, `trainer_state`, `log_extra(column, values)` and `log_metric(name,
        value)`. Lists, dicts, arrays and tensors are the function's own: it may change them.

        Args:
            prompts: N prompts, one for each completion.
            completions: N completions, text or messages.
            completion_ids: N lists of token ids.
            columns: The dataset's columns, N values each.
            trainer_state: The trainer's `TrainerState`.

        Raises:
            RewardError: a function raised, took longer than `timeout_s`, did not return one finite number or
                None per completion, or logged under a name that the trainer uses.
        """
        self._limit.warn_of_thread()
        shared = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            **{name: values for name, values in columns.items() if name not in REPLACED_COLUMNS},
            "trainer_state": trainer_state,
        }
        logs = [FunctionLog(name) for name in self.names]
        # An async function may have changed something before it is waited for.
        functions = f"One of the reward functions ({', '.join(self.names)})"
        with users_code(functions), kept_trainer_state(functions, trainer_state):
            rewards = self._call_all(shared, logs)
        table = RewardTable(
            torch.tensor(rewards, dtype=torch.float32).T.contiguous(), *merge_logs(logs, len(prompts))
        )
        self._warn_unrewarded(table.rewards, shared)
        return table

    @property
    def functions(self) -> list[Callable[..., Any] | nn.Module]:
        """[F] functions and models as they were given; models given by name are loaded."""
        return [func.model if isinstance(func, RewardModel) else func for func in self._funcs]

    @property
    def tokenizers(self) -> list[PreTrainedTokenizerBase | None]:
        """[F] tokenizers of the reward models; None for a function."""
        return [func.tokenizer if isinstance(func, RewardModel) else None for func in self._funcs]

    def close(self) -> None:
        """End the thread of the async functions."""
        self._loop.close()

    def _call_all(self, shared: dict[str, Any], logs: list[FunctionLog]) -> list[list[float]]:
        """N rewards by each of the F functions."""
        prompts, completions = shared["prompts"], shared["completions"]
        rewards: list[list[float]] = [[] for _ in self._funcs]
        pending = {}
        self._counts.begin(_COUNTED, len(self._funcs))
        # The async ones first: they are on their way (waiting for a judge, say) while the others compute.
        order = sorted(range(len(self._funcs)), key=lambda i: not _is_async(self._funcs[i]))
        try:
            for i in order:
                self._limit.arm_last_resort()
                name, log = self.names[i], logs[i]
                self._counts.at_work = name
                own = own_arguments(shared) | {"log_extra": log.log_extra, "log_metric": log.log_metric}
                with blaming(name, prompts, completions, own["completions"]):
                    call = functools.partial(_call, self._funcs[i], own, len(prompts))
                    function = f"The reward function {name!r}"
                    with users_code(function), kept_trainer_state(function, shared["trainer_state"]):
                        output = self._limit.call(name, call)
                    if isinstance(output, Awaitable):
                        pending[i] = (self._loop.submit(output), list(own["completions"]))
                    else:
                        rewards[i] = self._checked(name, output, prompts, completions)
                        self._counts.add(_COUNTED)
            for i, (future, completions_given) in pending.items():
                self._limit.arm_last_resort()
                name = self._counts.at_work = self.names[i]
                function = f"The reward function {name!r}"
                with blaming(name, prompts, completions, completions_given):
                    with users_code(function), kept_trainer_state(function, shared["trainer_state"]):
                        output = self._loop.result(future)
                    rewards[i] = self._checked(name, output, prompts, completions)
                self._counts.add(_COUNTED)
        finally:
            self._counts.at_work = ""
            self._limit.disarm_last_resort()
            for future, _ in pending.values():
                future.cancel()  # harmless to those that are done; the rest would outlive an error
        return rewards

    def _checked(
        self, name: str, output: Any, prompts: Sequence[Any], completions: Sequence[Any]
    ) -> list[float]:
        """The rewards after `_check_rewards`, with one warning if float32 makes different ones equal."""
        values, rewards = _check_rewards(name, output, prompts, completions)
        if name not in self._tied and (pair := lost_difference(prompts, values, rewards)) is not None:
            self._tied.add(name)
            logger.warning(
                "The reward function %r gave one prompt's completions rewards from %r to %r, which are equal "
                "in float32, in which rewards are compared: nothing is learnt from the difference. Subtract "
                "from all rewards what they have in common, or return larger numbers.",
                name,
                *pair,
            )
        return rewards

    def _warn_unrewarded(self, rewards: Tensor, shared: dict[str, Any]) -> None:
        unrewarded = rewards.isnan().all(dim=1)
        if not unrewarded.any():
            return
        row = int(unrewarded.nonzero()[0])
        example = {key: values[row] for key, values in shared.items() if key != "trainer_state"}
        logger.warning(
            "All reward functions returned None for the following kwargs:\n%s\n"
            "That is one of %d completions of %d without a reward (from %s): their advantages are zero. "
            "Let at least one function return a number.",
            example,
            int(unrewarded.sum()),
            len(rewards),
            ", ".join(self.names),
        )


def _call(func: Callable[..., Any], arguments: dict[str, Any], num_completions: int) -> Any:
    """Call a function and return its result. An iterator is read here, so that an error in it is one of the
    function."""
    output = func(**arguments)
    if isinstance(output, Iterator):
        return list(islice(output, num_completions + 1))  # one too many is an error; it may have no end
    return output


def _check_rewards(
    name: str, output: Any, prompts: Sequence[Any], completions: Sequence[Any]
) -> tuple[list[Any], list[float]]:
    """The N rewards as they are and as floats, after checking that float32 holds them; NaN in place of
    None."""
    if isinstance(output, Set):
        raise RewardError(
            f"The reward function {name!r} returned a {type(output).__name__}, which has no order: return a "
            f"list of {len(prompts)} rewards, one per completion."
        )
    try:
        values = None if isinstance(output, (str, bytes, Mapping)) else list(output)
    except TypeError:  # not iterable, or a 0-d tensor
        values = None
    if values is None:
        raise RewardError(
            f"The reward function {name!r} returned {str(output)[:100]!r} ({type(output).__name__}), but a "
            f"list of {len(prompts)} rewards was expected, one per completion."
        )
    if len(values) != len(prompts):
        raise RewardError(
            f"The reward function {name!r} returned {len(values)} rewards, but {len(prompts)} were expected "
            "(one per prompt-completion pair). Make sure the reward function returns exactly one reward per "
            "completion."
        )
    numbers = [_number(value) for value in values]
    for index, number in enumerate(numbers):
        if number is None:
            raise RewardError(
                f"The reward function {name!r} returned {str(values[index])[:100]!r} "
                f"({type(values[index]).__name__}) for {describe(prompts, completions, index)}. "
                f"A reward is a finite number of up to {_LARGEST:.1e}, as float32 holds, or None to leave "
                "this completion to the other functions."
            )
    return values, [number for number in numbers if number is not None]


def _number(value: Any) -> float | None:
    """A reward as a float (NaN for None), or None if it is not a finite number."""
    if value is None:
        return math.nan
    if isinstance(value, (str, bytes)):  # float("1") would succeed
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several elements
        return None
    return number if abs(number) <= _LARGEST else None  # which NaN is not


def _is_async(func: Callable) -> bool:
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def _unique_names(funcs: Sequence[Callable]) -> list[str]:
    names: list[str] = []
    for func in funcs:
        while isinstance(func, functools.partial):
            func = func.func
        base = getattr(func, "__name__", type(func).__name__).strip("<>")  # "<lambda>" makes poor file names
        name, number = base, 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return names


def _check_length(option: str, values: Sequence, num_functions: int) -> None:
    if len(values) != num_functions:
        raise ValueError(
            f"Got {len(values)} {option} for {num_functions} reward functions, but their numbers must match: "
            "pass one for each, in order."
        )
