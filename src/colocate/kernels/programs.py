"""How many programs share the rows of a kernel that sums over them."""

from __future__ import annotations

from functools import cache

import torch


@cache
def num_programs(device: torch.device, num_warps: int) -> int:
    """The programs that a device runs at a time: 16 warps a multiprocessor, with 128 registers a thread.

    It is two in Triton's interpreter, where programs run one after the other: each then sees several tiles.
    """
    if device.type != "cuda":
        return 2
    return max(16 // num_warps, 1) * torch.cuda.get_device_properties(device).multi_processor_count
