"""From requests to completions: how the engine is asked while it is awake."""

from __future__ import annotations

from colocate.engines.base import RolloutEngine
from colocate.experience.requests import RolloutRequest
from colocate.types import Completion, SamplingParams


class Player:
    """Asks the engine once for every completion.

    Args:
        sampling: how tokens are drawn in every rollout.
    """

    def __init__(self, engine: RolloutEngine, sampling: SamplingParams) -> None:
        self._engine = engine
        self.sampling = sampling

    def play(self, request: RolloutRequest) -> list[Completion]:
        """Return the completions of a request, prompt by prompt; the engine must be awake."""
        return self._engine.generate(request.prompts, self.sampling)
