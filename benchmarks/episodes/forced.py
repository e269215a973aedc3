"""Makes a model of random weights play episodes: how long each turn is, and whether it calls the tool.

Each library's engine draws the tokens of a turn but for the last ones, a call of the tool and the stop token,
which are put behind what it returns: the libraries parse a turn, and go on from it, as if the model had
written it all. Where a random model has drawn a mark of the chat, a word stands in its place. Nothing else of
either library is changed.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.rollout.cases import Case
from colocate.engines.base import RolloutEngine
from colocate.types import Completion, Prompt, SamplingParams


@dataclass(frozen=True)
class ForcedTurns:
    """The turns of a rollout's episodes, in the order in which a library asks for them."""

    lengths: list[list[int]]
    """Tokens of each turn of each episode."""
    call_id: int
    stop_id: int
    first_word_id: int
    """Tokens before this one are no words, but marks."""

    @property
    def num_turns(self) -> int:
        return len(self.lengths[0])

    def tail(self, turn: int) -> tuple[int, ...]:
        """What ends a turn: all turns but the last one call the tool."""
        return (self.stop_id,) if turn + 1 == self.num_turns else (self.call_id, self.stop_id)

    def num_drawn(self, episode: int, turn: int) -> int:
        """The tokens of a turn that the engine draws."""
        return self.lengths[episode][turn] - len(self.tail(turn))

    def ended(self, drawn: Iterable[int], turn: int) -> tuple[int, ...]:
        """A turn as the library gets it."""
        first = self.first_word_id
        return (*(token if token >= first else token + first for token in drawn), *self.tail(turn))


def force_engine(engine: RolloutEngine, turns: ForcedTurns) -> None:
    """Have `submit`, `poll` and `extend` of our engine play `turns`."""
    submit, poll, extend, abort = engine.submit, engine.poll, engine.extend, engine.abort
    places: dict[int, tuple[int, int]] = {}
    """The episode and the turn of each of the engine's sequences."""

    def forced_submit(
        prompts: Sequence[Prompt], sampling: SamplingParams, *, keep: bool = False
    ) -> list[int]:
        episodes = itertools.count()
        limited = [
            replace(prompt, max_tokens=tuple(turns.num_drawn(next(episodes), 0) for _ in prompt.samples))
            for prompt in prompts
        ]
        numbers = submit(limited, sampling, keep=keep)
        assert len(numbers) == len(turns.lengths), "a rollout's episodes begin together"
        places.update({number: (episode, 0) for episode, number in enumerate(numbers)})
        return numbers

    def forced_poll() -> dict[int, Completion]:
        return {number: ended(completion, places[number][1]) for number, completion in poll().items()}

    def ended(completion: Completion, turn: int) -> Completion:
        assert completion.logprobs is not None
        token_ids = turns.ended(completion.token_ids, turn)
        # Of what the engine has not drawn it cannot tell a log-prob.
        drawn = zip(token_ids, completion.token_ids, completion.logprobs, strict=False)
        told = [logprob if token == own else math.nan for token, own, logprob in drawn]
        told += [math.nan] * len(turns.tail(turn))
        return replace(completion, token_ids=token_ids, logprobs=tuple(told), finish_reason="stop")

    def forced_extend(sequence: int, token_ids: Sequence[int], max_tokens: int) -> None:
        episode, turn = places[sequence]
        places[sequence] = (episode, turn + 1)
        num_drawn = turns.num_drawn(episode, turn + 1)
        assert num_drawn <= max_tokens, "max_completion_length has room for every turn"
        extend(sequence, [*turns.tail(turn), *token_ids], num_drawn)

    def forced_abort(sequences: Iterable[int]) -> None:
        sequences = list(sequences)
        for number in sequences:
            places.pop(number, None)
        abort(sequences)

    vars(engine).update(submit=forced_submit, poll=forced_poll, extend=forced_extend, abort=forced_abort)


def force_lengths(engine: RolloutEngine, case: Case) -> None:
    """Have our engine complete prompts of a single turn to the lengths of `case`: as many prompts one after
    the other as it has need the same tokens in sum, wherever a rollout begins."""
    limits = case.limits()

    def limited(prompts: Iterable[Prompt]) -> list[Prompt]:
        return [
            prompt
            if prompt.max_tokens is not None  # it goes on with what it had begun
            else replace(
                prompt,
                max_tokens=tuple(limits[prompt.key % len(limits)][sample] for sample in prompt.samples),
            )
            for prompt in prompts
        ]

    def with_limits(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda prompts, *more, **named: function(limited(prompts), *more, **named)

    vars(engine).update(generate=with_limits(engine.generate), submit=with_limits(engine.submit))


def force_vllm(llm: Any, turns: ForcedTurns) -> None:
    """Have `generate` of TRL's vLLM play `turns`: TRL calls it once for each turn, with all episodes."""
    generate, calls = llm.generate, itertools.count()

    def forced(prompts: Sequence[Any], sampling_params: Any, **more: Any) -> list[Any]:
        turn = next(calls) % turns.num_turns
        assert len(prompts) == len(turns.lengths), "every episode has every turn"
        limited = [copy.copy(sampling_params) for _ in prompts]
        for episode, params in enumerate(limited):
            params.max_tokens = turns.num_drawn(episode, turn)
        outputs = generate(prompts, sampling_params=limited, **more)
        for output in outputs:
            drawn = output.outputs[0]
            (last,) = drawn.logprobs[-1].values()
            drawn.token_ids = list(turns.ended(drawn.token_ids, turn))
            # vLLM has not drawn the last ones; TRL must have numbers, so it gets that of the token before.
            drawn.logprobs = [*drawn.logprobs, *({token: last} for token in turns.tail(turn))]
        return outputs

    llm.generate = forced


def force_transformers(trainer: Any, turns: ForcedTurns) -> None:
    """Have TRL play `turns` without vLLM: what transformers draws, all of one length, is cut."""
    generate, calls = trainer._generate_single_turn, itertools.count()

    def forced(prompt_ids: Sequence[Any], *more: Any, **named: Any) -> tuple[list[list[int]], None]:
        turn = next(calls) % turns.num_turns
        drawn, _ = generate(prompt_ids, *more, **named)
        return [
            list(turns.ended(ids[: turns.num_drawn(episode, turn)], turn))
            for episode, ids in enumerate(drawn)
        ], None

    trainer._generate_single_turn = forced
