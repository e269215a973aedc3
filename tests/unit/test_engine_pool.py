"""Several engines as one: whatever befalls them, each completion comes once and of one policy."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from engine_models import make_model, make_prompts
from fake_server import (
    BUCKET_BYTES,
    FakeVLLM,
    error_500,
    half_of_it,
    install_fake_vllm,
    late,
    nothing,
    restart,
    restart_before,
    send_json,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colocate.config import GRPOConfig
from colocate.engines import pool as pool_module
from colocate.engines.build import EngineParts, build_engine, server_urls
from colocate.engines.pool import EnginePool
from colocate.engines.rollout_server.client import CompletionRefused
from colocate.engines.rollout_server.engine import RolloutServerEngine
from colocate.engines.rollout_server.lease import Run, ServerHeld
from colocate.engines.rollout_server.patience import ALONE, Patience
from colocate.serving.driver import Drawn, Driver, Job, Update
from colocate.types import Completion, SamplingParams

COMPLETIONS, CHUNKS = "/v1/completions", "/collective_rpc receive_chunk"
SAMPLING = SamplingParams(max_tokens=6, seed=3)
SHORT = Patience(
    answer_s=10.0, silence_s=0.2, max_attempts=2, first_delay_s=0.01, message_s=20.0, poll_s=0.005,
    has_substitute=True,
)  # fmt: skip
HURRIED = dataclasses.replace(SHORT, answer_s=1.0, message_s=2.0)
"""With servers that hang."""
LIMIT_S = 200.0


@pytest.fixture(scope="module", name="model")
def served_model() -> Any:
    return make_model("qwen3")


class Fleet:
    """Stand-ins of vLLM's server, a pool of engines that use them, and the engine of one that is sound."""

    def __init__(
        self,
        model: Any,
        num_servers: int,
        directory: str,
        *,
        takes_turns: bool = False,
        patience: Patience = SHORT,
    ) -> None:
        self.model, self.patience = model, patience
        self.directory = directory
        self.servers = [FakeVLLM(model) for _ in range(num_servers + 1)]
        *self.fakes, self.sound = self.servers
        for fake in self.fakes:
            fake.settings["enable_sleep_mode"] = takes_turns
            fake.restart()
        self.engines: list[Any] = []
        self.alone = self.engine(self.sound, patience=ALONE)

    def engine(self, fake: FakeVLLM, **options: Any) -> RolloutServerEngine:
        engine = RolloutServerEngine(
            self.model,
            base_url=fake.base_url,
            **{
                "server_timeout_s": 4.0, "push_timeout_s": 100.0, "request_timeout_s": 100.0,
                "bucket_bytes": BUCKET_BYTES, "directory": self.directory, "patience": self.patience,
                **options,
            },
        )  # fmt: skip
        engine.wake_up()
        self.engines.append(engine)
        return engine

    def pool(self, run_id: str = "run", **options: Any) -> EnginePool:
        members = [self.engine(fake, run_id=run_id) for fake in self.fakes]
        pool = EnginePool(members, **{"timeout_s": 4.0, **options})
        pool.wake_up()
        self.engines.append(pool)
        return pool

    def update(self, pool: EnginePool, version: int) -> None:
        with torch.no_grad():
            self.model.lm_head.weight.add_(0.5)
        for engine in (pool, self.alone):
            engine.update_weights(self.model.named_parameters(), version)

    def close(self) -> None:
        for part in (*reversed(self.engines), *self.servers):
            part.close()
        self.engines, self.servers = [], []


@pytest.fixture(name="make_fleet")
def fleets(model, monkeypatch, tmp_path) -> Iterator[Callable[[int], Fleet]]:
    install_fake_vllm(monkeypatch)
    monkeypatch.setattr(pool_module, "_FIRST_PROBE_S", 0.02)
    monkeypatch.setattr(pool_module, "_LAST_PROBE_S", 0.2)
    monkeypatch.setattr(pool_module, "_GRACE_S", 0.3)
    made: list[Fleet] = []

    def make(num_servers: int, **options: Any) -> Fleet:
        made.append(Fleet(model, num_servers, str(tmp_path), **options))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()
    assert list(tmp_path.iterdir()) == [], "pushed files must not stay behind"


