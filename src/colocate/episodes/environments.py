"""Environments: objects that keep the state of an episode, and whose methods are its tools.

The rules are those of TRL 1.16's `environment_factory`; an end signal and a reward per turn are added.

    class Game:
        def reset(self, **row):         # required; text or content blocks go to the prompt's last message
            self.done = False
            self.turn_rewards = []
            return "Guess a number below 10."

        def guess(self, number: int) -> str:    # public: a tool
            ...
            self.turn_rewards.append(1.0)       # optional: what this turn has earned, besides get_reward
            self.done = True                    # optional: no turn follows this one

        def get_reward(self) -> float:  # optional, may be async: a reward column called `Game`
            ...
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from colocate.episodes.content import check_no_media, is_json, readable
from colocate.episodes.limited_calls import LimitedCalls
from colocate.episodes.tool_runner import ToolResult
from colocate.episodes.tools import Tool, Toolbox
from colocate.options.values import shown
from colocate.rewards.arguments import own_copy
from colocate.users_code.errors import words_of

logger = logging.getLogger(__name__)

Factory = Callable[[], Any]

NOT_TOOLS = ("reset", "get_reward")
"""Public methods of an environment that the model cannot call."""

EMPTY_PROMPT = [{"role": "user", "content": ""}]
"""The prompt of a row that has none: `reset` provides it."""


class Scene:
    """An environment while an episode is played in it.

    Attributes:
        environment: the object.
        name: its name among the factories; None if there is but one.
        prompt: the row's prompt with the observation of `reset`.
        toolbox: the tools of all environments and this one's methods.
        is_lost: whether something may still change the environment, so that it is not to be used again.
    """

    def __init__(
        self,
        environment: Any,
        name: str | None,
        number: int,
        prompt: list[dict[str, Any]],
        toolbox: Toolbox,
        calls: LimitedCalls,
    ) -> None:
        self.environment = environment
        self.name = name
        self.number = number
        self.prompt = prompt
        self.toolbox = toolbox
        self.is_lost = False
        self._calls = calls
        self._num_rewards = len(_turn_rewards(environment, calls) or ())

    @property
    def is_over(self) -> bool:
        """Whether the environment has ended the episode: its attribute or property `done` is True.

        To be asked when the tools of a turn have answered. TRL does not ask: there the model goes on until it
        calls no tool, and environments raise when they are called after their end.
        """
        done = _asked(self.environment, "done", False, self._calls)
        return isinstance(done, bool | np.bool_) and bool(done)

    def end_turn(self, results: Sequence[ToolResult] = ()) -> float | None:
        """Note that a turn's tools have answered.

        Args:
            results: the tools' answers. If one was left running, the environment is lost.

        Returns:
            The turn's reward: the sum of the numbers appended to the environment's list `turn_rewards` since
            the turn before. None if it has no such attribute, or that is None. It is added to the episode's
            rewards, `get_reward` among them, so nothing may be in both.

        Raises:
            ValueError: there is something else than a list of finite numbers, or it has become shorter.
        """
        self.is_lost = self.is_lost or any(result.is_left_running for result in results)
        rewards = _turn_rewards(self.environment, self._calls)
        if rewards is None:
            return None
        new, num_before = rewards[self._num_rewards :], self._num_rewards
        self._num_rewards = len(rewards)
        kind = type(self.environment).__name__
        if len(rewards) < num_before:
            raise ValueError(
                f"The list turn_rewards of {kind} had {num_before} rewards before this turn and has "
                f"{len(rewards)} after it. Tools append to it; only reset begins a new one."
            )
        total = 0.0
        for reward in new:
            if not isinstance(reward, int | float | np.number | np.bool_) or not math.isfinite(reward):
                raise ValueError(
                    f"The list turn_rewards of {kind} has got {shown(reward)}, which is no finite number."
                )
            total += float(reward)
        return total


class EnvironmentPool:
    """Environments by name, each constructed once and reset for every episode.

    One of each is constructed at once, to look at its class. Tools are the functions of the class, static
    methods among them, but `reset`, `get_reward` and names that begin with an underscore; properties are not
    evaluated, and attributes of the instance alone are not found.

    Args:
        factories: a class or function without arguments that makes an environment; or several by name, of
            which each row names one in its column `environment`.
        tools: tools that every episode has besides.
        num_workers: threads for the `reset` of environments that begin together; 0: the main thread.
        timeout_s: seconds that a `reset` or a factory may take; None: no limit.

    Attributes:
        is_one: whether there is a single factory, so that rows name none.
        toolboxes: the tools by the environment's name.
        shown: the environments of the episodes that were begun last, in their order; None: none was.
        reward_functions: async or sync, one for each class that has `get_reward`, called like the class. It
            takes the column `environments` and returns None where the environment is of another class.

    Raises:
        ValueError: a factory cannot be called, or an environment has no `reset` or tools that cannot be
            described.
    """

    def __init__(
        self,
        factories: Factory | Mapping[str, Factory],
        tools: Sequence[Tool] = (),
        num_workers: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        self._calls = LimitedCalls(timeout_s, num_workers)
        self._factories: dict[str | None, Factory]
        if isinstance(factories, Mapping):
            self._factories = {name: factory for name, factory in factories.items()}
        else:
            self._factories = {None: factories}
        self.is_one = not isinstance(factories, Mapping)
        if not self._factories:
            raise ValueError("environment_factory={} has no environment: name at least one factory.")
        self._instances: dict[str | None, list[Any]] = {}
        self._free: dict[str | None, list[int]] = {}  # heaps: the first one of a rollout is always number 0
        self.toolboxes: dict[str | None, Toolbox] = {}
        self.shown: list[Any] | None = None
        for name in self._factories:
            instance = self._make(name)
            self._instances[name], self._free[name] = [instance], [0]
            self.toolboxes[name] = Toolbox([*tools, *_methods(instance).values()])
        kinds = {type(instances[0]): None for instances in self._instances.values()}  # a set in their order
        self.reward_functions = [_reward_function(kind) for kind in kinds if _has(kind, "get_reward")]

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Scene]:
        """Reset a free environment for an episode of each row; where there is none, one more is constructed.

        `reset` gets the whole row, `prompt` included, but not the name of the environment if it was chosen by
        that. If it raises or takes too long, the environment is thrown away, a new one is constructed and
        reset once. (TRL lets the first error end the run.)

        Raises:
            ValueError: the row names no environment of the pool, `reset` has returned something else than
                None, text or a list of content blocks, or too much of it, or the prompt has no message to
                take it.
            RuntimeError: `reset` has failed twice.
        """
        taken: list[tuple[str | None, int]] = []
        try:
            for row in rows:
                name = self._name(row)
                taken.append((name, self._take(name)))
            own = [{k: v for k, v in row.items() if self.is_one or k != "environment"} for row in rows]
            observations = self._reset_all(taken, own)
            scenes = [self._scene(*opened) for opened in zip(taken, own, observations, strict=True)]
        except BaseException:
            for name, number in taken:
                heapq.heappush(self._free[name], number)
            raise
        self.shown = [scene.environment for scene in scenes]
        return scenes

    def end(self, scene: Scene) -> None:
        """Take an environment back for another episode, after the reward functions have seen it. A lost one
        is thrown away."""
        if scene.number in self._free[scene.name]:
            raise ValueError(f"The environment {scene.environment!r:.100} was given back twice.")
        if scene.is_lost:
            self._instances[scene.name][scene.number] = None
        heapq.heappush(self._free[scene.name], scene.number)

    def _name(self, row: Mapping[str, Any]) -> str | None:
        name = None if self.is_one else row.get("environment")
        if name not in self._factories:
            raise ValueError(
                f"A row has environment={shown(name)}, which is not among the environments of "
                f"environment_factory: {', '.join(map(repr, self._factories))}."
            )
        return name

    def _take(self, name: str | None) -> int:
        """Reserve the first free environment, and construct it if need be."""
        free, instances = self._free[name], self._instances[name]
        number = heapq.heappop(free) if free else len(instances)
        if number < len(instances) and instances[number] is not None:
            return number
        try:
            instance = self._new(name)
        except BaseException:
            if number < len(instances):
                heapq.heappush(free, number)
            raise
        if number < len(instances):
            instances[number] = instance
        else:
            instances.append(instance)
        return number

    def _scene(self, place: tuple[str | None, int], row: Mapping[str, Any], observation: Any) -> Scene:
        name, number = place
        instance = self._instances[name][number]
        prompt = _observed(type(instance).__name__, row.get("prompt", EMPTY_PROMPT), observation)
        methods = {method.__name__: method for method in _methods(instance).values()}
        toolbox = self.toolboxes[name].with_functions(methods)
        return Scene(instance, name, number, prompt, toolbox, self._calls)

    def _new(self, name: str | None) -> Any:
        """A new environment, which is none of the others."""
        instance = self._make(name)
        if any(instance is other for other in self._instances[name]):
            raise ValueError(
                f"{_option(name)} has returned the same {type(instance).__name__} twice, but episodes that "
                "are played at the same time need one each: let it construct a new one in every call."
            )
        return instance

    def _make(self, name: str | None) -> Any:
        factory = self._factories[name]
        if not callable(factory):
            raise ValueError(
                f"{_option(name)} is {factory!r:.100}, which cannot be called. Pass a class, or a function "
                "without arguments that constructs an environment: lambda: Game(size=4)."
            )
        made = self._calls.one(_option(name), factory)
        instance, error = made.value, made.error
        if error is not None:
            raise RuntimeError(
                f"{_option(name)} is {factory!r:.100}, which was to construct an environment and has raised "
                f"{words_of(error)}\nIt is called without arguments; bind those that it needs: "
                "lambda: Game(size=4)."
            ) from error
        if not _has(type(instance), "reset"):
            raise ValueError(
                f"The environment {type(instance).__name__} that {_option(name)} has made needs a method "
                "`reset(self, **row)` in its class: it is called before each episode."
            )
        if inspect.iscoroutinefunction(type(instance).reset):
            raise ValueError(
                f"{type(instance).__name__}.reset is async, but it is called without a loop: write `def "
                "reset`, with asyncio.run in it if need be. Tools and get_reward may be async."
            )
        return instance

    def _reset_all(self, places: Sequence[tuple[str | None, int]], rows: Sequence[Any]) -> list[Any]:
        """The result of `reset` for each row, in its environment or else in a new one."""
        outcomes = self._calls.all([self._reset_of(*pair) for pair in zip(places, rows, strict=True)])
        failed = [n for n, outcome in enumerate(outcomes) if outcome.error is not None]
        for n in failed:
            name, number = places[n]
            kind, error = type(self._instances[name][number]).__name__, outcomes[n].error
            assert error is not None
            logger.warning(
                "%s.reset has raised %s. It is thrown away, and a new one is reset.",
                kind,
                words_of(error),
            )
            self._instances[name][number] = self._new(name)
        again = self._calls.all([self._reset_of(places[n], rows[n]) for n in failed])
        for n, outcome in zip(failed, again, strict=True):
            if (error := outcome.error) is not None:
                name, number = places[n]
                raise RuntimeError(
                    f"{type(self._instances[name][number]).__name__}.reset has raised "
                    f"{words_of(error)}\nSo it did in the environment before this new one, for the row with "
                    f"the columns {', '.join(map(repr, rows[n]))}."
                ) from error
            outcomes[n] = outcome
        return [outcome.value for outcome in outcomes]

    def _reset_of(
        self, place: tuple[str | None, int], row: Mapping[str, Any]
    ) -> tuple[str, Callable[[], Any]]:
        """A call of `reset`, with its name."""
        name, number = place
        environment = self._instances[name][number]
        return f"{type(environment).__name__}.reset", lambda: environment.reset(**own_copy(row))


def _option(name: str | None) -> str:
    return "environment_factory" if name is None else f"environment_factory[{name!r}]"


def _has(kind: type, method: str) -> bool:
    return inspect.isfunction(getattr(kind, method, None))


def _methods(environment: Any) -> dict[str, Tool]:
    """The methods of an environment that are tools, by name. Only its class is looked at: properties are
    not evaluated."""
    return {
        name: getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)
        if name not in NOT_TOOLS and not name.startswith("_")
    }


def _observed(kind: str, prompt: Any, observation: Any) -> Any:
    """The prompt with an observation at the end of its last message; the row's own is left as it is."""
    if observation is None:
        return prompt
    if not isinstance(observation, str | list):
        raise ValueError(
            f"{kind}.reset has returned {shown(observation)} ({type(observation).__name__}). It returns "
            "None, or what is to stand at the prompt's end: text, or a list of content blocks."
        )
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[-1], Mapping):
        raise ValueError(
            f"{kind}.reset has returned an observation, which goes to the prompt's last message, but the "
            f"prompt is {shown(prompt)}. Give a list of messages, or let reset return None."
        )
    check_no_media(observation, f"{kind}.reset")
    if not is_json(observation):
        raise ValueError(
            f"{kind}.reset has returned a list with what JSON cannot write, so that no template reads it. "
            "It returns content blocks: [{'type': 'text', 'text': ...}]."
        )
    observation = readable(observation, f"The text that {kind}.reset has returned")
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


