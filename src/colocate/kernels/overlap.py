"""Kernels that start while the kernel launched before them still runs.

It is CUDA's programmatic dependent launch (CUDA C++ Programming Guide), which later capabilities than 9.x
have, too; it has run on these alone. A kernel launched with `launch_pdl` starts once every program of the
kernel before it has called `gdc_launch_dependents` or has ended. What it does before `gdc_wait` overlaps with
that kernel: it may read what no kernel of the step writes, such as weights. After `gdc_wait` the kernel
before it has ended, and its results can be read. Every overlapping kernel waits before it writes (attention's
suffix kernel writes a key earlier, but starts only once the prefix kernel has waited), so the end of one
kernel implies the end of all kernels before it, and memory may be used again as if kernels ran one after the
other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def can_overlap(tensor: Tensor) -> bool:
    """Whether a kernel on the tensor's device may start before the kernel launched ahead of it has ended."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] == 9
