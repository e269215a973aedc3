"""The running sequences as tensors: one row each, rows 0 .. num_rows - 1 in use."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import torch
from torch import Tensor

from colocate.engines.native.sampler import Sampler
from colocate.engines.native.scheduler import Sequence


class DecodeBatch:
    """What a decode step reads and writes, updated for all rows at once: no Python per sequence and step."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_pages: int,
        max_tokens: int,
        vocab_size: int,
        sampler: Sampler,
        stop_token_ids: SequenceABC[int],
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.num_rows = 0
        self.sampler = sampler
        self.block_tables = zeros(max_num_seqs, max_num_pages)
        self.positions = zeros(max_num_seqs)
        """Position of `last_tokens`; keys and values of all earlier positions are in the cache."""
        self.last_tokens = zeros(max_num_seqs)
        self.num_generated = zeros(max_num_seqs)
        self.limits = zeros(max_num_seqs)
        """Completion tokens at most."""
        self.prompt_keys = zeros(max_num_seqs)
        self.samples = zeros(max_num_seqs)
        self.token_ids = zeros(max_num_seqs, max_tokens)
        self.logprobs = zeros(max_num_seqs, max_tokens, dtype=torch.float32)
        self.seen = zeros(max_num_seqs, vocab_size, dtype=torch.bool) if sampler.needs_seen_tokens else None
        self._stop_token_ids = torch.tensor(list(stop_token_ids), dtype=torch.long, device=device)

    def _state(self) -> list[Tensor]:
        tensors = [self.block_tables, self.positions, self.last_tokens, self.num_generated, self.prompt_keys]
        tensors += [self.limits, self.samples, self.token_ids, self.logprobs]
        return tensors if self.seen is None else [*tensors, self.seen]

    def start(self, sequences: SequenceABC[Sequence], logits: Tensor) -> None:
        """Append rows for `sequences` and draw their next tokens from `logits` [len(sequences), V]."""
        first, device = self.num_rows, logits.device
        for row, sequence in enumerate(sequences, start=first):
            num_generated = len(sequence.token_ids)
            if num_generated:
                self.token_ids[row, :num_generated] = torch.tensor(sequence.token_ids, device=device)
                self.logprobs[row, :num_generated] = torch.tensor(sequence.logprobs, device=device)
            if self.seen is not None:
                self.seen[row] = False
                self.seen[row, torch.tensor([*sequence.prompt, *sequence.token_ids], device=device)] = True
        rows = slice(first, first + len(sequences))
        width = max(len(sequence.pages) for sequence in sequences)
        tables = [sequence.pages + [0] * (width - len(sequence.pages)) for sequence in sequences]
        numbers = [
            (s.num_context - 1, len(s.token_ids), s.limit, s.group.prompt.key, s.sample) for s in sequences
        ]
        # Rows are re-used: the rest of a table must name pages that exist in this rollout, which 0 always
        # does.
        self.block_tables[rows] = 0
        self.block_tables[rows, :width] = torch.tensor(tables, device=device)
        columns = torch.tensor(numbers, device=device).unbind(1)
        self.positions[rows], self.num_generated[rows], self.limits[rows] = columns[:3]
        self.prompt_keys[rows], self.samples[rows] = columns[3:]
        self.num_rows += len(sequences)
        self.draw(rows, logits)

    def draw(self, rows: slice, logits: Tensor) -> None:
        """Draw the next token of `rows` and append it."""
        seen = None if self.seen is None else self.seen[rows]
        num_generated = self.num_generated[rows]
        tokens, logprobs = self.sampler(
            logits, self.prompt_keys[rows], self.samples[rows], num_generated, seen
        )
        column = num_generated[:, None]
        self.token_ids[rows].scatter_(1, column, tokens[:, None])
        self.logprobs[rows].scatter_(1, column, logprobs[:, None])
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        self.last_tokens[rows] = tokens
        self.num_generated[rows] += 1
        self.positions[rows] += 1

    def set_pages(self, rows: SequenceABC[int], columns: SequenceABC[int], pages: SequenceABC[int]) -> None:
        """Enter newly allocated pages into the block tables."""
        where = torch.tensor([rows, columns, pages], device=self.block_tables.device)
        self.block_tables[where[0], where[1]] = where[2]

    def finished_rows(self) -> list[int]:
        """Rows whose last token is a stop token or the last allowed. The step's one look at the host."""
        rows = slice(0, self.num_rows)
        finished = self.num_generated[rows] >= self.limits[rows]
        if len(self._stop_token_ids):
            finished |= torch.isin(self.last_tokens[rows], self._stop_token_ids)
        return finished.nonzero()[:, 0].tolist()

    def read(self, rows: SequenceABC[int]) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities generated so far in `rows`."""
        index = torch.tensor(rows, device=self.token_ids.device)
        counts = self.num_generated[index].tolist()
        tokens, logprobs = self.token_ids[index].tolist(), self.logprobs[index].tolist()
        return [(t[:n], lp[:n]) for t, lp, n in zip(tokens, logprobs, counts, strict=True)]

    def remove(self, rows: SequenceABC[int]) -> None:
        """Drop rows; the others move up and keep their order."""
        gone = set(rows)
        kept = [row for row in range(self.num_rows) if row not in gone]
        first_hole = min(gone)
        index = torch.tensor(kept[first_hole:], dtype=torch.long, device=self.positions.device)
        for tensor in self._state():
            tensor[first_hole : len(kept)] = tensor[index]
        self.num_rows = len(kept)
