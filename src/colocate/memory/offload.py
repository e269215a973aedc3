"""Moves the contents of tensors to the host and back.

    store = HostStore(device)
    store.offload(tensors)      # their memory on the device is free; the tensors stay, with nothing in them
    ...
    store.prefetch()            # memory is taken and the copy begins, beside other work
    ...
    store.fetch()               # work launched from here on reads the old values

The tensor objects, their shapes, gradients and hooks stay as they are, since it is the storage beneath that
is shrunk to nothing and grown again. (An empty tensor as `.data` would change the shape as well, and a
backward pass could then not leave its gradient in `.grad`.) The price is that a kernel which reads a tensor
whose contents are on the host reads at address zero, so nobody may use these tensors until `fetch`.

Copies run at the speed of the bus only between pinned memory and the device. PyTorch's allocator of pinned
memory rounds every block up to a power of two. The store therefore takes slabs whose size is a power of two,
and lays the tensors out in them end to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from colocate.memory import host

SLAB_BYTES = 256 * 2**20
"""Pinned host memory is taken in slabs of this size; the last slab may be smaller."""

_ALIGNMENT_BYTES = 512
_SMALLEST_SLAB_BYTES = 2**20


class HostStore:
    """Host memory for the contents of one device's tensors. It grows when needed and is then kept.

    A store of the CPU copies as well, synchronously and without pinning, which frees no memory in the end.

    Args:
        without: the option with which nothing is moved, for messages.
    """

    def __init__(self, device: torch.device | str, without: str = "offload_optimizer=False") -> None:
        self._device = torch.device(device)
        self._without = without
        self._slabs: list[Tensor] = []
        self._away: list[_Moved] = []
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._arrival: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are on the host now."""
        return sum(moved.size_bytes for moved in self._away)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of host memory that the store holds, whether or not tensors are in it."""
        return sum(len(slab) for slab in self._slabs)

    def offload(self, tensors: Iterable[Tensor], *, in_use: Iterable[Tensor] = ()) -> None:
        """Copy the tensors to the host and free their memory on the device; nothing if some are on the host
        already.

        The call returns when the memory is free, because it is wanted at once, and the device has nothing
        else to do until then.

        Args:
            tensors: all on the store's device. They may share storages with one another.
            in_use: tensors that are read meanwhile; none of `tensors` may share a storage with them.

        Raises:
            MemoryError: the host has not enough memory. Nothing was moved.
        """
        if self._away:
            return
        self.fetch()
        try:
            storages = _whole_storages(tensors, in_use)
        except ValueError as error:
            raise ValueError(f"{error} Set {self._without}.") from None
        sizes = [storage.nbytes() for storage in storages]
        self._reserve(sum(_aligned(size) for size in sizes))
        moved = [_Moved(*pair) for pair in zip(storages, self._places(sizes), strict=True)]
        for one in moved:
            for device_part, host_part in one.parts():
                host_part.copy_(device_part, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()
        for one in moved:
            one.storage.resize_(0)
        self._away = moved

    def prefetch(self) -> None:
        """Begin to bring everything back: device memory is taken now, and the copy runs during the device's
        next work.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory. Everything is still away.
        """
        try:
            for moved in self._away:
                moved.storage.resize_(moved.size_bytes)
        except RuntimeError:  # an OutOfMemoryError on a GPU
            for moved in self._away:
                moved.storage.resize_(0)
            raise
        arriving, self._away = self._away, []
        if self._stream is not None and arriving:
            # Work that is still queued may have used the same memory before.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # nothing where there is none
            for moved in arriving:
                for device_part, host_part in moved.parts():
                    device_part.copy_(host_part, non_blocking=True)
            if self._stream is not None and arriving:
                self._arrival = self._stream.record_event()

    def fetch(self) -> None:
        """Bring back what is still on the host; work launched from here on waits until all has arrived.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory. Everything is still away.
        """
        self.prefetch()
        if self._arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrival)
            self._arrival = None

    def _reserve(self, size_bytes: int) -> None:
        missing = size_bytes - self.reserved_bytes
        if missing <= 0:
            return
        whole, rest = divmod(missing, SLAB_BYTES)
        slabs = [SLAB_BYTES] * whole
        if rest:
            slabs.append(max(_SMALLEST_SLAB_BYTES, 1 << (rest - 1).bit_length()))
        # The processes of this machine do it at the same moment, each for its own share.
        num_processes = host.num_processes()
        needed, available = num_processes * sum(slabs), host.available_bytes()
        if needed > available:
            gib = 2**30
            raise MemoryError(
                f"Moving {size_bytes / gib:.2f} GiB from {self._device} to the host needs {num_processes} "
                f"process(es) × {sum(slabs) / gib:.2f} GiB = {needed / gib:.2f} GiB of host memory beyond "
                f"what is held, and {available / gib:.2f} of {host.limit_bytes() / gib:.2f} GiB are "
                f"available. Set {self._without}, give the machine or container more memory, or train "
                "an adapter (use_peft=True)."
            )
        is_pinned = self._stream is not None
        self._slabs += [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for size in slabs]

    def _places(self, sizes: Sequence[int]) -> Iterator[list[Tensor]]:
        """The parts of slabs that hold each size; a tensor that crosses a slab's end has several."""
        slab, offset = 0, 0
        for size in sizes:
            parts = []
            while size:
                if offset == len(self._slabs[slab]):
                    slab, offset = slab + 1, 0
                part = self._slabs[slab][offset : offset + size]
                parts.append(part)
                size -= len(part)
                offset = _aligned(offset + len(part))
            yield parts


@dataclass(frozen=True)
class _Moved:
    """A storage and the parts of host memory that hold its bytes, in order."""

    storage: UntypedStorage
    host_parts: list[Tensor]

    @property
    def size_bytes(self) -> int:
        return sum(len(part) for part in self.host_parts)

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every part's bytes on the device and on the host."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        yield from zip(whole.split([len(part) for part in self.host_parts]), self.host_parts, strict=True)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _whole_storages(tensors: Iterable[Tensor], in_use: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each storage once, in the order of the tensors."""
    busy = {tensor.untyped_storage().data_ptr() for tensor in in_use}
    storages: dict[int, UntypedStorage] = {}
    seen: dict[int, dict[int, int]] = {}  # by storage: bytes of the views that begin at an offset
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if not storage.nbytes():
            continue
        if key in busy:
            raise ValueError(
                f"A tensor of shape {tuple(tensor.shape)} shares its memory with one that is in use, so it "
                "cannot be moved to the host."
            )
        if not storage.resizable():
            raise ValueError(
                f"The memory of a tensor of shape {tuple(tensor.shape)} is not PyTorch's own (a mapped file, "
                "or another library's), so it cannot be freed."
            )
        storages[key] = storage
        views, start = seen.setdefault(key, {}), int(tensor.storage_offset())
        views[start] = max(views.get(start, 0), tensor.nbytes)
    for key, storage in storages.items():
        if (covered := sum(seen[key].values())) < storage.nbytes():
            raise ValueError(
                f"{covered} of a storage's {storage.nbytes()} bytes were given: the rest belongs to somebody "
                "else, so it cannot be moved to the host."
            )
    return list(storages.values())
