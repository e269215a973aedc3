"""`EnginePool`: several engines as one. Turns that one of them loses are drawn by another.

A completion depends only on the weights, the prompt and the seeds, not on who draws it. So a turn whose
engine is lost is drawn again elsewhere and comes out the same, and only one answer for it is ever taken.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import torch

from colocate.engines.base import EngineLost, RolloutEngine
from colocate.engines.turns import Turn, TurnEngine, requests
from colocate.types import Completion, Prompt, SamplingParams

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

MAX_LOSSES = 5
"""The number of engines that a turn may lose before the run gives up: the turn may be the cause."""
_FIRST_PROBE_S = 0.5
_LAST_PROBE_S = 2.0
_WAIT_S = 0.05
"""Pause between looks at a pool of which nobody is left."""
_GRACE_S = 5.0
"""Seconds for which an outage of all engines is no end where none is to be waited for."""


class ServerReplica(RolloutEngine, Protocol):
    """An engine of a pool. It raises `EngineLost` where it can do its work no more."""

    # See `BaseEngine`.
    _max_len: int
    _max_len_reason: str
    _vocab_size: int

    @property
    def name(self) -> str:
        """The name in messages, such as its address."""
        ...

    @property
    def takes_turns(self) -> bool:
        """Whether it sleeps on the trainers' GPUs while they train."""
        ...

    def note_update(self, version: int) -> None:
        """Take notice of new weights while it is lost."""
        ...

    def is_back(self) -> bool:
        """Whether it answers again, after it was lost. Asked by a thread of its own."""
        ...

    def rejoin(self) -> None:
        """Get the present weights; raises EngineLost if that fails."""
        ...


