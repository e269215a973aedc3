"""From requests to episodes: how the engine is asked while it is awake."""

from __future__ import annotations

from colocate.engines.base import RolloutEngine
from colocate.episodes.episode import Episode
from colocate.experience.requests import RolloutRequest
from colocate.types import SamplingParams


class Player:
    """Asks the engine once for every completion.

    Args:
        sampling: how tokens are drawn in every rollout.
    """

    words = None
    """How episodes are played, for a run's header; None: in one turn."""

    def __init__(self, engine: RolloutEngine, sampling: SamplingParams) -> None:
        self._engine = engine
        self.sampling = sampling

    def play(self, request: RolloutRequest) -> list[Episode]:
        """Return the episodes of a request, of one turn each, prompt by prompt; the engine must be awake."""
        completions = self._engine.generate(request.prompts, self.sampling)
        prompts = [prompt for _, prompt in request.per_completion()]
        return [Episode.of_turn(p.token_ids, c) for p, c in zip(prompts, completions, strict=True)]
