"""`Submissions`: the sequences that an engine was asked for, by the numbers under which it was asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from colocate.engines.native.sequences import Group
from colocate.engines.native.sequences import Sequence as RunningSequence
from colocate.types import Completion, Prompt, SamplingParams


class Submissions:
    """Sequences from their submission until they have ended or are aborted, and turns not yet returned."""

    def __init__(self) -> None:
        self.sequences: dict[int, RunningSequence] = {}
        self.finished: list[RunningSequence] = []
        """Where a rollout puts sequences whose turn has ended."""
        self.ended: dict[int, Completion] = {}
        """Turns that have ended and were not returned yet."""
        self._num_submitted = 0
        self._sampling: SamplingParams | None = None

    @property
    def sampling(self) -> SamplingParams | None:
        """How the tokens of the sequences are drawn; None: there are no sequences."""
        return self._sampling if self.sequences else None

    @property
    def has_active(self) -> bool:
        """Whether a sequence waits or runs."""
        return any(not sequence.is_resting for sequence in self.sequences.values())

    def add(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, keep: bool
    ) -> dict[int, RunningSequence]:
        """Sequences for the samples of `prompts`, by their new numbers, in order."""
        self._sampling = sampling
        added = {}
        for prompt in prompts:
            group = Group(prompt, len(prompt.samples))
            for sample, limit in zip(prompt.samples, prompt.limits(sampling.max_tokens), strict=True):
                added[self._num_submitted] = RunningSequence(group, sample, limit, is_kept=keep)
                self._num_submitted += 1
        self.sequences.update(added)
        return added

    def remove(self, numbers: Iterable[int]) -> list[RunningSequence]:
        """Forget sequences, with turns that were not returned. Returns those that were there."""
        removed = []
        for number in numbers:
            self.ended.pop(number, None)
            if number in self.sequences:
                removed.append(self.sequences.pop(number))
        return removed

    def prompts(self, max_len: int) -> list[Prompt]:
        """The groups of all sequences as prompts whose limits are the most tokens that may follow them.

        Args:
            max_len: tokens that the engine's context has.
        """
        limits: dict[Group, list[int]] = {}
        for sequence in self.sequences.values():
            assert self._sampling is not None
            most = min(self._sampling.max_tokens, max_len - len(sequence.prompt))
            limit = most if sequence.is_kept else sequence.limit
            limits.setdefault(sequence.group, []).append(limit)
        return [
            replace(group.prompt, samples=range(len(most)), max_tokens=tuple(most))
            for group, most in limits.items()
        ]

    def end_turns(self, policy_version: int) -> None:
        """Turn the turns of `finished` into completions, and forget sequences that are not kept."""
        if not self.finished:
            return
        assert self._sampling is not None
        numbers = {sequence: number for number, sequence in self.sequences.items()}
        for sequence in self.finished:
            number = numbers[sequence]
            self.ended[number] = sequence.completion(self._sampling, policy_version)
            if not sequence.is_kept:
                del self.sequences[number]
        self.finished.clear()
