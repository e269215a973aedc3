"""What trainer and server must agree on to move weights: the layout of a chunk, and the NCCL group.

A chunk is one flat buffer of bytes with a list that says which tensor lies where. This file is imported by
vLLM's workers, too, and so loads no other package than torch.
"""

from __future__ import annotations

import base64
import math
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from colocate.engines.vllm.environment import environment

SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""What of a text model's configuration must agree between trainer and server."""

PROBE = "probe"
"""The file in a trainer's directory by which the server finds out whether it sees that directory."""
GROUP_TIMEOUT_S = 120.0
"""Longest wait for the meeting for NCCL and for each broadcast, during which a worker does nothing else."""

_ALIGNMENT_BYTES = 16  # every type can be viewed there


def layout_of(bucket: Iterable[tuple[str, Tensor]]) -> tuple[list[dict[str, Any]], int]:
    """Where each tensor of a bucket lies in a chunk, and the chunk's size in bytes."""
    places, offset_bytes = [], 0
    for name, tensor in bucket:
        places.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset_bytes": offset_bytes,
            }
        )
        size_bytes = tensor.numel() * tensor.element_size()
        offset_bytes += math.ceil(size_bytes / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places, offset_bytes


def tensors_in(flat: Tensor, places: Iterable[dict[str, Any]]) -> list[tuple[str, Tensor]]:
    """The named tensors of a chunk, as views of `flat` [bytes] uint8."""
    found = []
    for place in places:
        dtype = getattr(torch, place["dtype"])
        size_bytes = math.prod(place["shape"]) * dtype.itemsize
        part = flat[place["offset_bytes"] : place["offset_bytes"] + size_bytes]
        found.append((place["name"], part.view(dtype).view(place["shape"])))
    return found


def pack(bucket: Sequence[tuple[str, Tensor]], places: Sequence[dict[str, Any]], flat: Tensor) -> None:
    """Copy a bucket's tensors to their places in `flat` [bytes] uint8."""
    for (_, tensor), (_, view) in zip(bucket, tensors_in(flat, places), strict=True):
        view.copy_(tensor.detach())


class NcclGroup:
    """The trainer (rank 0) and every worker of the server, apart from all other process groups of either.

    Args:
        host, port: where rank 0 listens for the others.
        timeout_s: for each broadcast, and for meeting.
    """

    def __init__(
        self, host: str, port: int, *, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        store = torch.distributed.TCPStore(
            host, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
        self._timeout_s = timeout_s
        self._device = device
        # By default a watchdog kills the process when a broadcast takes too long. Here the other side may be
        # gone and come back, so the group is given up and the process lives on (2: clean up only).
        with environment({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}), torch.cuda.device(device):
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = torch.distributed.ProcessGroupNCCL(
                torch.distributed.PrefixStore("colocate-weights", store), rank, size, options
            )
        self._store = store  # rank 0 serves it: it must live as long as the group
        self._pending: Any = None
        self._connect()

    def _connect(self) -> None:
        """Make NCCL's connections, which the first broadcast does while it blocks for as long as it takes."""
        failures: list[BaseException] = []

        def broadcast() -> None:
            try:
                self.start_broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device))
                self.wait()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=broadcast, daemon=True, name="nccl-connect")
        thread.start()
        thread.join(self._timeout_s)
        if failures:
            raise RuntimeError(f"NCCL could not connect: {failures[0]}") from failures[0]
        if thread.is_alive():
            raise RuntimeError(f"NCCL did not connect within {self._timeout_s:g} s.")

    def start_broadcast(self, flat: Tensor) -> None:
        """Send `flat` from rank 0, or receive it there."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with torch.cuda.device(self._device):
            self._pending = self._group.broadcast([flat], options)

    def wait(self) -> None:
        """Return when the broadcast is done on this side.

        Raises:
            RuntimeError: it failed, or took longer than the group's timeout. The group is of no use any more.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._pending.is_completed():
            if time.monotonic() > deadline:
                self.abort()
                raise RuntimeError(f"NCCL: a broadcast of weights took longer than {self._timeout_s:g} s.")
            time.sleep(2e-4)
        self._pending.wait()  # orders the present stream after it, and raises what went wrong

    def abort(self) -> None:
        """Give the group up, without waiting for the other side."""
        self._group.abort()


def visible_gpus() -> list[str]:
    """Identities of this process's GPUs, by index."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def ipc_handle(flat: Tensor) -> dict[str, Any]:
    """What another process on this host needs to read `flat` [bytes] uint8 on CUDA; JSON, not a pickle."""
    device, handle, size_bytes, offset_bytes, counter, counter_offset, event, needs_event = (
        flat.untyped_storage()._share_cuda_()
    )
    return {
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
        "num_elements": flat.numel(),
        "handle": base64.b64encode(handle).decode(),
        "size_bytes": size_bytes,
        "offset_bytes": offset_bytes,
        "counter": base64.b64encode(counter).decode(),
        "counter_offset": counter_offset,
        "event": base64.b64encode(event).decode(),
        "needs_event": needs_event,
    }


def open_ipc_handle(handle: dict[str, Any], device_index: int) -> Tensor:
    """[bytes] uint8: the memory that `ipc_handle` described, mapped as memory of device `device_index`."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return rebuild_cuda_tensor(
        Tensor,
        torch.Size([handle["num_elements"]]),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        device_index,
        base64.b64decode(handle["handle"]),
        handle["size_bytes"],
        handle["offset_bytes"],
        False,
        base64.b64decode(handle["counter"]),
        handle["counter_offset"],
        base64.b64decode(handle["event"]),
        handle["needs_event"],
    )
