"""The tokens of a forward pass: which they are, and where attention finds their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from colocate.engines.native.batch import DecodeBatch, to_device
from colocate.engines.native.scheduler import Prefill


@dataclass(frozen=True)
class ContextPiece:
    """Consecutive tokens of a `Prefill` that go through the model in one forward pass."""

    item: Prefill
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.item.token_ids)


@dataclass(frozen=True)
class PrefillContext:
    """One forward pass over packed pieces, T tokens in all.

    The queries of a piece see its item's tokens from the first one on, also those of earlier passes.
    """

    pieces: Sequence[ContextPiece]
    page_size: int
    device: torch.device

    @property
    def query_lens(self) -> list[int]:
        return [piece.num_tokens for piece in self.pieces]

    @property
    def context_lens(self) -> list[int]:
        return [piece.stop for piece in self.pieces]

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and cache slots, each [T] int32."""
        ids = [np.asarray(piece.item.token_ids[piece.start : piece.stop]) for piece in self.pieces]
        positions = [np.arange(piece.start, piece.stop) for piece in self.pieces]
        slots = [self._slots(piece, piece.start) for piece in self.pieces]
        table = np.stack([np.concatenate(column) for column in (ids, positions, slots)])
        columns = to_device(table.astype(np.int32), self.device)
        return columns[0], columns[1], columns[2]

    @cached_property
    def last_tokens(self) -> Tensor:
        """Indices in 0 .. T - 1 of the last tokens of those items that end in this pass."""
        ends = accumulate(self.query_lens)
        last = [end - 1 for end, piece in zip(ends, self.pieces, strict=True) if piece.is_last]
        return to_device(np.array(last, dtype=np.int64), self.device)

    @cached_property
    def block_tables(self) -> list[Tensor]:
        """The pages of each piece's item, each [pages of the item]."""
        return [to_device(np.array(piece.item.pages), self.device) for piece in self.pieces]

    @cached_property
    def context_slots(self) -> Tensor | None:
        """Cache slots of all tokens that the pieces see, piece by piece; None: each sees its own alone."""
        if all(piece.start == 0 for piece in self.pieces):
            return None
        slots = np.concatenate([self._slots(piece, 0) for piece in self.pieces])
        return to_device(slots, self.device)

    @cached_property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Bounds of the pieces' packed queries, and of their packed contexts, each [pieces + 1] int32."""
        bounds = [[0, *accumulate(lens)] for lens in (self.query_lens, self.context_lens)]
        columns = to_device(np.array(bounds, dtype=np.int32), self.device)
        return columns[0], columns[1]

    def _slots(self, piece: ContextPiece, start: int) -> np.ndarray:
        positions = np.arange(start, piece.stop)
        pages = np.asarray(piece.item.pages)
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size


@dataclass(frozen=True)
class DecodeContext:
    """One new token in each of the first `num_rows` rows of a `DecodeBatch`."""

    batch: DecodeBatch
    num_rows: int
    max_context_len: int
    """Tokens of the longest row, known on the host; only PyTorch operations need it."""

    @property
    def block_tables(self) -> Tensor:
        return self.batch.block_tables[: self.num_rows]

    @property
    def context_lens(self) -> Tensor:
        return self.batch.context_lens[: self.num_rows]

    @property
    def positions(self) -> Tensor:
        return self.batch.positions[: self.num_rows]

    @property
    def slots(self) -> Tensor:
        return self.batch.slots[: self.num_rows]
