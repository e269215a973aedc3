"""Groups of consecutive ranks that run one tensor-parallel engine together.

Each rank drives its own vLLM, and the vLLMs of a group compute every forward pass together, so all of them
must be given equal requests in equal order. A group's requests are therefore gathered, every rank generates
the completions of all of them, and keeps those of its own requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

Request = TypeVar("Request")
Result = TypeVar("Result")


def check_group_size(size: int, world_size: int, option: str = "vllm_tensor_parallel_size") -> None:
    """Raises ValueError when groups of `size` ranks do not divide the run's processes."""
    if size < 1 or world_size % size:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        engines, rest = divmod(world_size, size) if size else (0, world_size)
        raise ValueError(
            f"{option}={size} does not divide the run: {world_size} processes = "
            f"{engines} × {size} + {rest}. Set it to one of {divisors}, or start a multiple of it."
        )


class TensorParallelGroup:
    """The `size` consecutive ranks that run this rank's engine together.

    All ranks of the run must make their groups at the same time. A group of one rank communicates with nobody
    and has no process group.

    Args:
        option: the name of the option that sets `size`, for messages.

    Raises:
        ValueError: `size` does not divide the number of processes.
    """

    def __init__(self, size: int, *, option: str = "vllm_tensor_parallel_size") -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        check_group_size(size, world_size, option)
        self.size = size
        self.index = self.rank // size
        """The number of this group among the run's groups."""
        self._process_group = None
        if size > 1:
            # `new_group` must be called by every rank for every group. Gloo, because requests are Python
            # objects on the host.
            for start in range(0, world_size, size):
                group = dist.new_group(list(range(start, start + size)), backend="gloo")
                if start <= self.rank < start + size:
                    self._process_group = group

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its group."""
        return self.rank % self.size == 0

    def gather(self, item: Result) -> list[Result]:
        """The items of all ranks of the group, which call this together, in the order of their ranks."""
        if self.size == 1:
            return [item]
        gathered: list[Result | None] = [None] * self.size
        dist.all_gather_object(gathered, item, group=self._process_group)
        return gathered  # type: ignore[return-value]  # every rank has filled its place

    def run(
        self,
        requests: Sequence[Request],
        generate: Callable[[list[Request]], list[Result]],
        *,
        error: ValueError | None = None,
    ) -> list[Result]:
        """Generate the results of all ranks' requests together.

        Every rank of the group must call `run` equally often, also with no requests.

        Args:
            requests: this rank's requests, any number; they are pickled.
            generate: makes one result per request, in order. It is called once, with all ranks' requests.
            error: the fault of this rank's requests. It is raised on every rank of the group, because the
                other ranks would otherwise wait for this one forever.

        Returns:
            The results of `requests`.

        Raises:
            ValueError: the `error` of a rank.
        """
        parts = self.gather((list(requests), str(error) if error else None))
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
