"""Memory of a rank's GPU by which a worker on the same GPU gets chunks of weights, as handles.

A handle is what PyTorch makes of a tensor for another process (`torch.multiprocessing.reductions`): a
function and the arguments with which it gives the tensor there. For CUDA it is an IPC handle of the buffer,
and no byte is copied but into the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Handle = tuple[Callable[..., Tensor], tuple[Any, ...]]


class SharedMemory(Protocol):
    """Memory of this rank's device that a worker on the same device can read."""

    gpu: str
    """The device, as the worker calls it: for CUDA "GPU-" and its UUID."""

    def buffer(self, num_bytes: int) -> Tensor:
        """A buffer [num_bytes] uint8: that of the chunk before, if it is large enough."""
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

        if self._flat is None or len(self._flat) < num_bytes:
            self._flat = None
            # Another process can open memory of an expandable segment only with further privileges.
            with plain_segments(self._device):
                self._flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._flat[:num_bytes]

    def handle(self, view: Tensor) -> Handle:
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(view)

    def written(self) -> None:
        torch.cuda.synchronize(self._device)  # streams of another process do not wait for ours

    def close(self) -> None:
        self._flat = None
