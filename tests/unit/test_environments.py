"""Environments: pooled, replaced when they break, refused when they are none; their ends and rewards."""

import asyncio
import os
import threading
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.episodes.content import MAX_CHARS
from colocate.episodes.environments import EnvironmentPool
from colocate.episodes.tool_runner import ToolResult
from colocate.rewards.base import RewardFunctions
from colocate.users_code.exits import EXIT_CODE


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: A number.
        b: A number.
    """
    return a + b


class Base:
    def inherited(self) -> str:
        """Inherited."""
        return "inherited"

    def reset(self, **row):
        self.row = row
        return self.observation

    observation: str | list | None = None


class Game(Base):
    attribute = 3

    def __init__(self):
        self.bound = lambda: "only the instance has it"
        self.done = False

    def zeta(self, word: str) -> str:
        """Zeta.

        Args:
            word: A word.
        """
        return word

    async def alpha(self) -> str:
        """Alpha."""
        return "alpha"

    @staticmethod
    def static(number: int) -> int:
        """Static.

        Args:
            number: A number.
        """
        return number

    @classmethod
    def of_class(cls) -> str:
        """A class method is no tool."""
        return cls.__name__

    @property
    def costly(self):
        raise RuntimeError("properties are not to be evaluated")

    def get_reward(self):
        return 1.5

    def _hidden(self):
        return None


class Other(Base):
    observation = " seen"

    def beta(self) -> str:
        """Beta."""
        return "beta"


def begin(pool, row):
    [scene] = pool.begin([row])
    return scene


def test_tools_are_the_functions_of_the_class():
    pool = EnvironmentPool(Game, [add])
    assert pool.toolboxes[None].names == ("add", "alpha", "inherited", "static", "zeta")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(["game", "other"]), st.integers(0, 5)), max_size=25))
def test_live_episodes_never_share_an_environment_and_no_more_are_made_than_needed(steps):
    made = []

    def factory(kind):
        def make():
            made.append(kind())
            return made[-1]

        return make

    pool = EnvironmentPool({"game": factory(Game), "other": factory(Other)})
    live, most = [], {"game": 1, "other": 1}
    for step in steps:
        if isinstance(step, str):
            live.append(begin(pool, {"environment": step}))
            most[step] = max(most[step], sum(scene.name == step for scene in live))
        elif step < len(live):
            pool.end(live.pop(step))
        assert len({id(scene.environment) for scene in live}) == len(live)
        for scene in live:
            assert all(
                getattr(function, "__self__", scene.environment) is scene.environment
                for function in scene.toolbox.functions
            )
    assert len(made) == sum(most.values())


def test_an_environment_may_change_its_row():
    class Greedy(Base):
        def reset(self, prompt, numbers):
            numbers.append(4)
            prompt[-1]["content"] = "changed"

    row = {"prompt": [{"role": "user", "content": "a"}], "numbers": [3]}
    assert begin(EnvironmentPool(Greedy), row).prompt == row["prompt"]
    assert row == {"prompt": [{"role": "user", "content": "a"}], "numbers": [3]}


def test_rewards_are_columns_of_the_classes():
    class Judged(Base):
        async def get_reward(self):
            await asyncio.sleep(0.001)
            return 0.25

    class Sub(Game):
        pass

    class SubJudged(Judged):
        pass

    kinds = [Game, Judged, Other, Sub, SubJudged]
    pool = EnvironmentPool({"again": Game} | {kind.__name__: kind for kind in kinds})
    scenes = pool.begin([{"environment": name} for name in ["again", *(kind.__name__ for kind in kinds)]])
    functions = RewardFunctions(pool.reward_functions)
    assert functions.names == ["Game", "Judged", "Sub", "SubJudged"]
    columns = {"environments": [scene.environment for scene in scenes]}
    try:
        table = functions.score(["?"] * 6, ["!"] * 6, [[1]] * 6, columns, None)
    finally:
        functions.close()
    rewards = {"again": [1.5, 0, 0, 0], "Game": [1.5, 0, 0, 0], "Judged": [0, 0.25, 0, 0], "Other": [0] * 4}
    rewards |= {"Sub": [0, 0, 1.5, 0], "SubJudged": [0, 0, 0, 0.25]}
    none_as_nan = [[value or float("nan") for value in row] for row in rewards.values()]
    np.testing.assert_equal(table.rewards.tolist(), none_as_nan)


def test_an_environment_whose_reset_fails_once_is_replaced(caplog):
    class Fragile(Base):
        made = 0

        def __init__(self):
            type(self).made += 1
            self.is_broken = self.made == 1

        def reset(self, seed, **row):
            if self.is_broken or seed < 0:
                raise ConnectionError("gone")
            return f" {seed}"

    pool = EnvironmentPool(Fragile)
    scene = begin(pool, {"seed": 3, "prompt": [{"role": "user", "content": "seed"}]})
    assert scene.prompt == [{"role": "user", "content": "seed 3"}] and Fragile.made == 2
    assert not scene.environment.is_broken
    assert "Fragile.reset has raised ConnectionError: gone" in caplog.text
    pool.end(scene)
    assert begin(pool, {"seed": 4}).environment is scene.environment
    with pytest.raises(
        RuntimeError, match=r"(?s)Fragile.reset has raised ConnectionError: gone.*columns 'seed'"
    ):
        begin(pool, {"seed": -1})
    assert begin(pool, {"seed": 5}).environment is not scene.environment
    assert Fragile.made == 4  # the second one, which was constructed twice, is in the pool


@pytest.fixture
def released():
    """An event for what hangs, which the test's end sets."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_reset_that_takes_too_long_is_one_that_has_failed(num_workers, released, nothing_is_collected):
    class Slow(Base):
        made = 0

        def __init__(self):
            type(self).made += 1
            self.is_slow = self.made == 1

        def reset(self, seed, **row):
            if self.is_slow or seed < 0:
                released.wait(100)

    pool = EnvironmentPool(Slow, num_workers=num_workers, timeout_s=0.3)
    scenes = pool.begin([{"seed": 1}, {"seed": 2}])
    assert not any(scene.environment.is_slow for scene in scenes)
    for scene in scenes:
        pool.end(scene)
    with pytest.raises(RuntimeError, match=r"Slow.reset has raised TimeoutError.*tool_timeout_s=0.3 s"):
        pool.begin([{"seed": -1}])
    assert len(pool.begin([{"seed": 1}, {"seed": 2}])) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_factory_that_takes_too_long_is_named(num_workers, released, nothing_is_collected):
    with pytest.raises(RuntimeError, match=r"environment_factory took longer than tool_timeout_s=0\.2 s"):
        EnvironmentPool(lambda: released.wait(100), num_workers=num_workers, timeout_s=0.2)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("place", ["factory", "reset", "done", "turn_rewards"])