def _turn_rewards(environment: Any, calls: LimitedCalls) -> list[Any] | None:
    """A list of an environment's `turn_rewards`; None: it has none.

    Raises:
        ValueError: they are no list of numbers, such as text.
    """
    rewards = _asked(environment, "turn_rewards", None, calls)
    if rewards is None or isinstance(rewards, list):
        return rewards
    if isinstance(rewards, tuple | deque):
        return list(rewards)
    if getattr(rewards, "ndim", None) == 1:  # an array, or a tensor
        return rewards.tolist()
    raise ValueError(
        f"turn_rewards of {type(environment).__name__} is {shown(rewards)} ({type(rewards).__name__}), but "
        "it is a list to which each turn's rewards are appended. Let reset begin with `self.turn_rewards = "
        "[]`, or call the attribute something else."
    )


def _asked(environment: Any, attribute: str, default: Any, calls: LimitedCalls) -> Any:
    """An attribute of an environment; a property has the same time limit as tools.

    Raises:
        ValueError: the property has raised something, or takes too long.
    """
    kind = type(environment)
    if not _is_computed(kind, attribute):
        return getattr(environment, attribute, default)
    name = f"The property {attribute} of {kind.__name__}"
    read = calls.one(name, lambda: getattr(environment, attribute, default))
    if read.error is not None:
        raise ValueError(
            f"{name} has raised {words_of(read.error)}\nIt is read after each turn, and must always have a "
            "value."
        ) from read.error
    return read.value


def _is_computed(kind: type, attribute: str) -> bool:
    """Whether reading an attribute of a class's instances runs code of the class."""
    own = inspect.getattr_static(kind, attribute, None)
    has_fallback = any("__getattr__" in vars(base) for base in kind.__mro__)
    return hasattr(own, "__get__") or has_fallback or kind.__getattribute__ is not object.__getattribute__


def _reward_function(kind: Any) -> Callable[..., Any]:
    """The reward function of the environments of exactly this class."""

    async def rewards_async(environments: Sequence[Any], **columns: Any) -> list[float | None]:
        own = [e.get_reward() if type(e) is kind else _none() for e in environments]
        return await asyncio.gather(*own)

    def rewards(environments: Sequence[Any], **columns: Any) -> list[float | None]:
        return [e.get_reward() if type(e) is kind else None for e in environments]

    function = rewards_async if inspect.iscoroutinefunction(kind.get_reward) else rewards
    function.__name__ = function.__qualname__ = kind.__name__
    return function


async def _none() -> None:
    """No reward."""
