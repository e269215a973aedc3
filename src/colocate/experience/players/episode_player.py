"""From requests to episodes of several turns; none waits for the turn or the tool of another one.

    engine.poll ──turn──▶ parse ──calls──▶ ToolRunner ──answers──▶ bridge ──▶ engine.extend ──▶ …
                            └── no call: the episode is over

Sync tools run in the main thread, between two windows of decode steps: the device draws the next tokens of
other episodes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from colocate.data.prompts import is_conversational
from colocate.engines.base import RolloutEngine
from colocate.engines.requests import turn_key
from colocate.episodes.environments import EnvironmentPool, Scene
from colocate.episodes.episode import Episode
from colocate.episodes.renderer import Renderer
from colocate.episodes.tool_runner import ToolResult, ToolRunner
from colocate.episodes.tools import Toolbox
from colocate.experience.players.play import Player
from colocate.experience.requests import RolloutRequest
from colocate.types import Completion, Prompt, SamplingParams

TOOL_BUDGET_S = 0.01
"""Seconds of sync tools between two windows. Meanwhile the device works on the decode steps of the window
that was just launched."""
LONGEST_WAIT_S = 1.0
"""Seconds for which the player sleeps at a time when the engine has nothing to do and tools are to answer."""


@dataclass(eq=False)
class _Play:
    """An episode that is being played."""

    prompt: Prompt
    """The request for this member alone."""
    messages: list[dict[str, Any]]
    """The conversation so far, the prompt's messages first."""
    num_prompt_messages: int
    toolbox: Toolbox
    scene: Scene | None
    """The episode's environment; None: it has none."""
    episode: Episode = field(default_factory=Episode)
    node: int | None = None
    """The node of the last turn, from which the next one goes on; None: the next one begins a history."""
    given_ids: tuple[int, ...] = ()
    """The tokens that the engine has been given for the turn that is under way, beyond the history of
    `node`."""
    num_tokens: int = 0
    """Tokens of the history after the prompt, sampled and given."""
    num_turns: int = 0
    number: int | None = None
    """The number of its sequence in the engine; None: the episode is over."""