def test_no_second_process_leaves_an_environment(num_workers, place, capfd):
    status = []

    def fork():
        child = os.fork()
        if child:
            status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return []

    class Forking(Base):
        def __init__(self):
            if place == "factory":
                fork()

        def reset(self, **row):
            if place == "reset":
                fork()

        done = property(lambda self: place == "done" and fork())
        turn_rewards = property(lambda self: fork() if place == "turn_rewards" else [])

    begin(EnvironmentPool(Forking, num_workers=num_workers), {}).is_over  # noqa: B018
    assert set(status) == {EXIT_CODE}
    assert "has forked" in capfd.readouterr().err


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_reset_returns_is_cleaned_and_bounded_as_results_of_tools_are(num_workers):
    class Speaking(Base):
        def reset(self, text, **row):
            return text

    pool = EnvironmentPool(Speaking, num_workers=num_workers)
    prompt = [{"role": "user", "content": "a"}]
    assert begin(pool, {"text": "\ud800é", "prompt": prompt}).prompt[0]["content"] == "a?é"
    blocks = [{"type": "text", "text": "\udfff"}]
    observed = begin(pool, {"text": blocks, "prompt": prompt}).prompt[0]["content"]
    assert observed == [{"type": "text", "text": "a"}, {"type": "text", "text": "?"}]
    for long in ("a" * (MAX_CHARS + 1), [{"type": "text", "text": "a" * MAX_CHARS}]):
        with pytest.raises(
            ValueError, match=r"Speaking.reset has returned has 10000\d+ characters, more than"
        ):
            begin(pool, {"text": long})
    image = [{"type": "image", "url": "a.png"}]
    with pytest.raises(ValueError, match=r"Speaking\.reset has returned a block of the type 'image'"):
        begin(pool, {"text": image})