def drain(pool: EnginePool) -> dict[int, Completion]:
    deadline_s, turns = time.monotonic() + LIMIT_S, {}
    while pool.is_busy:
        turns |= pool.poll()
        assert time.monotonic() < deadline_s, "a turn does not come"
    return turns


def die(seconds: float) -> Callable[..., None]:
    """A fault after which the server is gone for a while, and back with the weights it started with."""

    def fault(fake: FakeVLLM, handler: Any, status: int, answer: Any) -> None:
        with fake._lock:
            fake.restart()
            fake.gone_until_s = time.monotonic() + seconds
        handler.close_connection = True

    fault.is_instead = True  # type: ignore[attr-defined]
    return fault


def hang(fake: FakeVLLM, handler: Any, status: int, answer: Any) -> None:
    """The server says nothing for longer than it is waited for."""
    time.sleep(2.5)
    handler.close_connection = True


def become_another(fake: FakeVLLM, handler: Any, status: int, answer: Any) -> None:
    """The server is started again, with another model."""
    with fake._lock:
        fake.config = copy.deepcopy(fake.config)
        fake.config.get_text_config().num_hidden_layers += 1
        fake.restart()
    handler.close_connection = True


# ── Who draws what ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_completions_are_those_of_one_server(make_fleet, num_servers):
    fleet = make_fleet(num_servers)
    pool = fleet.pool()
    prompts = make_prompts([3, 5, 4, 7], 2)
    assert pool.generate(prompts, SAMPLING) == fleet.alone.generate(prompts, SAMPLING)
    fleet.update(pool, 4)
    completions = pool.generate(prompts, SAMPLING)
    assert completions == fleet.alone.generate(prompts, SAMPLING)
    assert {completion.policy_version for completion in completions} == {4}
    for fake in fleet.fakes:
        asked = fake.requests.count(COMPLETIONS)
        assert asked == 2 * 8 / num_servers if num_servers < 3 else asked in (4, 8)


def test_a_group_stays_together_and_goes_where_least_is_to_do(make_fleet):
    fleet = make_fleet(2)
    pool = fleet.pool()
    received: list[list[tuple[int, ...]]] = []
    for fake in fleet.fakes:
        received.append(seen := [])
        fake.draw = lambda body, seen=seen: seen.append(tuple(body["prompt"])) or True
    first, *others = make_prompts([3, 4, 5, 6], 4)
    long = dataclasses.replace(first, max_tokens=(6,) * 4)
    short = [dataclasses.replace(prompt, max_tokens=(2,) * 4) for prompt in others]
    pool.generate([long, *short], SAMPLING)
    assert [sorted(set(seen), key=len) for seen in received] == [
        [long.token_ids],
        [prompt.token_ids for prompt in short],
    ]


def test_later_turns_stay_where_the_earlier_are(make_fleet):
    fleet = make_fleet(2)
    pool = fleet.pool()
    sampling = dataclasses.replace(SAMPLING, max_tokens=40)
    prompts = [dataclasses.replace(p, max_tokens=(4,)) for p in make_prompts([3, 5])]
    numbers = pool.submit(prompts, sampling, keep=True)
    drain(pool)
    for _ in range(3):
        before = [fake.requests.count(COMPLETIONS) for fake in fleet.fakes]
        pool.extend(numbers[1], [7, 8], 4)
        drain(pool)
        after = [fake.requests.count(COMPLETIONS) for fake in fleet.fakes]
        assert [b - a for a, b in zip(before, after, strict=True)] == [0, 1]


def test_ranks_begin_with_different_servers(make_fleet):
    fleet = make_fleet(3)
    (prompt,) = make_prompts([3])
    for rank in range(3):
        fleet.pool(rank=rank).generate([prompt], SAMPLING)
    assert [fake.requests.count(COMPLETIONS) for fake in fleet.fakes] == [1, 1, 1]


# ── What befalls servers ─────────────────────────────────────────────────────────────────────────────────


