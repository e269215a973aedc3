"""Turns drawn by a server, each a request of its own: none waits for another one, and none is lost."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import fault_schedules
import pytest
from engine_models import make_model, make_prompts
from fake_server import (  # noqa: F401
    engines_of_fake,
    fake_vllm,
)
from faulty_front import error_500, half_of_it, hanging_fault, nothing, restart, restart_before  # noqa: F401
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_episodes import MAX_TOKENS, assert_each_is_as_alone, scripts
from test_episode_player import Table

from colocate.rollout_server.trainer.client import RequestRefused
from colocate.rollout_server.trainer.watch import Timeouts
from colocate.types import Completion, Prompt, SamplingParams
from tool_chat import call

COMPLETIONS = "/v1/completions"
SAMPLING = SamplingParams(max_tokens=6, seed=3)
LIMIT_S = 20.0
drain = partial(fault_schedules.drain, limit_s=LIMIT_S)


@pytest.fixture(scope="module", name="model")
def model_of_a_chat() -> Any:
    return make_model("qwen3", vocab_size=128, max_position_embeddings=1024)


def wait_for(condition: Callable[[], object], poll: Callable[[], object] = lambda: None) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        poll()
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def alone(engine: Any, prompts: Iterable[Prompt]) -> list[tuple[int, ...]]:
    return [engine.generate([prompt], SAMPLING)[0].token_ids for prompt in prompts]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    script=scripts(),
    delays_s=st.lists(st.sampled_from([0.0, 0.005, 0.05]), min_size=1, max_size=5),
    faults=st.lists(
        st.sampled_from([None, None, None, error_500, half_of_it, nothing, restart, restart_before]),
        max_size=12,
    ),
)
def test_whatever_fails_episodes_are_each_as_alone(make_engine, fake, script, delays_s, faults):
    engine = make_engine(on_server_loss="wait")
    drawn_at_s: dict[str, float] = {}

    def draw(body: dict[str, Any]) -> bool:
        delay_s = delays_s[body["seed"] % len(delays_s)]
        return time.monotonic() >= drawn_at_s.setdefault(str(body), time.monotonic() + delay_s)

    fake.draw, fake.faults[COMPLETIONS] = draw, faults
    sampling = SamplingParams(MAX_TOKENS, stop_token_ids=(3, 5, 8))
    assert_each_is_as_alone(engine, script, sampling, logprob_atol=0.0)
    engine.close()


def test_a_short_turn_goes_on_while_a_long_one_is_drawn(make_engine, fake, monkeypatch):
    events: list[str] = []

    def look() -> str:
        """Look."""
        events.append("tool")
        return "done"

    def write(text: str, member: int) -> str:
        if "long" in text:
            return "end"
        return "end" if "<|im_start|>tool\n" in text else call("look")

    def choice(body: dict[str, Any], index: int) -> dict[str, Any]:
        limit = (body["max_tokens"],)
        ids = table.engine.complete(Prompt(tuple(body["prompt"]), 0, range(1), limit), index)
        stopped = ids[-1] in body["stop_token_ids"]
        logprobs = {"token_logprobs": [-1.0] * len(ids)}
        reason = "stop" if stopped else "length"
        return {"index": index, "finish_reason": reason, "token_ids": ids, "logprobs": logprobs}

    def draw(body: dict[str, Any]) -> bool:
        """The long turn takes until the short episode has played two turns and a tool."""
        text = table.tokenizer.decode(body["prompt"])
        if "long" in text and events[-1:] != ["second turn"]:
            return False
        second = "<|im_start|>tool\n" in text
        events.append("long turn" if "long" in text else "second turn" if second else "first turn")
        return True

    def engine_of(complete: Any) -> Any:
        engine = make_engine()
        engine.complete = complete
        return engine

    table = Table(write, [look], make_engine=engine_of)
    monkeypatch.setattr(fake, "_choice", choice)
    fake.draw = draw
    long, short = table.play("long", "short", num_generations=1)
    assert events == ["first turn", "tool", "second turn", "long turn"]
    assert table.sampled(long) == "end<|im_end|>"
    assert table.sampled(short) == f"{call('look')}<|im_end|>|end<|im_end|>"


def test_a_turn_that_is_given_up_ends_at_the_server(make_engine, fake):
    engine = make_engine()
    prompts = make_prompts([3, 5, 2])
    expected = alone(engine, prompts)
    is_released = threading.Event()
    fake.draw = lambda body: body["prompt"] == list(prompts[1].token_ids) or is_released.is_set()
    first, second, third = engine.submit(prompts, SAMPLING, keep=True)
    found: dict[int, Completion] = {}
    wait_for(lambda: found, lambda: found.update(engine.poll()))
    assert found.keys() == {second}
    engine.abort([first, second])
    wait_for(lambda: fake.given_up)
    is_released.set()
    found = drain(engine)
    assert {number: turn.token_ids for number, turn in found.items()} == {third: expected[2]}
    assert [body["prompt"] for body in fake.given_up] == [list(prompts[0].token_ids)]


@pytest.mark.parametrize("event", ["sleep", "update", "close"])
def test_no_turn_is_under_way_when_the_weights_change(make_engine, fake, model, event):
    engine = make_engine()
    prompts = make_prompts([3, 5], 2)
    expected = [completion.token_ids for completion in engine.generate(prompts, SAMPLING)]
    is_released = threading.Event()
    fake.draw = lambda body: is_released.is_set()
    num_before = fake.reached.count(COMPLETIONS)
    numbers = engine.submit(prompts, SAMPLING)
    wait_for(lambda: fake.reached.count(COMPLETIONS) == num_before + 4, lambda: engine.poll())
    if event == "sleep":
        engine.sleep()
    elif event == "update":
        engine.update_weights(version=5)
    else:
        engine.close()
    wait_for(lambda: len(fake.given_up) == 4)
    is_released.set()
    if event == "close":
        return
    engine.wake_up()
    found = drain(engine)
    assert [found[number].token_ids for number in numbers] == expected
    assert {turn.policy_version for turn in found.values()} == {5 if event == "update" else 0}


def test_a_refusal_reaches_the_user_once_in_the_servers_words(make_engine, fake, monkeypatch):
    engine = make_engine()
    prompts = make_prompts([3, 5, 2])
    expected = alone(engine, prompts)
    answer, held = fake._do, set()

    def refuse(path: str, body: Any) -> tuple[int, Any]:
        if path == COMPLETIONS and body["prompt"] == list(prompts[2].token_ids):
            return 400, {"error": {"message": "2 tokens are too few for me"}}
        return answer(path, body)

    def hold(body: dict[str, Any]) -> bool:
        held.add(str(body["prompt"]))
        return False

    with monkeypatch.context() as patch:
        patch.setattr(fake, "_do", refuse)
        patch.setattr(fake, "draw", hold)
        numbers = engine.submit(prompts[:2], SAMPLING)
        wait_for(lambda: len(held) == 2, engine.poll)
        numbers += engine.submit(prompts[2:], SAMPLING)
        with pytest.raises(RequestRefused, match="HTTP 400: 2 tokens are too few for me"):
            drain(engine)
        wait_for(lambda: len(fake.given_up) == 2)
    found = drain(engine)
    assert [found[number].token_ids for number in numbers] == expected


def test_a_server_that_always_fails_is_an_error_with_advice(make_engine, fake):
    engine = make_engine()
    (number,) = engine.submit(make_prompts([3]), SAMPLING)
    fake.faults[COMPLETIONS] = [error_500] * 5
    with pytest.raises(RuntimeError, match=r"(?s)HTTP 500: out of luck.*vllm_on_server_loss='wait'"):
        drain(engine)
    assert fake.requests.count(COMPLETIONS) == 5
    engine.abort([number])


@pytest.mark.parametrize("on_server_loss", ["error", "wait"])
def test_a_restart_between_two_turns_is_noticed(make_engine, fake, on_server_loss):
    engine = make_engine(on_server_loss=on_server_loss)
    prompts = make_prompts([3, 5])
    expected = alone(engine, prompts)
    is_released = threading.Event()
    fake.draw = lambda body: body["prompt"] == list(prompts[0].token_ids) or is_released.is_set()
    numbers = engine.submit(prompts, SAMPLING)
    found: dict[int, Completion] = {}
    wait_for(lambda: found, lambda: found.update(engine.poll()))
    with fake._lock:
        fake.restart()
    is_released.set()
    if on_server_loss == "error":
        with pytest.raises(RuntimeError, match="restarted during a rollout"):
            drain(engine)
        return
    found |= drain(engine)
    assert [found[number].token_ids for number in numbers] == expected
    assert engine.num_restarts == 1


def test_a_server_that_hangs_is_noticed_by_polling(make_engine, fake, hang):
    engine = make_engine(timeouts=Timeouts(answer_s=0.4, silence_s=0.1))
    engine.generate(make_prompts([3]), SAMPLING)
    engine.submit(make_prompts([3]), SAMPLING)
    fake.faults[COMPLETIONS] = [hang] * 10
    fake.faults["/health"] = [hang] * 10
    with pytest.raises(RuntimeError, match=r"(?s)/health had no usable answer.*vllm_on_server_loss"):
        drain(engine)


def test_generating_in_between_leaves_turns_under_way(make_engine, fake):
    engine = make_engine()
    prompts, (other,) = make_prompts([3, 5]), make_prompts([4], seed=1)
    expected = alone(engine, [*prompts, other])
    is_released = threading.Event()
    fake.draw = lambda body: body["prompt"] == list(other.token_ids) or is_released.is_set()
    num_before = fake.reached.count(COMPLETIONS)
    numbers = engine.submit(prompts, dataclasses.replace(SAMPLING))
    assert engine.poll() == {}
    assert alone(engine, [other]) == expected[2:]
    is_released.set()
    found = drain(engine)
    assert [found[number].token_ids for number in numbers] == expected[:2]
    assert fake.reached.count(COMPLETIONS) - num_before == 3, "a turn was sent twice"
