"""The ways on which trainer and server move chunks of weights: an NCCL group, and handles of GPU memory.

vLLM's workers also import this file, so it imports no large package but torch.
"""

from __future__ import annotations

import base64
import threading
import time
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
"""Options of a text model's configuration that must be equal in trainer and server."""

PIECE_BYTES = 2**24
"""Bytes of weights in one message: a third more as text, and far less than a server takes as a body."""
PROBE = "probe"
"""Name of the file by which the server finds out whether it sees the trainer's directory."""
GROUP_TIMEOUT_S = 120.0
"""Longest wait for the NCCL group to form, and for each broadcast; a worker does nothing else meanwhile."""

PROCESS_SETTINGS = threading.Lock()
"""Held while settings of the whole process change for a moment, as several servers are pushed to at once."""


class NcclGroup:
    """An NCCL group of the trainer (rank 0) and all workers of the server, independent of their other groups.

    Args:
        host, port: the address at which rank 0 listens for the others.
        timeout_s: longest wait for the group to form, and for each broadcast.

    Raises:
        RuntimeError: the group did not form in time.
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
        # By default a watchdog kills the process when a broadcast takes too long. Here the other side may
        # restart, so only the group must end, not the process (2: clean up only).
        settings = environment({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"})
        with PROCESS_SETTINGS, settings, torch.cuda.device(device):
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = torch.distributed.ProcessGroupNCCL(
                torch.distributed.PrefixStore("colocate-weights", store), rank, size, options
            )
        self._store = store  # rank 0 serves the store, which must live as long as the group
        self._pending: Any = None
        self._connect()

    def _connect(self) -> None:
        """Make NCCL's connections by a first broadcast; in a thread, because it blocks without a limit."""
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
        """Start to send `flat` [bytes] uint8 if this is rank 0, or to receive into it on another rank."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with torch.cuda.device(self._device):
            self._pending = self._group.broadcast([flat], options)

    def wait(self) -> None:
        """Wait until the broadcast is done on this side.

        Raises:
            RuntimeError: it failed, or took longer than the group's timeout. The group cannot be used again.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._pending.is_completed():
            if time.monotonic() > deadline:
                self.abort()
                raise RuntimeError(f"NCCL: a broadcast of weights took longer than {self._timeout_s:g} s.")
            time.sleep(2e-4)
        self._pending.wait()  # makes the current stream wait for it, and raises its error

    def abort(self) -> None:
        """End the group without waiting for the other side."""
        self._group.abort()


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that this process sees, by index."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def ipc_handle(flat: Tensor) -> dict[str, Any]:
    """A handle, as JSON, with which another process of this host can read `flat` [bytes] uint8 on CUDA."""
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
    """Map the memory that `ipc_handle` described as memory of device `device_index`: [bytes] uint8."""
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