def test_a_lost_server_s_work_is_done_elsewhere_and_it_comes_back_with_the_weights_of_now(make_fleet, caplog):
    fleet = make_fleet(2)
    pool = fleet.pool()
    prompts = make_prompts([3, 5, 4, 7], 3)
    fleet.fakes[0].faults[COMPLETIONS] = [None, die(0.3)]
    assert pool.generate(prompts, SAMPLING) == fleet.alone.generate(prompts, SAMPLING)
    assert f"{fleet.fakes[0].base_url} is lost" in caplog.text
    fleet.update(pool, 1)
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        before = fleet.fakes[0].requests.count(COMPLETIONS)
        assert pool.generate(prompts, SAMPLING) == fleet.alone.generate(prompts, SAMPLING)
        if fleet.fakes[0].requests.count(COMPLETIONS) > before:
            break
        time.sleep(0.02)
    assert f"{fleet.fakes[0].base_url} is back" in caplog.text


def test_a_server_that_hangs_is_given_up(make_fleet):
    fleet = make_fleet(2, patience=HURRIED)
    pool = fleet.pool()
    prompts = make_prompts([3, 5, 4, 7])
    for path in (COMPLETIONS, "/health"):
        fleet.fakes[0].faults[path] = [hang] * 4
    assert pool.generate(prompts, SAMPLING) == fleet.alone.generate(prompts, SAMPLING)


@pytest.mark.parametrize("on_loss", ["error", "wait"])
def test_when_none_is_left_each_is_named_with_its_reason(make_fleet, on_loss):
    fleet = make_fleet(2)
    pool = fleet.pool(on_loss=on_loss, timeout_s=0.3)
    fleet.fakes[0].faults[COMPLETIONS] = [become_another] * 9
    fleet.fakes[1].faults[COMPLETIONS] = [die(60)]
    with pytest.raises(RuntimeError, match="All 2 engines of the pool are lost") as raised:
        for _ in range(20):
            pool.generate(make_prompts([3, 5]), SAMPLING)
            time.sleep(0.05)
    for fake in fleet.fakes:
        assert fake.base_url in str(raised.value)
    assert "did not come back within 0.3 s" in str(raised.value)
    if on_loss == "wait":
        assert re.search(r"it has num_hidden_layers \d instead of 2", str(raised.value))


def test_a_request_that_ends_every_server_ends_the_run(make_fleet):
    fleet = make_fleet(2)
    pool = fleet.pool(on_loss="wait")
    for fake in fleet.fakes:
        fake.faults[COMPLETIONS] = [die(0.01)] * 50
    with pytest.raises(RuntimeError, match=r"lost 5 times with its engine.*It may be what ends them"):
        pool.generate(make_prompts([3]), SAMPLING)


def test_another_model_is_noticed_between_rollouts_too(make_fleet, caplog):
    fleet = make_fleet(2)
    pool = fleet.pool()
    prompts = make_prompts([3, 5, 4, 7])
    pool.generate(prompts, SAMPLING)
    became = fleet.fakes[0]
    became.config = copy.deepcopy(became.config)
    became.config.get_text_config().num_hidden_layers += 1
    became.restart()
    before = became.requests.count(COMPLETIONS)
    for _ in range(5):
        assert pool.generate(prompts, SAMPLING) == fleet.alone.generate(prompts, SAMPLING)
        time.sleep(0.05)
    assert became.requests.count(COMPLETIONS) == before
    assert f"{became.base_url} is lost: The server at {became.base_url} serves another model" in caplog.text


def test_a_server_that_comes_back_shorter_stays_lost(make_fleet):
    fleet = make_fleet(2)
    pool = fleet.pool()
    prompts = make_prompts([3, 5, 4, 7])
    pool.generate(prompts, SAMPLING)
    short = fleet.fakes[0]
    short.config = copy.deepcopy(short.config)
    short.config.max_position_embeddings //= 2
    short.faults[COMPLETIONS] = [restart] * 2
    for _ in range(5):
        assert pool.generate(prompts, SAMPLING) == fleet.alone.generate(prompts, SAMPLING)
        time.sleep(0.05)
    short.faults[COMPLETIONS], fleet.fakes[1].faults[COMPLETIONS] = [], [die(60)]
    with pytest.raises(RuntimeError, match="came back with a context of"):
        pool.generate(prompts, SAMPLING)


