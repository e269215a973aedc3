"""Device memory that can be given away and taken back while its addresses stay valid.

An arena reserves a range of virtual addresses once and backs a prefix of it with physical memory:

    |<------------------ capacity_bytes, reserved, costs nothing ------------------>|
    |<-- mapped_bytes: whole handles of physical memory -->|<-- touching it faults ->|

Tensors over the range, and CUDA graphs captured on them, stay valid while the memory behind them is lent to
training and taken back; only the contents are lost. PyTorch's allocator cannot do that: it never unmaps a
live tensor, and never promises an address again. CUDA's virtual memory management can (CUDA driver API,
"Virtual Memory Management"), and `cuda-bindings` reaches it from Python.

The driver needs about as long to map a small handle as a large one, so handles are large: 100 GiB take 2.6 s
to map in handles of 2 MiB and 0.04 to 0.22 s in handles of 256 MiB (one H200).
"""

from __future__ import annotations

import math
import os
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from colocate.memory import garbage

HANDLE_BYTES = 256 * 2**20


class ArenaExhausted(MemoryError):
    """The device has too little free memory for what an arena was asked to back.

    Attributes:
        asked_bytes: bytes that the arena was asked to back, in whole handles.
        mapped_bytes: bytes that it backs, as many as before the attempt.
        free_bytes: further bytes that were free on the device after PyTorch gave back all that it did not
            use.
    """

    def __init__(self, message: str, *, asked_bytes: int, mapped_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.mapped_bytes = mapped_bytes
        self.free_bytes = free_bytes


class Arena:
    """A range of device addresses of which the first `mapped_bytes` have memory behind them.

    There is one arena per device and purpose, since two KV caches would each take all of the device's free
    memory. An arena is closed by `close`, or when nothing refers to it any more (tensors made by `tensor`
    refer to it); when the interpreter exits, the driver takes everything back.

    Args:
        device: a CUDA device.
        capacity_bytes: the most that will ever be mapped, rounded up to whole handles. Address space costs
            nothing: the device's whole memory is a good choice.
        handle_bytes: the unit in which memory comes and goes, a power of two.
        driver: replaces CUDA in tests.
        purpose: what the memory is for; messages name it.

    Raises:
        ImportError: `cuda-bindings` is missing.
        RuntimeError: the device has an arena for this purpose already.
        ValueError: a size is not positive, or no multiple of what the device can map.
    """

    def __init__(
        self,
        device: torch.device,
        capacity_bytes: int,
        handle_bytes: int = HANDLE_BYTES,
        driver: Any = None,
        purpose: str = "KV cache",
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        _check_only_one(device, purpose)
        driver = _CudaDriver(device) if driver is None else driver
        granularity = driver.granularity()
        if capacity_bytes < 1 or handle_bytes < 1 or handle_bytes % granularity:
            raise ValueError(
                f"capacity_bytes={capacity_bytes} and handle_bytes={handle_bytes} must be positive, and a "
                f"handle a multiple of the {granularity} bytes that {device} maps at least."
            )
        self.device = device
        self.purpose = purpose
        self._range = _Range(driver, -(-capacity_bytes // handle_bytes), handle_bytes)
        self._finalizer = weakref.finalize(self, _release_quietly, self._range, os.getpid())
        # At exit the driver takes everything back with the context, whatever state that is in by then. To
        # unmap before would fault kernels that still run, or wait for those that never end.
        self._finalizer.atexit = False
        _ARENAS[device, purpose] = self

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{_gib(self.mapped_bytes)} mapped at {self.address:#x}"
        return f"<Arena on {self.device}, {_gib(self.capacity_bytes)} reserved, {state}>"

    @property
    def is_closed(self) -> bool:
        return self._range.is_released

    @property
    def address(self) -> int:
        """The address at which the range begins; it never changes."""
        return self._range.address

    @property
    def capacity_bytes(self) -> int:
        return self._range.num_bytes

    @property
    def handle_bytes(self) -> int:
        return self._range.handle_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of device memory that the arena holds now."""
        return self._range.num_mapped * self._range.handle_bytes

    def resize(self, num_bytes: int) -> None:
        """Back the first `num_bytes`, rounded up to whole handles, and no more.

        Memory that stays mapped keeps its contents; newly mapped memory is undefined. The device is
        synchronised first, since a kernel that still reads memory which is unmapped would fault.

        Raises:
            ArenaExhausted: the device has not enough free memory, even after `torch.cuda.empty_cache()`; the
                memory mapped before is still mapped.
        """
        if self.is_closed:
            raise RuntimeError(f"The arena on {self.device} is closed: make a new one.")
        if num_bytes < 0:
            raise ValueError(f"num_bytes={num_bytes} must not be negative.")
        num_handles = -(-num_bytes // self.handle_bytes)
        if num_handles == self._range.num_mapped:
            return
        self._range.driver.synchronize()
        if num_handles < self._range.num_mapped:
            self._range.shrink(num_handles)
            return
        before = self._range.num_mapped
        try:
            # Beyond the range nothing could be mapped even if the device had it.
            has_grown = num_handles * self.handle_bytes <= self.capacity_bytes and (
                self._range.grow(num_handles) or self._grow_after_emptying_cache(num_handles)
            )
        except BaseException:
            self._range.shrink(before)
            raise
        if not has_grown:
            self._range.shrink(before)
            raise self._exhausted(num_handles * self.handle_bytes)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int = 0) -> Tensor:
        """A tensor of `shape` whose first element lies `offset_bytes` into the range.

        The tensor may reach beyond the mapped memory, but nothing may touch that part. It keeps the arena
        alive, and nothing may touch it after `close`.
        """
        if self.is_closed or not self.mapped_bytes:
            raise RuntimeError(f"{self} has no memory: resize() it before making tensors.")
        end_bytes = offset_bytes + math.prod(shape) * dtype.itemsize
        if end_bytes > self.capacity_bytes:
            raise ValueError(
                f"A tensor {list(shape)} of {dtype} at byte {offset_bytes} ends at byte {end_bytes}, beyond "
                f"the {self.capacity_bytes} bytes that the arena on {self.device} reserves."
            )
        # Its users write into it with and without inference mode, which only a tensor made outside allows.
        with torch.inference_mode(False):
            whole = self._range.driver.tensor(self.address, self.capacity_bytes, owner=self)
            return whole[offset_bytes:end_bytes].view(dtype).view(shape)

    def close(self) -> None:
        """Give memory and addresses back. Nothing may touch tensors of the arena any more."""
        if not self.is_closed:
            self._range.release()
        self._finalizer.detach()
        if _ARENAS.get((self.device, self.purpose)) is self:
            del _ARENAS[self.device, self.purpose]

    def _grow_after_emptying_cache(self, num_handles: int) -> bool:
        # Only now: blocks that PyTorch keeps spare the trainer asking for them again in its next turn.
        self._range.driver.empty_cache()
        return self._range.grow(num_handles)

    def _exhausted(self, asked_bytes: int) -> ArenaExhausted:
        mapped, free = self.mapped_bytes, self._range.driver.free_bytes()
        reason = f"{_gib(mapped)} are mapped, {_gib(asked_bytes - mapped)} more are missing"
        if asked_bytes > self.capacity_bytes:
            reason += f", and the arena reserves {_gib(self.capacity_bytes)}"
        return ArenaExhausted(
            f"The arena for the {self.purpose} on {self.device} was asked for {_gib(asked_bytes)}: {reason}; "
            f"{_gib(free)} are free on the device, and PyTorch's tensors hold "
            f"{_gib(self._range.driver.allocated_bytes())}. Set kv_cache_tokens or max_num_seqs lower, "
            "or let go of tensors and of other processes on the device.",
            asked_bytes=asked_bytes,
            mapped_bytes=mapped,
            free_bytes=free,
        )


_ARENAS: weakref.WeakValueDictionary[tuple[torch.device, str], Arena] = weakref.WeakValueDictionary()


def _check_only_one(device: torch.device, purpose: str) -> None:
    if (device, purpose) in _ARENAS:
        garbage.collect()  # an owner that was dropped may wait in a reference cycle
    if (other := _ARENAS.get((device, purpose))) is not None:
        raise RuntimeError(
            f"{device} has an arena for its {purpose} already: {other}. Close its owner (`engine.close()`) "
            "before making another."
        )


class _Range:
    """Reserved addresses; the first `num_mapped` handles of them have memory.

    A handle is released as soon as it is mapped. From then on the mapping alone holds the memory, and
    unmapping frees it. So `num_mapped` is the whole state, and it is correct after every single call of the
    driver.
    """

    def __init__(self, driver: Any, num_handles: int, handle_bytes: int) -> None:
        self.driver = driver
        self.handle_bytes = handle_bytes
        self.num_bytes = num_handles * handle_bytes
        self.num_mapped = 0
        self._num_accessible = 0
        self.is_released = False
        self.address: int = driver.reserve(self.num_bytes, handle_bytes)

    def grow(self, num_handles: int) -> bool:
        """Back the first `num_handles` handles; False if memory ran out, those mapped by then stay so."""
        try:
            while self.num_mapped < num_handles:
                self.driver.map(self.address + self.num_mapped * self.handle_bytes, self.handle_bytes)
                self.num_mapped += 1
            start = self._num_accessible * self.handle_bytes
            self.driver.set_access(self.address + start, self.num_mapped * self.handle_bytes - start)
            self._num_accessible = self.num_mapped
        except _OutOfDeviceMemory:
            return False
        return True

    def shrink(self, num_handles: int) -> None:
        self._num_accessible = min(self._num_accessible, num_handles)
        # Handle by handle: the driver unmaps only what was mapped in one piece.
        while self.num_mapped > num_handles:
            last = self.num_mapped - 1
            self.driver.unmap(self.address + last * self.handle_bytes, self.handle_bytes)
            self.num_mapped = last

    def release(self) -> None:
        self.driver.synchronize()
        self.shrink(0)
        self.driver.free_addresses(self.address, self.num_bytes)
        self.is_released = True


def _release_quietly(addresses: _Range, pid: int) -> None:
    """Release an arena that was dropped without `close`; nobody is there to be told of an error."""
    if os.getpid() != pid:
        return  # a forked child has no CUDA context; the memory is its parent's
    with suppress(RuntimeError):
        addresses.release()


class _OutOfDeviceMemory(RuntimeError):
    pass


class _CudaDriver:
    """The calls of CUDA's driver and of PyTorch that an arena needs, on one device."""

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ImportError(
                "A KV cache on a GPU needs the package cuda-bindings, which PyTorch's CUDA 13 wheels bring "
                "and others do not: pip install 'cuda-bindings>=12.9'."
            ) from error
        self._cu: Any = driver
        self._device = device
        # Makes the device's primary context, PyTorch's own, and makes it current: in any other, PyTorch's
        # kernels would fault on the arena.
        torch.empty(1, device=device)
        torch.cuda.synchronize(device)
        location = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = location
        self._properties.location.id = device.index
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = location
        self._access.location.id = device.index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def granularity(self) -> int:
        minimum = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))

    def reserve(self, num_bytes: int, alignment: int) -> int:
        return int(self._call("cuMemAddressReserve", num_bytes, alignment, 0, 0))

    def free_addresses(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int) -> None:
        handle = self._call("cuMemCreate", num_bytes, self._properties, 0)
        try:
            self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)

    def set_access(self, address: int, num_bytes: int) -> None:
        self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)

    def synchronize(self) -> None:
        # Also makes the primary context current in this thread, which may have used no CUDA before.
        torch.cuda.synchronize(self._device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def tensor(self, address: int, num_bytes: int, owner: object) -> Tensor:
        return torch.as_tensor(_DeviceArray(address, num_bytes, owner), device=self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._cu, name)(*arguments)
        if status != self._cu.CUresult.CUDA_SUCCESS:
            is_memory = status == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
            failure = _OutOfDeviceMemory if is_memory else RuntimeError
            raise failure(f"{name} failed on {self._device}: {status.name}.")
        return results[0] if results else None


class _DeviceArray:
    """Bytes at an address in the form that PyTorch makes tensors of; the tensor keeps this object, and so
    `owner`."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
