"""The mean of gradients over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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
