"""`Submissions`: the sequences submitted to an engine, by their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from colocate.engines.native.kept_pages import KeptPages
from colocate.engines.native.sequences import Group
from colocate.engines.native.sequences import Sequence as RunningSequence
from colocate.types import Completion, Prompt, SamplingParams

_SAVED = (
    *("sample", "limit", "is_kept", "turn", "given", "token_ids", "logprobs", "versions", "num_found"),
    "is_resting",
)
"""The fields of a sequence that are saved, besides its prompt."""


class Submissions:
    """Sequences from their submission until they have ended or are aborted, and turns not yet returned."""

    def __init__(self) -> None:
        self.sequences: dict[int, RunningSequence] = {}
        self.finished: list[RunningSequence] = []
        """Where a rollout puts sequences whose turn has ended."""
        self.ended: dict[int, Completion] = {}
        """Turns that have ended and were not returned yet."""
        self.kept: KeptPages | None = None
        """Copies of the pages that the sequences had when they were set aside."""
        self._num_submitted = 0
        self._sampling: SamplingParams | None = None

    @property
    def sampling(self) -> SamplingParams | None:
        """The sampling parameters of the sequences; None: there are no sequences."""
        return self._sampling if self.sequences else None

    @property
    def has_active(self) -> bool:
        """Whether a sequence waits or runs."""
        return any(not sequence.is_resting for sequence in self.sequences.values())

    def add(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, keep: bool, is_findable: bool
    ) -> dict[int, RunningSequence]:
        """Sequences for the samples of `prompts`, by their new numbers, in order.

        Args:
            is_findable: see `Group.is_findable`.
        """
        self._sampling = sampling
        added = {}
        for prompt in prompts:
            group = Group(prompt, len(prompt.samples), is_findable=is_findable)
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
        """The groups of all sequences as prompts, each with the most tokens that may follow as its limit.

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

    def note_version(self, policy_version: int) -> None:
        """Remember that `policy_version` drew all tokens that were drawn since this was called last."""
        for sequence in self.sequences.values():
            sequence.note_version(policy_version)

    def forget_cache(self) -> None:
        """Keep nothing of the sequences but their tokens."""
        self.kept = None
        for sequence in self.sequences.values():
            sequence.group.forget()
            sequence.forget()

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

    def state_dict(self) -> dict[str, Any]:
        """The sequences' tokens, and the turns that were not returned yet. All pages are given up, so that
        this run and one resumed from the state go on equally."""
        self.forget_cache()
        groups = list({sequence.group: None for sequence in self.sequences.values()})
        numbers = {group: number for number, group in enumerate(groups)}
        return {
            "prompts": [(group.prompt.token_ids, group.prompt.key) for group in groups],
            "sequences": {
                number: {"group": numbers[s.group], **{name: getattr(s, name) for name in _SAVED}}
                for number, s in self.sequences.items()
            },
            "ended": {number: vars(completion) for number, completion in self.ended.items()},
            "num_submitted": self._num_submitted,
        }

    def load_state_dict(self, state: dict[str, Any], sampling: SamplingParams) -> None:
        """Have the sequences of a `state_dict`, in their order, to be drawn by `sampling`."""
        groups = [Group(Prompt(tuple(ids), key), 0, is_findable=True) for ids, key in state["prompts"]]
        self.sequences = {
            number: RunningSequence(**{**fields, "group": groups[fields["group"]]})
            for number, fields in state["sequences"].items()
        }
        self.ended = {number: Completion(**fields) for number, fields in state["ended"].items()}
        self._num_submitted, self._sampling = state["num_submitted"], sampling
