"""Programmatic dependent launch: a kernel is in place before the kernel before it has ended.

Between two kernels of a captured graph lies about a microsecond in which nothing runs, and a decode step has
ten kernels per layer. From compute capability 9.0 on, a kernel launched with `launch_pdl` may start as soon as
all programs of its predecessor have called `gdc_launch_dependents` or ended; `gdc_wait` then waits until the
predecessor has ended and what it wrote can be read (CUDA C++ Programming Guide, "Programmatic Dependent Launch
and Synchronization"). Every kernel so launched waits before it touches what others write or read, so that the
end of a kernel implies the end of all before it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def can_overlap(tensor: Tensor) -> bool:
    """Whether kernels on this tensor's device may be launched so."""
    return tensor.is_cuda and _capability(tensor.device.index) >= (9, 0)


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)
