"""Consecutive ranks that run one tensor-parallel engine together.

Each rank drives its own vLLM, and the vLLMs of a group compute each forward pass together: all of them must
be given the same requests in the same order. So the requests of a group are gathered, every rank generates
all of them, and each keeps the results of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

Request = TypeVar("Request")
Result = TypeVar("Result")


def check_group_size(size: int, world_size: int) -> None:
    """Raises ValueError when groups of `size` ranks do not divide the run's processes."""
    if size < 1 or world_size % size:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        engines, rest = divmod(world_size, size) if size else (0, world_size)
        raise ValueError(
            f"vllm_tensor_parallel_size={size} does not divide the run: {world_size} processes = "
            f"{engines} × {size} + {rest}. Set it to one of {divisors}, or start a multiple of it."
        )


class TensorParallelGroup:
    """The ranks that share this rank's engine: `size` consecutive ones.

    Made on every rank at the same time. Groups of one need no communication, and no process group either.

    Raises:
        ValueError: `size` does not divide the number of processes.
    """

    def __init__(self, size: int) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        check_group_size(size, world_size)
        self.size = size
        self.index = self.rank // size
        """The group's number."""
        self._process_group = None
        if size > 1:
            # Every rank has to make every group. Gloo: requests are Python objects, on the host.
            for start in range(0, world_size, size):
                group = dist.new_group(list(range(start, start + size)), backend="gloo")
                if start <= self.rank < start + size:
                    self._process_group = group

    def run(
        self,
        requests: Sequence[Request],
        generate: Callable[[list[Request]], list[Result]],
        *,
        error: ValueError | None = None,
    ) -> list[Result]:
        """Generate this rank's requests together with the rest of the group.

        Every rank of the group calls this equally often; one with nothing to ask still takes part.

        Args:
            requests: this rank's, as many as it likes. Picklable.
            generate: makes one result per request, in their order. Called once with the whole group's.
            error: what is wrong with this rank's requests. It is raised on every rank of the group: the
                others would wait for this one forever.

        Returns:
            The results of `requests`.

        Raises:
            ValueError: some rank's `error`.
        """
        parts: list[tuple[list[Request], str | None]] = [(list(requests), str(error) if error else None)]
        if self.size > 1:
            gathered: list[tuple[list[Request], str | None] | None] = [None] * self.size
            dist.all_gather_object(gathered, parts[0], group=self._process_group)
            parts = [part for part in gathered if part is not None]
        if error is not None:
            raise error
        for member, (_, message) in enumerate(parts):
            if message is not None:
                raise ValueError(f"Rank {self.index * self.size + member} of this group: {message}")
        everything = [request for part, _ in parts for request in part]
        if not everything:
            return []
        results = generate(everything)
        assert len(results) == len(everything), f"{len(results)} results for {len(everything)} requests"
        start = sum(len(part) for part, _ in parts[: self.rank % self.size])
        return results[start : start + len(requests)]
