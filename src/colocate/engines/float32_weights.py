"""A model's weights in float32 for a while, where memory has room for such a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from colocate.memory.host import available_bytes, num_processes
from colocate.weights.fully_sharded import is_fully_sharded

_SHARE = 0.8
"""The part of the free memory that the copy may take: a short forward pass needs the rest."""


@contextmanager
def in_float32(model: nn.Module) -> Iterator[bool]:
    """Compute in float32 within the block, if that is possible, and yield whether it is.

    The parameters' own tensors come back unchanged afterwards. A model that is float32 already stays so; one
    with quantised weights, or split over ranks, stays as it is, and so does one whose copy would not fit.
    """
    parameters = list(model.parameters())
    low: list[Tensor] = [p for p in parameters if p.dtype in (torch.bfloat16, torch.float16)]
    num_bytes = 4 * sum(p.numel() for p in low)
    if (
        not all(p.is_floating_point() and p.dtype.itemsize > 1 for p in parameters)
        or is_fully_sharded(model)
        or (low and num_bytes > _SHARE * _free_bytes(low[0].device))
    ):
        yield False
        return
    low += [b for b in model.buffers() if b.dtype in (torch.bfloat16, torch.float16)]
    own = [tensor.data for tensor in low]
    try:
        for tensor in low:
            tensor.data = tensor.data.float()
        yield True
    finally:
        for tensor, data in zip(low, own, strict=True):
            tensor.data = data


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return available_bytes() // num_processes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