@pytest.mark.parametrize(
    ("done", "is_over"),
    [
        (False, False),
        (True, True),
        (np.True_, True),
        (np.False_, False),
        (1, False),
        (["task"], False),
        (None, False),
    ],
)
def test_the_end_signal_is_true_and_nothing_else(done, is_over):
    scene = begin(EnvironmentPool(Game), {})
    scene.environment.done = done
    assert scene.is_over is is_over


def test_a_property_or_no_end_signal_will_do_and_a_tool_called_done_is_none():
    class Property(Base):
        done = property(lambda self: self.row["number"] > 1)

    class Tool(Base):
        def done(self) -> str:
            """Say that you are done."""
            return "good"

    pool = EnvironmentPool({"property": Property, "tool": Tool, "none": Other})
    assert begin(pool, {"environment": "property", "number": 2}).is_over
    assert not begin(pool, {"environment": "property", "number": 1}).is_over
    assert not begin(pool, {"environment": "tool"}).is_over
    assert not begin(pool, {"environment": "none"}).is_over


def test_rewards_of_a_turn_are_what_its_tools_have_appended():
    class Walk(Base):
        def reset(self, **row):
            self.turn_rewards = []

    pool = EnvironmentPool({"walk": Walk, "other": Other})
    assert begin(pool, {"environment": "other"}).end_turn() is None
    scene = begin(pool, {"environment": "walk"})
    rewards = scene.environment.turn_rewards
    turns = []
    for new in ([], [1], [0.5, np.float32(0.25)], [True]):
        rewards.extend(new)
        turns.append(scene.end_turn())
    assert turns == [0.0, 1.0, 0.75, 1.0]
    for bad in (float("nan"), "1", None):
        rewards.append(bad)
        with pytest.raises(ValueError, match="turn_rewards of Walk has got"):
            scene.end_turn()
    rewards.clear()
    with pytest.raises(ValueError, match="had 7 rewards before this turn and has 0 after it"):
        scene.end_turn()


@pytest.mark.parametrize("make", [tuple, deque, np.array, torch.tensor])
def test_rewards_of_a_turn_may_be_another_sequence_of_numbers(make):
    scene = begin(EnvironmentPool(Game), {})
    for rewards, turn in (([], 0.0), ([100.0], 100.0), ([100.0, 2.5, 1.0], 3.5)):
        scene.environment.turn_rewards = make(rewards)
        assert scene.end_turn() == turn


@pytest.mark.parametrize("bad", ["1.0", 3.5, {0: 1.0}, {1.0}, np.array(1.0), lambda: [1.0]])
def test_rewards_of_a_turn_that_are_no_list_are_refused(bad):
    class Rewarding(Game):
        def reset(self, bad_from_the_start=False, **row):
            self.turn_rewards = bad if bad_from_the_start else []

    pool, words = EnvironmentPool(Rewarding), "turn_rewards of Rewarding is .*but it is a list"
    with pytest.raises(ValueError, match=words):
        begin(pool, {"bad_from_the_start": True})
    scene = begin(pool, {})
    scene.environment.turn_rewards = bad
    with pytest.raises(ValueError, match=words):
        scene.end_turn()


def test_a_property_that_raises_is_named():
    class Raising(Base):
        is_broken = False
        done = property(lambda self: 1 / 0)

        @property
        def turn_rewards(self):
            return 1 / 0 if self.is_broken else None

    scene = begin(EnvironmentPool(Raising), {})
    with pytest.raises(ValueError, match="The property done of Raising has raised ZeroDivisionError"):
        scene.is_over  # noqa: B018
    scene.environment.is_broken = True
    with pytest.raises(ValueError, match="The property turn_rewards of Raising has raised ZeroDivisionError"):
        scene.end_turn()


