"""The running sequences as tensors: one row each, rows 0 .. num_rows - 1 in use."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colocate.engines.native.sequences import Sequence
from colocate.engines.requests import turn_key


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device without making the host wait.

    The array is pinned first, because a copy from pageable memory waits for everything that was launched
    before it.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()


@dataclass(frozen=True)
class Window:
    """The tokens of a few decode steps, on their way to the host."""

    sequences: list[Sequence]
    """The sequence of each row when the steps were launched."""
    token_ids: Tensor  # [steps, rows] int32; -1 where the sequence had finished before
    logprobs: Tensor  # [steps, rows] float32
    arrived: torch.cuda.Event | None
    """Recorded behind the copies to the host; None on a CPU."""

    def read(self) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of every row; waits for the steps to end."""
        if self.arrived is not None:
            self.arrived.synchronize()
        counts = (self.token_ids >= 0).sum(dim=0).tolist()
        token_ids, logprobs = self.token_ids.t().tolist(), self.logprobs.t().tolist()
        return [(t[:n], lp[:n]) for t, lp, n in zip(token_ids, logprobs, counts, strict=True)]


class DecodeBatch:
    """The tensors that decode steps read and write: one operation updates a whole tensor, not each row.

    The tensors' addresses never change, so captured graphs may use them. A row that has finished keeps its
    place, and steps leave it as it is, until the host removes it.
    """

    def __init__(
        self, *, max_num_seqs: int, max_num_pages: int, max_num_steps: int, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.num_rows = 0
        self.block_tables = zeros(max_num_seqs, max_num_pages)
        self.prompt_keys = zeros(max_num_seqs, dtype=torch.int64)
        self._state = zeros(6, max_num_seqs)
        self.positions, self.last_tokens, self.num_generated, self.samples, self.limits, self.finished = (
            self._state.unbind()
        )
        """Views [max_num_seqs] of `_state`. `positions` are those of `last_tokens`, the tokens that the next
        step feeds; keys and values of all earlier positions are in the cache."""
        self.finished.fill_(1)
        self.slots = zeros(max_num_seqs)
        self.context_lens = zeros(max_num_seqs)
        self.out_token_ids = zeros(max_num_steps, max_num_seqs)
        self.out_logprobs = zeros(max_num_steps, max_num_seqs, dtype=torch.float32)
        self.step = zeros(1)
        """Index of the row in `out_token_ids` and `out_logprobs` that the present step writes."""
        self.seed = zeros(1, dtype=torch.int64)
        self.seen: Tensor | None = None  # [max_num_seqs, V] bool

    @property
    def max_num_seqs(self) -> int:
        return self.block_tables.shape[0]

    def reset(self, *, seed: int, vocab_size: int | None) -> None:
        """Forget all rows; with a `vocab_size` keep `seen` [max_num_seqs, vocab_size], for a repetition
        penalty."""
        self.num_rows = 0
        self.finished.fill_(1)
        self.seed.fill_((seed + 2**63) % 2**64 - 2**63)
        self.seen = None
        if vocab_size is not None:
            self.seen = torch.zeros(self.max_num_seqs, vocab_size, dtype=torch.bool, device=self.device)

    def save(self) -> tuple[Tensor, Tensor]:
        """A copy of the rows' state that a step changes, for `restore`."""
        return self._state.clone(), self.step.clone()

    def restore(self, saved: tuple[Tensor, Tensor]) -> None:
        """Undo the steps since `save`."""
        self._state.copy_(saved[0])
        self.step.copy_(saved[1])

    def start(self, sequences: SequenceABC[Sequence]) -> slice:
        """Append rows for `sequences`, whose next tokens can then be drawn. Returns the rows."""
        first, count = self.num_rows, len(sequences)
        rows = slice(first, first + count)
        # Rows are re-used. Entries of a block table beyond the sequence's pages must name a page that exists,
        # and page 0 always does.
        table = np.zeros((count, max(len(sequence.pages) for sequence in sequences)), dtype=np.int32)
        state = np.zeros((6, count), dtype=np.int32)
        keys = np.empty(count, dtype=np.int64)
        for index, sequence in enumerate(sequences):
            table[index, : len(sequence.pages)] = sequence.pages
            num_generated = len(sequence.token_ids)
            state[:5, index] = (
                sequence.num_context - 1, 0, num_generated, sequence.sample, sequence.limit
            )  # fmt: skip
            keys[index] = turn_key(sequence.group.prompt.key, sequence.turn)
            if self.seen is not None:
                seen = torch.tensor(sequence.context, device=self.device)
                self.seen[first + index] = False
                self.seen[first + index, seen] = True
        self.block_tables[rows] = 0
        self.block_tables[rows, : table.shape[1]] = to_device(table, self.device)
        self._state[:, rows] = to_device(state, self.device)
        self.prompt_keys[rows] = to_device(keys, self.device)
        self.num_rows += count
        return rows

    def set_pages(self, rows: SequenceABC[int], columns: SequenceABC[int], pages: SequenceABC[int]) -> None:
        """Enter newly allocated pages into the block tables."""
        where = to_device(np.array([rows, columns, pages]), self.device)
        self.block_tables[where[0], where[1]] = where[2].int()

    def send(self, sequences: SequenceABC[Sequence], rows: slice, num_steps: int) -> Window:
        """Start copying the last `num_steps` steps' tokens of `rows` to the host."""
        token_ids = self.out_token_ids[:num_steps, rows].to("cpu", non_blocking=True, copy=True)
        logprobs = self.out_logprobs[:num_steps, rows].to("cpu", non_blocking=True, copy=True)
        arrived = None
        if self.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        return Window(list(sequences), token_ids, logprobs, arrived)

    def remove(self, rows: SequenceABC[int]) -> None:
        """Drop some rows. The rows behind them move up, so the rest keeps its order."""
        gone = set(rows)
        kept = [row for row in range(self.num_rows) if row not in gone]
        first_hole, old = min(gone), self.num_rows
        self.num_rows = len(kept)
        index = to_device(np.array(kept[first_hole:], dtype=np.int64), self.device)
        moved = slice(first_hole, len(kept))
        self._state[:, moved] = self._state.index_select(1, index)
        for tensor in (self.block_tables, self.prompt_keys, self.seen):
            if tensor is not None:
                tensor[moved] = tensor.index_select(0, index)
        self.finished[len(kept) : old] = 1
