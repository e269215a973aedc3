"""Which sequences run, and on which pages: the bookkeeping of the host, in Python and without tensors.

A window of several decode steps runs before the host reads tokens again, so pages are allocated for the whole
window in advance.

Sequences start in the order of their prompts. A group's prompt is prefilled once, and all members share the
pages that it fills. If the prompt ends inside a page, this tail page is copied for each member except the
last, which takes the original, because each member writes its first own token there. When pages run out, the
youngest running sequence is preempted: it gives its pages back and waits at the head of the queue with the
tokens that it has, to be recomputed by one prefill. The youngest usually has the fewest tokens to recompute,
and the oldest always advances, so that every rollout ends.
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
    """Tokens to run through the model: a prompt, or the context of a preempted sequence."""

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
    """Members that have never run."""
    pages: list[int] = field(default_factory=list)
    """The pages that the prompt fills; in the cache while `num_holders` > 0."""
    num_holders: int = 0
    """Running members, plus one while the group is retained."""
    is_retained: bool = False
    """True: the group itself holds the prompt's pages too, for members that have not started."""
    tail_page: int | None = None
    """While the group is retained, the page with the prompt's last tokens; None: they fill whole pages."""
    logits: Tensor | None = None
    """Logits [V] after the prompt, from which each member draws its first token."""