def test_what_any_server_would_refuse_is_no_loss(make_fleet):
    fleet = make_fleet(2)
    pool = fleet.pool()

    def refuse(fake: FakeVLLM, handler: Any, status: int, answer: Any) -> None:
        send_json(handler, 400, {"error": {"message": "this prompt is not to my taste"}})

    for fake in fleet.fakes:
        fake.faults[COMPLETIONS] = [refuse]
    with pytest.raises(CompletionRefused, match="not to my taste"):
        pool.generate(make_prompts([3]), SAMPLING)
    for fake in fleet.fakes:
        fake.faults[COMPLETIONS] = []
    prompts = make_prompts([3, 5])
    assert pool.generate(prompts, SAMPLING) == fleet.alone.generate(prompts, SAMPLING)


def test_an_outage_of_all_that_is_short_is_no_end(make_fleet, caplog):
    fleet = make_fleet(2)
    pool = fleet.pool(on_loss="error")
    for fake in fleet.fakes:
        fake.faults[COMPLETIONS] = [die(0.1)]
    prompts = make_prompts([3, 5])
    assert pool.generate(prompts, SAMPLING) == fleet.alone.generate(prompts, SAMPLING)
    assert caplog.text.count("is lost") == 2
    assert pool.num_restarts >= 1  # the first may have drawn all before the other came


def engine_of_options(fleet: Fleet, **options: Any) -> Any:
    urls = ", ".join(fake.base_url for fake in fleet.fakes)
    config = GRPOConfig(engine="vllm_server", vllm_server_base_url=urls, use_cpu=True, bf16=False, **options)
    parts = EngineParts(fleet.model, config, Accelerator(cpu=True), SAMPLING, {})
    return build_engine("rollout_server", parts)


def test_the_option_makes_a_pool_of_its_servers(make_fleet, tmp_path_factory):
    fleet = make_fleet(2)
    engine = engine_of_options(fleet, output_dir=str(tmp_path_factory.mktemp("run")))
    engine.wake_up()
    prompts = make_prompts([3, 5, 4])
    assert engine.generate(prompts, SAMPLING) == fleet.alone.generate(prompts, SAMPLING)
    assert all(fake.requests.count(COMPLETIONS) for fake in fleet.fakes)
    engine.close()


def test_where_another_run_has_a_server_the_others_are_let_go(make_fleet, tmp_path_factory):
    fleet = make_fleet(3)
    run = dict(vars(Run("theirs", "runs/theirs", "node1", 4711, "")))
    fleet.fakes[2].message("claim", run=run)
    with pytest.raises(ServerHeld, match=r"belongs to the run in runs/theirs \(process 4711 on node1\)"):
        engine_of_options(fleet, output_dir=str(tmp_path_factory.mktemp("run")))
    for fake in fleet.fakes[:2]:
        assert fake.message("claim", run=run) == {}, "it is free"


def test_a_server_named_twice_is_refused():
    assert server_urls(" http://a:1 ,http://b:2/,") == ["http://a:1", "http://b:2"]
    assert server_urls(None) == []
    with pytest.raises(ValueError, match="names no server"):
        server_urls(" , ")
    with pytest.raises(ValueError, match=r"names http://a:1 2 times"):
        server_urls("http://a:1,http://b:2,http://a:1/")


# ── Whatever befalls them ────────────────────────────────────────────────────────────────────────────────


def doubled(fake: FakeVLLM, handler: Any, status: int, answer: Any) -> None:
    """The server has done what it was told, and its answer is lost, so that it is told again."""
    handler.close_connection = True


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


def schedules(num_servers: int) -> st.SearchStrategy[list[dict[str, list[Any]]]]:
    """For each server, faults by path, in the order of its requests."""
    faults = st.lists(st.sampled_from(FAULTS), max_size=5)
    return st.lists(
        st.dictionaries(st.sampled_from(PATHS), faults, max_size=4),
        min_size=num_servers,
        max_size=num_servers,
    )


