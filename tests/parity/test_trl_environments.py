"""Environments and tools against TRL's own trainer: its code runs on the same classes, rows and calls."""

import asyncio
import copy
import inspect
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer import grpo_trainer as trl

from colocate.episodes.environments import EnvironmentPool
from colocate.episodes.tool_runner import ToolRunner
from colocate.episodes.tools import Toolbox


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: A number.
        b: A number.
    """
    return a + b


class Plain:
    observation: str | list | None = None

    def reset(self, **row):
        self.row = row
        return self.observation

    def inherited(self) -> str:
        """Inherited."""
        return "inherited"


class Game(Plain):
    attribute = 3

    def __init__(self):
        self.bound = lambda: "only the instance has it"

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


class Text(Plain):
    observation = " seen"


class Blocks(Plain):
    observation = [{"type": "text", "text": "block"}]  # noqa: RUF012


class Generated(Exception):
    """Raised where TRL would generate."""


class TRLScenes:
    """TRL's code from rows to prompts and tools, on no more of a trainer than it reads."""

    def __init__(self, factories, tools):
        self.trainer = trainer = SimpleNamespace(
            accelerator=SimpleNamespace(device="cpu"),
            model=SimpleNamespace(training=True),
            tools=[add],
            _standalone_tools=list(tools),
            _multi_environment=isinstance(factories, dict),
            _generate=self._generate,
        )
        trainer.environment_factories = factories if isinstance(factories, dict) else {None: factories}
        trainer._environment_pool = {name: [make()] for name, make in trainer.environment_factories.items()}

    def _generate(self, prompts):
        self.prompts = prompts
        raise Generated

    def begin(self, rows):
        with pytest.raises(Generated):
            trl.GRPOTrainer._generate_and_score_completions(self.trainer, rows)
        tools = zip(self.trainer._sync_tool_dicts, self.trainer._async_tool_dicts, strict=True)
        return list(zip(self.prompts, self.trainer.environments, (a | b for a, b in tools), strict=True))


CONTENTS = st.one_of(st.text(max_size=3), st.just([{"type": "text", "text": "a"}]))
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": CONTENTS}), min_size=1)
NAMES = st.sampled_from(["game", "text", "blocks"])
ROWS = st.lists(
    st.fixed_dictionaries({"environment": NAMES, "answer": st.integers()}, optional={"prompt": MESSAGES}),
    min_size=1,
    max_size=6,
)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, factory=st.sampled_from([None, Game, Text, Blocks]), tools=st.sampled_from([[], [add]]))
def test_prompts_environments_and_tools_are_those_of_trl(rows, factory, tools):
    factories = factory or {"game": Game, "text": Text, "blocks": Blocks}
    theirs, ours = TRLScenes(factories, tools), EnvironmentPool(factories, tools)
    first = None
    for _ in range(2):  # environments are used again, in the same order
        untouched = copy.deepcopy(rows)
        scenes = ours.begin(rows)
        assert rows == untouched
        for scene, (prompt, environment, functions) in zip(scenes, theirs.begin(rows), strict=True):
            assert scene.prompt == prompt
            assert type(scene.environment) is type(environment) and scene.environment.row == environment.row
            assert set(scene.toolbox.names) == set(functions)
            for function in scene.toolbox.functions:
                its_own = getattr(functions[function.__name__], "__self__", None) is environment
                assert getattr(function, "__self__", None) is (scene.environment if its_own else None)
        environments = [scene.environment for scene in scenes]
        assert first is None or all(a is b for a, b in zip(first, environments, strict=True))
        first = environments
        for scene in scenes:
            ours.end(scene)


def fail(text: str) -> str:
    """Fail.

    Args:
        text: Why.
    """
    raise ValueError(text)


def blocks(text: str) -> list:
    """Return a list.

    Args:
        text: What it has.
    """
    return [{"type": "text", "text": text}]


def nothing() -> None:
    """Return nothing."""


async def later(text: str) -> dict:
    """Return a dict after a while.

    Args:
        text: What it has.
    """
    await asyncio.sleep(0.001)
    return {"text": text}


async def fail_later(text: str) -> str:
    """Fail after a while.

    Args:
        text: Why.
    """
    await asyncio.sleep(0.001)
    raise KeyError(text)


TOOLS = [add, fail, blocks, nothing, later, fail_later]


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def trl_results(messages, loop, monkeypatch):
    """What TRL's loop appends to each assistant message: tool messages; and its counts."""
    num_messages = len(messages)
    trainer = SimpleNamespace(
        max_tool_calling_iterations=1,
        max_completion_length=10**6,
        _sync_tool_dicts=[{f.__name__: f for f in TOOLS if not inspect.iscoroutinefunction(f)}]
        * num_messages,
        _async_tool_dicts=[{f.__name__: f for f in TOOLS if inspect.iscoroutinefunction(f)}] * num_messages,
        async_loop=loop,
        _get_tool_suffix_ids=lambda tool_messages: [0],
        _generate_single_turn=lambda ids, *args, **kwargs: ([[1]] * len(ids), None),
        use_vllm=False,
        _is_vlm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)),
        tools=TOOLS,
        environment_factories=None,
        _tokenizer=None,
    )
    monkeypatch.setattr(trl, "parse_response", lambda *args, **kwargs: {})
    completions = [[message] for message in copy.deepcopy(messages)]
    ids = [[1] for _ in messages]
    out = trl.GRPOTrainer._tool_call_loop(
        trainer, [[] for _ in messages], ids, [list(i) for i in ids], completions, None, None, {}
    )
    return [completion[1:] for completion in out[1]], out[4], out[5]


ARGUMENTS = st.one_of(
    st.just({}),
    st.just({"a": 1, "b": 2}),
    st.text(max_size=3).map(lambda text: {"text": text}),
    st.just("a=1"),
)
CALLS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["function"] * 4 + ["web"]),
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from([f.__name__ for f in TOOLS] + ["unknown"]), "arguments": ARGUMENTS}
        ),
    }
)
ASSISTANT = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.just(""), "tool_calls": st.lists(CALLS, max_size=4)}
)


@settings(max_examples=60, deadline=None)
@given(messages=st.lists(ASSISTANT, min_size=1, max_size=4), num_workers=st.sampled_from([0, 2]))
def test_tool_messages_are_those_of_trl(loop, messages, num_workers):
    """All but their order: TRL puts what async tools return after everything else."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        theirs, num_calls, num_failures = trl_results(messages, loop, monkeypatch)
    box, runner, ours = Toolbox(TOOLS), ToolRunner(None, num_workers), {}
    try:
        for key, message in enumerate(messages):
            runner.start(key, box.calls(message))
        while runner.has_work:
            ours.update(runner.poll())
            runner.wait(1.0)
    finally:
        runner.close()
    results = [ours[key] for key in range(len(messages))]
    assert sum(map(len, results)) == num_calls
    assert sum(result.is_failure for message in results for result in message) == num_failures
    for mine, message, calls in zip(results, theirs, messages, strict=True):
        own = [result.message for result in mine]
        assert sorted(own, key=str) == sorted(message, key=str)
        if not any(call["function"]["name"].endswith("later") for call in calls["tool_calls"]):
            assert own == message
