"""Episodes of several turns, played with an engine that is told what to write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from colocate.data.prompts import tokenize_prompts
from colocate.episodes.environments import EnvironmentPool
from colocate.episodes.episode import Episode
from colocate.episodes.renderer import Renderer
from colocate.episodes.tool_runner import ToolRunner
from colocate.episodes.tools import Toolbox
from colocate.experience.players.episode_player import EpisodePlayer
from colocate.experience.requests import RolloutRequest
from colocate.types import Prompt, SamplingParams
from tiny import StubEngine
from tool_chat import TEMPLATE, add, call, make_chat_tokenizer, user

Writer = Callable[[str, int], str]
"""(all that came before, member) -> the text of a turn, without its stop token."""


class Table:
    """A player, and what it plays with."""

    def __init__(
        self,
        write: Writer,
        tools: Any = (),
        *,
        environments: EnvironmentPool | None = None,
        template: str = TEMPLATE,
        max_tokens: int = 600,
        max_iterations: int | None = None,
        timeout_s: float | None = None,
        make_engine: Callable[[Any], Any] = StubEngine,
    ) -> None:
        self.tokenizer = make_chat_tokenizer(template)
        stop = self.tokenizer.eos_token_id
        self.contexts: list[str] = []

        def complete(prompt: Prompt, member: int) -> list[int]:
            text = self.tokenizer.decode(prompt.token_ids)
            self.contexts.append(text)
            ids = [*self.tokenizer(write(text, member))["input_ids"], stop]
            return ids[: prompt.limits(max_tokens)[0]]

        self.engine = make_engine(complete)
        self.engine.wake_up()
        self.toolbox = Toolbox(tools)
        self.environments = environments
        self.player = EpisodePlayer(
            self.engine,
            SamplingParams(max_tokens, stop_token_ids=(stop,)),
            Renderer(self.tokenizer, None, (stop,)),
            ToolRunner(timeout_s),
            tokenize=self.tokenize,
            toolbox=self.toolbox,
            environments=environments,
            max_tool_calling_iterations=max_iterations,
            context_length=900,
        )

    def schemas(self) -> Any:
        boxes = [self.toolbox] if self.environments is None else list(self.environments.toolboxes.values())
        return boxes[0].schemas or None

    def tokenize(self, rows: Any) -> list[tuple[int, ...]]:
        return tokenize_prompts(rows, self.tokenizer, schemas=[self.schemas()] * len(rows))

    def play(self, *texts: str, num_generations: int = 2, **columns: Any) -> list[Episode]:
        rows = [{"prompt": user(text), **columns} for text in texts]
        prompts = [Prompt(ids, key, range(num_generations)) for key, ids in enumerate(self.tokenize(rows))]
        return self.player.play(RolloutRequest(rows, prompts, num_generations))

    def text(self, episode: Episode) -> str:
        (row,) = episode.rows()
        return self.tokenizer.decode(row.prompt_ids + row.completion_ids)

    def sampled(self, episode: Episode) -> str:
        """The sampled text, with a bar for each stretch of given text."""
        (row,) = episode.rows()
        pieces = [
            self.tokenizer.decode([token]) if is_sampled else "|"
            for token, is_sampled in zip(row.completion_ids, row.is_sampled, strict=True)
        ]
        text = "".join(pieces)
        while "||" in text:
            text = text.replace("||", "|")
        return text


def sums(text: str, member: int) -> str:
    """Two calls, then the answer: what the tools have said."""
    answers = text.split("<|im_start|>tool\n")[1:]
    if len(answers) < 2:
        return call("add", a=member, b=len(answers))
    return "is " + " ".join(answer.partition("<|im_end|>")[0] for answer in answers)


def test_an_episode_is_what_the_chat_template_renders():
    table = Table(sums, [add])
    for number, episode in enumerate(table.play("q", "r")):
        member = number % 2
        calls = [call("add", a=member, b=n) for n in range(2)]
        assert table.sampled(episode) == (
            f"{calls[0]}<|im_end|>|{calls[1]}<|im_end|>|is {member} {member + 1}<|im_end|>"
        )
        prompt = user(
            "q" if episode.nodes[0].given_ids == table.tokenize([{"prompt": user("q")}])[0] else "r"
        )
        rendered = table.tokenizer.apply_chat_template(
            prompt + episode.messages, tools=table.schemas(), tokenize=False
        )
        assert table.text(episode) + "\n" == rendered
        assert [m["role"] for m in episode.messages] == ["assistant", "tool"] * 2 + ["assistant"]
        assert (episode.tool_calls, episode.tool_failures, episode.is_truncated) == (2, 0, False)
    assert not table.engine.is_busy


def test_failures_are_what_the_model_reads():
    def write(text: str, member: int) -> str:
        if "<|im_start|>tool\n" in text:
            return "ok"
        return call("add", a="x", b=1) if member else call("no_such", a=1)

    table = Table(write, [add])
    unknown, wrong = table.play("q")
    assert "{'error': 'Tool no_such not found.'}" in table.text(unknown)
    assert "error" in table.text(wrong) and (wrong.tool_calls, wrong.tool_failures) == (1, 1)


def test_episodes_count_what_took_too_long_and_how_long_tools_took():
    async def nap(seconds: float) -> str:
        """Nap.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "awake"

    def write(text: str, member: int) -> str:
        naps = [0.1, 0.2] if member else [600.0]
        num_taken = text.count("<|im_start|>tool\n")
        return call("nap", seconds=naps[num_taken]) if num_taken < len(naps) else "ok"

    late, quick = Table(write, [nap], timeout_s=4.0).play("q")
    assert (late.tool_calls, late.tool_failures, late.tool_timeouts) == (1, 1, 1)
    assert (quick.tool_calls, quick.tool_failures, quick.tool_timeouts) == (2, 0, 0)
    # Clocks may differ by a tick, so half of what the naps take; the time limit, and not the whole nap.
    assert 0.15 < quick.tool_s < late.tool_s < 60.0


