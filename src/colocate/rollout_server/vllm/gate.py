"""The gate in front of vLLM's API server.

    vllm serve MODEL --middleware colocate.rollout_server.vllm.gate.VLLMGate ...

`--middleware`, the ASGI interface and the routes are public. Internal to vLLM, and checked with 0.25 to 0.33,
is that `app.state.vllm_config.model_config.get_vocab_size()` is the model's vocabulary.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from colocate.http import gate
from colocate.http.gate import App, Receive, Refused, Scope, Send, is_of_the_holder
from colocate.http.key import ServerKey
from colocate.rollout_server.wire.receiver import other_weights

_TRUSTED_S = 1.0
"""Seconds for which the workers are not asked again which weights they have. A gate sees the pause before a
push, and asks anew; only a gate of another of vLLM's processes may not. The trainer compares the names of the
weights before and after each rollout in any case, and vLLM's prefix cache is salted with them."""


class VLLMGate(gate.Gate):
    """ASGI middleware that checks every request before vLLM sees it.

    Args:
        app: vLLM's application.
        key: see `http.gate.Gate`.
    """

    def __init__(self, app: App, key: ServerKey | None = None) -> None:
        super().__init__(app, _vocab_size, key)
        self._weights: str | None = None
        """The name of the workers' weights at `_asked_s`, by time.monotonic()."""
        self._asked_s = 0.0
        self._asking = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_of_the_holder(scope):
            self._weights = None  # others may come
        await super().__call__(scope, receive, send)

    async def _check_generation(self, scope: Scope, content: dict[str, Any]) -> None:
        await super()._check_generation(scope, content)
        if (wanted := content.get("cache_salt")) is None:
            return
        async with self._asking:  # requests come by hundreds: one asks for all
            if self._weights != wanted or time.monotonic() - self._asked_s > _TRUSTED_S:
                self._asked_s = time.monotonic()
                names = {answer.get("version") for answer in await self._ask_workers(scope, "weights")}
                self._weights = names.pop() if len(names) == 1 else None
            if self._weights != wanted:
                raise Refused(409, other_weights(wanted, self._weights))


def _vocab_size(scope: Scope) -> int:
    return scope["app"].state.vllm_config.model_config.get_vocab_size()
