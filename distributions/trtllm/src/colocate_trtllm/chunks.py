"""The trainer's weights for workers on the same GPU: chunks in one buffer of fixed size, as handles.

A handle is what PyTorch makes of a tensor for another process (`torch.multiprocessing.reductions`): a
function and the arguments with which it gives the tensor there. For CUDA it is an IPC handle of the buffer,
and no byte is copied but into the buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from colocate.weights.buckets import BUCKET_BYTES, buckets

_ALIGNMENT_BYTES = 256  # as the allocator's; a view of any type may begin there

Handle = tuple[Callable[..., Tensor], tuple[Any, ...]]


class Chunk(NamedTuple):
    """Some of the weights, readable until the next chunk is asked for."""

    handles: list[tuple[str, Handle]]
    """Name and handle of each tensor, or of the part of it."""
    parts: dict[str, tuple[int, tuple[int, ...]]]
    """The part's first element and the tensor's shape, by each name that stands for a part of a tensor."""


class SharedMemory(Protocol):
    """Memory of this rank's device that a worker on the same device can read."""

    gpu: str
    """The device, as the worker calls it: for CUDA "GPU-" and its UUID."""

    def buffer(self, num_bytes: int) -> Tensor:
        """A buffer [num_bytes] uint8, which is used until `close`."""
        ...

    def handle(self, view: Tensor) -> Handle:
        """The handle of a contiguous view of the buffer."""
        ...

    def written(self) -> None:
        """Wait until what was written to the buffer is there for others."""
        ...

    def close(self) -> None:
        """Free the buffer."""
        ...


class CudaMemory:
    """A buffer on a GPU, whose handles are CUDA's IPC handles."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: Tensor | None = None
        self.gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def buffer(self, num_bytes: int) -> Tensor:
        from colocate.engines.vllm.internals import plain_segments

        # Another process can open memory of an expandable segment only with further privileges.
        with plain_segments(self._device):
            self._flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._flat

    def handle(self, view: Tensor) -> Handle:
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(view)

    def written(self) -> None:
        torch.cuda.synchronize(self._device)  # streams of another process do not wait for ours

    def close(self) -> None:
        self._flat = None


def chunks(model: nn.Module, memory: SharedMemory, max_bytes: int = BUCKET_BYTES) -> Iterator[Chunk]:
    """All weights of a causal language model, as `buckets` gives them, in chunks that fit into one buffer.

    A tensor that does not fit is split. The buffer is filled anew when the next chunk is asked for: all
    readers must have copied the one before. All ranks that share the weights take the chunks together.

    Args:
        max_bytes: the size of the buffer.

    Raises:
        ValueError: the buffer would be smaller than one element, or see `buckets`.
    """
    named = itertools.chain.from_iterable(buckets(model, max_bytes))
    try:
        flat = memory.buffer(max_bytes)
        filling = _Filling(flat, memory)
        for name, tensor in named:
            yield from filling.add(name, tensor.detach())
        yield from filling.flush()
    finally:
        memory.close()


class _Filling:
    """The chunk that is being filled."""

    def __init__(self, flat: Tensor, memory: SharedMemory) -> None:
        self._flat, self._memory = flat, memory
        self._start()

    def _start(self) -> None:
        self._chunk = Chunk([], {})
        self._used_bytes = 0

    def add(self, name: str, tensor: Tensor) -> Iterator[Chunk]:
        """Put a tensor in; the chunks that become full are given out."""
        size, whole = tensor.element_size(), tensor.reshape(-1)
        if size > len(self._flat):
            raise ValueError(f"A chunk of {len(self._flat)} bytes has no room for one element of {name}.")
        first = 0
        while first < len(whole):
            room = max(len(self._flat) - self._used_bytes, 0) // size
            left = len(whole) - first
            if room == 0 or (room < left <= len(self._flat) // size):  # whole in a chunk, rather than in two
                yield from self.flush()
                continue
            count = min(room, left)
            start = self._used_bytes
            view = self._flat[start : start + count * size].view(tensor.dtype)
            view.copy_(whole[first : first + count])
            if count == len(whole):
                view = view.view(tensor.shape)
            else:
                self._chunk.parts[name] = (first, tuple(tensor.shape))
            self._chunk.handles.append((name, self._memory.handle(view)))
            self._used_bytes = -(-(start + count * size) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            first += count

    def flush(self) -> Iterator[Chunk]:
        if self._chunk.handles:
            self._memory.written()
            yield self._chunk
            self._start()
