"""Several engines as one: whatever befalls them, each completion comes once and of one policy."""

from __future__ import annotations

import copy
import dataclasses
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from engine_models import make_model, make_prompts
from fake_server import FakeVLLM, install_fake_vllm
from fault_schedules import (
    CHUNKS,
    COMPLETIONS,
    HURRIED,
    LIMIT_S,
    Fleet,
    MakeFleet,
    check_schedules,
    drain,
    fleets_of,
    play,
)
from faulty_front import become_another, die, doubled, error_500, hang, late, restart, send_json

from colocate.config.grpo_config import GRPOConfig
from colocate.http.lease import LeaseHolder, ServerHeld
from colocate.rollout_server.options import server_urls
from colocate.rollout_server.trainer.client import CompletionRefused
from colocate.rollout_server.trainer.pool import EnginePool
from colocate.rollout_server.trainer.watch import ALONE
from colocate.run.engine import build_engine
from colocate.serving.driver import Drawn, Driver, Job, Update
from colocate.types import SamplingParams

SAMPLING = SamplingParams(max_tokens=6, seed=3)


@pytest.fixture(scope="module", name="model")
def served_model() -> Any:
    return make_model("qwen3")


def fake_fleet(model: Any, num_servers: int, directory: Path, *, takes_turns: bool = False) -> Fleet:
    """Stand-ins of vLLM's server."""
    *fakes, sound = [FakeVLLM(model) for _ in range(num_servers + 1)]
    for fake in fakes:
        fake.settings["enable_sleep_mode"] = takes_turns
        fake.restart()
    fleet = Fleet(model, fakes, directory)
    fleet.parts.append(sound)
    fleet.alone = fleet.engine(sound, timeouts=ALONE)
    return fleet


@pytest.fixture(name="make_fleet")
def fleets(model, monkeypatch, tmp_path) -> Iterator[MakeFleet]:
    install_fake_vllm(monkeypatch)
    with fleets_of(partial(fake_fleet, model), monkeypatch, tmp_path) as make:
        yield make


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


class Together:
    """A fault for several servers that answers once each of them has been asked."""

    def __init__(self, num_servers: int) -> None:
        self.barrier = threading.Barrier(num_servers, timeout=15)

    def __call__(self, fake: FakeVLLM, handler: Any, status: int, answer: Any) -> None:
        self.barrier.wait()
        send_json(handler, status, answer)


@pytest.mark.parametrize("takes_turns", [False, True])
def test_weights_are_pushed_to_all_at_once(make_fleet, takes_turns):
    fleet = make_fleet(3, takes_turns=takes_turns)
    pool = fleet.pool()
    paths = [CHUNKS, "/collective_rpc finish", *(["/sleep", "/wake_up"] if takes_turns else [])]
    meetings = {path: Together(3) for path in paths}
    for fake in fleet.fakes:
        fake.faults |= {path: [meeting] for path, meeting in meetings.items()}
    if takes_turns:
        pool.sleep()
    fleet.update(pool, 1)
    pool.wake_up()
    assert not any(meeting.barrier.broken for meeting in meetings.values())
    assert all(fake.suffered and not any(fake.faults.values()) for fake in fleet.fakes)
    prompts = make_prompts([3, 5, 4])
    assert pool.generate(prompts, SAMPLING) == fleet.alone.generate(prompts, SAMPLING)
    assert not any(member.loss for member in pool._members)


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("no room to merge an adapter")])
def test_an_engine_that_fails_in_a_push_leaves_the_others_right(make_fleet, monkeypatch, error):
    fleet = make_fleet(3)
    pool = fleet.pool()
    failing, *others = fleet.fakes
    meeting = Together(2)
    for fake in others:
        fake.faults[CHUNKS] = [meeting]

    def run_out(*arguments: Any) -> int:
        raise error

    if error is None:
        failing.faults[CHUNKS] = [die(60)]
        fleet.update(pool, 1)
    else:
        monkeypatch.setattr(pool._members[0].replica._pusher, "push", run_out)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            fleet.update(pool, 1)
        fleet.alone.update_weights(1)
    assert [member.loss is not None for member in pool._members] == [error is None, False, False]
    prompts = make_prompts([3, 5])
    expected = fleet.alone.generate(prompts, SAMPLING)
    for member in pool._members[1:]:
        assert member.replica.generate(prompts, SAMPLING) == expected
    assert not meeting.barrier.broken
    assert [fake.requests.count(CHUNKS) > 1 for fake in others] == [True, True]


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
    fleet = make_fleet(2)
    fleet.timeouts = HURRIED
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
    return build_engine(fleet.model, config, Accelerator(cpu=True), SAMPLING)


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
    run = dict(vars(LeaseHolder("theirs", "runs/theirs", "node1", 4711, "")))
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


def test_whatever_befalls_servers_no_completion_is_lost_doubled_or_mixed(make_fleet):
    check_schedules(make_fleet, 12)


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("told", ["/collective_rpc finish", "/reset_prefix_cache", "/resume"])
def test_a_server_goes_on_where_the_answers_at_the_end_of_a_push_were_lost(make_fleet, told, takes_turns):
    """It has the weights, and nobody has heard so: it must not stay paused for ever."""
    fleet = make_fleet(1, takes_turns=takes_turns)
    fleet.timeouts = HURRIED
    assert play(fleet, [{told: [doubled] * HURRIED.max_attempts}])
    assert takes_turns or not fleet.fakes[0].is_paused  # who takes turns has fallen asleep


@pytest.mark.parametrize("fault", [None, late, error_500, die(60)])
def test_only_a_server_that_was_gone_may_be_named(make_fleet, monkeypatch, fault):
    """The schedules' own check: a run that ends with a sound server's name is no end of a schedule."""
    fleet = make_fleet(1)
    fleet.timeouts = HURRIED

    def name_it(pool: EnginePool, *arguments: Any) -> None:
        pool._members[0].replica._ask("/health")
        raise RuntimeError(f"{fleet.fakes[0].base_url} is lost")

    monkeypatch.setattr(EnginePool, "update_weights", name_it)
    schedule = [{"/health": [fault]}]
    if fault in (None, late, error_500):  # of which the last is asked again, and answered
        with pytest.raises(AssertionError, match="is lost"):
            play(fleet, schedule)
    else:
        assert play(fleet, schedule) is False


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
