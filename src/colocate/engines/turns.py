"""`TurnEngine`: sequences of several turns for engines that complete whole lists of prompts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from colocate.engines.base import BaseEngine
from colocate.engines.requests import turn_key, unextendable
from colocate.types import Completion, Prompt, SamplingParams


@dataclass
class Turn:
    """A sequence, and its turn that waits to be drawn or was drawn last."""

    prompt: Prompt
    sample: int
    limit: int
    is_kept: bool
    number: int = 0
    tokens: tuple[int, ...] = ()
    """The tokens after the prompt, drawn and given."""

    def as_prompt(self) -> Prompt:
        """The request for this turn alone."""
        return Prompt(
            (*self.prompt.token_ids, *self.tokens),
            turn_key(self.prompt.key, self.number),
            range(self.sample, self.sample + 1),
            (self.limit,),
        )


@dataclass
class _Ledger:
    sampling: SamplingParams | None = None
    num_submitted: int = 0
    turns: dict[int, Turn] = field(default_factory=dict)
    waiting: dict[int, Turn] = field(default_factory=dict)
    """The turns of `turns` that are to be drawn."""

    def add(self, turn: Turn) -> None:
        self.turns[self.num_submitted] = self.waiting[self.num_submitted] = turn
        self.num_submitted += 1


class TurnEngine(BaseEngine):
    """An engine whose `generate` completes a list of prompts in one call.

    `poll` generates every turn that waits. Nothing of an earlier turn is kept but its tokens: the next turn
    is a longer prompt. A subclass writes `generate`, and `_draw` where some turns can end before others.
    """

    _counts_each_token = False
    """Whether tokens are counted as they are drawn; otherwise `poll` counts those of whole turns."""

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Complete every prompt. See `RolloutEngine.generate`."""

    @cached_property
    def _ledger(self) -> _Ledger:
        return _Ledger()

    @property
    def is_busy(self) -> bool:
        return bool(self._ledger.waiting)

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, keep: bool = False) -> list[int]:
        ledger = self._ledger
        self._check_submission(prompts, sampling, ledger.sampling if ledger.turns else None)
        ledger.sampling = sampling
        first = ledger.num_submitted
        for prompt in prompts:
            for sample, limit in zip(prompt.samples, prompt.limits(sampling.max_tokens), strict=True):
                ledger.add(Turn(prompt, sample, limit, keep))
        return list(range(first, ledger.num_submitted))

    def poll(self) -> dict[int, Completion]:
        self._check_awake("poll")
        ledger = self._ledger
        if not ledger.waiting:
            return {}
        assert ledger.sampling is not None
        ended = self._draw(ledger.waiting, ledger.sampling)
        if not self._counts_each_token:
            self.counts.add("tokens", sum(len(completion.token_ids) for completion in ended.values()))
        for number, completion in ended.items():
            turn = ledger.waiting.pop(number)
            turn.tokens += completion.token_ids
            if not turn.is_kept:
                del ledger.turns[number]
        return ended

    def _draw(self, waiting: Mapping[int, Turn], sampling: SamplingParams) -> dict[int, Completion]:
        """Draw turns, and return those that have ended: here all at once."""
        completions = self.generate(requests(list(waiting.values())), sampling)
        return dict(zip(waiting, completions, strict=True))

    def extend(self, sequence: int, token_ids: Sequence[int], max_tokens: int) -> None:
        turn, sampling = self._ledger.turns.get(sequence), self._ledger.sampling
        if turn is None or sequence in self._ledger.waiting or sampling is None:
            raise unextendable(sequence)
        self._check_extension(
            sequence,
            token_ids,
            max_tokens,
            num_prompt=len(turn.prompt.token_ids),
            num_after=len(turn.tokens),
            sampling=sampling,
        )
        turn.tokens += tuple(token_ids)
        turn.number += 1
        turn.limit = max_tokens
        self._ledger.waiting[sequence] = turn

    def abort(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self._ledger.turns.pop(sequence, None)
            self._ledger.waiting.pop(sequence, None)


def requests(turns: Sequence[Turn]) -> list[Prompt]:
    """The turns as prompts, in order; neighbours that begin on one prompt stay one request."""
    prompts: list[Prompt] = []
    last: Turn | None = None
    for turn in turns:
        is_next = last is not None and turn.prompt is last.prompt and turn.sample == last.sample + 1
        if is_next and not (turn.tokens or last.tokens):  # type: ignore[union-attr]
            limits = (*prompts[-1].limits(0), turn.limit)
            samples = range(prompts[-1].samples.start, turn.sample + 1)
            prompts[-1] = replace(prompts[-1], samples=samples, max_tokens=limits)
        else:
            prompts.append(turn.as_prompt())
        last = turn
    return prompts
