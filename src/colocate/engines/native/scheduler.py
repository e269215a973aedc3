"""Which sequences run, and on which pages. Python only: no tensor is touched here.

Several decode steps run between two looks at the host, so pages are reserved for all of them in advance.

Groups wait in order. A group's prompt is prefilled once and its full pages are shared by all members; the
last page, if the prompt ends inside it, is copied for each member but the last. When pages run out, the
youngest running sequence gives its pages back and waits at the head of the queue with the tokens it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

from torch import Tensor

from colocate.engines.native.pages import PagePool, pages_for
from colocate.types import Prompt


@dataclass(frozen=True)
class Prefill:
    """Tokens to run through the model: a prompt, or a preempted sequence to recompute."""

    token_ids: SequenceABC[int]
    """The whole context, from its first token."""
    num_cached: int
    """Leading tokens whose keys and values are already in `pages`."""
    pages: SequenceABC[int]
    """Pages of the whole context, in order."""


@dataclass(eq=False)
class Group:
    """A prompt and the pages of it that are in the cache."""

    prompt: Prompt
    num_unstarted: int
    pages: list[int] = field(default_factory=list)
    """The prompt's full pages; meaningful while `num_holders` > 0."""
    num_holders: int = 0
    """Running members, plus one while the group is retained."""
    is_retained: bool = False
    """The group itself holds the prompt's pages, for members that have not started."""
    tail_page: int | None = None
    """While retained: the page with the prompt's last tokens, if they do not fill one."""
    logits: Tensor | None = None
    """[V] after the prompt, from which each member draws its first token."""


