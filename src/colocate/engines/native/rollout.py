"""One rollout: admits sequences, launches decode steps, collects tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from colocate.engines.native.batch import Window
from colocate.engines.native.decoder import Decoder
from colocate.engines.native.pages import PagePool
from colocate.engines.native.scheduler import Scheduler
from colocate.engines.native.scheduler import Sequence as RunningSequence
from colocate.types import Completion, Prompt, SamplingParams

MAX_ROWS_PER_START = 64
"""Sequences that draw their first token together; it bounds the stacked copy of their logits, [64, V]."""


class Rollout:
    """Completes a list of prompts on `num_pages` pages of the decoder's cache.

    The host reads tokens later than the device draws them. It launches a window of steps first and then reads
    the tokens of the window before, so that the device never waits for the host. In return a row whose
    sequence has finished idles until the host has read its last token and removes it.
    """

    def __init__(
        self, decoder: Decoder, prompts: Sequence[Prompt], sampling: SamplingParams, *, num_pages: int
    ) -> None:
        cache, self.backend = decoder.cache, decoder.backend
        self.decoder = decoder
        self.batch = decoder.batch
        self.cache = cache
        self.pool = PagePool(num_pages)
        self.scheduler = Scheduler(
            prompts,
            pool=self.pool,
            page_size=cache.page_size,
            max_num_seqs=decoder.max_num_seqs,
            max_tokens=sampling.max_tokens,
        )
        self._stop_token_ids = set(sampling.stop_token_ids)
        self._windows: deque[Window] = deque()
        self._running: list[RunningSequence] = []
        """The scheduler's running sequences at the last launch."""
        decoder.start_rollout(sampling)

    def run(self, policy_version: int) -> list[Completion]:
        scheduler = self.scheduler
        while scheduler.has_work:
            self._admit()
            num_steps = self._reserve()
            if num_steps:
                self._launch(num_steps)
            else:
                self._collect(max_in_flight=0)
        assert self.pool.num_free == self.pool.num_pages, "KV pages are still held after the rollout"
        return [
            Completion(
                token_ids=tuple(sequence.token_ids),
                logprobs=tuple(sequence.logprobs),
                finish_reason="stop" if sequence.token_ids[-1] in self._stop_token_ids else "length",
                policy_version=policy_version,
            )
            for sequence in scheduler.sequences
        ]

    def _admit(self) -> None:
        """Start waiting sequences: fill their pages and draw their first tokens."""
        admission = self.scheduler.admit()
        if admission.prefills:
            logits = self.decoder.runner.prefill([prefill for prefill, _ in admission.prefills])
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
        """Allocate the pages that the coming window of steps needs, preempting sequences if too few are free.

        Returns:
            The steps of the window; 0 if every running sequence has reached its limit.
        """
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
        """Read the windows' tokens except the newest ones', and remove the sequences that have finished.

        Args:
            max_in_flight: windows not to read yet; None: the backend's `windows_in_flight`.
        """
        if max_in_flight is None:
            max_in_flight = self.backend.windows_in_flight
        while len(self._windows) > max_in_flight:
            window = self._windows.popleft()
            finished: list[RunningSequence] = []
            for sequence, (token_ids, logprobs) in zip(window.sequences, window.read(), strict=True):
                if not token_ids:
                    continue
                sequence.token_ids += token_ids
                sequence.logprobs += logprobs
                is_stopped = token_ids[-1] in self._stop_token_ids
                if is_stopped or len(sequence.token_ids) == sequence.limit:
                    finished.append(sequence)
            if finished:
                rows = [sequence.row for sequence in finished]
                self.scheduler.finish(rows)
                self.batch.remove(rows)
