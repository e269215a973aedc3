"""Which sequences run, and on which pages: the bookkeeping of the host, in Python and without tensors.

A window of several decode steps runs before the host reads tokens again, so pages are allocated for the whole
window in advance.

Sequences start in the order of their prompts. A group's prompt is prefilled once, and all members share the
pages that it fills. If the prompt ends inside a page, this tail page is copied for each member except the
last, which takes the original, because each member writes its first own token there. When pages run out, the
youngest running sequence is preempted: it gives its pages back and waits at the head of the queue with the
tokens that it has, to be recomputed by one prefill. The youngest usually has the fewest tokens to recompute,
and the oldest always advances, so that every rollout ends.

A prompt that may share pages with others (`Group.is_findable`) begins with the pages that the prefix cache
finds for it, and so do recomputed tokens. The full pages of a sequence can be found once it stops or rests,
those of its prompt once that is read.

A sequence that is kept rests after a turn, without a row but with its pages, until it is extended by tokens
that it has not drawn. Then it waits before those that have not started, and only the new tokens are
prefilled. Pages of sequences that do not run are taken away last, when one sequence alone lacks pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

from colocate.engines.native.pages import pages_for
from colocate.engines.native.prefix_cache import PrefixCache
from colocate.engines.native.sequences import Group, Sequence


@dataclass(frozen=True)
class Prefill:
    """Tokens to run through the model: a prompt, or the context of a preempted sequence."""

    token_ids: SequenceABC[int]
    """The whole context, from its first token."""
    num_cached: int
    """Leading tokens whose keys and values are already in `pages`."""
    pages: SequenceABC[int]
    """Pages of the whole context, in order."""


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

    def __init__(self, prefixes: PrefixCache, *, max_num_seqs: int) -> None:
        self.prefixes = prefixes
        self.pool = prefixes.pool
        self.page_size = page_size = prefixes.page_size
        self.max_num_seqs = max_num_seqs
        self.running: list[Sequence] = []
        """Running sequences by row, which is the order in which they started: the last is the youngest."""
        self._resumed: deque[Sequence] = deque()
        """Sequences that wait with tokens of their own: preempted ones, then extended ones."""
        self._fresh: deque[Sequence] = deque()
        """Sequences that wait to start on their prompts."""
        self._idle: dict[Sequence, None] = {}
        """Sequences that have pages and do not run, in the order in which they stopped."""
        self._retained: list[Group] = []
        self._num_steps = 0
        # At step t a running sequence feeds position offset + t, and needs a new page if the page size
        # divides it. So it is filed under -offset modulo the page size, and step t looks only at the
        # sequences filed under t modulo the page size.
        self._by_phase: list[dict[Sequence, None]] = [{} for _ in range(page_size)]
        self._max_offset = 0
        self._last_step = 0

    @property
    def has_work(self) -> bool:
        return bool(self._fresh or self._resumed or self.running)

    def wait(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences that do not run, behind those that wait already."""
        for sequence in sequences:
            (self._fresh if sequence.is_fresh else self._resumed).append(sequence)

    @property
    def max_context_len(self) -> int:
        """Tokens that the longest running sequence will have in the cache after the coming step."""
        return self._max_offset + self._num_steps + 1

    @property
    def num_steps_left(self) -> int:
        """Steps until every running sequence has reached its limit."""
        return max(0, self._last_step - self._num_steps)

    def admit(self) -> Admission:
        """Start waiting sequences, in order, as long as rows and pages are free.

        If nothing runs and the first waiting sequence finds too few pages, prompts that are only retained and
        sequences that rest give theirs up, so that one sequence always runs.
        """
        admission = Admission()
        while len(self.running) < self.max_num_seqs and (waiting := self._resumed or self._fresh):
            sequence = waiting[0]
            if not self._try_start(sequence, admission, force=False):
                if self.running:
                    break
                started = self._try_start(sequence, admission, force=True)
                assert started, "a sequence that fits the empty pool could not be started on it"
            waiting.popleft()
            sequence.row = len(self.running)
            sequence.offset = sequence.num_context - self._num_steps
            self._by_phase[-sequence.offset % self.page_size][sequence] = None
            self.running.append(sequence)
            admission.started.append(sequence)
        if admission.started:
            self._note_running()
        return admission

    def shared_prefixes(self) -> list[tuple[list[int], int]]:
        """The rows of each running prompt's members, and the number of leading pages that they share."""
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
                youngest = self.running.pop()
                self._stop(youngest)
                self._resumed.appendleft(youngest)
                preempted.append(youngest)
            elif self._retained:
                self._drop_retained()
            else:
                self._take_idle_pages()
        if preempted:
            self._note_running()
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
        """Free the rows of sequences whose turn has ended; the sequences behind them move up.

        Sequences that are not kept also give their pages back.
        """
        for row in rows:
            sequence = self.running[row]
            if sequence.is_kept and not sequence.is_over:
                self._rest(sequence)
            else:
                self._stop(sequence)
        gone = set(rows)
        self.running = [sequence for row, sequence in enumerate(self.running) if row not in gone]
        for row, sequence in enumerate(self.running):
            sequence.row = row
        self._note_running()

    def stop_all(self) -> list[Sequence]:
        """Stop all running sequences; they keep the pages of tokens read. The host must have read all tokens.

        Returns:
            The sequences that have pages.
        """
        self._drop_retained()
        for sequence in self.running:
            self._keep_pages(sequence)
        self.running = []
        self._note_running()
        return list(self._idle)

    def give_back(self) -> None:
        """Stop all running sequences, and give all pages back; their contents can still be found.

        The host must have read all tokens before, and this scheduler is of no use afterwards.
        """
        for sequence in self.stop_all():
            self.pool.release(sequence.pages)

    def adopt(self, sequences: SequenceABC[Sequence]) -> dict[int, int]:
        """Give sequences of another scheduler as many pages as they had there; the pool must have these.

        Returns:
            The new number of each page, by its old one.
        """
        old = sorted({page for sequence in sequences for page in sequence.pages})
        new = dict(zip(old, self.pool.allocate(len(old)), strict=True))
        for sequence in sequences:
            group = sequence.group
            if group.num_holders == 0:
                group.pages = [new[page] for page in group.pages]
            group.num_holders += 1
            sequence.pages = [new[page] for page in sequence.pages]
            self.pool.share(sequence.pages)
            self._idle[sequence] = None
        self.pool.release(new.values())  # held by sequences alone
        return new

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that does not run, and give its pages back."""
        if sequence.is_fresh:
            self._fresh.remove(sequence)
            group = sequence.group
            group.num_unstarted -= 1
            if group.is_retained and not group.num_unstarted:
                self._drop_group(group)
        elif not sequence.is_resting:
            self._resumed.remove(sequence)
        if sequence.pages:
            del self._idle[sequence]
            self._release(sequence)

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
        """Give a waiting sequence its pages, and note its prefills and copies; False if too few pages are
        free: then nothing has changed, except that `force` drops retained prompts and idle pages if nothing
        runs."""
        if sequence.is_fresh:
            start = self._start_fresh
        else:
            start = self._start_extended if sequence.pages else self._start_resumed
        while not start(sequence, admission, force):
            if not force or not self._idle.keys() - {sequence}:
                return False
            self._take_idle_pages(sequence)
        return True

    def _has_room(self, num_pages: int, found: SequenceABC[int] = ()) -> bool:
        # One free page per running sequence is held in reserve. Without it the newcomer, as the youngest,
        # would be preempted within a few steps, when the others need their next pages.
        return self.pool.num_free - self.pool.count_free(found) - num_pages >= len(self.running)

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
        found = self._find_prompt(group) if group.num_holders == 0 else []
        num_pages = 0
        if not group.is_retained:
            num_pages = (num_full - len(found) if group.num_holders == 0 else 0) + bool(has_tail)
        if has_tail and not takes_over:
            num_pages += 1
        if force:
            self._drop_retained(keep=group)
        if not self._has_room(num_pages, found):
            return False
        if not group.is_retained:
            self._retain(group, found, admission)
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
        sequence.num_found = group.num_found
        return True

    def _start_resumed(self, sequence: Sequence, admission: Admission, force: bool) -> bool:
        """Start a preempted sequence again by a prefill of prompt and tokens; see `_try_start`.

        It shares the prompt's full pages, if its group has them, and those that the prefix cache finds, and
        prefills only the rest.
        """
        if force:
            self._drop_retained()
        group, context = sequence.group, sequence.context
        num_full = len(sequence.prompt) // self.page_size
        is_cached = group.num_holders > 0
        num_held = num_full if is_cached else 0
        names = self._names(group, context)
        found = self.prefixes.find(names, len(context), num_held)
        num_pages = pages_for(len(context), self.page_size) - num_held - len(found)
        if not self._has_room(num_pages, found):
            return False
        self.pool.share(found)
        pages = found + self.pool.allocate(num_pages)
        if is_cached:
            self._hold(group)
            sequence.pages = group.pages + pages
        else:
            group.pages, group.num_holders = pages[:num_full], 1
            sequence.pages = pages
        num_cached = (num_held + len(found)) * self.page_size
        if sequence.num_found is None:
            sequence.num_found = num_cached
        admission.prefills.append((Prefill(context, num_cached, list(sequence.pages)), sequence))
        return True

    def _start_extended(self, sequence: Sequence, admission: Admission, force: bool) -> bool:
        """Start a sequence on pages that it has kept, by a prefill of its new tokens; see `_try_start`."""
        if force:
            self._drop_retained()
        num_pages = pages_for(sequence.num_context, self.page_size) - len(sequence.pages)
        if not self._has_room(num_pages):
            return False
        sequence.pages += self.pool.allocate(num_pages)
        del self._idle[sequence]
        if sequence.num_found is None:
            sequence.num_found = sequence.num_cached
        prefill = Prefill(sequence.context, sequence.num_cached, list(sequence.pages))
        admission.prefills.append((prefill, sequence))
        return True

    def _find_prompt(self, group: Group) -> list[int]:
        """Pages for the beginning of a prompt that its group does not have."""
        return self.prefixes.find(self._names(group, ()), len(group.prompt.token_ids))

    def _names(self, group: Group, token_ids: SequenceABC[int]) -> list[bytes]:
        """The names of full pages of the prompt, `token_ids` after it; none if the group is not findable."""
        if not group.is_findable:
            return []
        if group.names is None:
            group.names = self.prefixes.names(group.prompt.token_ids)
        return self.prefixes.names(token_ids, group.names) if token_ids else group.names

    def _retain(self, group: Group, found: list[int], admission: Admission) -> None:
        """Bring a prompt's pages (`found`, by `_find_prompt`) into the cache, and let the group hold them."""
        prompt = group.prompt.token_ids
        num_full, has_tail = divmod(len(prompt), self.page_size)
        is_cached = group.num_holders > 0
        if is_cached:
            self._hold(group)
        else:
            self.pool.share(found)
            group.pages, group.num_holders = found + self.pool.allocate(num_full - len(found)), 1
            self.prefixes.enter(self._names(group, ()), group.pages)
        group.tail_page = self.pool.allocate(1)[0] if has_tail else None
        group.is_retained = True
        self._retained.append(group)
        # Its last token is read in any case, for the logits after it.
        num_cached = min((num_full if is_cached else len(found)) * self.page_size, len(prompt) - 1)
        if group.num_found is None:
            group.num_found = num_cached
        if has_tail or not is_cached or group.logits is None:
            pages = group.pages + ([] if group.tail_page is None else [group.tail_page])
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
            self._drop_group(group)

    def _drop_group(self, group: Group) -> None:
        self.pool.release(group.pages)
        if group.tail_page is not None:
            self.pool.release([group.tail_page])
            group.tail_page = None
        group.is_retained = False
        self._retained.remove(group)
        self._let_go(group)

    def _take_idle_pages(self, starting: Sequence | None = None) -> None:
        """Take the pages of the sequence that kept them the shortest, not `starting`; it is recomputed."""
        youngest = next(sequence for sequence in reversed(self._idle) if sequence is not starting)
        del self._idle[youngest]
        self._release(youngest)

    def _stop(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._release(sequence)

    def _rest(self, sequence: Sequence) -> None:
        self._keep_pages(sequence)
        sequence.is_resting = True

    def _keep_pages(self, sequence: Sequence) -> None:
        """Let a sequence that ran hold the pages of the tokens that it has read."""
        self._leave(sequence)
        num_pages = pages_for(sequence.num_cached, self.page_size)  # those beyond were taken for a window
        self.pool.release(sequence.pages[num_pages:])
        del sequence.pages[num_pages:]
        self._idle[sequence] = None

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of those that run, and make its pages findable."""
        del self._by_phase[-sequence.offset % self.page_size][sequence]
        # The last token drawn was never fed: it has no key and value.
        sequence.num_cached = sequence.num_context - 1
        if sequence.group.is_findable:
            names = self._names(sequence.group, sequence.context[: sequence.num_cached])
            self.prefixes.enter(names, sequence.pages)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.num_cached = [], 0
        self._let_go(sequence.group)

    def _note_running(self) -> None:
        """The demands of every step on the running sequences, found when one starts or stops."""
        self._max_offset = max((sequence.offset for sequence in self.running), default=0)
        self._last_step = max((sequence.end - sequence.offset for sequence in self.running), default=0)
