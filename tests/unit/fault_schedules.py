"""Schedules of faults, which servers of a pool suffer while a run of three updates draws with them.

Whatever befalls the servers, each completion comes once and of one version of the weights, and the run either
comes to its end or names a server that was lost.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import make_prompts
from fake_server import BUCKET_BYTES
from faulty_front import (
    FaultyFront,
    become_another,
    die,
    doubled,
    error_500,
    half_of_it,
    hang,
    late,
    nothing,
    restart,
    restart_before,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from colocate.rollout_server.trainer import pool as pool_module
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.rollout_server.trainer.pool import EnginePool
from colocate.rollout_server.trainer.watch import Timeouts
from colocate.types import Completion, SamplingParams

COMPLETIONS, CHUNKS = "/v1/completions", "/collective_rpc receive_chunk"
SHORT = Timeouts(
    answer_s=10.0, silence_s=0.2, max_attempts=2, first_delay_s=0.01, message_s=20.0, poll_s=0.005,
    has_substitute=True,
)  # fmt: skip
HURRIED = dataclasses.replace(SHORT, answer_s=1.0, message_s=2.0)
"""With servers that hang."""
LIMIT_S = 200.0

FAULTS = [
    *(None, None, None, error_500, half_of_it, nothing, doubled, late, restart, restart_before, hang),
    *(die(0.05), die(0.5), die(60), become_another),
]
PATHS = [
    COMPLETIONS,
    CHUNKS,
    "/health",
    *(f"/collective_rpc {do}" for do in ("state", "begin", "finish", "claim", "note_sleep")),
    *("/sleep", "/wake_up"),
]


class Fleet:
    """Servers that fail, pools of engines that use them, and an engine that is sound.

    Args:
        model: the trainer's.
        fakes: the servers.
        directory: where pushed weights are.
    """

    alone: Any
    """The engine that is sound."""
    timeouts = SHORT
    """Of the engines that are made from now on."""

    def __init__(self, model: Any, fakes: Sequence[FaultyFront], directory: Path) -> None:
        self.model, self.fakes, self.directory = model, list(fakes), directory
        self.parts: list[Any] = list(fakes)
        """What is closed with it, the last first."""

    def engine(self, fake: FaultyFront, **options: Any) -> RolloutServerEngine:
        engine = RolloutServerEngine(
            self.model,
            base_url=fake.base_url,
            **{
                "server_timeout_s": 4.0, "push_timeout_s": 100.0, "request_timeout_s": 100.0,
                "bucket_bytes": BUCKET_BYTES, "directory": str(self.directory), "timeouts": self.timeouts,
                **options,
            },
        )  # fmt: skip
        engine.wake_up()
        self.parts.append(engine)
        return engine

    def pool(self, run_id: str = "run", **options: Any) -> EnginePool:
        members = [self.engine(fake, run_id=run_id) for fake in self.fakes]
        pool = EnginePool(members, **{"timeout_s": 4.0, **options})
        pool.wake_up()
        self.parts.append(pool)
        return pool

    def update(self, pool: EnginePool, version: int) -> None:
        """Publish other weights."""
        with torch.no_grad():
            self.model.lm_head.weight.add_(0.5)
        for engine in (pool, self.alone):
            engine.update_weights(version)

    def check(self, drawn: Sequence[Completion], expected: Sequence[Completion]) -> None:
        """Compare what a pool has drawn with what the engine that is sound draws."""
        assert drawn == expected

    def close(self) -> None:
        while self.parts:
            self.parts.pop().close()


MakeFleet = Callable[..., Fleet]


@contextmanager
def fleets_of(make: MakeFleet, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[MakeFleet]:
    """Makes fleets, closes them at the end, and lets their pools look for lost servers often."""
    monkeypatch.setattr(pool_module, "_FIRST_PROBE_S", 0.02)
    monkeypatch.setattr(pool_module, "_LAST_PROBE_S", 0.2)
    monkeypatch.setattr(pool_module, "_GRACE_S", 0.3)
    made: list[Fleet] = []

    def make_one(num_servers: int, **options: Any) -> Fleet:
        made.append(make(num_servers, directory, **options))
        return made[-1]

    yield make_one
    for fleet in made:
        fleet.close()
    assert list(directory.iterdir()) == [], "pushed files must not stay behind"


def drain(engine: Any, limit_s: float = LIMIT_S) -> dict[int, Completion]:
    deadline_s, turns = time.monotonic() + limit_s, {}
    while engine.is_busy:
        turns |= engine.poll()
        assert time.monotonic() < deadline_s, "a turn does not come"
    return turns


def schedules(num_servers: int, faults: Sequence[Any]) -> st.SearchStrategy[list[dict[str, list[Any]]]]:
    """For each server, faults by path, in the order of its requests."""
    return st.lists(
        st.dictionaries(st.sampled_from(PATHS), st.lists(st.sampled_from(faults), max_size=5), max_size=4),
        min_size=num_servers,
        max_size=num_servers,
    )


def play(fleet: Fleet, schedule: Sequence[dict[str, list[Any]]]) -> bool:
    """Three updates, each with a rollout of whole completions and one of turns. Returns whether the run came
    to its end; else its error has named servers that were lost, and no other."""
    sampling = SamplingParams(max_tokens=12, seed=3, stop_token_ids=(5,))
    prompts = [dataclasses.replace(p, max_tokens=(4, 4)) for p in make_prompts([3, 5, 4], 2)]
    try:
        pool = fleet.pool(on_loss="wait", timeout_s=2.0)
        for fake, faults in zip(fleet.fakes, schedule, strict=True):
            fake.faults |= {path: list(found) for path, found in faults.items()}
        before: list[tuple[int, ...]] = []
        for version in range(3):
            fleet.update(pool, version)
            pool.wake_up()
            expected = fleet.alone.generate(prompts, sampling)
            fleet.check(pool.generate(prompts, sampling), expected)
            tokens = [completion.token_ids for completion in expected]
            assert tokens != before, "versions could not be told apart"
            before = tokens
            numbers = pool.submit(prompts, sampling, keep=True)
            first = drain(pool)
            fleet.check([first[number] for number in numbers], expected)
            for number in numbers[::2]:
                pool.extend(number, [7], 4)
            second = drain(pool)
            assert sorted(second) == numbers[::2]
            again = fleet.alone.submit(prompts, sampling, keep=True)
            drain(fleet.alone)
            for number in again[::2]:
                fleet.alone.extend(number, [7], 4)
            expected_turns = drain(fleet.alone)
            fleet.check([second[n] for n in numbers[::2]], [expected_turns[n] for n in again[::2]])
            pool.abort(numbers)
            fleet.alone.abort(again)
            pool.sleep()
            for member in pool._members:
                assert not member.replica.takes_turns or member.loss or not fake_of(fleet, member).awake
    except RuntimeError as error:
        named = [fake for fake in fleet.fakes if fake.base_url in str(error)]
        assert named, error
        for fake in named:
            assert fake.was_gone(fleet.timeouts.max_attempts, fleet.timeouts.answer_s), error
        return False
    return True


def fake_of(fleet: Fleet, member: Any) -> Any:
    (fake,) = (fake for fake in fleet.fakes if fake.base_url == member.replica.name)
    return fake


def check_schedules(make_fleet: MakeFleet, num_examples: int, faults: Sequence[Any] = FAULTS) -> None:
    """Play so many schedules. The environment's COLOCATE_SCHEDULES names a file for the counts of how they
    ended (benchmarks/pool/suite.py)."""
    finished: list[bool] = []

    @settings(
        max_examples=num_examples,
        deadline=None,
        # A schedule takes seconds, too long to shrink it.
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(num_servers=st.integers(1, 3), takes_turns=st.booleans(), data=st.data())
    def check(num_servers: int, takes_turns: bool, data: Any) -> None:
        schedule = data.draw(schedules(num_servers, faults))
        fleet = make_fleet(num_servers, takes_turns=takes_turns)
        fleet.timeouts = HURRIED
        try:
            finished.append(play(fleet, schedule))
        finally:
            fleet.close()

    check()
    if path := os.environ.get("COLOCATE_SCHEDULES"):
        named = len(finished) - sum(finished)
        Path(path).write_text(json.dumps({"num_finished": sum(finished), "num_named": named}))
    is_a_sample = num_examples >= 10
    assert not is_a_sample or sum(finished) > len(finished) / 2, "most leave somebody who can finish"
