"""TextArena's games for one player."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocate.episodes.adapters.base import TextEnvironment, import_package

HINT = 'TextArena\'s games need TextArena: pip install "textarena>=0.7"'


class TextArenaEnvironment(TextEnvironment):
    """A game for one player, made anew for each episode, because TextArena's wrappers keep observations over
    `reset`. The row's column `seed`, if there is one, seeds it.

    The reward is the game's at its end. If an observation repeats the one before, as with the games' default
    wrapper, only the new part is shown.

    Args:
        game: its name, such as "Sudoku-v0". Some games (Wordle, Hangman, ...) download lists of words.
        per_turn: whether turns have rewards of their own; otherwise the episode has their sum.
        arguments: those of `textarena.make`.

    Raises:
        ImportError: TextArena is not installed.
    """

    def __init__(self, game: str, *, per_turn: bool = False, **arguments: Any) -> None:
        super().__init__(per_turn)
        self._textarena = import_package("textarena", HINT)
        self._game, self._arguments = game, arguments
        self._env: Any = None
        self._seen = ""

    def _open(self, row: Mapping[str, Any]) -> str:
        self._env = self._textarena.make(self._game, **self._arguments)
        self._env.reset(num_players=1, seed=row.get("seed"))
        self._seen = ""
        return self._look()

    def _step(self, action: str) -> tuple[str, float, bool]:
        done, _ = self._env.step(action=action)
        observation = self._look()
        if not done:
            return observation, 0.0, False
        rewards, _ = self._env.close()
        return observation, (rewards or {}).get(0, 0.0), True

    def _look(self) -> str:
        _, observation = self._env.get_observation()
        if not isinstance(observation, str):  # of a game without wrappers: sender, message, kind
            return "\n".join(message for _, message, _ in observation)
        new = observation.removeprefix(self._seen)
        self._seen = observation
        return new.strip("\n")
