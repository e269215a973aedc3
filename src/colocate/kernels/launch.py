"""The launch of kernels: how many programs share rows, and how a kernel starts before the last has ended.

The latter is CUDA's programmatic dependent launch (CUDA C++ Programming Guide), for compute capability 9.0
and later; it was only ever run on 9.x. A kernel launched with `launch_pdl` starts once every program of the
kernel before it has called `gdc_launch_dependents` or has ended. Its work before `gdc_wait` overlaps with
that kernel, so it may only read data that no kernel of the step writes, such as weights. After `gdc_wait` the
kernel before it has ended, and its results can be read. Every overlapping kernel waits before it writes
(attention's suffix kernel writes a key earlier, but starts only once the prefix kernel has waited), so the
end of one kernel implies the end of all kernels before it, and memory may be used again as if kernels ran one
after the other.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def num_programs(device: torch.device, num_warps: int) -> int:
    """The programs that a device runs at a time: 16 warps a multiprocessor, with 128 registers a thread.

    It is two in Triton's interpreter, where programs run one after the other: each then sees several tiles.
    """
    if device.type != "cuda":
        return 2
    return max(16 // num_warps, 1) * torch.cuda.get_device_properties(device).multi_processor_count


def can_overlap(tensor: Tensor) -> bool:
    """Whether a kernel on the tensor's device may start before the kernel launched ahead of it has ended."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] == 9
