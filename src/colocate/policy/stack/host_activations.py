"""Activations kept in pinned host memory between a layer's forward and its backward pass.

A layer's input has h values a token, and the layer does at least 24 h^2 operations a token: for h = 4,096 a
GPU computes at least five times as long as PCI Express needs for the copy. So copies on a stream of their own
cost no time, as long as they are asked for one layer ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostActivations:
    """Numbered tensors on the host, taken back in the reverse order of their numbers.

    The host's buffers are kept for the next micro-batch. On a CPU it holds the tensors themselves.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        self._stored: dict[int, Tensor] = {}
        self._coming: dict[int, tuple[Tensor, torch.cuda.Event]] = {}
        self._stream: torch.cuda.Stream | None = None

    def clear(self) -> None:
        """Forget all stored tensors, for when the backward pass that would have taken them has failed."""
        self._stored.clear()
        self._coming.clear()

    def put(self, number: int, x: Tensor) -> None:
        """Start to copy `x`; its memory is free for others once the copy is done."""
        if not x.is_cuda:
            self._stored[number] = x
            return
        self._stream = self._stream or torch.cuda.Stream(x.device)
        stored = self._buffer(number, x.nbytes).view(x.dtype)[: x.numel()].view(x.shape)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            stored.copy_(x, non_blocking=True)
        x.record_stream(self._stream)
        self._stored[number] = stored

    def take(self, number: int) -> Tensor:
        """Return tensor `number` on its device, and start to copy back the tensor before it."""
        if self._stream is None:
            return self._stored.pop(number)
        self._fetch(number)
        x, arrived = self._coming.pop(number)
        torch.cuda.current_stream(x.device).wait_event(arrived)
        if number - 1 in self._stored:
            self._fetch(number - 1)
        return x

    def _fetch(self, number: int) -> None:
        if number in self._coming:
            return
        assert self._stream is not None, "fetched from the host, so it was put there by the stream"
        stored = self._stored.pop(number)
        x = torch.empty(stored.shape, dtype=stored.dtype, device=self._stream.device)
        # Queued work of another tensor may still use this memory.
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            x.copy_(stored, non_blocking=True)
        x.record_stream(self._stream)
        self._coming[number] = x, self._stream.record_event()

    def _buffer(self, number: int, num_bytes: int) -> Tensor:
        buffer = self._buffers.get(number)
        if buffer is None or buffer.nbytes < num_bytes:
            self._buffers.pop(number, None)
            # The pinned allocator would round up to this anyway.
            size = 1 << (num_bytes - 1).bit_length()
            buffer = self._buffers[number] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return buffer
