"""The clients of OpenEnv's environments that TRL's scripts import, playing the games themselves.

The interfaces are those of the packages `echo_env`, `openspiel_env` and `textarena_env` as far as the scripts
use them; where the real clients ask a server at `base_url`, these keep the game.
"""

from __future__ import annotations

import itertools
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

CONTAINER_URL = "http://localhost:8001"
"""Where a container's environment would be."""


class Client:
    """What all clients have in common: the URLs that were asked for are kept."""

    urls: ClassVar[set[str]] = set()

    def __init__(self, base_url: str) -> None:
        self.urls.add(base_url)

    def close(self) -> None:
        self.step = None  # a closed client plays no further


class Action(SimpleNamespace):
    """What a client's `step` gets."""


def result(reward: float | None, done: bool, **observation: Any) -> SimpleNamespace:
    """What `reset` and `step` return."""
    return SimpleNamespace(
        observation=SimpleNamespace(reward=reward, done=done, **observation), reward=reward, done=done
    )


class EchoEnv(Client):
    """Answers with the message, and rewards each of its characters with 0.1."""

    def step(self, action: Action) -> SimpleNamespace:
        return result(len(action.message) / 10, False, echoed_message=action.message)


class OpenSpielEnv(Client):
    """Catch on 10 rows and 5 columns. The ball never falls where the paddle begins, in the middle."""

    columns = itertools.cycle((0, 1, 3, 4))

    def reset(self) -> SimpleNamespace:
        self.row, self.column, self.paddle = 0, next(self.columns), 2
        return self.result()

    def step(self, action: Action) -> SimpleNamespace:
        assert action.game_name == "catch" and self.row < 9
        self.row += 1
        self.paddle = min(4, max(0, self.paddle + action.action_id - 1))
        return self.result()

    def result(self) -> SimpleNamespace:
        done = self.row == 9
        reward = (1.0 if self.paddle == self.column else -1.0) if done else None
        info_state = [0.0] * 50
        info_state[5 * self.row + self.column] = info_state[45 + self.paddle] = 1.0
        return result(reward, done, info_state=info_state)


class TextArenaEnv(Client):
    """Wordle or Sudoku, by the name in `base_url`. The one message has all that has been said so far."""

    def __init__(self, base_url: str) -> None:
        super().__init__(base_url)
        self.play = self.wordle if "wordle" in base_url else self.sudoku

    def reset(self) -> SimpleNamespace:
        self.filled = [[(3 * (r % 3) + r // 3 + c) % 9 + 1 for c in range(9)] for r in range(9)]
        self.empty = {(1, 1): self.filled[0][0], (5, 5): self.filled[4][4]}
        for r, c in self.empty:
            self.filled[r - 1][c - 1] = 0
        self.text = "Guess the word." if self.play == self.wordle else self.board()
        return self.result(0.0, False)

    def step(self, action: Action) -> SimpleNamespace:
        return self.play(action.message)

    def result(self, reward: float, done: bool) -> SimpleNamespace:
        return result(reward, done, messages=[SimpleNamespace(content=self.text)])

    def wordle(self, message: str) -> SimpleNamespace:
        done = message == "[crane]"
        self.text += "\nG G G G G" if done else "\nX X X X X"
        return self.result(float(done), done)

    def sudoku(self, message: str) -> SimpleNamespace:
        row, column, number = map(int, message.strip("[]").split())
        if self.empty.get((row, column)) != number:
            self.text += "\nInvalid move: please resubmit."
            return self.result(0.0, False)
        del self.empty[row, column]
        self.filled[row - 1][column - 1] = number
        self.text += "\n" + self.board()
        return self.result(float(not self.empty), not self.empty)

    def board(self) -> str:
        lines = ["   " + " ".join(f"C{c}" for c in range(1, 10))]
        for r, numbers in enumerate(self.filled, 1):
            cells = [str(n or ".") for n in numbers]
            lines.append(f"R{r} " + " | ".join(" ".join(cells[i : i + 3]) for i in (0, 3, 6)))
        return "\n".join(lines)


class LocalDockerProvider:
    """Starts no container."""

    def start_container(self, image: str) -> str:
        return CONTAINER_URL

    def wait_for_ready(self, base_url: str) -> None:
        assert base_url == CONTAINER_URL


def modules() -> dict[str, ModuleType]:
    """The modules by name, for `sys.modules`."""
    contents: dict[str, dict[str, Any]] = {
        "echo_env": {"EchoEnv": EchoEnv},
        "echo_env.models": {"EchoAction": Action},
        "openspiel_env": {"OpenSpielEnv": OpenSpielEnv},
        "openspiel_env.models": {"OpenSpielAction": Action},
        "textarena_env": {"TextArenaEnv": TextArenaEnv, "TextArenaAction": Action},
        "openenv": {},
        "openenv.core": {},
        "openenv.core.containers": {},
        "openenv.core.containers.runtime": {"LocalDockerProvider": LocalDockerProvider},
        "requests": {},
    }
    made = {name: ModuleType(name) for name in contents}
    for name, content in contents.items():
        vars(made[name]).update(content)
    return made