def test_an_environment_that_a_tool_may_still_change_is_not_used_again():
    pool = EnvironmentPool(Game)
    first, second = pool.begin([{}, {}])
    for scene, is_left_running in ((first, True), (second, False)):
        scene.end_turn(
            [ToolResult("zeta", "", True, 0.1, is_left_running), ToolResult("zeta", "", False, 0.1)]
        )
        scene.end_turn([ToolResult("zeta", "", False, 0.1)])
        pool.end(scene)
    again = [scene.environment for scene in pool.begin([{}, {}])]
    assert again[1] is second.environment and again[0] is not first.environment


@pytest.mark.parametrize("num_workers", [0, 4])
def test_environments_that_begin_together_may_be_reset_in_threads(num_workers):
    meeting = threading.Barrier(4 if num_workers else 1)

    class Slow(Base):
        def reset(self, number, **row):
            self.row = number
            if number < 0:
                raise ValueError("below zero")
            if number < 4:  # one after the other they would not meet
                meeting.wait(60)

    pool = EnvironmentPool(Slow, num_workers=num_workers)
    scenes = pool.begin([{"number": number} for number in range(4)])
    assert [scene.environment.row for scene in scenes] == list(range(4))
    with pytest.raises(RuntimeError, match="below zero"):
        pool.begin([{"number": 4}, {"number": -1}])
    assert len(pool.begin([{"number": 4}, {"number": 5}])) == 2


class NoReset:
    def act(self) -> str:
        """Act."""
        return ""


class InstanceReset:
    def __init__(self):
        self.reset = lambda **row: None


class AsyncReset:
    async def reset(self, **row):
        return ""


class BadTool(Base):
    def act(self):
        return ""


SHARED = Game()


@pytest.mark.parametrize(
    ("factories", "words"),
    [
        (NoReset, "NoReset that environment_factory has made needs a method `reset"),
        ({"a": Game, "b": InstanceReset}, r"InstanceReset that environment_factory\['b'\]"),
        (AsyncReset, "AsyncReset.reset is async"),
        (BadTool, "act.*no docstring"),
        (SHARED, "cannot be called. Pass a class"),
        ({}, "no environment"),
    ],
)
def test_what_is_no_environment_is_refused(factories, words):
    with pytest.raises(ValueError, match=words):
        EnvironmentPool(factories)


class NeedsSize(Base):
    def __init__(self, size):
        raise AssertionError("never called without it")


class Unreachable(Base):
    def __init__(self):
        raise ConnectionError("no server at port 7")


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (NeedsSize, r"(?s)environment_factory is .*NeedsSize.* raised TypeError.*'size'.*without arguments"),
        (
            {"a": Unreachable},
            r"environment_factory\['a'\] is .* raised ConnectionError: no server at port 7",
        ),
    ],
)
def test_an_environment_that_cannot_be_constructed_is_named(factory, words):
    with pytest.raises(RuntimeError, match=words):
        EnvironmentPool(factory)


def test_a_tool_and_a_method_of_one_name_are_refused():
    def zeta(word: str) -> str:
        """Zeta.

        Args:
            word: A word.
        """
        return word

    with pytest.raises(ValueError, match="Two tools have the name 'zeta'"):
        EnvironmentPool(Game, [zeta])


def test_rows_that_no_environment_can_play_are_refused():
    class Odd(Base):
        observation = 3

    pool = EnvironmentPool({"game": Game, "other": Other, "odd": Odd, "shared": lambda: SHARED})
    with pytest.raises(
        ValueError, match=r"environment='golf', which is not among .*: 'game', 'other', 'odd'"
    ):
        begin(pool, {"environment": "golf"})
    with pytest.raises(ValueError, match="environment=None"):
        begin(pool, {"prompt": []})
    with pytest.raises(ValueError, match=r"Odd.reset has returned 3 \(int\)"):
        begin(pool, {"environment": "odd"})
    for prompt in ("text", []):
        with pytest.raises(ValueError, match=r"Other.reset has returned an observation.*list of messages"):
            begin(pool, {"environment": "other", "prompt": prompt})
    assert begin(pool, {"environment": "game", "prompt": "text"}).prompt == "text"
    scene = begin(pool, {"environment": "shared"})
    with pytest.raises(ValueError, match=r"environment_factory\['shared'\] has returned the same Game twice"):
        begin(pool, {"environment": "shared"})
    pool.end(scene)
    with pytest.raises(ValueError, match="given back twice"):
        pool.end(scene)
