"""Scripts of episodes that come, go on and are given up at random, and what an open engine makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from engine_models import VOCAB_SIZE
from hypothesis import strategies as st

from colocate.engines.base import RolloutEngine
from colocate.engines.requests import turn_key
from colocate.types import Completion, Prompt, SamplingParams

MAX_TOKENS = 30
Member = tuple[int, int]
"""(prompt key, sample)."""
Turn = tuple[list[int], int]
"""(tokens given, most tokens to draw)."""


@dataclass(frozen=True)
class Script:
    """What is asked of an engine, and when: numbers of polls."""

    arrivals: list[tuple[int, Prompt]]
    extensions: dict[Member, list[Turn]]
    aborts: dict[Member, int]

    @property
    def members(self) -> list[Member]:
        return [(prompt.key, sample) for _, prompt in self.arrivals for sample in prompt.samples]


@st.composite
def scripts(draw: st.DrawFn, max_groups: int = 4, max_members: int = 3) -> Script:
    token_ids = st.integers(0, VOCAB_SIZE - 1)
    arrivals, extensions, aborts = [], {}, {}
    for key in range(100, 100 + draw(st.integers(1, max_groups))):
        prompt = tuple(draw(st.lists(token_ids, min_size=1, max_size=11)))
        limits = draw(st.lists(st.integers(1, 12), min_size=1, max_size=max_members))
        arrivals.append((draw(st.integers(0, 4)), Prompt(prompt, key, range(len(limits)), tuple(limits))))
        for sample, limit in enumerate(limits):
            left, turns = MAX_TOKENS - limit, []
            for given in draw(st.lists(st.lists(token_ids, max_size=6), max_size=3)):
                if left <= len(given):
                    break
                turns.append((given, draw(st.integers(1, min(8, left - len(given))))))
                left -= len(given) + turns[-1][1]
            extensions[key, sample] = turns
            if draw(st.integers(0, 5)) == 0:
                aborts[key, sample] = draw(st.integers(0, 6))
    return Script(arrivals, extensions, aborts)


def play(engine: RolloutEngine, script: Script, sampling: SamplingParams) -> dict[Member, list[Completion]]:
    """Every member's turns; those of a member that was aborted as far as they were returned."""
    turns: dict[Member, list[Completion]] = {member: [] for member in script.members}
    numbers: dict[int, Member] = {}
    try:
        _play(engine, script, sampling, numbers, turns)
    finally:
        engine.abort(numbers)
    return turns


def _play(engine, script, sampling, numbers, turns) -> None:
    waiting, num_polls = list(script.arrivals), 0
    while waiting or engine.is_busy:
        for arrival in [arrival for arrival in waiting if arrival[0] <= num_polls]:
            waiting.remove(arrival)
            prompt = arrival[1]
            members = [(prompt.key, sample) for sample in prompt.samples]
            numbers.update(zip(engine.submit([prompt], sampling, keep=True), members, strict=True))
        gone = [n for n, member in numbers.items() if script.aborts.get(member) == num_polls]
        engine.abort(gone)
        for number, completion in engine.poll().items():
            member = numbers[number]
            assert number not in gone, "an aborted sequence had a turn"
            turns[member].append(completion)
            if len(turns[member]) <= len(script.extensions[member]):
                engine.extend(number, *script.extensions[member][len(turns[member]) - 1])
        num_polls += 1
        assert num_polls < 1000, "the engine stays busy"


def assert_each_is_as_alone(
    engine: RolloutEngine, script: Script, sampling: SamplingParams, *, logprob_atol: float
) -> None:
    """Every turn is what `generate` draws after its context, and none is missing."""
    played = play(engine, script, sampling)
    for _, prompt in script.arrivals:
        for sample, limit in zip(prompt.samples, prompt.limits(MAX_TOKENS), strict=True):
            turns, extensions = played[prompt.key, sample], script.extensions[prompt.key, sample]
            if (prompt.key, sample) not in script.aborts:
                assert len(turns) == 1 + len(extensions)
            context = prompt.token_ids
            for number, (turn, (given, most)) in enumerate(
                zip(turns, [([], limit), *extensions], strict=False)
            ):
                context += tuple(given)
                request = Prompt(context, turn_key(prompt.key, number), range(sample, sample + 1), (most,))
                (alone,) = engine.generate([request], sampling)
                assert turn.token_ids == alone.token_ids
                assert turn.finish_reason == alone.finish_reason
                if alone.logprobs is not None:
                    assert turn.logprobs == pytest.approx(alone.logprobs, abs=logprob_atol)
                context += turn.token_ids
