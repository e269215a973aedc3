"""Collectives under one name in every supported PyTorch, the mean of gradients, and the end of
groups.

PyTorch 2.13 has renamed the collectives of single tensors, and warns of their old names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(full: Tensor, part: Tensor, group: ProcessGroup) -> Any:
    """Start to gather the parts [n/t, ...] of all ranks of `group`, in their order, into `full` [n, ...].

    Returns:
        The work to wait for; neither tensor may be changed or freed before.
    """
    return _all_gather(full, part, group=group, async_op=True)


def all_gather(full: Tensor, part: Tensor, group: ProcessGroup) -> None:
    """Gather the parts [n/t, ...] of all ranks of `group`, in their order, into `full` [n, ...].

    On a GPU only the current stream waits for it, so that it can be captured in a graph.
    """
    _all_gather(full, part, group=group)


def reduce_scatter(part: Tensor, full: Tensor, group: ProcessGroup) -> None:
    """Fill `part` [n/t, ...] with this rank's rows of the sum of `full` [n, ...] over the ranks of `group`.

    On a GPU only the current stream waits for it.
    """
    _reduce_scatter(part, full, group=group)


_WAIT_S = 5.0
_LOOK_S = 0.001
_NUM_LOOKS = 3


def leave_process_groups() -> None:
    """Destroy gloo's process groups, and wait until no thread of theirs is at work any more.

    A thread of gloo frees the tensors of a collective some time after the collective has ended, and asks
    Python to do so. Once the interpreter is being taken apart, that aborts the process ("terminate called
    without an active exception"). A group that is destroyed ends its threads; one that a trainer or a mesh
    still holds is not destroyed.

    An NCCL group is left alone: destroying it can wait for ever for a rank that has died.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
    until_s, num_idle = time.monotonic() + _WAIT_S, 0
    while num_idle < _NUM_LOOKS and time.monotonic() < until_s:
        states = _states_of_gloo_threads()
        if not states:
            return
        num_idle = 0 if "R" in states else num_idle + 1
        time.sleep(_LOOK_S)  # a thread that waits for the interpreter gets it meanwhile, and then runs


def _states_of_gloo_threads() -> list[str]:
    """Linux's letter for the state of each, "R" if it runs or could; empty where the system does not say."""
    states = []
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().strip() == "pt_gloo_runloop":
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


BUCKET_BYTES = 64 * 2**20
"""Bytes that are reduced at a time: large enough that bandwidth counts and not latency, small enough that the
copy is no second set of gradients."""


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_reduce_mean(tensors: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replace every tensor by its mean over all ranks, in place.

    Every rank must pass the same shapes and dtypes in the same order.
    """
    bucket: list[Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        if bucket and (size_bytes + tensor.nbytes > bucket_bytes or tensor.dtype != bucket[0].dtype):
            _reduce_bucket(bucket)
            bucket, size_bytes = [], 0
        bucket.append(tensor)
        size_bytes += tensor.nbytes
    if bucket:
        _reduce_bucket(bucket)


def _reduce_bucket(tensors: list[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
