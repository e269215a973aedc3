"""SkyRL-gym's text environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocate.episodes.adapters.base import TextEnvironment, import_package

HINT = 'SkyRL-gym\'s environments need SkyRL-gym: pip install "skyrl-gym>=0.4"'


class SkyRLGymEnvironment(TextEnvironment):
    """A SkyRL-gym environment, made anew for each episode, as SkyRL does.

    There an action is all that the model writes in a turn; here it is the argument of the tool. The
    environment's answer to the user is the tool's result.

    Args:
        environment: the name under which it is registered, such as "gsm8k_multi_turn".
        env_config: its configuration.
        max_turns: handed to it with the row's columns (`reward_spec`, `extra_info`, ...).
        per_turn: whether turns have rewards of their own; otherwise the episode has their sum.

    Raises:
        ImportError: SkyRL-gym is not installed.
    """

    def __init__(
        self, environment: str, env_config: Any = None, max_turns: int = 1, *, per_turn: bool = False
    ) -> None:
        super().__init__(per_turn)
        self._skyrl_gym = import_package("skyrl_gym", HINT)
        self._name, self._max_turns = environment, max_turns
        self._env_config = {} if env_config is None else env_config
        self._env: Any = None

    def _open(self, row: Mapping[str, Any]) -> str | None:
        if self._env is not None:
            self._env.close()
        prompt = row.get("prompt", [{"role": "user", "content": ""}])
        extras = {
            **{name: value for name, value in row.items() if name != "prompt"},
            "max_turns": self._max_turns,
        }
        self._env = self._skyrl_gym.make(self._name, env_config=self._env_config, extras=extras)
        opened, _ = self._env.init([dict(message) for message in prompt])
        *before, last = prompt
        *before_now, last_now = opened[: len(prompt)] or [{"content": ""}]
        if before_now != before or not last_now["content"].startswith(last["content"]):
            raise ValueError(
                f"The environment {self._name!r} rewrites the row's prompt, but here it can only add to it: "
                "give the dataset the prompt as `init` returns it."
            )
        added = last_now["content"][len(last["content"]) :]
        return _texts([{"content": added}, *opened[len(prompt) :]])

    def _step(self, action: str) -> tuple[str, float, bool]:
        output = self._env.step(action)
        return _texts(output["observations"]), output["reward"], output["done"]


def _texts(messages: list[dict[str, Any]]) -> str:
    return "\n".join(message["content"] for message in messages if message["content"])