def play(fleet: Fleet, schedule: list[dict[str, list[Any]]]) -> bool:
    """Three updates, each with a rollout of whole completions and one of turns. Returns whether the run came
    to its end; else its error has named a server that was lost."""
    sampling = SamplingParams(max_tokens=12, seed=3, stop_token_ids=(5,))
    prompts = [dataclasses.replace(p, max_tokens=(4, 4)) for p in make_prompts([3, 5, 4], 2)]
    try:
        pool = fleet.pool(on_loss="wait", timeout_s=2.0)
        for fake, faults in zip(fleet.fakes, schedule, strict=True):
            fake.faults |= {path: list(found) for path, found in faults.items()}
        for version in range(3):
            fleet.update(pool, version)
            pool.wake_up()
            expected = fleet.alone.generate(prompts, sampling)
            assert pool.generate(prompts, sampling) == expected
            numbers = pool.submit(prompts, sampling, keep=True)
            first = drain(pool)
            assert [first[number] for number in numbers] == expected
            for number in numbers[::2]:
                pool.extend(number, [7], 4)
            second = drain(pool)
            assert sorted(second) == numbers[::2]
            again = fleet.alone.submit(prompts, sampling, keep=True)
            drain(fleet.alone)
            for number in again[::2]:
                fleet.alone.extend(number, [7], 4)
            expected_turns = drain(fleet.alone)
            assert [second[n] for n in numbers[::2]] == [expected_turns[n] for n in again[::2]]
            pool.abort(numbers)
            fleet.alone.abort(again)
            pool.sleep()
            for member in pool._members:
                assert not member.replica.takes_turns or member.loss or not fake_of(fleet, member).awake
    except RuntimeError as error:
        assert any(fake.base_url in str(error) for fake in fleet.fakes), error
        return False
    return True


def fake_of(fleet: Fleet, member: Any) -> FakeVLLM:
    (fake,) = (fake for fake in fleet.fakes if fake.base_url == member.replica.name)
    return fake


def check_schedules(make_fleet: Callable[[int], Fleet], num_examples: int) -> None:
    finished: list[bool] = []

    @settings(
        max_examples=num_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(num_servers=st.integers(1, 3), takes_turns=st.booleans(), data=st.data())
    def check(num_servers: int, takes_turns: bool, data: Any) -> None:
        schedule = data.draw(schedules(num_servers))
        fleet = make_fleet(num_servers, takes_turns=takes_turns, patience=HURRIED)
        try:
            finished.append(play(fleet, schedule))
        finally:
            fleet.close()

    check()
    if path := os.environ.get("COLOCATE_SCHEDULES"):  # benchmarks/pool/suite.py
        named = len(finished) - sum(finished)
        Path(path).write_text(json.dumps({"num_finished": sum(finished), "num_named": named}))
    assert sum(finished) > len(finished) / 2, "most schedules leave somebody who can finish"


def test_whatever_befalls_servers_no_completion_is_lost_doubled_or_mixed(make_fleet):
    check_schedules(make_fleet, 12)


@pytest.mark.slow
def test_two_hundred_schedules_of_faults_lose_nothing(make_fleet):
    check_schedules(make_fleet, 200)


def test_requests_of_many_callers_go_to_a_pool_and_outlive_a_server(make_fleet):
    """Two callers with other sampling parameters, while the first server is gone for good."""
    fleet = make_fleet(2)
    pool = fleet.pool()
    fleet.update(pool, 1)
    driver, told = Driver(pool, slice_s=0.0), {}
    fleet.fakes[0].faults[COMPLETIONS] = [die(LIMIT_S)]
    asked = [
        (prompt, dataclasses.replace(SAMPLING, temperature=temperature))
        for temperature in (1.0, 0.5)
        for prompt in make_prompts([5, 3], 2)
    ]
    for number, (prompt, sampling) in enumerate(asked):
        updates: list[Update] = []
        told[number] = updates
        driver.ask(Job(prompt, sampling, updates.append))
    deadline_s = time.monotonic() + LIMIT_S
    while any(sum(isinstance(update, Drawn) for update in updates) < 2 for updates in told.values()):
        driver.advance()
        assert time.monotonic() < deadline_s, "a request is not answered"
    for number, (prompt, sampling) in enumerate(asked):
        drawn = {update.choice: update.token_ids for update in told[number] if isinstance(update, Drawn)}
        alone = fleet.alone.generate([prompt], sampling)
        assert [drawn[choice] for choice in range(2)] == [completion.token_ids for completion in alone]
