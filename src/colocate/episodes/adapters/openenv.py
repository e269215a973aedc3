"""OpenEnv's environments, which run on servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from colocate.episodes.adapters.base import TextEnvironment, import_package

HINT = 'A client that is not given is OpenEnv\'s generic one: pip install "openenv>=0.10"'


class OpenEnvEnvironment(TextEnvironment):
    """A session with an OpenEnv server; the row's column `seed`, if there is one, goes to its `reset`.

        OpenEnvEnvironment("http://localhost:8000", action="message", observation="reply")
        OpenEnvEnvironment(lambda: EchoEnv(base_url=url), lambda text: EchoAction(message=text), "reply")

    Each environment has a client of its own, and so a session: the server must allow as many as there are
    episodes at a time (`max_concurrent_envs`). An action waits for the server's answer: with `tool_workers`
    those of several episodes wait at the same time.

    Args:
        client: the server's address, or a function that makes a client.
        action: makes an action of the model's text, or names the field of an action that takes it.
        observation: reads an observation as text, or names the field that has it.
        per_turn: whether turns have rewards of their own; otherwise the episode has their sum.

    Raises:
        ImportError: OpenEnv is not installed, and `client` is an address.
    """

    def __init__(
        self,
        client: str | Callable[[], Any],
        action: str | Callable[[str], Any],
        observation: str | Callable[[Any], str],
        *,
        per_turn: bool = False,
    ) -> None:
        super().__init__(per_turn)
        if isinstance(client, str):
            made = import_package("openenv.core", HINT).GenericEnvClient(base_url=client)
        else:
            made = client()
        # Clients are async since OpenEnv 0.2; their sync form has a loop and a thread of its own.
        self._client = made.sync() if hasattr(made, "sync") else made
        self._action = action if callable(action) else lambda text: {action: text}
        self._observation = observation if callable(observation) else lambda seen: _field(seen, observation)

    def _open(self, row: Mapping[str, Any]) -> str:
        seed = row.get("seed")
        return self._observation(self._client.reset(**({} if seed is None else {"seed": seed})).observation)

    def _step(self, action: str) -> tuple[str, float | None, bool]:
        result = self._client.step(self._action(action))
        return self._observation(result.observation), result.reward, result.done


def _field(observation: Any, name: str) -> str:
    """A field of an observation, which is a dict with the generic client and else an object."""
    return str(observation[name] if isinstance(observation, Mapping) else getattr(observation, name))
