"""The format in which weights travel: chunks, each a flat buffer of bytes with the tensors' places in it.

vLLM's workers also import this file, so it imports no large package but torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 256  # as the allocator's; a view of any type may begin there


class Chunk(NamedTuple):
    """Some of the weights, readable until the next chunk is asked for."""

    flat: Tensor
    """The bytes, [bytes] uint8."""
    places: list[dict[str, Any]]
    """Name, type, shape and offset of each tensor in `flat`."""

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors with their names, as views of `flat`."""
        return [(place["name"], _view(self.flat, place)) for place in self.places]


def packed(tensors: Iterable[tuple[str, Tensor]], buffer: Callable[[int], Tensor]) -> Chunk:
    """The chunk of some tensors, copied into the memory [bytes] uint8 that `buffer` gives."""
    places, offset_bytes = [], 0
    tensors = list(tensors)
    for name, tensor in tensors:
        places.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset_bytes": offset_bytes,
            }
        )
        offset_bytes += math.ceil(tensor.nbytes / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    chunk = Chunk(buffer(offset_bytes), places)
    for (_, tensor), (_, view) in zip(tensors, chunk.tensors, strict=True):
        view.copy_(tensor.detach())
    return chunk


def layout_hash(sizes: Iterable[tuple[str, int]]) -> str:
    """A name for the tensors of a push: SHA-256 of their names and bytes, in the order in which they come."""
    digest = hashlib.sha256()
    for name, size_bytes in sizes:
        digest.update(f"{name} {size_bytes}\n".encode())
    return digest.hexdigest()


def checksum_of(flat: Tensor) -> int:
    """The sum of a chunk's words of 8 bytes, modulo 2^64: a chunk with one changed word has another sum. It
    is computed on the chunk's device, at the rate of its memory."""
    return int(flat.view(torch.int64).sum())


def _view(flat: Tensor, place: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, place["dtype"])
    part = flat[place["offset_bytes"] :][: math.prod(place["shape"]) * dtype.itemsize]
    return part.view(dtype).view(place["shape"])
