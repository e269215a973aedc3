"""Collectives by one name in every PyTorch that is supported.

PyTorch 2.13 has renamed those of single tensors, and warns of the old names.
"""

from __future__ import annotations

from typing import Any

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
