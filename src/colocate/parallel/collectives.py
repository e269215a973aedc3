"""Collectives by one name in every PyTorch that is supported."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# PyTorch 2.13 has renamed it, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_rows(full: Tensor, part: Tensor, group: ProcessGroup) -> Any:
    """Start to gather the parts [n/t, ...] of all ranks of `group`, in their order, into `full` [n, ...].

    Returns:
        The work to wait for; neither tensor may be changed or freed before.
    """
    return _all_gather(full, part, group=group, async_op=True)
