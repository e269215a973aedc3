"""Gymnasium's environments whose actions and observations are text (`gymnasium.spaces.Text`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from colocate.episodes.adapters.base import TextEnvironment, import_package

HINT = 'Gymnasium\'s environments need Gymnasium: pip install "gymnasium>=1.0"'


class GymnasiumEnvironment(TextEnvironment):
    """A Gymnasium environment; the row's column `seed`, if there is one, seeds it.

    Args:
        environment: the name under which it is registered, or a class or function that makes it.
        per_turn: whether turns have rewards of their own; otherwise the episode has their sum.
        arguments: those of `gymnasium.make`, or of the class or function.

    Raises:
        ImportError: Gymnasium is not installed.
        ValueError: actions or observations are not text.
    """

    def __init__(
        self, environment: str | Callable[..., Any], *, per_turn: bool = False, **arguments: Any
    ) -> None:
        super().__init__(per_turn)
        gymnasium = import_package("gymnasium", HINT)
        if isinstance(environment, str):
            self._env = gymnasium.make(environment, **arguments)
        else:
            self._env = environment(**arguments)
        for name in ("action_space", "observation_space"):
            space = getattr(self._env, name)
            if not isinstance(space, gymnasium.spaces.Text):
                raise ValueError(
                    f"The {name} of {environment!r:.100} is {space}, but a model reads and writes text: wrap "
                    "the environment so that this is a gymnasium.spaces.Text."
                )

    def _open(self, row: Mapping[str, Any]) -> str:
        observation, _ = self._env.reset(seed=row.get("seed"))
        return observation

    def _step(self, action: str) -> tuple[str, float, bool]:
        space = self._env.action_space
        if not space.contains(action):
            raise ValueError(f"{action!r:.100} is not an action of {space}.")
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return observation, float(reward), bool(terminated or truncated)
