"""Requests of many callers on one engine: each gets what it would get alone, whatever the others do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.engines.native.engine import NativeEngine
from colocate.engines.requests import turn_key
from colocate.engines.transformers_engine import TransformersEngine
from colocate.rollout_server.trainer.pool import EnginePool
from colocate.serving.driver import Begun, Drawn, Driver, Job
from colocate.types import Completion, Prompt, SamplingParams
from native_replica import NativeReplica
from serving_case import STOP, random_model, sampling_of

MAX_LEN = 64
SAMPLINGS = [sampling_of(MAX_LEN), sampling_of(MAX_LEN, temperature=0.5), sampling_of(MAX_LEN, top_k=3)]
MAX_TURNS = 2000


def native(**options: Any) -> NativeEngine:
    return NativeEngine(random_model(), max_num_seqs=4, max_model_len=MAX_LEN, page_size=4, **options)


def pool() -> EnginePool:
    return EnginePool(
        [NativeReplica(random_model(), max_num_seqs=3, max_model_len=MAX_LEN) for _ in range(2)]
    )


def transformers() -> TransformersEngine:
    return TransformersEngine(random_model(), pad_token_id=0, max_num_seqs=4)


@dataclass
class Caller:
    """What one job is told, put together."""

    job: Any = None
    updates: list[Any] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        ends = [u for u in self.updates if isinstance(u, Drawn) and u.finish_reason]
        return len(ends) == len(self.job.prompt.samples) or any(
            isinstance(u, Exception) for u in self.updates
        )

    def completion(self, choice: int) -> tuple[tuple[int, ...], tuple[float, ...], str | None]:
        drawn = [u for u in self.updates if isinstance(u, Drawn) and u.choice == choice]
        ids = tuple(i for u in drawn for i in u.token_ids)
        return ids, tuple(x for u in drawn for x in u.logprobs or ()), drawn[-1].finish_reason


def ask(driver: Driver, prompt: Prompt, sampling: SamplingParams, **options: Any) -> Caller:
    caller = Caller()
    caller.job = Job(prompt, sampling, caller.updates.append, **options)
    driver.ask(caller.job)
    return caller


def finish(driver: Driver, *callers: Caller) -> None:
    for _ in range(MAX_TURNS):
        if all(caller.is_over for caller in callers):
            return
        driver.advance()
    raise AssertionError("not all requests were answered")


def fresh(make: Any) -> Any:
    engine = make()
    engine.wake_up()
    return engine


def alone(engine: Any, caller: Caller) -> list[Completion]:
    return engine.generate([caller.job.prompt], caller.job.sampling)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, Prompt, SamplingParams, bool, int | None]]:
    """When each comes, what it asks, whether it follows its tokens, and after how many turns it leaves."""
    found = []
    for key in range(draw(st.integers(1, 7))):
        ids = tuple(draw(st.lists(st.integers(2, 90), min_size=1, max_size=9)))
        n, limit = draw(st.integers(1, 3)), draw(st.integers(1, 20))
        leaves = draw(st.none() | st.integers(0, 6))
        prompt = Prompt(ids, 1000 + key, range(n), (limit,) * n)
        sampling = draw(st.sampled_from(SAMPLINGS))
        found.append((draw(st.integers(0, 8)), prompt, sampling, draw(st.booleans()), leaves))
    return found


@pytest.mark.parametrize("make", [native, pool, transformers])
@settings(max_examples=12)
@given(asked=requests())
@pytest.mark.share(3)
def test_each_completion_is_the_one_drawn_alone_and_those_who_leave_disturb_nobody(make, asked):
    engine = make()
    engine.wake_up()
    driver = Driver(engine, slice_s=0.001)
    callers: list[Caller | None] = [None] * len(asked)
    for turn in range(MAX_TURNS):
        for number, (at, prompt, sampling, is_followed, leaves) in enumerate(asked):
            if turn == at:
                callers[number] = ask(driver, prompt, sampling, is_followed=is_followed)
            if leaves is not None and turn == at + leaves:
                driver.cancel(callers[number].job)
        driver.advance()
        started = [c for c, (*_, leaves) in zip(callers, asked, strict=True) if leaves is None]
        if turn > 15 and all(caller.is_over for caller in started):
            break
    else:
        raise AssertionError("not all requests were answered")
    driver.advance()
    assert not engine.is_busy and not driver._batches
    fresh = make()
    fresh.wake_up()
    for caller, (*_, leaves) in zip(callers, asked, strict=True):
        if leaves is not None:
            continue
        assert caller is not None and isinstance(caller.updates[0], Begun)
        for choice, expected in enumerate(alone(fresh, caller)):
            ids, logprobs, reason = caller.completion(choice)
            assert (ids, reason) == (expected.token_ids, expected.finish_reason)
            assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    engine.close()
    fresh.close()


def test_a_long_request_does_not_keep_one_with_other_parameters_waiting():
    """The native engine sets the long one aside; without that the short one would come last."""
    engine = native()
    engine.wake_up()
    driver = Driver(engine, slice_s=0.0)
    greedy = sampling_of(MAX_LEN, temperature=0.0)
    never_stops = SamplingParams(max_tokens=MAX_LEN, seed=0)
    long = ask(driver, Prompt((5, 6), 1, range(1), (60,)), never_stops, is_followed=True)
    for _ in range(3):
        driver.advance()
    short = ask(driver, Prompt((5, 6), 1, range(1), (2,)), greedy)
    finish(driver, short)
    assert 0 < sum(len(u.token_ids) for u in long.updates if isinstance(u, Drawn)) < 60
    finish(driver, long)
    assert [long.completion(0)[0]] == [c.token_ids for c in alone(engine, long)]


def test_an_engine_that_fails_ends_the_requests_that_it_had_and_takes_new_ones(monkeypatch):
    engine = native()
    engine.wake_up()
    driver = Driver(engine)
    prompt = Prompt((5, 6), 1, range(1), (4,))
    first, waiting = ask(driver, prompt, SAMPLINGS[0]), ask(driver, prompt, SAMPLINGS[1])
    with monkeypatch.context() as patch:
        patch.setattr(engine, "poll", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.advance()
        driver.fail(RuntimeError("gone"))
    assert isinstance(first.updates[-1], RuntimeError) and isinstance(waiting.updates[-1], RuntimeError)
    again = ask(driver, prompt, SAMPLINGS[0])
    finish(driver, again)
    assert again.completion(0)[0] == alone(engine, again)[0].token_ids


def test_a_request_that_cannot_be_drawn_ends_alone():
    engine = native()
    engine.wake_up()
    driver = Driver(engine)
    good = ask(driver, Prompt((5, 6), 1, range(1), (4,)), SAMPLINGS[0])
    bad = ask(driver, Prompt((5,) * MAX_LEN, 1, range(1), (4,)), SAMPLINGS[0])
    finish(driver, good)
    assert isinstance(bad.updates[0], ValueError) and "context" in str(bad.updates[0])
    assert good.completion(0)[0]


def test_a_kept_sequence_is_extended_and_let_go_in_the_end():
    engine = native()
    engine.wake_up()
    driver = Driver(engine)
    sampling = SamplingParams(max_tokens=40, stop_token_ids=(STOP,))
    first = ask(driver, Prompt((5, 6), 1, range(1), (4,)), sampling, keep=True)
    finish(driver, first)
    number = next(u.sequence for u in first.updates if isinstance(u, Drawn) and u.finish_reason)
    assert number is not None
    second = ask(
        driver, Prompt((5, 6), 1, range(1), (5,)), sampling, keep=True, extends=number, given_ids=(7, 8)
    )
    finish(driver, second)
    (number,) = engine.submit([Prompt((5, 6), 1, range(1), (4,))], sampling, keep=True)
    turns = []
    for added in ((7, 8), None):
        while number not in (ended := engine.poll()):
            pass
        turns.append(ended[number].token_ids)
        if added:
            engine.extend(number, added, 5)
    assert [first.completion(0)[0], second.completion(0)[0]] == turns
    engine.abort([number])
    driver.fail(RuntimeError("the end"))
    assert not engine._submissions.sequences


@pytest.mark.parametrize("make", [native, pool, transformers])
@pytest.mark.parametrize("is_another_drawn", [False, True], ids=["resting", "drawing"])
def test_kept_sequences_make_room_for_other_parameters_and_go_on_after_them(make, is_another_drawn):
    """The turns of an agent are those that it has alone, whoever asks with other parameters in between."""
    sampling, turns = SamplingParams(max_tokens=50, stop_token_ids=(STOP,), seed=3), []
    for has_visitor in (False, True):
        engine = make()
        engine.wake_up()
        driver = Driver(engine, slice_s=0.0)
        first = ask(driver, Prompt((5, 6), 1, range(1), (4,)), sampling, keep=True)
        finish(driver, first)
        (number,) = (u.sequence for u in first.updates if isinstance(u, Drawn) and u.finish_reason)
        assert number is not None
        whole = (5, 6, *first.completion(0)[0], 7)
        if has_visitor:
            others = [ask(driver, Prompt((8, 9), 5, range(2), (9, 9)), SAMPLINGS[1])]
            others += [ask(driver, Prompt((8,), 6, range(1), (30,)), sampling)] * is_another_drawn
            finish(driver, *others)
            for other in others:
                assert [other.completion(n)[0] for n in other.job.prompt.samples] == [
                    completion.token_ids for completion in alone(fresh(make), other)
                ]
        options: dict[str, Any] = dict(keep=True, extends=number, given_ids=(7,))
        second = ask(driver, Prompt(whole, turn_key(1, 1), range(1), (5,)), sampling, **options)
        finish(driver, second)
        turns.append((first.completion(0)[0], second.completion(0)[0]))
        driver.fail(RuntimeError("the end"))
        assert not engine.is_busy and not driver._batches
        engine.close()
    assert turns[0] == turns[1]


def test_a_request_of_a_rollout_that_is_over_extends_nobodys_sequence():
    engine = native()
    engine.wake_up()
    driver = Driver(engine)
    finish(driver, first := ask(driver, Prompt((5, 6), 1, range(1), (4,)), SAMPLINGS[0], keep=True))
    driver.fail(RuntimeError("the rollout is over"))
    prompt = Prompt((5, 6, *first.completion(0)[0], 7), 2, range(1), (4,))
    finish(driver, late := ask(driver, prompt, SAMPLINGS[0], extends=0, given_ids=(7,)))
    assert late.completion(0)[0] == alone(engine, late)[0].token_ids


@pytest.mark.parametrize("breaks", [("submit",), ("poll", "abort")])
def test_whoever_waits_is_told_when_the_engine_fails(breaks, monkeypatch):
    engine = native()
    engine.wake_up()
    driver = Driver(engine)
    callers = [ask(driver, Prompt((5, 6), 1, range(1), (4,)), sampling) for sampling in SAMPLINGS[:2] * 2]
    for name in breaks:
        monkeypatch.setattr(engine, name, lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        driver.advance()
    driver.fail(RuntimeError("gone"))
    assert all(isinstance(caller.updates[-1], RuntimeError) for caller in callers)


def test_waiting_ends_with_a_request_or_a_wake():
    driver = Driver(native())
    start_s = time.monotonic()
    driver.wake()
    driver.advance(60.0)
    assert time.monotonic() - start_s < 30.0
