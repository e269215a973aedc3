"""When an engine is of no use: it hangs, it is broken, or its thread has ended; and when it is only busy."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import make_model

from colocate.engines.native.engine import NativeEngine
from colocate.serving import engine_thread as module
from colocate.serving.engine_thread import (
    CALL_S,
    FIRST_STEPS_S,
    NUM_FIRST_STEPS,
    STEP_S,
    Stepper,
    step_limit_s,
)
from colocate.serving.refusal import Refusal
from tiny import StubEngine


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeDriver:
    """Does what a test says, and notes what requests are told."""

    has_requests = True

    def __init__(self) -> None:
        self.advance: Callable[[float], object] = lambda wait_s: None
        self.draw_one: Callable[[], object] = lambda: None
        self.told: list[str] = []

    def fail(self, error: Exception, wait_s: float = 0.0) -> None:
        self.told.append(str(error))


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=clock))
    return clock


def stepping(step_s: float = STEP_S) -> tuple[Stepper, Any]:
    driver: Any = FakeDriver()
    return Stepper(driver, step_s), driver


def stood_for(clock: Clock, stepper: Stepper, seconds: float) -> bool:
    """Whether the engine is of use after a step has taken so long, and before it ends."""
    is_of_use: list[bool] = []

    def advance(wait_s: float) -> None:
        clock.now_s += seconds
        is_of_use.append(stepper.trouble is None)

    stepper._driver.advance = advance  # type: ignore[method-assign]
    stepper.step(0.0)
    assert stepper.trouble is None or not is_of_use[0]
    return is_of_use[0]


def test_first_steps_may_compile_for_minutes_and_later_ones_may_not(clock):
    stepper, _ = stepping()
    for _ in range(NUM_FIRST_STEPS):
        assert stood_for(clock, stepper, FIRST_STEPS_S - 1)
    assert stood_for(clock, stepper, STEP_S - 1)
    assert not stood_for(clock, stepper, STEP_S + 1)
    with pytest.raises(Refusal, match=r"hangs: .* for 61 s, longer than the 60 s .* at step 18") as raised:
        stepper.check()
    assert raised.value.status == 503
    stepper.note_call()
    stepper.check()  # it was only slow


def test_a_first_step_hangs_when_no_compilation_takes_so_long(clock):
    assert not stood_for(clock, stepping()[0], FIRST_STEPS_S + 1)


def test_how_long_a_later_step_may_take_depends_on_engine_and_device(clock):
    cpu, gpu, engine = torch.device("cpu"), torch.device("cuda"), NativeEngine(make_model("qwen3"))
    assert step_limit_s(engine, gpu) == STEP_S and step_limit_s(engine, cpu) == FIRST_STEPS_S
    assert step_limit_s(StubEngine(lambda prompt, member: [1]), gpu) == math.inf
    stepper, _ = stepping(math.inf)
    for _ in range(NUM_FIRST_STEPS + 1):
        assert stood_for(clock, stepper, 10 * FIRST_STEPS_S)


def test_what_is_done_between_steps_has_a_limit_of_its_own(clock):
    stepper, _ = stepping()
    stepper.note_call()
    clock.now_s += CALL_S
    stepper.check()
    clock.now_s += 1
    assert "hangs" in str(stepper.trouble)


def test_an_engine_that_fails_once_is_of_use():
    stepper, driver = stepping()
    driver.advance = lambda wait_s: 1 / 0
    stepper.step(0.0)
    stepper.check()
    assert driver.told == ["The engine has failed: division by zero"]


def test_an_engine_that_cannot_draw_a_token_is_broken_until_it_can(clock):
    stepper, driver = stepping()
    driver.advance, driver.draw_one = lambda wait_s: 1 / 0, lambda: [][0]
    stepper.step(0.0)
    with pytest.raises(Refusal, match=r"cannot draw a single token \(IndexError\)"):
        stepper.check()
    num_steps = stepper.num_steps
    driver.draw_one = lambda: None
    stepper.step(0.0)  # it is not asked all the time
    assert stepper.trouble is not None and driver.told[-1] == stepper.trouble
    clock.now_s += module._PROBE_S
    stepper.step(0.0)
    stepper.check()
    assert stepper.num_steps == num_steps


def test_a_thread_that_has_ended_is_told_to_all_even_if_the_engine_lets_nothing_go():
    stepper, driver = stepping()
    assert stepper.end(SystemExit("x")).status == 503
    assert driver.told == [stepper.trouble]
    driver.fail = lambda error: 1 / 0
    refusal = stepper.end(MemoryError())
    assert str(refusal) == stepper.trouble and "(MemoryError)" in str(refusal)