class EpisodePlayer(Player):
    """Plays episodes in which a model calls tools, and goes on with what they have answered.

    Sampled tokens stay as they were sampled. A tool's answer becomes tokens by `Renderer.bridge`; where the
    chat template rewrites the history instead, the conversation is rendered anew and begins another row of
    the episode.

    Args:
        sampling: how tokens are drawn. Its `max_tokens` bound all tokens after the prompt, given ones among
            them.
        tokenize: the tokens of rows whose prompts environments have added to, as `RequestBuilder.tokenize`.
        toolbox: the tools of every episode, where there are no environments.
        environments: where each episode gets an environment, and its tools; None: there are none.
        max_tool_calling_iterations: turns at most after which tools are called; None: no limit.
        context_length: tokens that prompt and completion may have together.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingParams,
        renderer: Renderer,
        runner: ToolRunner,
        *,
        tokenize: Callable[[Sequence[dict[str, Any]]], list[tuple[int, ...]]],
        toolbox: Toolbox,
        environments: EnvironmentPool | None = None,
        max_tool_calling_iterations: int | None = None,
        context_length: int,
    ) -> None:
        self._engine = engine
        self.sampling = sampling
        self._renderer = renderer
        self._runner = runner
        self._tokenize = tokenize
        self._toolbox = toolbox
        self._environments = environments
        self._max_iterations = max_tool_calling_iterations
        self._context_length = context_length
        self._shown: list[_Play] = []
        """The last episodes, at whose environments reward functions may still look."""
        self._plays: dict[int, _Play] = {}
        """Episodes under way, by the number of their sequence in the engine."""

    @property
    def words(self) -> str:
        boxes = {None: self._toolbox} if self._environments is None else self._environments.toolboxes
        names = {name: ", ".join(box.names) or "none" for name, box in boxes.items()}
        tools = "; ".join(text if name is None else f"{name}: {text}" for name, text in names.items())
        return f"tools {tools}" if self._environments is None else f"environments with tools {tools}"

    def play(self, request: RolloutRequest) -> list[Episode]:
        """Return the episodes of a request, prompt by prompt; the engine must be awake.

        Raises:
            ValueError: a prompt is no conversation, or too long with what its environment has added.
            RuntimeError: an environment's `reset` has failed twice.
        """
        try:
            return self.finish(self.begin(request))
        finally:
            self.stop()

    def begin(self, request: RolloutRequest) -> list[_Play]:
        """Queue the first turns of a request's episodes. Raises as `play` does."""
        plays = self._plays_of(request)
        self._submit(plays)
        return plays

    def finish(self, begun: list[_Play]) -> list[Episode]:
        """Go on, with all episodes that were begun, until those of one request are over, and return these."""
        self._shown = begun
        counts = self._engine.counts
        counts.begin("episodes", len(begun))
        while num_left := sum(play.number is not None for play in begun):
            counts.leave("episodes", num_left)
            self._advance()
        counts.leave("episodes", 0)
        return [_finished(play) for play in begun]

    def stop(self) -> None:
        """Leave the episodes that are not over, after an error, or Ctrl-C."""
        for number in list(self._plays):
            self._runner.cancel(number)
            self._retire(number)

    def _advance(self) -> None:
        """Let the engine generate a little further, and tools answer meanwhile."""
        for number, completion in self._engine.poll().items():
            self._take(number, completion)
        for key, results in self._runner.poll(TOOL_BUDGET_S).items():
            assert isinstance(key, int), "calls are started under the numbers of sequences"
            self._answer(key, results)
        if not self._engine.is_busy and self._runner.has_work:
            self._engine.counts.at_work = "waiting for tools"
            self._runner.wait(LONGEST_WAIT_S)
            self._engine.counts.at_work = ""

    def _plays_of(self, request: RolloutRequest) -> list[_Play]:
        """The episodes of a request, each with an environment that has been reset, if there are any."""
        members = [
            (row, replace(prompt, samples=range(sample, sample + 1), max_tokens=None))
            for row, prompt in zip(request.rows, request.prompts, strict=True)
            for sample in prompt.samples
        ]
        for row, prompt in members:
            if not is_conversational(row["prompt"]):
                raise ValueError(
                    f"Prompt {prompt.key} is plain text, but answers of tools are messages of a chat. Give "
                    'prompts as messages: [{"role": "user", "content": ...}].'
                )
        if self._environments is None:
            return [
                _Play(prompt, list(row["prompt"]), len(row["prompt"]), self._toolbox, None)
                for row, prompt in members
            ]
        for play in self._shown:
            if play.scene is not None:
                self._environments.end(play.scene)
        self._shown = []
        scenes = self._environments.begin([row for row, _ in members])
        observed = [{**row, "prompt": scene.prompt} for (row, _), scene in zip(members, scenes, strict=True)]
        token_ids = self._tokenize(observed)
        return [
            _Play(replace(prompt, token_ids=ids), list(scene.prompt), len(scene.prompt), scene.toolbox, scene)
            for (_, prompt), ids, scene in zip(members, token_ids, scenes, strict=True)
        ]

    def _submit(self, plays: Sequence[_Play]) -> None:
        """Ask for the first turns; members that begin alike are asked for together, to share their prompt."""
        prompts: list[Prompt] = []
        for play in plays:
            own = play.given_ids = play.prompt.token_ids
            last = prompts[-1] if prompts else None
            sample = play.prompt.samples.start
            if last is not None and (last.key, last.token_ids) == (play.prompt.key, own):
                assert last.samples.stop == sample, "the members of a group come in order"
                prompts[-1] = replace(last, samples=range(last.samples.start, sample + 1))
            else:
                prompts.append(play.prompt)
        numbers = self._engine.submit(prompts, self.sampling, keep=True)
        for number, play in zip(numbers, plays, strict=True):
            self._plays[number], play.number = play, number

    def _take(self, number: int, completion: Completion) -> None:
        """Note a turn that has ended, and start the tools that it calls."""
        play = self._plays[number]
        play.node = play.episode.add(play.node, play.given_ids, completion)
        play.num_tokens += len(completion.token_ids)
        play.num_turns += 1
        self._engine.counts.add("turns")
        message = self._renderer.parse(completion.token_ids, play.given_ids, play.toolbox.schemas)
        play.messages.append(message)
        calls = play.toolbox.calls(message)
        is_last = self._max_iterations is not None and play.num_turns > self._max_iterations
        # A tool is not called if there is no room for what it answers.
        if calls and not is_last and play.num_tokens < self.sampling.max_tokens:
            self._runner.start(number, calls)
        else:
            self._retire(number)

    def _answer(self, number: int, results: Sequence[ToolResult]) -> None:
        """Give the tools' answers to the model, and let it draw its next turn."""
        play, episode = self._plays[number], self._plays[number].episode
        episode.tool_calls += len(results)
        episode.tool_failures += sum(result.is_failure for result in results)
        episode.tool_timeouts += sum(result.is_timeout for result in results)
        episode.tool_s += sum(result.latency_s for result in results)
        answers = [result.message for result in results]
        if play.scene is not None and (reward := play.scene.end_turn(results)) is not None:
            assert play.node is not None, "a turn has ended"
            episode.turn_rewards[play.node] = reward
        if play.scene is not None and play.scene.is_over:
            play.messages += answers
            self._retire(number)
            return
        last_id = episode.nodes[-1].sampled_ids[-1]
        given_ids = self._renderer.bridge(play.messages, answers, play.toolbox.schemas, last_id=last_id)
        if given_ids is None:
            self._fork(number, answers)
            return
        left = self._room(play, play.num_tokens + len(given_ids))
        if left < 1:  # the answers are taken back, as in TRL: the episode ends with the turn before
            self._retire(number)
            return
        play.messages += answers
        play.given_ids = tuple(given_ids)
        play.num_tokens += len(given_ids)
        self._engine.extend(number, given_ids, left)

    def _fork(self, number: int, answers: Sequence[dict[str, Any]]) -> None:
        """Go on from the conversation as the chat template renders it now, in a history of its own."""
        play = self._plays[number]
        self._retire(number)
        context = tuple(self._renderer.render([*play.messages, *answers], play.toolbox.schemas))
        num_tokens = max(0, len(context) - len(play.prompt.token_ids))
        left = self._room(play, num_tokens)
        if left < 1:
            return
        play.messages += answers
        play.node, play.given_ids, play.num_tokens = None, context, num_tokens
        key = turn_key(play.prompt.key, play.num_turns)
        turn = Prompt(context, key, play.prompt.samples, (left,))
        (number,) = self._engine.submit([turn], self.sampling, keep=True)
        self._plays[number], play.number = play, number

    def _room(self, play: _Play, num_tokens: int) -> int:
        """The tokens that may follow when the history has `num_tokens` after its prompt."""
        most = min(self.sampling.max_tokens, self._context_length - len(play.prompt.token_ids))
        return most - num_tokens

    def _retire(self, number: int) -> None:
        """Let go of a sequence; its episode is over, or goes on in another one."""
        self._plays.pop(number).number = None
        self._engine.abort([number])


def _finished(play: _Play) -> Episode:
    """The episode of a play that is over, as reward functions see it."""
    episode = play.episode
    episode.messages = play.messages[play.num_prompt_messages :]
    if play.scene is not None:
        episode.prompt = play.scene.prompt
        episode.environment = play.scene.environment
    return episode
