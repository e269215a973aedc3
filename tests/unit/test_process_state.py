"""What a user's code leaves changed of the process is put back, and named."""

import contextlib
import io
import sys
from concurrent.futures import wait

import pytest
import torch
from transformers import TrainerState

from colocate.episodes.environments import EnvironmentPool
from colocate.episodes.tool_runner import ToolRunner
from colocate.episodes.tools import ToolCall
from colocate.rewards.base import RewardFunctions
from colocate.users_code.background import BackgroundLoop
from tiny import StubEngine, make_trainer, weights_of

CHANGES = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "inference mode": lambda: HELD.append(torch.inference_mode()) or HELD[-1].__enter__(),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "default device": lambda: torch.set_default_device("meta"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
}
HELD: list = []


def modes():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_device(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.ones(1, requires_grad=True).sum().requires_grad,
    )


def call_reward(function):
    with contextlib.closing(RewardFunctions([function])) as functions:
        functions.score(["a"], ["b"], [[1]], {}, TrainerState())


def call_async_reward(function):
    async def judge(**columns):
        return function()

    call_reward(judge)


def call_tool(function):
    runner = ToolRunner()
    with runner:
        runner.start("key", [ToolCall(function, "tool", {})])
        while runner.has_work:
            runner.poll()


def call_reset(function):
    EnvironmentPool(type("Game", (), {"reset": lambda self, **row: function() and None})).begin([{}])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("door", [call_reward, call_tool, call_reset])
def test_modes_and_defaults_of_pytorch_are_put_back(door, change, caplog):
    before = modes()
    for raises in (False, True):

        def function(raises=raises, **columns):
            change()
            return [1 / 0 if raises else 1.0]

        with contextlib.suppress(Exception):
            door(function)
        assert modes() == before
    assert "changed, from" in caplog.text and "It is put back" in caplog.text


@pytest.mark.parametrize("name", ["default dtype", "precision"])
def test_what_an_async_function_changes_at_once_is_put_back(name, monkeypatch, caplog):
    before, submit = modes(), BackgroundLoop.submit

    def ended(loop, awaitable):
        future = submit(loop, awaitable)
        wait([future], timeout=60)
        return future

    monkeypatch.setattr(BackgroundLoop, "submit", ended)
    call_async_reward(lambda: CHANGES[name]() or [1.0])
    assert modes() == before
    assert "One of the reward functions (judge) has left" in caplog.text


@pytest.mark.parametrize("door", [call_reward, call_async_reward, call_tool, call_reset])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream_is_open_again_for_all_who_hold_it(door, name, monkeypatch, capfd):
    descriptor = {"stdout": 1, "stderr": 2}[name]
    stream = io.TextIOWrapper(open(descriptor, "wb", closefd=False), "utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, name, stream)

    def function(**columns):
        getattr(sys, name).close()
        return [1.0]

    door(function)
    assert getattr(sys, name) is stream and not stream.closed
    stream.write("still here ☃")
    stream.flush()
    assert "still here ☃" in getattr(capfd.readouterr(), name[3:])


def test_the_trainers_count_of_steps_is_not_a_functions(caplog):
    state = TrainerState(global_step=3, max_steps=7)

    def judge(trainer_state, **columns):
        trainer_state.global_step, trainer_state.max_steps, trainer_state.of_mine = 100, 3, "kept"
        return [1.0]

    with contextlib.closing(RewardFunctions([judge])) as functions:
        functions.score(["a"], ["b"], [[1]], {}, state)
    assert (state.global_step, state.max_steps, state.of_mine) == (3, 7, "kept")
    assert "'judge' has left trainer_state.global_step changed, from 3 to 100" in caplog.text


def test_a_run_goes_on_as_if_nothing_had_been_changed(tmp_path):
    def judge(completions, trainer_state, is_rude=False, **columns):
        if is_rude:
            trainer_state.global_step = 100
            for change in CHANGES.values():
                change()
        return [float(len(completion)) for completion in completions]

    trained = []
    for name, is_rude in (("clean", False), ("rude", True)):
        reward = lambda is_rude=is_rude, **columns: judge(is_rude=is_rude, **columns)  # noqa: E731
        engine = StubEngine(lambda prompt, member: [8] * (member + 1) + [1])
        trainer = make_trainer(tmp_path / name, reward_funcs=reward, stub=engine)
        assert trainer.train().global_step == 2
        trained.append(weights_of(trainer.model))
    for name, weights in trained[0].items():
        assert torch.equal(weights, trained[1][name])
