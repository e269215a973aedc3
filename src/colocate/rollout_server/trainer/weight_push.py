"""The trainer's side of a weight push: it sends the policy in chunks to a server on other GPUs.

There are four transports, of which "auto" chooses the fastest that works:

    ipc     the server's workers read a buffer on the trainer's GPU, which must be visible to them
    nccl    a broadcast from the trainer to all workers, on one host or between hosts
    file    a file in a directory that both see, usually in shared memory; needs no GPUs
    http    the messages themselves, in pieces; needs no GPUs and nothing in common, and is the slowest
"""

from __future__ import annotations

import base64
import logging
import socket
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colocate.engines.vllm.internals import plain_segments
from colocate.parallel.launching import free_port
from colocate.rollout_server.trainer.client import (
    HttpClient,
    MalformedResponse,
    ServerUnreachable,
    WorkerError,
    Workers,
)
from colocate.rollout_server.wire.shared_directory import SHARED_MEMORY, SharedDirectory
from colocate.rollout_server.wire.weight_wire import (
    GROUP_TIMEOUT_S,
    PIECE_BYTES,
    PROBE,
    PROCESS_SETTINGS,
    NcclGroup,
    checksum_of,
    ipc_handle,
    layout_hash,
    layout_of,
    pack,
    visible_gpus,
)
from colocate.weights.buckets import buckets, sizes, tied_head

logger = logging.getLogger(__name__)

TransportName = Literal["auto", "ipc", "nccl", "file", "http"]

_POLL_S = 0.2


