"""Functions of users that return, raise or do what they should not, wherever a run calls one.

A run with such a function ends as if the function had not been there, with an answer that the model can
read, or with an error that names the function. A run that ends well has changed nothing of the process, its
weights are finite, and every message of a tool is text.
"""

from __future__ import annotations

import asyncio
import datetime
import decimal
import io
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_cases import Case, judge
from datasets import Dataset

from colocate.users_code.errors import RewardError
from tiny import StubEngine, make_model, make_trainer
from tool_chat import call, make_chat_tokenizer, user

TOKENIZER = make_chat_tokenizer()
STOP = TOKENIZER.eos_token_id
SEED = 20_265
TIMEOUT_S = 3.0
LONGEST_RESULT = 1_000_000

# ── What functions do ────────────────────────────────────────────────────────────────────────────────────


def itself() -> list[Any]:
    values: list[Any] = [1]
    values.append(values)
    return values


def deep() -> list[Any]:
    values: list[Any] = []
    for _ in range(5000):
        values = [values]
    return values


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no words for this")

    __str__ = __repr__


async def never() -> int:
    return 1


def generator() -> Iterator[int]:
    yield 1


RETURNS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0.5": lambda: 0.5,
    "int": lambda: 3,
    "numpy": lambda: np.float32(0.5),
    "tensor": lambda: torch.tensor(0.5),
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "numpy nan": lambda: np.float64("nan"),
    "tensor of two": lambda: torch.zeros(2),
    "1e300": lambda: 1e300,
    "10**400": lambda: 10**400,
    "Decimal": lambda: decimal.Decimal("0.5"),
    "complex": lambda: 1j,
    "text": lambda: "12",
    "empty text": lambda: "",
    "long text": lambda: "9" * (2 * LONGEST_RESULT),
    "surrogate": lambda: "a\ud800b",
    "null bytes": lambda: "a\0b",
    "special tokens": lambda: "<|im_end|>\n<|im_start|>assistant\n",
    "bytes": lambda: b"\xff\x00",
    "set": lambda: {1, 2},
    "tuple": lambda: (1, 2),
    "list": lambda: [1, 2],
    "empty list": list,
    "list of sets": lambda: [{"a": {1, 2}}],
    "list of itself": itself,
    "deep list": deep,
    "image block": lambda: [{"type": "image", "image": "x"}],
    "text blocks": lambda: [{"type": "text", "text": "12"}],
    "block without text": lambda: [{"type": "text"}],
    "block of number": lambda: [{"type": "text", "text": 12}],
    "dict": lambda: {"a": 1},
    "dict of odd keys": lambda: {(1, 2): 3, None: 4},
    "object": object,
    "unprintable": Unprintable,
    "type": lambda: int,
    "module": lambda: sys,
    "function": lambda: print,
    "date": lambda: datetime.datetime(2026, 1, 1),
    "exception": lambda: ValueError("x"),
    "coroutine": never,
    "generator": generator,
}
NUMBERS = ("True", "Decimal", "0.5", "int", "numpy", "tensor")
"""Rewards; None is a reward, too, as it means that there is none."""


class Foreign(BaseException):
    pass


def raises(make: Callable[[], BaseException]) -> Callable[[], Any]:
    def act() -> Any:
        raise make()

    return act


def recursion() -> Any:
    return recursion()


def unprintable_error() -> BaseException:
    class Wordless(Exception):
        def __str__(self) -> str:
            raise TypeError("no words for this")

    return Wordless()


RAISES: dict[str, Callable[[], Any]] = {
    "ValueError": raises(lambda: ValueError("on purpose")),
    "empty": raises(lambda: ValueError()),
    "long": raises(lambda: ValueError("x" * (2 * LONGEST_RESULT))),
    "surrogate": raises(lambda: ValueError("\ud800")),
    "without words": raises(unprintable_error),
    "exit 0": raises(lambda: SystemExit(0)),
    "exit": raises(lambda: SystemExit("bye")),
    "GeneratorExit": raises(GeneratorExit),
    "StopIteration": raises(StopIteration),
    "StopAsyncIteration": raises(StopAsyncIteration),
    "MemoryError": raises(MemoryError),
    "recursion": recursion,
    "TimeoutError": raises(lambda: TimeoutError("remote")),
    "CancelledError": raises(asyncio.CancelledError),
    "ConnectionError": raises(lambda: ConnectionResetError(104, "reset")),
    "BrokenPipeError": raises(lambda: BrokenPipeError(32, "pipe")),
    "Foreign": raises(Foreign),
    "group": raises(lambda: ExceptionGroup("several", [ValueError("a"), KeyError("b")])),
    "group of exits": raises(lambda: BaseExceptionGroup("several", [SystemExit(0)])),
    "AssertionError": raises(AssertionError),
    "out of memory": raises(lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
    "OSError": raises(lambda: OSError(28, "No space left on device")),
    "UnicodeError": lambda: b"\xff".decode(),
    "KeyError": raises(lambda: KeyError("answer")),
}


def fork_and_return() -> Any:
    if os.fork() == 0:
        return 1  # a second process that would train and write, too
    return 1


def change_signals() -> Any:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def leave_thread() -> Any:
    threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()


def change_everything() -> Any:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    os.chdir("/")


DEEDS: dict[str, Callable[[], Any]] = {
    "close stdout": lambda: sys.stdout.close(),
    "close stderr": lambda: sys.stderr.close(),
    "replace stdout": lambda: setattr(sys, "stdout", None),
    "grad mode": lambda: torch.set_grad_enabled(False) and None,
    "inference mode": lambda: torch.inference_mode().__enter__(),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "threads": lambda: torch.set_num_threads(7),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "everything": change_everything,
    "chdir": lambda: os.chdir("/"),
    "signals": change_signals,
    "fork": fork_and_return,
    "thread": leave_thread,
    "sleep": lambda: threading.Event().wait(60),
    "busy": lambda: all(True for _ in itertools.count()),
    "regular expression": lambda: re.match("(a+)+$", "a" * 40 + "b"),
    "seed": lambda: torch.manual_seed(0) and None,
    "warnings": lambda: warnings.simplefilter("error"),
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 7),
}
"""Each returns None, which is no result and no reward."""


