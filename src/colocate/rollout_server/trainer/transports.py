"""`Transport`: a way for chunks of weights from the trainer to a server on other GPUs.

There are four, of which "auto" chooses the fastest that works:

    ipc     the server's workers read a buffer on the trainer's GPU, which must be visible to them
    nccl    a broadcast from the trainer to all workers, on one host or between hosts
    file    a file in a directory that both see, usually in shared memory; needs no GPUs
    http    the messages themselves, in pieces; needs no GPUs and nothing in common, and is the slowest
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from colocate.engines.vllm.internals import plain_segments
from colocate.rollout_server.trainer.client import HttpClient, ServerUnreachable
from colocate.rollout_server.wire.shared_directory import SharedDirectory
from colocate.rollout_server.wire.weight_wire import PIECE_BYTES, PROCESS_SETTINGS, NcclGroup, ipc_handle

TransportName = Literal["auto", "ipc", "nccl", "file", "http"]


class Transport(ABC):
    """A way to send the bytes of chunks, one chunk at a time.

    For each chunk the pusher calls `buffer`, packs the chunk, sends `offer`'s result to the workers in a
    message, calls `transmit` while they handle it, and `settle` when they have answered.
    """

    @abstractmethod
    def buffer(self, size_bytes: int) -> Tensor:
        """The buffer [size_bytes] uint8 to pack the next chunk into."""

    @abstractmethod
    def offer(self, flat: Tensor) -> dict[str, Any]:
        """The description by which the workers find the packed chunk `flat`."""

    def transmit(self, flat: Tensor) -> None:  # noqa: B027  only a broadcast must be sent, others are read
        """Send the chunk `flat`, which the workers have been told to receive."""

    def settle(self) -> None:  # noqa: B027  workers have copied an ipc chunk when they answer
        """Finish a chunk that the workers have, after which its buffer may be used again."""

    @abstractmethod
    def close(self) -> None:
        """Free what the transport holds, even in the middle of a chunk."""


class FileTransport(Transport):
    """Chunks as files in a directory that trainer and server share.

    Args:
        parent: where to make the directory, a `SharedDirectory`.
    """

    def __init__(self, parent: str | None) -> None:
        self._owner = SharedDirectory(parent)
        self.directory = self._owner.path
        self._num_files = 0

    def buffer(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def offer(self, flat: Tensor) -> dict[str, Any]:
        from safetensors.torch import save_file

        self._path = self.directory / f"{self._num_files}.safetensors"
        self._num_files += 1
        save_file({"chunk": flat}, self._path)
        return {"file": self._path.name}

    def settle(self) -> None:
        self._path.unlink()

    def close(self) -> None:
        self._owner.close()


class HttpTransport(Transport):
    """Chunks in pieces, each in a message of its own, as text in base 64.

    Args:
        keep: has the workers keep a piece, given as these arguments, until the rest of its chunk comes.
    """

    def __init__(self, keep: Callable[..., None]) -> None:
        self._keep = keep

    def buffer(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def offer(self, flat: Tensor) -> dict[str, Any]:
        pieces = flat.split(PIECE_BYTES)
        for number, piece in enumerate(pieces):
            self._keep(number=number, base64_text=base64.b64encode(piece.numpy()).decode())
        return {"pieces": len(pieces)}

    def close(self) -> None:
        pass


class IpcTransport(Transport):
    """Chunks in a buffer on the trainer's GPU, which the workers map into their own address space."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: Tensor | None = None
        self._handle: dict[str, Any] = {}

    def buffer(self, size_bytes: int) -> Tensor:
        if self._flat is None or len(self._flat) < size_bytes:
            self._flat = None
            # Another process can open memory of an expandable segment only with further privileges.
            with PROCESS_SETTINGS, plain_segments(self._device):
                self._flat = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            self._handle = ipc_handle(self._flat)
        return self._flat[:size_bytes]

    def offer(self, flat: Tensor) -> dict[str, Any]:
        torch.cuda.synchronize(self._device)  # streams of another process do not wait for ours
        return {"ipc": self._handle}

    def close(self) -> None:
        self._flat = None


class NcclTransport(Transport):
    """Chunks as broadcasts in an NCCL group of the trainer and all workers.

    Raises:
        RuntimeError: the group did not form within `timeout_s`.
    """

    def __init__(
        self,
        client: HttpClient,
        num_workers: int,
        device: torch.device,
        host: str,
        port: int,
        timeout_s: float,
    ) -> None:
        self._device = device
        joining = client.submit_message(
            "join_group",
            host=host,
            port=port,
            size=1 + num_workers,
            timeout_s=timeout_s,
            deadline_s=timeout_s,
        )
        try:
            self._group = NcclGroup(
                host, port, rank=0, size=1 + num_workers, device=device, timeout_s=timeout_s
            )
        except RuntimeError as error:
            reason = joining.exception() if joining.done() else None
            if isinstance(reason, ServerUnreachable):
                raise reason from error
            raise RuntimeError(
                f"Trainer and server did not meet for NCCL at {host}:{port} within {timeout_s:g} s: "
                f"{reason or error}. The server must reach that address: set vllm_group_host to one of this "
                "machine's that it can, and vllm_group_port to a port that is open."
            ) from error
        joining.result()

    def buffer(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def offer(self, flat: Tensor) -> dict[str, Any]:
        return {"nccl": True}

    def transmit(self, flat: Tensor) -> None:
        self._group.start_broadcast(flat)

    def settle(self) -> None:
        self._group.wait()

    def close(self) -> None:
        self._group.abort()