class EnginePool(TurnEngine):
    """Generates with several engines that have the same weights.

    New sequences go to the engine with the fewest outstanding tokens, the members of a group together, as
    their prompt is then computed once. Later turns of an episode stay where its earlier ones are in a cache,
    unless that engine has more than twice as much to do as another one.

    A lost engine is probed, at first every half second and then less often. Once it answers it gets the
    present weights, and only then sequences.

    Args:
        replicas: the engines, asleep. The pool closes them.
        rank: of this process; ranks begin with different engines.
        barrier: waits for all processes of the run.
        on_loss: what to do when none is left: "error", or "wait" for one to come back.
        timeout_s: seconds to wait then.

    Raises:
        ValueError: there is no engine, or they have different vocabularies.
    """

    def __init__(
        self,
        replicas: Sequence[ServerReplica],
        *,
        rank: int = 0,
        barrier: Callable[[], object] = lambda: None,
        on_loss: Literal["error", "wait"] = "error",
        timeout_s: float = 240.0,
    ) -> None:
        sizes = {replica._vocab_size for replica in replicas}
        if len(sizes) != 1:
            raise ValueError(f"A pool needs engines of one vocabulary; their sizes are {sorted(sizes)}.")
        (self._vocab_size,) = sizes
        self.shares_weights = all(replica.shares_weights for replica in replicas)
        first = rank % len(replicas)
        self._members = [_Member(replica) for replica in [*replicas[first:], *replicas[:first]]]
        self._barrier = barrier
        self._on_loss = on_loss
        self._timeout_s = timeout_s
        self._assigned: dict[Hashable, _Assignment] = {}
        """Turns that are being drawn, by their sequences' numbers or by keys of `generate`'s own."""
        self._cached_by: dict[Hashable, _Member] = {}
        """Engines that have a prompt, or an episode's earlier turns, in their cache."""
        self._ended: dict[Hashable, Completion] = {}
        self._num_lost: dict[Hashable, int] = {}
        self._num_calls = itertools.count()

    # ── What it has ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def _max_len(self) -> int:  # type: ignore[override]
        return self._shortest._max_len

    @property
    def _max_len_reason(self) -> str:  # type: ignore[override]
        return f"{self._shortest.name}: {self._shortest._max_len_reason}"

    @property
    def _shortest(self) -> ServerReplica:
        return min((member.replica for member in self._members), key=lambda replica: replica._max_len)

    @property
    def kv_cache_bytes(self) -> int:
        return sum(member.replica.kv_cache_bytes for member in self._members)

    @property
    def rollout_weight_bytes(self) -> int:
        return sum(member.replica.rollout_weight_bytes for member in self._members)

    # ── Rollout ──────────────────────────────────────────────────────────────────────────────────────────

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Complete every prompt. See `RolloutEngine.generate`.

        Raises:
            RuntimeError: no engine is left, or a sequence was lost `MAX_LOSSES` times.
        """
        self._check(prompts, sampling)
        self._count_requests(prompts, sampling)
        call = next(self._num_calls)
        waiting: dict[Hashable, Turn] = {}
        for prompt in prompts:
            for sample, limit in zip(prompt.samples, prompt.limits(sampling.max_tokens), strict=True):
                waiting["generate", call, len(waiting)] = Turn(prompt, sample, limit, is_kept=False)
        keys, completions = list(waiting), {}
        try:
            while waiting:
                for key, completion in self._advance(waiting, sampling).items():
                    del waiting[key]
                    completions[key] = completion
                    self._count_ended([completion])
        finally:
            self._forget(keys)
        return [completions[key] for key in keys]

    def progress(self, sequence: int, start: int = 0) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
        assigned = self._assigned.get(sequence)
        return ((), None) if assigned is None else assigned.member.replica.progress(assigned.number, start)

    def abort(self, sequences: Iterable[int]) -> None:
        sequences = list(sequences)
        self._forget(sequences)
        super().abort(sequences)

    def _draw(self, waiting: Mapping[int, Turn], sampling: SamplingParams) -> dict[int, Completion]:
        ended = self._advance(waiting, sampling)
        for number in ended:
            if not waiting[number].is_kept:
                self._forget([number])
        return ended

    def _advance(self, waiting: Mapping[Key, Turn], sampling: SamplingParams) -> dict[Key, Completion]:
        """Place the turns that are nowhere yet, let all engines go on, and return those that have ended."""
        self._readmit()
        if new := waiting.keys() - self._assigned.keys() - self._ended.keys():
            for turns in _groups({key: turn for key, turn in waiting.items() if key in new}):
                self._assign(turns, sampling)
        for member in self._present:
            try:
                ended = member.replica.poll() if member.turns else {}
            except EngineLost as error:
                self._lose(member, error)
                continue
            for number, completion in ended.items():
                if number in member.turns:
                    key = self._release(member, number)
                    self._ended[key] = completion
                    self._num_lost.pop(key, None)
        self.num_restarts = sum(member.replica.num_restarts for member in self._members)
        return {key: self._ended.pop(key) for key in waiting.keys() & self._ended.keys()}

    def _assign(self, turns: Mapping[Key, Turn], sampling: SamplingParams) -> None:
        """Give turns that begin on one prompt to one engine."""
        cache_key = _cache_key(*next(iter(turns.items())))
        member = self._choice(cache_key, sum(turn.limit for turn in turns.values()))
        self._cached_by[cache_key] = member
        numbers = member.replica.submit(requests(list(turns.values())), sampling)
        for number, (key, turn) in zip(numbers, turns.items(), strict=True):
            member.turns[number] = key
            member.load += turn.limit
            self._assigned[key] = _Assignment(member, number, turn.limit)
            self._cached_by[key] = member

    def _choice(self, cache_key: Hashable, cost: int) -> _Member:
        present = self._present or self._await_one()
        least = min(present, key=lambda member: member.load)
        own = self._cached_by.get(cache_key)
        return own if own in present and own.load <= 2 * least.load + cost else least

    def _release(self, member: _Member, number: int) -> Hashable:
        """Take a turn from an engine; returns its key."""
        key = member.turns.pop(number)
        member.load -= self._assigned.pop(key).cost
        return key

    def _forget(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            for known in (self._cached_by, self._ended, self._num_lost):
                known.pop(key, None)
            if (assigned := self._assigned.get(key)) is not None:
                self._release(assigned.member, assigned.number)
                assigned.member.replica.abort([assigned.number])

    # ── Engines that are lost and come back ──────────────────────────────────────────────────────────────

    @property
    def _present(self) -> list[_Member]:
        return [member for member in self._members if member.loss is None]

    def _lose(self, member: _Member, error: EngineLost) -> None:
        """Take an engine's turns back, and have it probed."""
        numbers = list(member.turns)
        keys = [self._release(member, number) for number in numbers]
        member.replica.abort(numbers)
        member.loss = _ServerLoss(member.replica, str(error), _FIRST_PROBE_S)
        left = len(self._present)
        logger.warning(
            f"{member.replica.name} is lost: {error} "
            + (f"{left} of {len(self._members)} engines go on with its {len(keys)} turns." if left else "")
        )
        for key in keys:
            self._num_lost[key] = self._num_lost.get(key, 0) + 1
            if self._num_lost[key] == MAX_LOSSES:
                raise RuntimeError(
                    f"A sequence was lost {MAX_LOSSES} times with its engine, the last time with "
                    f"{member.replica.name}: {error} It may be what ends them: look into their logs."
                )

    def _readmit(self) -> None:
        """Give engines that answer again the present weights, and then sequences."""
        for member in self._members:
            if (loss := member.loss) is None or not loss.is_over.is_set():
                continue
            try:
                member.replica.rejoin()
            except EngineLost as error:
                member.loss = loss.goes_on(member.replica, str(error))
                continue
            member.loss = None
            logger.warning(f"{member.replica.name} is back, with the weights of now.")

    def _await_one(self) -> list[_Member]:
        """Wait until an engine is back."""
        deadline_s = time.monotonic() + (self._timeout_s if self._on_loss == "wait" else _GRACE_S)
        while True:
            self._readmit()
            if present := self._present:
                return present
            if time.monotonic() >= deadline_s:
                raise RuntimeError(self._all_lost())
            time.sleep(_WAIT_S)

    def _all_lost(self) -> str:
        losses = [
            f"{member.replica.name}, lost at {member.loss.since}: {member.loss.reason}"
            for member in self._members
            if member.loss is not None
        ]
        is_waited_for = self._on_loss == "wait"
        waited = f" and did not come back within {self._timeout_s if is_waited_for else _GRACE_S:g} s"
        advice = "" if is_waited_for else ", or set vllm_on_server_loss='wait' to have the run wait for one"
        return (
            f"All {len(losses)} engines of the pool are lost{waited}:\n  "
            + "\n  ".join(losses)
            + "\nLook into their logs, start them again (`colocate rollout-serve`) and resume from the last "
            f"checkpoint{advice}."
        )

    # ── Memory and weights ───────────────────────────────────────────────────────────────────────────────

    def sleep(self, keep_bytes: int = 0) -> None:
        """Put all engines to sleep; each may keep its share of `keep_bytes`.

        All processes of the run must call this where engines take turns with them.
        """
        if takes_turns := self._is_awake and self._takes_turns:
            self._barrier()  # others may still be drawing
        self._each(lambda replica: replica.sleep(keep_bytes // len(self._members)))
        super().sleep(keep_bytes)
        if takes_turns:
            self._cached_by.clear()
            self._barrier()

    def wake_up(self) -> None:
        """Wake all engines up. One that is lost is awake, with the present weights, when it is back.

        All processes of the run must call this where engines take turns with them.
        """
        if takes_turns := not self._is_awake and self._takes_turns:
            self._barrier()  # others may still be training
        super().wake_up()
        self._each(lambda replica: replica.wake_up())
        if takes_turns:
            self._barrier()

    def update_weights(self, version: int) -> None:
        """Publish to all engines side by side. One that is lost gets the weights when it is back.

        All processes of the run must call this. See `RolloutEngine.update_weights`.
        """
        self._check_open()
        for member in self._members:
            if member.loss is not None:
                member.replica.note_update(version)
        self._each(lambda replica: replica.update_weights(version))
        self.policy_version = version
        self._cached_by.clear()  # the caches have been dropped
        self._barrier()

    @property
    def _takes_turns(self) -> bool:
        return any(member.replica.takes_turns for member in self._members)

    def _each(self, action: Callable[[ServerReplica], object]) -> None:
        """Call `action` for every engine that is not lost, side by side; returns when all calls have ended.
        Raises the first error that is not the loss of an engine."""
        if not (present := self._present):
            return
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def act(replica: ServerReplica) -> None:
            if gpu is not None:
                torch.cuda.set_device(gpu)  # a new thread begins with the first one
            action(replica)

        executor = ThreadPoolExecutor(len(present), thread_name_prefix="pool")
        try:
            futures = [executor.submit(act, member.replica) for member in present]
            wait(futures)
        finally:
            executor.shutdown(wait=False)  # after Ctrl-C `close` ends what is under way
        errors = [future.exception() for future in futures]
        for member, error in zip(present, errors, strict=True):
            if isinstance(error, EngineLost):
                self._lose(member, error)
        for error in errors:
            if error is not None and not isinstance(error, EngineLost):
                raise error

    def close(self) -> None:
        """Close all engines."""
        super().close()
        for member in self._members:
            if member.loss is not None:
                member.loss.stop()
            member.replica.close()


@dataclass(eq=False)
class _Member:
    replica: ServerReplica
    turns: dict[int, Hashable] = field(default_factory=dict)
    """The turns that it draws, by its own numbers for them."""
    load: int = 0
    """Tokens that they may still take."""
    loss: _ServerLoss | None = None


@dataclass(frozen=True)
class _Assignment:
    member: _Member
    number: int
    cost: int
    """Tokens that the turn may still take."""


class _ServerLoss:
    """Why and since when an engine is lost, and a thread that asks until it answers again.

    Args:
        delay_s: until the first question; it doubles each time, and is multiplied by a random number between
            0.5 and 1.5, so that not all ranks ask at once.
    """

    def __init__(
        self, replica: ServerReplica, reason: str, delay_s: float, *, since_s: float | None = None
    ) -> None:
        self.reason = reason
        self._delay_s = delay_s
        self._since_s = time.time() if since_s is None else since_s
        self.is_over = threading.Event()
        self._is_stopped = threading.Event()
        threading.Thread(target=self._probe, args=(replica.is_back,), name="pool-probe", daemon=True).start()

    @property
    def since(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self._since_s))

    def goes_on(self, replica: ServerReplica, reason: str) -> _ServerLoss:
        """The loss, continued after the engine answered but could not be used."""
        return _ServerLoss(replica, reason, min(2 * self._delay_s, _LAST_PROBE_S), since_s=self._since_s)

    def stop(self) -> None:
        self._is_stopped.set()

    def _probe(self, is_back: Callable[[], bool]) -> None:
        jitter, delay_s = random.Random(), self._delay_s  # the run's generators must not advance
        while not self._is_stopped.wait(delay_s * jitter.uniform(0.5, 1.5)):
            if is_back():
                return self.is_over.set()
            delay_s = min(2 * delay_s, _LAST_PROBE_S)


def _cache_key(key: Hashable, turn: Turn) -> Hashable:
    """The key that a turn shares with its episode's earlier turns, or else with its group's."""
    return key if turn.number else ("prompt", turn.prompt.key)


def _groups(turns: Mapping[Key, Turn]) -> Iterator[dict[Key, Turn]]:
    """The turns, those of one group together."""
    groups: dict[Hashable, dict[Key, Turn]] = {}
    for key, turn in turns.items():
        groups.setdefault(_cache_key(key, turn), {})[key] = turn
    yield from groups.values()