@dataclass(eq=False)
class Sequence:
    """One member of a group: waiting or running."""

    group: Group
    sample: int
    limit: int
    """Completion tokens at most."""
    token_ids: list[int] = field(default_factory=list)
    """Completion so far, as far as the host has seen it."""
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    row: int = -1
    """Row in the batch while running."""
    offset: int = 0
    """While running: position of the token that decode step t feeds, minus t. It never changes."""
    logits: Tensor | None = None
    """[V] after all tokens so far, of a sequence that was preempted and has been recomputed."""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.group.prompt.token_ids

    @property
    def next_logits(self) -> Tensor:
        """[V] to draw the first token from after starting."""
        logits = self.group.logits if self.logits is None else self.logits
        assert logits is not None, "a sequence was started before its context was prefilled"
        return logits

    @property
    def num_context(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def end(self) -> int:
        """Positions that are ever fed to the model. The last token drawn is not."""
        return len(self.prompt) + self.limit - 1


@dataclass
class Admission:
    """What has to happen, in this order, before `started` can decode."""

    prefills: list[tuple[Prefill, Group | Sequence]] = field(default_factory=list)
    """Each with the owner of the logits that it yields."""
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching over `max_num_seqs` rows and a pool of pages. Deterministic."""

    def __init__(
        self, prompts: Iterable[Prompt], *, pool: PagePool, page_size: int, max_num_seqs: int, max_tokens: int
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.running: list[Sequence] = []
        """In batch-row order, which is also the order of starting: the last is the youngest."""
        self.sequences: list[Sequence] = []
        """All, in the order in which completions are returned."""
        for prompt in prompts:
            group = Group(prompt, num_unstarted=len(prompt.samples))
            limits = prompt.limits(max_tokens)
            self.sequences += [
                Sequence(group, sample, limit) for sample, limit in zip(prompt.samples, limits, strict=True)
            ]
        self._waiting = deque(self.sequences)
        self._retained: list[Group] = []
        self._num_steps = 0
        # Every running sequence grows by one token per step, so those that need a page at step t are the ones
        # with the same (t + offset) modulo the page size: no need to look at all of them.
        self._by_phase: list[dict[Sequence, None]] = [{} for _ in range(page_size)]
        self._max_offset = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.running)

    @property
    def max_context_len(self) -> int:
        """Tokens of the longest running sequence after the coming step's key and value are stored."""
        return self._max_offset + self._num_steps + 1

    @property
    def num_steps_left(self) -> int:
        """Steps until the last of the running sequences reaches its limit; 0 if all have."""
        last_step = max((sequence.end - sequence.offset for sequence in self.running), default=0)
        return max(0, last_step - self._num_steps)

    def admit(self) -> Admission:
        """Start waiting sequences, in order, while rows and pages last."""
        admission = Admission()
        while self._waiting and len(self.running) < self.max_num_seqs:
            sequence = self._waiting[0]
            if not self._try_start(sequence, admission, force=False):
                if self.running:
                    break
                started = self._try_start(sequence, admission, force=True)
                assert started, "a sequence that fits the empty pool could not be started on it"
            self._waiting.popleft()
            sequence.row = len(self.running)
            sequence.offset = sequence.num_context - self._num_steps
            self._by_phase[-sequence.offset % self.page_size][sequence] = None
            self.running.append(sequence)
            admission.started.append(sequence)
        self._update_max_offset()
        return admission

    def shared_prefixes(self) -> list[tuple[list[int], int]]:
        """The rows of each running prompt, and the number of leading pages that they share."""
        rows: dict[Group, list[int]] = {}
        for sequence in self.running:
            rows.setdefault(sequence.group, []).append(sequence.row)
        return [(members, len(group.pages)) for group, members in rows.items()]

    def lacks_pages(self, num_steps: int) -> bool:
        """Whether the coming steps need more pages than are free."""
        return len(self._growing(num_steps)) > self.pool.num_free

    def make_room(self, num_steps: int) -> list[Sequence]:
        """Preempt until the coming steps' pages are there. Returns the preempted, their rows still set.

        The host must have seen every token: a preempted sequence is recomputed from them.
        """
        preempted = []
        while self.lacks_pages(num_steps):
            if len(self.running) > 1:
                youngest = self.running[-1]
                self._stop(youngest)
                del self.running[-1]
                self._waiting.appendleft(youngest)
                preempted.append(youngest)
            else:
                self._drop_retained()
        if preempted:
            self._update_max_offset()
        return preempted

    def grow(self, num_steps: int) -> tuple[list[int], list[int], list[int]]:
        """Give the coming steps' pages to the sequences that need one: (rows, block-table columns, pages)."""
        growing = self._growing(num_steps)
        pages = self.pool.allocate(len(growing))
        columns = []
        for sequence, page in zip(growing, pages, strict=True):
            columns.append(len(sequence.pages))
            sequence.pages.append(page)
        return [sequence.row for sequence in growing], columns, pages

    def advance(self, num_steps: int) -> None:
        """Decode steps have been launched."""
        self._num_steps += num_steps

    def finish(self, rows: SequenceABC[int]) -> None:
        """Free the rows and pages of finished sequences; the rows behind them move up."""
        for row in rows:
            self._stop(self.running[row])
        gone = set(rows)
        self.running = [sequence for row, sequence in enumerate(self.running) if row not in gone]
        for row, sequence in enumerate(self.running):
            sequence.row = row
        self._update_max_offset()

    def _growing(self, num_steps: int) -> list[Sequence]:
        """Sequences that begin a new page in the coming steps, in the order in which they do."""
        steps = range(self._num_steps, self._num_steps + num_steps)
        return [
            sequence
            for step in steps
            for sequence in self._by_phase[step % self.page_size]
            if sequence.offset + step < sequence.end
        ]

    def _try_start(self, sequence: Sequence, admission: Admission, *, force: bool) -> bool:
        """Give a waiting sequence its pages. `force`: nothing runs, and whatever else is kept may go."""
        start = self._start_resumed if sequence.token_ids else self._start_fresh
        return start(sequence, admission, force)

    def _has_room(self, num_pages: int) -> bool:
        # Every running sequence keeps a page in reserve, or the newcomer would be preempted within a few
        # steps.
        return self.pool.num_free - num_pages >= len(self.running)

    def _start_fresh(self, sequence: Sequence, admission: Admission, force: bool) -> bool:
        group = sequence.group
        num_full, has_tail = divmod(len(sequence.prompt), self.page_size)
        takes_over = group.num_unstarted == 1 or force
        num_pages = 0
        if not group.is_retained:
            num_pages = (num_full if group.num_holders == 0 else 0) + bool(has_tail)
        if has_tail and not takes_over:
            num_pages += 1
        if force:
            self._drop_retained(keep=group)
        if not self._has_room(num_pages):
            return False
        if not group.is_retained:
            self._retain(group, admission)
        if takes_over:
            # The group's hold on the pages becomes the sequence's.
            group.is_retained = False
            self._retained.remove(group)
            sequence.pages = group.pages + ([] if group.tail_page is None else [group.tail_page])
            group.tail_page = None
        else:
            self._hold(group)
            sequence.pages = list(group.pages)
            if group.tail_page is not None:
                (page,) = self.pool.allocate(1)
                admission.page_copies.append((group.tail_page, page))
                sequence.pages.append(page)
        group.num_unstarted -= 1
        return True

    def _start_resumed(self, sequence: Sequence, admission: Admission, force: bool) -> bool:
        if force:
            self._drop_retained()
        group, context = sequence.group, (*sequence.prompt, *sequence.token_ids)
        num_full = len(sequence.prompt) // self.page_size
        is_cached = group.num_holders > 0
        num_pages = pages_for(len(context), self.page_size) - (num_full if is_cached else 0)
        if not self._has_room(num_pages):
            return False
        new_pages = self.pool.allocate(num_pages)
        if is_cached:
            self._hold(group)
            sequence.pages = group.pages + new_pages
        else:
            group.pages, group.num_holders = new_pages[:num_full], 1
            sequence.pages = new_pages
        num_cached = num_full * self.page_size if is_cached else 0
        admission.prefills.append((Prefill(context, num_cached, list(sequence.pages)), sequence))
        return True

    def _retain(self, group: Group, admission: Admission) -> None:
        """Bring a prompt's pages into the cache, held by the group itself."""
        prompt = group.prompt.token_ids
        num_full, has_tail = divmod(len(prompt), self.page_size)
        is_cached = group.num_holders > 0
        if is_cached:
            self._hold(group)
        else:
            group.pages, group.num_holders = self.pool.allocate(num_full), 1
        group.tail_page = self.pool.allocate(1)[0] if has_tail else None
        group.is_retained = True
        self._retained.append(group)
        if has_tail or not is_cached:
            pages = group.pages + ([] if group.tail_page is None else [group.tail_page])
            num_cached = num_full * self.page_size if is_cached else 0
            admission.prefills.append((Prefill(prompt, num_cached, pages), group))

    def _hold(self, group: Group) -> None:
        self.pool.share(group.pages)
        group.num_holders += 1

    def _let_go(self, group: Group) -> None:
        group.num_holders -= 1
        assert group.num_holders >= 0, "a prompt was let go more often than it was held"
        if group.num_holders == 0:
            group.pages = []

    def _drop_retained(self, keep: Group | None = None) -> None:
        """Forget prompts kept for members that have not started; they will be prefilled again."""
        for group in [group for group in self._retained if group is not keep]:
            self.pool.release(group.pages)
            if group.tail_page is not None:
                self.pool.release([group.tail_page])
                group.tail_page = None
            group.is_retained = False
            self._retained.remove(group)
            self._let_go(group)

    def _stop(self, sequence: Sequence) -> None:
        del self._by_phase[-sequence.offset % self.page_size][sequence]
        self.pool.release(sequence.pages)
        sequence.pages = []
        self._let_go(sequence.group)

    def _update_max_offset(self) -> None:
        self._max_offset = max((sequence.offset for sequence in self.running), default=0)
