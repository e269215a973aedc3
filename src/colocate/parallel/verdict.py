"""Agreement of several ranks on whether the work that each has done by itself has succeeded.

A rank whose work fails must not leave the others in a collective that it will never reach. So all ranks
exchange their outcomes before the next collective, and do the same then: go on, repeat, or raise.
"""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class PeerError(RuntimeError):
    """Another rank's work has failed; the message names the rank, its host and its error."""


class Peers:
    """The ranks that agree: those of `group`, or this one alone.

    All of them must make the same calls in the same order.

    Args:
        device: where the group's collectives take their tensors.
        group: the ranks; None: this one.
    """

    def __init__(self, device: torch.device, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self._device = device
        self._table: Tensor | None = None

    @classmethod
    def all(cls, device: torch.device) -> Peers:
        """All ranks of the run."""
        is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return cls(device, dist.group.WORLD if is_distributed else None)

    @property
    def are_several(self) -> bool:
        return self.num_ranks > 1

    def gather(self, *numbers: int) -> list[list[int]]:
        """The numbers of each rank, in the order of ranks; all ranks pass equally many."""
        if not self.are_several:
            return [list(numbers)]
        # A sum of rows that only their owners fill, in memory that is kept: it works when memory has run out.
        if self._table is None or self._table.shape[1] != len(numbers):
            self._table = torch.empty(self.num_ranks, len(numbers), dtype=torch.int64, device=self._device)
        self._table.zero_()
        self._table[dist.get_rank(self._group)].copy_(torch.tensor(numbers))
        dist.all_reduce(self._table, group=self._group)
        return self._table.tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag of any rank is set."""
        return any(flag for (flag,) in self.gather(int(flag)))

    def short_of_memory(self, error: Exception | None) -> list[str]:
        """The errors of ranks that have run out of memory, each with its name; empty if all have succeeded.

        Args:
            error: the error of this rank's work; None: it has succeeded.

        Raises:
            Exception: `error` itself, if it is not about memory.
            PeerError: another rank's error is not about memory.
        """
        is_short = isinstance(error, torch.OutOfMemoryError)
        outcomes = self.gather(int(error is not None) + int(error is not None and not is_short))
        if not any(code for (code,) in outcomes):
            return []
        told = self._told("" if error is None else first_line(error))
        if error is not None and not is_short:
            raise error
        failed = [text for text, (code,) in zip(told, outcomes, strict=True) if code == 2]
        if failed:
            raise PeerError(f"{'; '.join(failed)}. This rank, whose own work went well, stops with it.")
        return [text for text, (code,) in zip(told, outcomes, strict=True) if code == 1]

    def agree(self, error: Exception | None) -> None:
        """Wait for all ranks, and stop together if the work of one has failed.

        Args:
            error: the error of this rank's work; None: it has succeeded.

        Raises:
            Exception: `error` itself.
            PeerError: another rank's work has failed.
        """
        failures = self.gather(int(error is not None))
        if not any(failed for (failed,) in failures):
            return
        told = self._told("" if error is None else first_line(error))
        if error is not None:
            raise error
        named = "; ".join(text for text, (failed,) in zip(told, failures, strict=True) if failed)
        raise PeerError(f"{named}. This rank, whose own work went well, stops with it.")

    def _told(self, text: str) -> list[str]:
        """The text of every rank, with the rank's name if there are several."""
        if self._group is None:
            return [text]
        texts: list[str] = [""] * self.num_ranks
        own = f"rank {dist.get_rank()} ({socket.gethostname()}): {text}"
        dist.all_gather_object(texts, own, group=self._group)
        return texts


def first_line(error: BaseException) -> str:
    """An error in one line: its type, and the beginning of its message."""
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