class PushInterrupted(RuntimeError):
    """The push must be repeated: the server restarted, or gave it up because it was silent, or a chunk came
    damaged."""


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
        tell: sends a message with these arguments to the workers, and waits for their answers.
    """

    def __init__(self, tell: Callable[..., list[dict[str, Any]]]) -> None:
        self._tell = tell

    def buffer(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def offer(self, flat: Tensor) -> dict[str, Any]:
        pieces = flat.split(PIECE_BYTES)
        for number, piece in enumerate(pieces):
            text = base64.b64encode(piece.numpy()).decode()
            _check(self._tell(number=number, base64_text=text), "kept")
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
        self, workers: Workers, num_workers: int, device: torch.device, host: str, port: int, timeout_s: float
    ) -> None:
        self._device = device
        joining = workers.start(
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


@dataclass
class WeightPusher:
    """Sends a policy's weights to a server. After a failed push the next one starts afresh.

    Args:
        client, workers: the server.
        transport: "ipc", "nccl", "file", or "auto" for the fastest that works.
        group_host, group_port: where the server's workers connect to the trainer for NCCL. None: this
            machine's address on the way to the server; 0: any free port.
        bucket_bytes: largest size of a chunk; a larger tensor is a chunk of its own.
        directory: parent directory for files; None: shared memory, or the temporary directory without it.
        timeout_s: seconds for a whole push, waiting for the end of another process's push included.
        message_s: seconds for each of its messages.
    """

    client: HttpClient
    workers: Workers
    _: KW_ONLY
    transport: TransportName
    group_host: str | None
    group_port: int
    bucket_bytes: int
    directory: str | None
    timeout_s: float
    message_s: float

    def __post_init__(self) -> None:
        self.is_asleep = False
        """The server's memory of weights and KV cache is to be taken again. Set by whoever has asked it."""
        self.is_unfinished = False
        """The server was paused for a push that has not come to its end. It may have the weights all the
        same, as the answer that says so can be lost; another push lets it go on."""
        self._transport: Transport | None = None
        self._transport_is_to: list[str] = []
        self._push_id: str | None = None

    def push(self, model: nn.Module, token: str) -> int:
        """Load the model's present weights into the server under the name `token`, unless it has them.

        During the push the server generates nothing: its requests are aborted, and new ones wait. After a
        failed push it stays paused until the next one, because its weights are a mixture of old and new ones.

        Returns:
            Bytes sent.

        Raises:
            PushInterrupted, ServerUnreachable: the server is gone or restarted; push again when it is back.
            WorkerError, RequestRefused: the server refused, with the reason.
        """
        deadline = time.monotonic() + self.timeout_s
        self.is_unfinished = True
        replaces, self._push_id = self._push_id, uuid.uuid4().hex
        if was_asleep := self.is_asleep:
            self._tell("/wake_up?tags=weights", deadline)
        try:
            sent_bytes = self._push(model, token, replaces, deadline)
        except BaseException:
            self.reset()
            raise
        if was_asleep:
            self._tell("/wake_up?tags=kv_cache", deadline)
            self._note_sleep(False, deadline)
        self._tell("/reset_prefix_cache", deadline)
        self._tell("/resume", deadline)
        self.is_unfinished = False
        return sent_bytes

    def put_to_sleep(self) -> None:
        """Let the server give the memory of weights and KV cache back; the next push wakes it up.

        Raises:
            PushInterrupted: it restarted meanwhile, and may be awake.
            ServerUnreachable, WorkerError, RequestRefused: see `push`.
        """
        deadline = time.monotonic() + self.timeout_s
        before = self._note_sleep(True, deadline)
        self._tell("/sleep?level=2", deadline)  # 2: the weights are dropped, as newer ones will be sent
        if self._note_sleep(True, deadline) != before:
            raise PushInterrupted("The server restarted when it was about to sleep.")

    def reset(self) -> None:
        """Close the transport; the next push chooses one again."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _push(self, model: nn.Module, token: str, replaces: str | None, deadline: float) -> int:
        start_ids = self._begin(token, replaces, tied_head(model), layout_hash(sizes(model)), deadline)
        if start_ids is None:
            return 0
        if start_ids != self._transport_is_to:
            self.reset()  # restarted workers have neither joined the group nor been shown the directory
        if self._transport is None:
            device = next(model.parameters()).device
            self._transport, self._transport_is_to = self._choose(device, deadline), start_ids
        sent_bytes = num_chunks = 0
        for bucket in buckets(model, self.bucket_bytes):
            places, size_bytes = layout_of(bucket)
            flat = self._transport.buffer(size_bytes)
            pack(bucket, places, flat)
            received = self.workers.start(
                "receive_chunk",
                push_id=self._push_id,
                chunk=num_chunks,
                places=places,
                size_bytes=size_bytes,
                checksum=checksum_of(flat),
                offer=self._transport.offer(flat),
                deadline_s=self._remaining_s(deadline),
            )
            self._transport.transmit(flat)
            _check(received.result(), "loaded")
            self._transport.settle()
            sent_bytes += size_bytes
            num_chunks += 1
        finished = self.workers.call(
            "finish",
            push_id=self._push_id,
            token=token,
            num_chunks=num_chunks,
            deadline_s=self._remaining_s(deadline),
        )
        _check(finished, "finished")
        return sent_bytes

    def _begin(
        self, token: str, replaces: str | None, tied_head: str | None, layout: str, deadline: float
    ) -> list[str] | None:
        """Pause the server and begin the push on all workers.

        Args:
            token: the name of the weights to be sent.
            replaces: id of this process's earlier push, which has failed.
            tied_head, layout: see `receiver`.

        Returns:
            Identities of the workers' starts; None if the server has these weights already.
        """
        unless: str | None = token
        while True:
            self._tell("/pause?mode=abort", deadline)
            answers = self.workers.call(
                "begin",
                push_id=self._push_id,
                unless=unless,
                replaces=replaces,
                tied_head=tied_head,
                layout=layout,
                deadline_s=self._remaining_s(deadline),
            )
            kinds = {answer["is"] for answer in answers}
            if kinds == {"ready"}:
                return [answer["start_id"] for answer in answers]
            if kinds == {"current"}:
                return None
            if "busy" not in kinds:
                unless = None  # an earlier push was finished on some workers only
                continue
            # Another process is pushing; usually the run's weights of now, to a server that has restarted.
            if time.monotonic() + _POLL_S > deadline:
                raise WorkerError(
                    f"Another process has been pushing weights to {self.client.base_url} for "
                    f"{self.timeout_s:g} s. Give every run a server of its own."
                )
            time.sleep(_POLL_S)

    def _note_sleep(self, is_asleep: bool, deadline: float) -> list[str]:
        """Tell the workers whether they sleep; returns the identities of their starts."""
        told = self.workers.call("note_sleep", is_asleep=is_asleep, deadline_s=self._remaining_s(deadline))
        return [answer["start_id"] for answer in told]

    def _tell(self, path: str, deadline: float) -> None:
        self.client.call("POST", path, deadline_s=self._remaining_s(deadline), parse=_check_done)

    # ── Choice of the transport ──────────────────────────────────────────────────────────────────────────

    def _choose(self, device: torch.device, deadline: float) -> Transport:
        workers = self.workers.describe(deadline_s=self._remaining_s(deadline))
        are_on_gpus = device.type == "cuda" and all(w["device_type"] == "cuda" for w in workers)
        gpu = visible_gpus()[device.index or 0] if device.type == "cuda" else None
        name = self.transport
        if name == "auto":
            if are_on_gpus:
                name = "ipc" if all(gpu in worker["visible_gpus"] for worker in workers) else "nccl"
            else:
                name = "file"
        files = self._file_transport(deadline) if name == "file" else None
        if name == "file" and files is None:
            if self.transport == "file":
                raise ValueError(
                    f"Weights cannot go to the server by file: it does not see {self._parent_directory} of "
                    "this machine. Set a directory that both share, use GPUs on both sides (nccl), or leave "
                    "the transport at 'auto'."
                )
            name = "http"
        logger.info(f"Weights go to the server at {self.client.base_url} by {name}.")
        if files is not None:
            return files
        if name == "http":
            return HttpTransport(partial(self._send_piece, deadline))
        if not are_on_gpus:
            raise ValueError(
                f"Weights cannot go to the server by {name}: the trainer is on {device.type}, the server "
                f"on {workers[0]['device_type']}, and {name} needs GPUs on both sides. Leave the transport "
                "at 'auto'."
            )
        if name == "ipc":
            if any(gpu not in worker["visible_gpus"] for worker in workers):
                raise ValueError(
                    f"Weights cannot go to the server by ipc: its workers do not see the trainer's GPU "
                    f"{gpu}. Add it behind the server's own in its CUDA_VISIBLE_DEVICES, or use nccl."
                )
            return IpcTransport(device)
        if any(gpu == worker["gpu"] for worker in workers):
            raise ValueError(
                f"Weights cannot go to the server by nccl: it runs on the trainer's own GPU {gpu}, and NCCL "
                "needs a GPU for each side. Use ipc, or move the server with CUDA_VISIBLE_DEVICES."
            )
        host = self.group_host or self._own_address()
        port = self.group_port or free_port(host)
        timeout_s = min(self._remaining_s(deadline), GROUP_TIMEOUT_S)
        return NcclTransport(self.workers, len(workers), device, host, port, timeout_s)

    @property
    def _parent_directory(self) -> str:
        return self.directory or (str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else tempfile.gettempdir())

    def _file_transport(self, deadline: float) -> FileTransport | None:
        """The transport by files; None if the server does not see this machine's directory."""
        transport = FileTransport(self._parent_directory)
        mark = uuid.uuid4().hex
        probe = transport.directory / PROBE
        probe.write_text(mark)
        try:
            answers = self.workers.call(
                "share", directory=str(transport.directory), mark=mark, deadline_s=self._remaining_s(deadline)
            )
        except BaseException:
            transport.close()
            raise
        probe.unlink()
        if all(answer["is_shared"] for answer in answers):
            return transport
        transport.close()
        return None

    def _send_piece(self, deadline: float, **piece: Any) -> list[dict[str, Any]]:
        return self.workers.call(
            "keep_piece", push_id=self._push_id, deadline_s=self._remaining_s(deadline), **piece
        )

    def _remaining_s(self, deadline: float) -> float:
        """Seconds for a message until `deadline`: at least 0.01, so that a late one fails with a message."""
        return max(min(deadline - time.monotonic(), self.message_s), 0.01)

    def _own_address(self) -> str:
        """This machine's address on the way to the server."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.client.host, self.client.port))  # UDP: nothing is sent
            return probe.getsockname()[0]


def _check_done(answer: Any) -> None:
    if isinstance(answer, dict) and answer.get("success") is False:
        # Requests that were aborted still hold blocks of the KV cache for a moment; the call is repeated.
        raise MalformedResponse("the server could not")


def _check(answers: list[dict[str, Any]], expected: str) -> None:
    kinds = {answer["is"] for answer in answers}
    if "damaged" in kinds:
        raise PushInterrupted("Other bytes of the weights came to the server than were sent.")
    if kinds != {expected}:
        found = {f"{each.get('num_chunks')} chunks of {each.get('push_id')}" for each in answers}
        raise PushInterrupted(
            "The server does not know this push any more: it restarted, or gave it up because it was silent. "
            f"It has {', '.join(sorted(found))}."
        )
