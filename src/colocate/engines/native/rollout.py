"""One rollout: admits sequences, launches decode steps, collects tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from colocate.engines.native.batch import Window
from colocate.engines.native.decoder import MAX_ROWS_PER_START, Decoder
from colocate.engines.native.kept_pages import HostRoom, KeptPages
from colocate.engines.native.pages import pages_for
from colocate.engines.native.prefix_cache import PrefixCache
from colocate.engines.native.scheduler import Scheduler
from colocate.engines.native.sequences import Sequence as RunningSequence
from colocate.reporting.work_counts import WorkCounts
from colocate.types import SamplingParams


class Rollout:
    """Draws turns of sequences on the first `num_pages` pages of the decoder's cache.

    The host reads tokens later than the device draws them. It launches a window of steps first and then reads
    the tokens of the window before, so that the device never waits for the host. In return a row whose
    sequence has finished idles until the host has read its last token and removes it.

    Args:
        salt: names all but tokens that keys and values depend on. See `PrefixCache`.
        finished: receives the sequences whose turn has ended. It outlives the rollout.
        counts: where tokens are counted when the host has read them.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampling: SamplingParams,
        *,
        num_pages: int,
        salt: bytes,
        finished: list[RunningSequence],
        counts: WorkCounts,
    ) -> None:
        cache, self.backend = decoder.cache, decoder.backend
        self.decoder = decoder
        self.batch = decoder.batch
        self.cache = cache
        self.pool = cache.pool
        self.pool.resize(num_pages)
        self._prefixes = PrefixCache(self.pool, cache.page_size, salt)
        self.scheduler = Scheduler(self._prefixes, max_num_seqs=decoder.max_num_seqs)
        self.finished = finished
        self._counts = counts
        self._stop_token_ids = set(sampling.stop_token_ids)
        self._windows: deque[Window] = deque()
        self._running: list[RunningSequence] = []
        """The scheduler's running sequences at the last launch."""
        decoder.start_rollout(sampling)

    def restart(self, sequences: Iterable[RunningSequence], kept: KeptPages | None) -> None:
        """Queue all `sequences` but those that rest.

        Args:
            kept: pages of an earlier rollout; None, or too many for this cache: no token is in the cache.
        """
        sequences = list(sequences)
        adopted = [] if kept is None else self._adoptable(sequences)
        groups = {sequence.group for sequence in adopted}
        for group in {sequence.group: None for sequence in sequences}:
            group.leave() if group in groups else group.forget()
            if group in groups and kept is not None and kept.salt != self._prefixes.salt:
                group.is_findable = False  # its pages are another policy's, in part
        if kept is not None and adopted:
            kept.restore(self.cache, self.scheduler.adopt(adopted))
        for sequence in sequences:
            sequence.row = -1
            if sequence.group not in groups:
                sequence.forget()
            sequence.group.num_unstarted += sequence.is_fresh
        self.scheduler.wait(sequence for sequence in sequences if not sequence.is_resting)

    def _adoptable(self, sequences: Sequence[RunningSequence]) -> list[RunningSequence]:
        """The sequences that go on with kept pages; none if the cache has too few.

        A group with members that have not begun is read anew: they share its prompt's pages, which must come
        from the present weights.
        """
        beginning = {sequence.group for sequence in sequences if sequence.is_fresh}
        found = [sequence for sequence in sequences if sequence.pages and sequence.group not in beginning]
        pages = {page for sequence in found for page in sequence.pages}
        return found if len(pages) <= self.pool.num_free else []

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens`, prompt and all that may follow, can run alone."""
        num_pages = pages_for(num_tokens - 1, self.cache.page_size)
        return num_tokens <= self.decoder.max_len and num_pages <= self.pool.num_pages

    @torch.inference_mode()
    def advance(self) -> None:
        """Start sequences that can start, launch a window of steps and read the one before."""
        self._admit()
        num_steps = self._reserve()
        if num_steps:
            self._launch(num_steps)
        else:
            self._collect(max_in_flight=0)

    @torch.inference_mode()
    def settle(self) -> None:
        """Read all tokens that were drawn."""
        self._collect(max_in_flight=0)

    @torch.inference_mode()
    def keep(self, room: HostRoom) -> KeptPages | None:
        """Stop all sequences, and copy their pages to the host; None if it has no room for them."""
        self.settle()
        numbers = sorted({page for sequence in self.scheduler.stop_all() for page in sequence.pages})
        if not room.has(self.cache.bytes_of(len(numbers))):
            return None
        return KeptPages(self.cache, numbers, self._prefixes.salt)

    def close(self) -> None:
        """Stop all sequences, and give their pages back to the cache, where later rollouts may find them."""
        self.settle()
        self.scheduler.give_back()

    @torch.inference_mode()
    def drop(self, sequences: Sequence[RunningSequence]) -> None:
        """Forget sequences in any state."""
        rows = []
        for sequence in sequences:
            sequence.is_over = True
            if sequence in self.scheduler.running:
                rows.append(sequence.row)
            else:
                self.scheduler.drop(sequence)
        if rows:
            self.scheduler.finish(rows)
            self.batch.remove(rows)

    def _admit(self) -> None:
        """Start waiting sequences: fill their pages and draw their first tokens."""
        admission = self.scheduler.admit()
        if admission.prefills:
            prefills = [prefill for prefill, _ in admission.prefills]
            has_prefixes = self.backend.would_share(self.scheduler.shared_prefixes())
            self.decoder.compile_ahead(prefills, len(admission.started), has_prefixes=has_prefixes)
            logits = self.decoder.runner.prefill(prefills)
            for row, (_, owner) in zip(logits, admission.prefills, strict=True):
                owner.logits = row
        if admission.page_copies:
            self.cache.copy_pages(*zip(*admission.page_copies, strict=True))
        for first in range(0, len(admission.started), MAX_ROWS_PER_START):
            started = admission.started[first : first + MAX_ROWS_PER_START]
            rows = self.batch.start(started)
            self.decoder.draw_first(rows, torch.stack([sequence.next_logits for sequence in started]))
            self._windows.append(self.batch.send(started, rows, 1))
        for sequence in admission.started:
            sequence.logits = None
            if sequence.group.num_unstarted == 0:
                sequence.group.logits = None
        self._collect()

    def _reserve(self) -> int:
        """Allocate the next window's pages, preempting if need be. Returns its steps; 0: all at a limit."""
        scheduler = self.scheduler
        num_steps = min(self.backend.steps_per_look, scheduler.num_steps_left)
        if scheduler.lacks_pages(num_steps):
            self._collect(max_in_flight=0)
            preempted = scheduler.make_room(num_steps)
            if preempted:
                self.batch.remove([sequence.row for sequence in preempted])
            num_steps = min(num_steps, scheduler.num_steps_left)
        grown = scheduler.grow(num_steps)
        if grown[0]:
            self.batch.set_pages(*grown)
        return num_steps

    def _launch(self, num_steps: int) -> None:
        scheduler, rows = self.scheduler, slice(0, self.batch.num_rows)
        if self._running != scheduler.running:
            self._running = list(scheduler.running)
            self.backend.share_prefixes(scheduler.shared_prefixes())
        self.decoder.begin_window()
        for _ in range(num_steps):
            self.decoder.step(scheduler.max_context_len)
            scheduler.advance(1)
        self._windows.append(self.batch.send(scheduler.running, rows, num_steps))
        self._collect()

    def _collect(self, max_in_flight: int | None = None) -> None:
        """Read the tokens of all windows but the newest `max_in_flight`, and remove finished sequences."""
        if max_in_flight is None:
            max_in_flight = self.backend.windows_in_flight
        while len(self._windows) > max_in_flight:
            window = self._windows.popleft()
            finished: list[RunningSequence] = []
            num_read = 0
            for sequence, (token_ids, logprobs) in zip(window.sequences, window.read(), strict=True):
                if not token_ids or sequence.is_over:
                    continue
                sequence.token_ids += token_ids
                sequence.logprobs += logprobs
                num_read += len(token_ids)
                if sequence.has_ended(self._stop_token_ids):
                    finished.append(sequence)
            self._counts.add("tokens", num_read)
            if finished:
                rows = [sequence.row for sequence in finished]
                self.scheduler.finish(rows)
                self.batch.remove(rows)
                self.finished += finished
