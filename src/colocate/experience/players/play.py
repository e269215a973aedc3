"""Players, which make the episodes of a request while the engine is awake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from colocate.engines.base import RolloutEngine
from colocate.episodes.episode import Episode
from colocate.experience.requests import RolloutRequest
from colocate.types import Completion, SamplingParams


@dataclass(frozen=True)
class BegunRequest:
    """A request whose sequences the engine has, and their numbers there."""

    request: RolloutRequest
    numbers: list[int]


class Player:
    """Makes the episodes of requests. Unless a subclass says otherwise, none of them is left unfinished."""

    sampling: SamplingParams
    """The parameters by which tokens are drawn in every rollout."""
    is_resumable = False
    """Whether a checkpoint has the player's state."""

    @property
    def words(self) -> str | None:
        """A clause about how episodes are played, for a run's header; None: in one turn."""
        return None

    @property
    def has_restored(self) -> bool:
        """Whether completions wait that older weights began before the run was resumed."""
        return False

    def play(self, request: RolloutRequest) -> list[Episode]:
        """Return the episodes of a request, prompt by prompt; the engine must be awake."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget what was restored: its prompts are begun anew."""

    def state_dict(self) -> dict[str, Any]:
        """The completions of requests that are not finished."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the completions of a `state_dict`."""


class SingleTurnPlayer(Player):
    """Asks the engine for completions, each of which is an episode."""

    def __init__(self, engine: RolloutEngine, sampling: SamplingParams) -> None:
        self._engine = engine
        self.sampling = sampling
        self._ended: dict[int, Completion] = {}
        """Completions of requests that are not finished, by the numbers of their sequences."""

    def play(self, request: RolloutRequest) -> list[Episode]:
        return _episodes(request, self._engine.generate(request.prompts, self.sampling))

    def begin(self, request: RolloutRequest) -> BegunRequest:
        """Queue the sequences of a request."""
        return BegunRequest(request, self._engine.submit(request.prompts, self.sampling))

    def finish(self, begun: BegunRequest) -> list[Episode]:
        """Generate until a request that was begun is completed, and return its episodes as `play` does."""
        counts = self._engine.counts
        counts.begin("completions", len(begun.numbers))
        while num_left := sum(number not in self._ended for number in begun.numbers):
            counts.leave("completions", num_left)
            self._ended.update(self._engine.poll())
        counts.leave("completions", 0)
        return _episodes(begun.request, [self._ended.pop(number) for number in begun.numbers])

    def stop(self) -> None:
        """Forget completions of requests that are not finished; the engine may keep their sequences."""
        self._ended.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"ended": {number: vars(completion) for number, completion in self._ended.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ended = {number: Completion(**fields) for number, fields in state["ended"].items()}


def _episodes(request: RolloutRequest, completions: list[Completion]) -> list[Episode]:
    prompts = [prompt for _, prompt in request.per_completion()]
    return [Episode.of_turn(p.token_ids, c) for p, c in zip(prompts, completions, strict=True)]