def test_no_episode_waits_for_the_tool_of_another():
    order: list[str] = []

    async def look(name: str) -> str:
        """Look.

        Args:
            name: What for.
        """
        order.append(f"{name} begins")
        while name == "0.0" and not {"1.3 ends", "2.3 ends"} <= set(order):  # ends last, or never
            await asyncio.sleep(0.01)
        order.append(f"{name} ends")
        return "done"

    def write(text: str, member: int) -> str:
        num_turns = text.count("<|im_start|>tool\n")
        if num_turns == (1 if member == 0 else 4):
            return "end"
        return call("look", name=f"{member}.{num_turns}")

    Table(write, [look], max_tokens=800, timeout_s=100.0).play("q", num_generations=3)
    assert order.index("1.3 ends") < order.index("0.0 ends")
    assert order.index("2.3 ends") < order.index("0.0 ends")


def test_an_answer_without_room_is_taken_back():
    def tell() -> str:
        """Tell a lot."""
        return "x" * 100

    def write(text: str, member: int) -> str:
        return call("tell") if "<|im_start|>tool\n" not in text else "y" * 50

    size = len(call("tell")) - len("<tool_call></tool_call>") + 3  # a mark is one token, as is the stop
    roomy, tight = Table(write, [tell], max_tokens=300), Table(write, [tell], max_tokens=size + 100)
    (whole,), (cut,) = roomy.play("q", num_generations=1), tight.play("q", num_generations=1)
    assert [m["role"] for m in whole.messages] == ["assistant", "tool", "assistant"]
    assert [m["role"] for m in cut.messages] == ["assistant"]
    assert not cut.is_truncated and cut.tool_calls == 1
    assert table_is_idle(roomy) and table_is_idle(tight)
    # With room for the answer and a few tokens more, these are drawn, and the episode is cut short.
    (short,) = Table(write, [tell], max_tokens=len(whole.rows()[0].completion_ids) - 20).play(
        "q", num_generations=1
    )
    assert short.is_truncated and short.rows()[0].num_sampled == whole.rows()[0].num_sampled - 20


