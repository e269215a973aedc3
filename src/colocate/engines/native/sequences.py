"""Sequences, and groups of sequences with one prompt, as the scheduler handles them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor

from colocate.types import Completion, Prompt, SamplingParams


@dataclass(eq=False)
class Group:
    """A prompt and the pages of it that are in the cache."""

    prompt: Prompt
    num_unstarted: int
    """Members that have never run."""
    pages: list[int] = field(default_factory=list)
    """The pages that the prompt fills; in the cache while `num_holders` > 0."""
    num_holders: int = 0
    """Members that have pages, plus one while the group is retained."""
    is_retained: bool = False
    """True: the group itself holds the prompt's pages too, for members that have not started."""
    tail_page: int | None = None
    """The page with the prompt's last tokens, while the group is retained; None: they fill whole pages."""
    logits: Tensor | None = None
    """Logits [V] after the prompt, from which each member draws its first token."""
    is_findable: bool = False
    """Whether other prompts may find pages of its members, and its members theirs. See `PrefixCache`."""
    names: list[bytes] | None = None
    """The names of `pages`; None: not worked out since the cache was lost."""
    num_found: int | None = None
    """Tokens of the prompt that earlier prompts had left in the cache; None: it has not been read."""

    def forget(self) -> None:
        """Count no page as held, and no member as waiting: the cache has been lost."""
        self.pages = []
        self.leave()

    def leave(self) -> None:
        """Count no holder and no member: they are counted anew where the pages are adopted."""
        self.num_holders, self.is_retained, self.tail_page = 0, False, None
        self.num_unstarted, self.logits, self.names = 0, None, None


@dataclass(eq=False)
class Sequence:
    """One member of a group. It waits, runs, or rests: between two turns it has nothing to draw."""

    group: Group
    sample: int
    limit: int
    """Largest number of tokens that the present turn may draw."""
    is_kept: bool = False
    """Whether it rests when a turn has ended, so that it can be extended; else it is over then."""
    turn: int = 0
    """The number of the present turn, from 0."""
    given: list[int] = field(default_factory=list)
    """The tokens between the prompt and the present turn: earlier turns, and what was given after each."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens of the present turn that the host has read so far."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The versions of the weights that drew the leading tokens of the present turn, as far as noted."""
    pages: list[int] = field(default_factory=list)
    """The pages that it has while it runs, or has kept while it rests or waits."""
    row: int = -1
    """Row in the batch, while the sequence runs."""
    offset: int = 0
    """Decode step t of the rollout feeds the token at position `offset` + t, as long as the sequence runs."""
    num_cached: int = 0
    """Leading tokens whose keys and values are in `pages`, while it has pages and does not run."""
    num_found: int | None = None
    """Tokens that were in the cache when the present turn began, and not read for it; None: it has yet to
    begin."""
    logits: Tensor | None = None
    """Logits [V] after all its tokens, if it starts with more than its prompt."""
    is_resting: bool = False
    is_over: bool = False
    """True: its last turn has ended, or it was aborted; tokens that still arrive are not its own."""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.group.prompt.token_ids

    @property
    def is_fresh(self) -> bool:
        """Whether it consists of its prompt alone."""
        return not (self.given or self.token_ids)

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens, from the prompt's first one."""
        return (*self.prompt, *self.given, *self.token_ids)

    @property
    def num_context(self) -> int:
        return len(self.prompt) + len(self.given) + len(self.token_ids)

    @property
    def next_logits(self) -> Tensor:
        """Logits [V] from which the sequence draws its first token after it starts or resumes."""
        logits = self.group.logits if self.logits is None else self.logits
        assert logits is not None, "a sequence was started before its context was prefilled"
        return logits

    @property
    def end(self) -> int:
        """Number of positions that are fed to the model at most; the last token drawn is never fed."""
        return len(self.prompt) + len(self.given) + self.limit - 1

    def has_ended(self, stop_token_ids: Collection[int]) -> bool:
        """Whether the present turn has drawn all its tokens."""
        return len(self.token_ids) == self.limit or self.token_ids[-1] in stop_token_ids

    def note_version(self, policy_version: int) -> None:
        """Remember that `policy_version` drew all tokens that were drawn since this was called last."""
        self.versions += [policy_version] * (len(self.token_ids) - len(self.versions))

    def completion(self, sampling: SamplingParams, policy_version: int) -> Completion:
        """The tokens drawn in the present turn, which has ended."""
        is_stopped = self.token_ids[-1] in sampling.stop_token_ids
        has_older = bool(self.versions) and self.versions[0] != policy_version
        self.note_version(policy_version)
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason="stop" if is_stopped else "length",
            policy_version=self.versions[-1],
            policy_versions=tuple(self.versions) if has_older else None,
            num_cached_tokens=self.num_found,
        )

    def begin_turn(self, token_ids: list[int], limit: int) -> None:
        """Append `token_ids`, which were not drawn, and let the sequence draw up to `limit` more."""
        self.given += self.token_ids + token_ids
        self.token_ids, self.logprobs, self.versions, self.limit = [], [], [], limit
        self.turn += 1
        self.num_found = None
        self.is_resting = False

    def forget(self) -> None:
        """Hold no page and no row: the cache has been lost."""
        self.pages, self.row, self.num_cached, self.logits = [], -1, 0, None
