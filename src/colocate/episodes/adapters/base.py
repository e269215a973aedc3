"""The common part of text environments: an action goes in, an observation and a reward come out."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class TextEnvironment(abc.ABC):
    """An environment that is played by one tool, `act`, whose argument and result are text.

    Args:
        per_turn: whether turns have rewards of their own; otherwise the episode has their sum.

    Attributes:
        done: whether the episode is over.
        rewards: the reward of every action so far.
        turn_rewards: `rewards` if `per_turn`, else None.
    """

    def __init__(self, per_turn: bool = False) -> None:
        self._per_turn = per_turn
        self.done = False
        self.rewards: list[float] = []

    @property
    def turn_rewards(self) -> list[float] | None:
        return self.rewards if self._per_turn else None

    def reset(self, **row: Any) -> str | None:
        self.done = False
        self.rewards = []
        return self._open(row)

    def act(self, action: str) -> str:
        """Take an action.

        Args:
            action: The action, as text.

        Returns:
            What is to be seen after it.
        """
        if self.done:
            raise ValueError("The episode is over.")
        observation, reward, done = self._step(action)
        self.done = bool(done)
        self.rewards.append(float(reward or 0.0))
        return observation

    def get_reward(self) -> float:
        return 0.0 if self._per_turn else sum(self.rewards)

    @abc.abstractmethod
    def _open(self, row: Mapping[str, Any]) -> str | None:
        """Begin an episode; the first observation."""

    @abc.abstractmethod
    def _step(self, action: str) -> tuple[str, float | None, bool]:
        """Take an action. Returns the observation, the reward and whether the episode is over. The model
        reads the text of an exception, and the episode goes on."""


def import_package(name: str, hint: str) -> ModuleType:
    """Import a library that need not be installed.

    Raises:
        ImportError: it is not there; the message is `hint`.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise  # it is there, and lacks something itself
        raise ImportError(hint) from error