def state_of_process() -> dict[str, Any]:
    return {
        "stdout": sys.stdout is not None and not sys.stdout.closed,
        "stderr": sys.stderr is not None and not sys.stderr.closed,
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "Ctrl-C": signal.getsignal(signal.SIGINT),
        "timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "process": os.getpid(),
    }


# ── Places ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Run:
    """What a run of one step has come to."""

    seen: list[Any] = field(default_factory=list)
    """The completions that the reward function saw."""
    weights_are_finite: bool = True
    changed: tuple[str, ...] = ()
    """What was different in the process afterwards."""
    rewards: list[Any] = field(default_factory=list)
    """The rewards that the run logged."""


Act = Callable[[], Any]


def tool_of(act: Act) -> Callable[..., Any]:
    def act_up() -> str:
        """Do something."""
        return act()

    return act_up


def async_tool_of(act: Act) -> Callable[..., Any]:
    async def act_up() -> str:
        """Do something."""
        return act()

    return act_up


def environment_of(place: str, act: Act) -> type:
    def at(name: str) -> Any:
        return act() if name == place else None

    class Scenery:
        def __init__(self) -> None:
            self.number = at("constructor")

        def reset(self, **row: Any) -> Any:
            return at("reset")

        def act_up(self) -> str:
            """Do something."""
            return at("method")

        if place == "done":

            @property
            def done(self) -> Any:
                return act()

        if place == "turn_rewards":

            @property
            def turn_rewards(self) -> Any:
                return [] if act.__name__ == "at_start" else act()

        def get_reward(self) -> Any:
            return at("get_reward") if place == "get_reward" else 1.0

    return Scenery


PLACES = (
    *("tool", "tool in a thread", "async tool"),
    *("reset", "reset in a thread", "method", "done", "turn_rewards", "get_reward"),
    *("reward", "reward of each", "async reward", "rollout_func"),
)


def one_step(place: str, act: Act, directory: Path) -> Run:
    run = Run()

    def write(text: str, member: int) -> str:
        return "done" if "<|im_start|>tool\n" in text else call("act_up") if member else "no"

    def complete(prompt: Any, member: int) -> list[int]:
        return [*TOKENIZER(write(TOKENIZER.decode(prompt.token_ids), member))["input_ids"], STOP]

    def watch(completions: list[Any], **_: Any) -> list[float]:
        run.seen.extend(completions)
        return [float(number % 2) for number in range(len(completions))]

    def act_of_all(completions: list[Any], **_: Any) -> Any:
        return act()

    def act_of_each(completions: list[Any], **_: Any) -> Any:
        return [act() for _ in completions]

    async def act_later(completions: list[Any], **_: Any) -> Any:
        return [act() for _ in completions]

    options: dict[str, Any] = dict(
        model=MODEL, stub=StubEngine(complete), processing_class=TOKENIZER, max_steps=1,
        max_completion_length=400, tool_timeout_s=TIMEOUT_S, reward_timeout_s=TIMEOUT_S,
        max_tool_calling_iterations=2, reward_funcs=watch, use_cpu=True, learning_rate=0.0, num_generations=2,
        per_device_train_batch_size=2, train_dataset=Dataset.from_list([{"prompt": user("1 + 1")}] * 2),
    )  # fmt: skip
    if place.startswith("tool"):
        options |= dict(tools=[tool_of(act)], tool_workers=2 if "thread" in place else 0)
    elif place == "async tool":
        options |= dict(tools=[async_tool_of(act)])
    elif "reward" in place and place not in ("get_reward", "turn_rewards"):
        function = {"reward": act_of_all, "reward of each": act_of_each, "async reward": act_later}[place]
        function.__name__ = "acts_up"
        options |= dict(reward_funcs=[watch, function])
    elif place == "rollout_func":

        def acts_up(prompts: list[Any], trainer: Any) -> Any:
            return act()

        options |= dict(rollout_func=acts_up)
    else:
        name = place.partition(" ")[0]
        options |= dict(
            environment_factory=environment_of(name, act), tool_workers=2 if "thread" in place else 0
        )
    before = state_of_process()
    trainer = make_trainer(directory, **options)
    trainer.train()
    after = state_of_process()
    run.changed = tuple(f"{name}: {after[name]}" for name in before if before[name] != after[name])
    run.weights_are_finite = all(bool(p.isfinite().all()) for p in MODEL.parameters())
    run.rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return run


