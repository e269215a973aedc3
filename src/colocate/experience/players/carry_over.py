"""Carry-over: the engine's rows stay full, as later prompts are begun before the last completion has ended.

Where completions differ in length, the longest one has the device to itself at the end of a rollout. With
`max_policy_lag` L the engine has L more generation batches, whose sequences take the rows that become free:

    rollout k    batch k ████████████▌        batch k+1     ▐███████
    rollout k+1  batch k+1       ████▌        batch k+2  ▐██████████

A rollout ends when its own batch is complete. The batch has the same prompts as with L = 0, so none is
favoured for its short answers. Tokens that later batches have drawn by then stay, and those batches go on
after the update with the new weights. So a token is at most L rollouts older than the step that trains on it,
and keeps the log-prob with which it was drawn, for importance sampling. Over L + 1 rollouts there are at
least as many decode steps as the longest completion has tokens: that is the price of bounding the age of
tokens.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from colocate.data.sampler import PromptBatches
from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.submissions import Submissions
from colocate.episodes.episode import Episode
from colocate.experience.players.episode_player import EpisodePlayer
from colocate.experience.players.play import BegunRequest, Player, SingleTurnPlayer
from colocate.experience.requests import RequestBuilder, RolloutRequest
from colocate.types import SamplingParams


class CarryingPlayer(Player):
    """Plays one generation batch to its end, and later ones as far as they get meanwhile.

    Episodes of a single turn are saved as far as they are, so that a resumed run goes on exactly. Those with
    tools or environments, whose state is elsewhere, are begun anew after a run was resumed.

    Args:
        player: plays the episodes that are trained on.
        held_out: plays the episodes of evaluations; those of `player` leave the engine meanwhile.
        max_policy_lag: L, generation batches that are begun ahead.
    """

    is_resumable = True

    def __init__(
        self,
        player: SingleTurnPlayer | EpisodePlayer,
        held_out: SingleTurnPlayer | EpisodePlayer,
        engine: NativeEngine,
        batches: PromptBatches,
        requests: RequestBuilder,
        max_policy_lag: int,
    ) -> None:
        self._player: Any = player
        self._held_out = held_out
        self._engine = engine
        self._batches = batches
        self._requests = requests
        self._max_lag = max_policy_lag
        self._begun: deque[Any] = deque()
        """The results of `begin` for the requests that are not finished, in the order of their batches."""
        self._newest_key = -1
        """The first prompt's key of the newest request that was begun."""
        self._restored: deque[list[int]] = deque()
        """The numbers of the sequences of each request that was begun before the run was resumed."""
        self._aside = Submissions()
        """The engine's sequences, while another phase of the step has the device."""

    @property
    def words(self) -> str | None:
        words: str | None = self._player.words
        return words

    @property
    def sampling(self) -> SamplingParams:  # type: ignore[override]
        sampling: SamplingParams = self._player.sampling
        return sampling

    @sampling.setter
    def sampling(self, sampling: SamplingParams) -> None:
        self._player.sampling = self._held_out.sampling = sampling

    def play(self, request: RolloutRequest) -> list[Episode]:
        """Return the episodes of a request, and begin those of the batches that come next.

        Raises:
            ValueError, RuntimeError: see `EpisodePlayer.play`.
        """
        if request.is_held_out:
            return self._held_out.play(request)
        self._engine.take_back(self._aside)
        try:
            self._begin(request)
            for batch in self._batches.peek(self._max_lag):
                if batch.keys[0] > self._newest_key:
                    self._begin(self._requests.training(batch))
            episodes: list[Episode] = self._player.finish(self._begun.popleft())
        except BaseException:
            self._player.stop()
            raise
        self._aside = self._engine.set_aside()
        return episodes

    def _begin(self, request: RolloutRequest) -> None:
        """Begin a request, unless it was begun before."""
        key = request.batch_keys[0]
        if key > self._newest_key:
            self._newest_key = key
            is_begun = bool(self._restored)
            self._begun.append(
                BegunRequest(request, self._restored.popleft()) if is_begun else self._player.begin(request)
            )

    @property
    def has_restored(self) -> bool:
        return bool(self._restored)

    def clear(self) -> None:
        self._restored.clear()
        self._aside = Submissions()
        if isinstance(self._player, SingleTurnPlayer):
            self._player.stop()

    def state_dict(self) -> dict[str, Any]:
        if not isinstance(self._player, SingleTurnPlayer):
            return {"begun": []}
        return {
            "begun": [begun.numbers for begun in self._begun],
            "player": self._player.state_dict(),
            "sequences": self._aside.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state["begun"] or not isinstance(self._player, SingleTurnPlayer):
            return
        self._restored.extend(state["begun"])
        self._player.load_state_dict(state["player"])
        self._aside.load_state_dict(state["sequences"], self.sampling)