def test_a_turn_that_is_cut_short_calls_nothing():
    written = call("add", a=1, b=1)
    size = len(make_chat_tokenizer()(written)["input_ids"])
    table = Table(lambda text, member: written, [add], max_tokens=size)
    (episode,) = table.play("q", num_generations=1)
    assert "tool_calls" in episode.messages[0] and episode.tool_calls == 0 and episode.is_truncated


def table_is_idle(table: Table) -> bool:
    return not table.engine.is_busy and not table.engine._ledger.turns


@pytest.mark.parametrize("max_iterations", [0, 1, 3])
def test_iterations_are_counted_as_in_trl(max_iterations):
    table = Table(lambda text, member: call("add", a=1, b=1), [add], max_iterations=max_iterations)
    (episode,) = table.play("q", num_generations=1)
    assert len(episode.nodes) == max_iterations + 1
    assert episode.tool_calls == max_iterations


class Guess:
    """Ends at 3, with a reward for each guess."""

    def reset(self, start: str, **row: Any) -> str:
        self.done, self.turn_rewards, self.guesses = False, [], []
        return f" {start}"

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The number.
        """
        self.guesses.append(number)
        self.turn_rewards.append(float(number))
        self.done = number == 3
        return "right" if self.done else "wrong"

    def get_reward(self) -> float:
        return float(len(self.guesses))


def test_an_environment_begins_ends_and_rewards():
    pool = EnvironmentPool(Guess)
    table = Table(
        lambda text, member: call("guess", number=text.count("<|im_start|>tool\n") + 2 * member),
        environments=pool,
    )
    for _ in range(2):  # the environments of the first rollout serve the second one
        first, second = table.play("q", start="go")
        assert first.environment is not second.environment
        assert first.environment.guesses == [0, 1, 2, 3] and second.environment.guesses == [2, 3]
        assert first.prompt == user("q go") and "q go<|im_end|>" in table.text(first)
        assert first.messages[-1] == {"role": "tool", "name": "guess", "content": "right"}
        assert list(first.turn_rewards.values()) == [0, 1, 2, 3]
        assert len(first.nodes) == 4 and not first.is_truncated
    assert len(pool._instances[None]) == 2


def test_a_rewritten_history_is_another_row():
    stripping = TEMPLATE.replace(
        "{{ message.content }}",
        "{{ message.content.split('</think>')[-1] if not loop.last else message.content }}",
    )

    def write(text: str, member: int) -> str:
        return "<think>hm</think>" + (call("add", a=1, b=2) if "<|im_start|>tool\n" not in text else "3")

    table = Table(write, [add], template=stripping)
    (episode,) = table.play("q", num_generations=1)
    first, second = episode.rows()
    assert "hm" in table.tokenizer.decode(first.completion_ids)
    assert table.tokenizer.decode(second.completion_ids).count("hm") == 1
    assert first.num_sampled + second.num_sampled == sum(len(node.sampled_ids) for node in episode.nodes)
    assert table_is_idle(table)


def test_what_is_not_for_the_model_ends_the_play_and_leaves_the_engine_free():
    def stop() -> str:
        """Stop."""
        raise KeyboardInterrupt

    table = Table(lambda text, member: call("stop"), [stop])
    with pytest.raises(KeyboardInterrupt):
        table.play("q", "r")
    assert table_is_idle(table)
    assert not table.player._runner.has_work


def test_plain_text_is_refused():
    table = Table(sums, [add])
    request = RolloutRequest([{"prompt": "q"}], [Prompt((5,), 7, range(1))], 1)
    with pytest.raises(ValueError, match="Prompt 7 is plain text"):
        table.player.play(request)