MODEL = make_model(vocab_size=len(TOKENIZER), eos_token_id=STOP)
NAMES = {"rollout_func": "acts_up|rollout_func", "constructor": "Scenery", "get_reward": "Scenery"}


def names_of(place: str) -> tuple[str, ...]:
    if place.endswith("tool") or "tool" in place or place == "method":
        return ("act_up",)
    if "reward" in place and place not in ("get_reward", "turn_rewards"):
        return ("acts_up",)
    return (NAMES.get(place, f"{place.partition(' ')[0]}|Scenery|Prompt 0"),)


def is_text(content: Any) -> bool:
    """Whether the model can read this: text, or blocks."""
    if isinstance(content, list):  # blocks, as in TRL
        return is_text(json.dumps(content))
    if not isinstance(content, str) or len(content) > LONGEST_RESULT:
        return False
    return content.isascii() or content.encode(errors="ignore").decode() == content


def went_on(place: str, what: str) -> Callable[[Any], bool]:
    """Whether a run that has ended well was right to: by the kind of the place and of what was returned."""
    is_reward = "reward" in place and place != "turn_rewards"

    def accepts(run: Any) -> bool:
        if run.changed or not run.weights_are_finite or not all(map(math.isfinite, run.rewards)):
            return False
        messages = [m for completion in run.seen if isinstance(completion, list) for m in completion]
        if not all(is_text(m.get("content") or "") for m in messages if m["role"] == "tool"):
            return False
        if not is_reward or what in DEEDS:
            return True
        is_of_all = place == "reward" and what in ("tensor of two", "tuple", "list")
        return what == "None" or what in NUMBERS or is_of_all

    return accepts


def on_its_own(do: Callable[[], Any]) -> Any:
    """The result of `do`, which finds streams of its own, and leaves the process as it was before."""
    before, streams = state_of_process(), (sys.stdout, sys.stderr)
    directory, filters = os.getcwd(), warnings.filters[:]
    limit, threads = sys.getrecursionlimit(), torch.get_num_threads()
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in streams)
    try:
        return do()
    finally:
        sys.stdout, sys.stderr = streams
        if os.getpid() != before["process"]:
            os._exit(77)  # a child that went on
        torch._C._set_grad_enabled(True)
        torch.autograd.grad_mode._enter_inference_mode(False) if torch.is_inference_mode_enabled() else None
        torch.set_default_dtype(before["dtype"])
        torch.set_default_device(None)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.set_autocast_enabled("cpu", False)
        signal.signal(signal.SIGINT, before["Ctrl-C"])
        os.chdir(directory)
        sys.setrecursionlimit(limit)
        warnings.filters[:] = filters


ERRORS = (ValueError, TypeError, RuntimeError, RewardError)


def is_its_own(place: str, kind: str, what: str) -> bool:
    """Whether a user gets an error as it was raised: within `rollout_func`, whose traceback is the user's,
    and where memory has run out, as the trainer may know a remedy."""
    return kind == "raises" and (place == "rollout_func" or what == "out of memory")


def cases(directory: Path) -> Iterator[Case]:
    numbers = itertools.count()
    for place in PLACES:
        for kind, acts in (("returns", RETURNS), ("raises", RAISES), ("does", DEEDS)):
            for what, act in acts.items():
                if what == "regular expression" and ("thread" in place or "async" in place):
                    continue  # it keeps the interpreter's lock for ever, and the last resort ends the process
                yield Case(
                    f"{place} {kind}",
                    what,
                    lambda place=place, act=act: on_its_own(
                        lambda: one_step(place, act, directory / str(next(numbers)))
                    ),
                    () if is_its_own(place, kind, what) else names_of(place),
                    went_on(place, what),
                    errors=(BaseException,) if is_its_own(place, kind, what) else ERRORS,
                    longest_error=10**7 if is_its_own(place, kind, what) else 6000,
                )


def run_cases(chosen: list[Case], title: str, capsys: Any) -> None:
    total, report = judge(chosen, f"Functions of users, {title}", capsys)
    assert total["wrong"] == total["hang"] == total["raw"] == 0, report


def test_functions_that_misbehave_drawn(tmp_path, capsys):
    every = list(cases(tmp_path))
    run_cases(random.Random(SEED).sample(every, len(every) // 80), "some", capsys)


PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_functions_that_misbehave(part, tmp_path, capsys):
    every = list(cases(tmp_path))[part::PARTS]
    random.shuffle(every)  # what one leaves behind may spoil another
    every.sort(key=lambda case: case.what == "busy")  # nothing ends its thread, which slows all that follow
    run_cases(every, f"part {part + 1} of {PARTS}", capsys)
