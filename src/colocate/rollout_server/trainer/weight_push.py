"""`WeightPusher`: keeps the weights of a server on other GPUs equal to a policy's."""

from __future__ import annotations

import logging
import socket
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch

from colocate.parallel.launching import free_port
from colocate.rollout_server.trainer.client import HttpClient, MalformedResponse, WorkerError
from colocate.rollout_server.trainer.fit import Starts, start_id_of
from colocate.rollout_server.trainer.transports import (
    FileTransport,
    HttpTransport,
    IpcTransport,
    NcclTransport,
    Transport,
    TransportName,
)
from colocate.rollout_server.wire.shared_directory import SHARED_MEMORY
from colocate.rollout_server.wire.weight_wire import GROUP_TIMEOUT_S, PROBE, visible_gpus
from colocate.weights.chunks import checksum_of
from colocate.weights.source import WeightSource

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_MAX_INTERRUPTIONS = 5
"""The number of times that a push is interrupted before it is given up."""


class PushInterrupted(RuntimeError):
    """The push must be repeated: the server restarted, or gave it up because it was silent, or a chunk came
    damaged."""


@dataclass
class WeightPusher:
    """Sends a policy's weights to a server that does not have them. After a failed push the next one starts
    afresh.

    Args:
        client: the server's.
        starts: those that are known of the server.
        transport: "ipc", "nccl", "file", or "auto" for the fastest that works.
        group_host, group_port: where the server's workers connect to the trainer for NCCL. None: this
            machine's address on the way to the server; 0: any free port.
        directory: parent directory for files; None: shared memory, or the temporary directory without it.
        timeout_s: seconds for a whole push, waiting for the end of another process's push included.
        message_s: seconds for each of its messages.
        answer_s: seconds for an answer that takes the server no work.
    """

    client: HttpClient
    _: KW_ONLY
    starts: Starts
    transport: TransportName
    group_host: str | None
    group_port: int
    directory: str | None
    timeout_s: float
    message_s: float
    answer_s: float

    def __post_init__(self) -> None:
        self.num_restarts = 0
        """The number of times that another start of the server answered than the one before."""
        self.start_id: str | None = None
        self.is_asleep = False
        """The server's memory of weights and KV cache is to be taken again. Set by whoever has asked it."""
        self.is_unfinished = False
        """The server was paused for a push that has not come to its end. It may have the weights all the
        same, as the answer that says so can be lost; another push lets it go on."""
        self._transport: Transport | None = None
        self._transport_is_to: list[str] = []
        self._last: str | None = None
        """The name of this process's last push."""

    def state(self) -> tuple[str, str | None]:
        """Identity of the server's start, and name of its weights: None if its workers disagree."""
        states = self.client.message("state", deadline_s=self.answer_s)
        start_id, versions = start_id_of(states), {state["version"] for state in states}
        self.starts.note(start_id)
        self.num_restarts += self.start_id not in (None, start_id)
        self.start_id = start_id
        self.is_asleep = any(state["is_asleep"] for state in states)
        return start_id, versions.pop() if len(versions) == 1 else None

    def push(self, source: WeightSource, version: str, check_start: Callable[[str], None]) -> str:
        """Load a policy's present weights into the server under the name `version`, unless it has them.

        During a push the server generates nothing: its requests are aborted, and new ones wait. After a
        failed push it stays paused until the next one, because its weights are a mixture of old and new ones.

        Args:
            check_start: called with the identity of the server's start before weights are sent to it. After
                a restart it may have another model.

        Returns:
            The identity of the server's start.

        Raises:
            PushInterrupted, ServerUnreachable: the server is gone or restarted; push again when it is back.
            WorkerError, RequestRefused: the server refused, with the reason.
        """
        pushed_to: str | None = None
        failure = PushInterrupted("The server restarted after a push.")
        for _ in range(_MAX_INTERRUPTIONS + 1):
            start_id, present = self.state()
            if present == version and not self.is_unfinished:
                return start_id
            if pushed_to not in (None, start_id):
                break
            check_start(start_id)
            pushed_to = start_id
            try:
                self._push_whole(source, version)
            except PushInterrupted as error:  # the server may only have given a silent push up
                failure = error
        raise failure

    def _push_whole(self, source: WeightSource, version: str) -> None:
        began_s = time.monotonic()
        deadline = began_s + self.timeout_s
        self.is_unfinished = True
        replaces, self._last = self._last, uuid.uuid4().hex
        if was_asleep := self.is_asleep:
            self._tell("/wake_up?tags=weights", deadline)
        try:
            sent_bytes = self._push(source, version, replaces, deadline)
        except BaseException:
            self.reset()
            raise
        if was_asleep:
            self._tell("/wake_up?tags=kv_cache", deadline)
            self._note_sleep(False, deadline)
        self._tell("/reset_prefix_cache", deadline)
        self._tell("/resume", deadline)
        self.is_unfinished = False
        logger.info(f"Sent {sent_bytes / 2**20:.1f} MiB of weights in {time.monotonic() - began_s:.2f} s.")

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

    def _push(self, source: WeightSource, version: str, replaces: str | None, deadline: float) -> int:
        start_ids = self._begin(version, replaces, source, deadline)
        if start_ids is None:
            return 0
        if start_ids != self._transport_is_to:
            self.reset()  # restarted workers have neither joined the group nor been shown the directory
        if self._transport is None:
            device = next(source.model.parameters()).device
            self._transport, self._transport_is_to = self._choose(device, deadline), start_ids
        sent_bytes = num_chunks = 0
        for flat, places in source.chunks(self._transport.buffer):
            received = self.client.submit_message(
                "receive_chunk",
                push=self._last,
                chunk=num_chunks,
                places=places,
                size_bytes=len(flat),
                checksum=checksum_of(flat),
                offer=self._transport.offer(flat),
                deadline_s=self._remaining_s(deadline),
            )
            self._transport.transmit(flat)
            _check(received.result(), "loaded")
            self._transport.settle()
            sent_bytes += len(flat)
            num_chunks += 1
        finished = self.client.message(
            "finish",
            push=self._last,
            version=version,
            num_chunks=num_chunks,
            deadline_s=self._remaining_s(deadline),
        )
        _check(finished, "finished")
        return sent_bytes

    def _begin(
        self, version: str, replaces: str | None, source: WeightSource, deadline: float
    ) -> list[str] | None:
        """Pause the server and begin the push on all workers.

        Args:
            version: the name of the weights to be sent.
            replaces: name of this process's earlier push, which has failed.

        Returns:
            Identities of the workers' starts; None if the server has these weights already.
        """
        unless: str | None = version
        while True:
            self._tell("/pause?mode=abort", deadline)
            answers = self.client.message(
                "begin",
                push=self._last,
                unless=unless,
                replaces=replaces,
                tied_head=source.tied_head,
                layout=source.layout,
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
        told = self.client.message("note_sleep", is_asleep=is_asleep, deadline_s=self._remaining_s(deadline))
        return [answer["start_id"] for answer in told]

    def _tell(self, path: str, deadline: float) -> None:
        self.client.call("POST", path, deadline_s=self._remaining_s(deadline), parse=_check_done)

    # ── Choice of the transport ──────────────────────────────────────────────────────────────────────────

    def _choose(self, device: torch.device, deadline: float) -> Transport:
        workers = self.client.describe(deadline_s=self._remaining_s(deadline))
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
            return HttpTransport(partial(self._keep_piece, deadline))
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
        return NcclTransport(self.client, len(workers), device, host, port, timeout_s)

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
            answers = self.client.message(
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

    def _keep_piece(self, deadline: float, **piece: Any) -> None:
        told = self.client.message(
            "keep_piece", push=self._last, deadline_s=self._remaining_s(deadline), **piece
        )
        _check(told, "kept")

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
        found = {f"{each.get('num_chunks')} chunks of {each.get('push')}" for each in answers}
        raise PushInterrupted(
            "The server does not know this push any more: it restarted, or gave it up because it was silent. "
            f"It has {', '.join(sorted(found))}."
        )
