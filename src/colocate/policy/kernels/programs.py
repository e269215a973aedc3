"""How many programs share the rows of a kernel that sums over them."""

from __future__ import annotations

from functools import cache

import torch


@cache
def num_programs(device: torch.device) -> int:
    """Programs that fill a device: each keeps sums in registers, so only a few fit a multiprocessor.

    In Triton's interpreter, where programs run one after the other, two: each then sees several rows.
    """
    if device.type != "cuda":
        return 2
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