@dataclass(eq=False)
class Sequence:
    """One member of a group: waiting or running."""

    group: Group
    sample: int
    limit: int
    """Largest number of completion tokens."""
    token_ids: list[int] = field(default_factory=list)
    """The completion's tokens that the host has read so far."""
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    row: int = -1
    """Row in the batch, while the sequence runs."""
    offset: int = 0
    """Decode step t of the rollout feeds the token at position `offset` + t, as long as the sequence runs."""
    logits: Tensor | None = None
    """Logits [V] after all its tokens, if the sequence was preempted and has been recomputed."""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.group.prompt.token_ids

    @property
    def next_logits(self) -> Tensor:
        """Logits [V] from which the sequence draws its first token after it starts or resumes."""
        logits = self.group.logits if self.logits is None else self.logits
        assert logits is not None, "a sequence was started before its context was prefilled"
        return logits

    @property
    def num_context(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def end(self) -> int:
        """Number of positions that are fed to the model at most; the last token drawn is never fed."""
        return len(self.prompt) + self.limit - 1


@dataclass
class Admission:
    """The work that newly started sequences need before they decode: prefills, then copies of pages."""

    prefills: list[tuple[Prefill, Group | Sequence]] = field(default_factory=list)
    """Each prefill, with the group or sequence whose `logits` it yields."""
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages to copy, as (source, destination)."""
    started: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching over `max_num_seqs` rows and a pool of pages; it decides without randomness."""

    def __init__(
        self, prompts: Iterable[Prompt], *, pool: PagePool, page_size: int, max_num_seqs: int, max_tokens: int
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.running: list[Sequence] = []
        """Running sequences by row, which is the order in which they started: the last is the youngest."""
        self.sequences: list[Sequence] = []
        """All sequences of the rollout, in the order in which completions are returned."""
        for prompt in prompts:
            group = Group(prompt, num_unstarted=len(prompt.samples))
            limits = prompt.limits(max_tokens)
            self.sequences += [
                Sequence(group, sample, limit) for sample, limit in zip(prompt.samples, limits, strict=True)
            ]
        self._waiting = deque(self.sequences)
        self._retained: list[Group] = []
        self._num_steps = 0
        # At step t a running sequence feeds position offset + t, and needs a new page if the page size
        # divides it. So it is filed under -offset modulo the page size, and step t looks only at the
        # sequences filed under t modulo the page size.
        self._by_phase: list[dict[Sequence, None]] = [{} for _ in range(page_size)]
        self._max_offset = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.running)

    @property
    def max_context_len(self) -> int:
        """Tokens that the longest running sequence will have in the cache after the coming step."""
        return self._max_offset + self._num_steps + 1

    @property
    def num_steps_left(self) -> int:
        """Steps until every running sequence has reached its limit."""
        last_step = max((sequence.end - sequence.offset for sequence in self.running), default=0)
        return max(0, last_step - self._num_steps)

    def admit(self) -> Admission:
        """Start waiting sequences, in order, as long as rows and pages are free.

        If nothing runs and the first waiting sequence finds too few pages, prompts that are only retained
        give theirs up, so that one sequence always runs.
        """
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
        """For each prompt that runs, its members' rows and the number of leading pages that they share."""
        rows: dict[Group, list[int]] = {}
        for sequence in self.running:
            rows.setdefault(sequence.group, []).append(sequence.row)
        return [(members, len(group.pages)) for group, members in rows.items()]

    def lacks_pages(self, num_steps: int) -> bool:
        """Whether the next `num_steps` steps need more pages than are free."""
        return len(self._growing(num_steps)) > self.pool.num_free

    def make_room(self, num_steps: int) -> list[Sequence]:
        """Preempt the youngest sequences until the next `num_steps` steps have enough free pages.

        The host must have read all tokens before, because a preempted sequence is recomputed from them.

        Returns:
            The preempted sequences; their `row` is still the one that they had.
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
        """Allocate the pages that sequences need in the next `num_steps` steps.

        Returns:
            The entries to make in the block tables: rows, columns and pages.
        """
        growing = self._growing(num_steps)
        pages = self.pool.allocate(len(growing))
        columns = []
        for sequence, page in zip(growing, pages, strict=True):
            columns.append(len(sequence.pages))
            sequence.pages.append(page)
        return [sequence.row for sequence in growing], columns, pages

    def advance(self, num_steps: int) -> None:
        """Count `num_steps` decode steps, which have been launched."""
        self._num_steps += num_steps

    def finish(self, rows: SequenceABC[int]) -> None:
        """Free the rows and pages of finished sequences; the sequences behind them move up."""
        for row in rows:
            self._stop(self.running[row])
        gone = set(rows)
        self.running = [sequence for row, sequence in enumerate(self.running) if row not in gone]
        for row, sequence in enumerate(self.running):
            sequence.row = row
        self._update_max_offset()

    def _growing(self, num_steps: int) -> list[Sequence]:
        """Sequences that begin a new page in the next `num_steps` steps, in the order of these steps."""
        steps = range(self._num_steps, self._num_steps + num_steps)
        return [
            sequence
            for step in steps
            for sequence in self._by_phase[step % self.page_size]
            if sequence.offset + step < sequence.end
        ]

    def _try_start(self, sequence: Sequence, admission: Admission, *, force: bool) -> bool:
        """Give a waiting sequence its pages, and note the prefills and copies that it needs.

        Args:
            force: nothing runs, so the retained prompts of other groups may be dropped for it.

        Returns:
            False, with nothing changed except those prompts, if too few pages are free.
        """
        start = self._start_resumed if sequence.token_ids else self._start_fresh
        return start(sequence, admission, force)

    def _has_room(self, num_pages: int) -> bool:
        # One free page per running sequence is held in reserve. Without it the newcomer, as the youngest,
        # would be preempted within a few steps, when the others need their next pages.
        return self.pool.num_free - num_pages >= len(self.running)

    def _start_fresh(self, sequence: Sequence, admission: Admission, force: bool) -> bool:
        """Start a sequence without tokens on its group's prompt; see `_try_start`.

        The first member to start brings the prompt into the cache, where the group retains it for the others.
        The last member takes over the group's hold and its tail page; the others add a holder to the full
        pages and get a copy of the tail page. A forced start takes over as well, since the pool may have no
        page for a copy: the members that still wait then prefill the prompt again.
        """
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
            # The sequence becomes the holder of the pages in place of the group.
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
        """Start a preempted sequence again by a prefill of prompt and tokens; see `_try_start`.

        If the prompt's full pages are still in the cache, it shares them and prefills only what follows.
        """
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
        """Bring a prompt's pages into the cache, and let the group itself hold them."""
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
        """Give up prompts retained for members that have not started, which will prefill them again."""
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
