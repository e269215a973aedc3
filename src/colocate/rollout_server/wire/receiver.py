"""`Receiver`: the server's half of a weight push, for any engine.

It obeys only messages signed with the server's key, most of them only from the run that holds the server. A
push has the messages `begin`, one `receive_chunk` for each numbered chunk, and `finish`. A message may arrive
twice, and its work is done once; one that is out of order is refused, with the present state as the answer.
During a push the weights are a mixture of old and new ones, and have no version.

A server has one receiver for each of its workers, that is, for each process that has a part of the weights.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from hmac import compare_digest
from typing import Any, Protocol

import torch
from torch import Tensor

from colocate.http.key import VARIABLE, ServerKey, key_from_environment
from colocate.http.lease import Lease, LeaseHolder, ServerHeld
from colocate.http.messages import opened_message, sealed_answer
from colocate.rollout_server.wire.weight_wire import (
    GROUP_TIMEOUT_S,
    PROBE,
    NcclGroup,
    open_ipc_handle,
    visible_gpus,
)
from colocate.weights.chunks import Chunk, checksum_of, layout_hash

logger = logging.getLogger(__name__)

_PUSH_LEASE_S = 60.0
"""Seconds of silence after which another process of the run may begin a push in place of the present one."""
_CHUNK_FILE = re.compile(r"[0-9]{1,12}\.safetensors")


class ServedWeights(Protocol):
    """A worker's weights, and the methods by which its engine takes new ones from a `Receiver`."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def rank(self) -> int:
        """The worker's number among those of its server."""
        ...

    def facts(self) -> dict[str, Any]:
        """Facts that a trainer compares with its own model: `engine`, `num_replicas`, `can_sleep`,
        `logprobs_mode`, `dtype`, and `shape`, the options `weight_wire.SHAPE` of the model."""
        ...

    def begin(self, tied_head: str | None) -> None:
        """Make ready for tensors. Nothing generates until `end`.

        Args:
            tied_head: name of the weight that is also the head's; None: they are not tied.
        """
        ...

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load whole tensors, named as in the model's own state dict, and keep no reference to them."""
        ...

    def end(self) -> None:
        """Make the weights ready to generate with, complete or not. Ending twice is harmless."""
        ...

    def missing(self) -> list[str]:
        """The weights, by name, that were not loaded since `begin`; none where the engine cannot tell."""
        ...


class Receiver:
    """The state of one worker's weights; its public methods are the messages of a trainer.

    Args:
        weights: the worker's weights.
        key: the server's key; None: the one in the environment.
    """

    OF_ANYBODY = ("describe", "weights", "abandon")
    OF_THE_HOLDER = (
        *("claim", "release", "state", "share", "join_group"),
        *("begin", "keep_piece", "receive_chunk", "finish", "note_sleep"),
    )

    def __init__(self, weights: ServedWeights, key: ServerKey | None = None) -> None:
        self._weights, self._key = weights, key
        self._device = weights.device
        self._start_id = uuid.uuid4().hex
        self._version: str | None = None
        self._push: str | None = None
        self._finished: str | None = None
        self._num_chunks = 0
        self._layout: tuple[str, str] | None = None
        """The run whose weights these are, and their layout."""
        self._announced_layout = ""
        self._sizes: list[tuple[str, int]] = []
        self._last_message_s = 0.0
        self._is_asleep = False
        self._group: NcclGroup | None = None
        self._mapped: tuple[dict[str, Any], Tensor] | None = None
        self._pieces: list[bytes] = []
        """The beginning of the next chunk, where chunks come in messages."""
        self._lease = Lease()
        self._directory: str | None = None

    def answer(self, message: str, signature: str) -> dict[str, Any]:
        """Do what a signed message asks. It never raises: the caller is told of errors by its answer.

        Args:
            message: {"do": method, "run": run, ...arguments} as JSON; see `_do`.
            signature: the message's signature; see `messages`.

        Returns:
            A signed answer: the method's result, {"error": text}, or {"holder": run} if another run holds the
            server. If the message is not signed with the key, {"error": text} without a signature.
        """
        try:
            key = self._key or key_from_environment()
            if key is None:
                raise PermissionError(f"the server was started without {VARIABLE}")
            arguments = opened_message(key, message, signature)
        except Exception as error:
            logger.warning(f"colocate: a message was refused: {error}")
            return {"error": str(error)}
        try:
            return sealed_answer(key, self._do(**arguments), signature)
        except ServerHeld as error:
            return sealed_answer(key, {"holder": error.holder}, signature)
        except Exception as error:
            logger.exception("A message of the trainer failed")
            return sealed_answer(key, {"error": f"{type(error).__name__}: {error}"}, signature)

    def _do(
        self, do: str, run: dict[str, Any] | None = None, instead_of: str | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Call the method `do` with `arguments`.

        A method of `OF_THE_HOLDER` takes the server's lease for `run`, or renews it.

        Args:
            run: the fields of the `lease.LeaseHolder` that asks.
            instead_of: see `Lease.claim`.

        Raises:
            ServerHeld: another run holds the server.
        """
        if do in self.OF_THE_HOLDER:
            if run is None:
                raise ValueError(
                    f"{do!r} came from no run: trainer and server have other versions of colocate"
                )
            self._lease.claim(LeaseHolder(**run), instead_of)
        elif do not in self.OF_ANYBODY:
            raise ValueError(f"unknown message {do!r}: trainer and server have other versions of colocate")
        return getattr(self, do)(**arguments)

    @property
    def version(self) -> str | None:
        """The name of the weights (the run and the version of its policy), by which requests ask for them;
        None: they are no trainer's, or a mixture, or asleep."""
        return None if self._is_asleep else self._version

    # ── Messages of the trainer ──────────────────────────────────────────────────────────────────────────

    def describe(self) -> dict[str, Any]:
        """Facts with which the trainer checks that this is its model and chooses a transport."""
        uuids = visible_gpus()
        return {
            **self._weights.facts(),
            "rank": self._weights.rank,
            "start_id": self._start_id,
            "device_type": self._device.type,
            "gpu": uuids[self._device.index or 0] if self._device.type == "cuda" else None,
            "visible_gpus": uuids,
        }

    def state(self) -> dict[str, Any]:
        """`version` names the weights of the last finished push, None before and during a push, and asleep.

        `start_id` is different after every start of the server.
        """
        return {"start_id": self._start_id, "version": self.version, "is_asleep": self._is_asleep}

    def weights(self) -> dict[str, Any]:
        """The version of `state`."""
        return {"version": self.version}

    def claim(self) -> dict[str, Any]:
        """Do nothing: `answer` has taken the server for the run that gets this answer."""
        return {}

    def release(self) -> dict[str, Any]:
        """End the run's lease of the server."""
        self._lease.release()
        return {}

    def abandon(self) -> dict[str, Any]:
        """End a push whose run does not hold the server any more, so that the model can run again.

        Returns:
            {"is": "free"}; {"is": "held"}, with nothing done, if a run holds the server.
        """
        if self._lease.holder is not None:
            return {"is": "held"}
        self._push = None
        self._weights.end()
        return {"is": "free"}

    def note_sleep(self, is_asleep: bool) -> dict[str, Any]:
        """Note that the server is about to give the memory of its weights back, which ends a push; or that it
        is awake with new ones.

        Returns:
            {"start_id": as in `state`}.
        """
        self._is_asleep = is_asleep
        if is_asleep:
            self._version = self._push = None
        return {"start_id": self._start_id}

    def share(self, directory: str, mark: str) -> dict[str, Any]:
        """Find out whether the server sees a directory of the trainer. If so, weights may come from it.

        Args:
            mark: the contents of the file `PROBE` in it. No other file is read, and the answer says only
                whether these contents agree, so the method does not reveal files of the server.
        """
        self._directory = None
        with suppress(OSError), open(_open_plainly(directory, PROBE), "rb") as file:
            if compare_digest(file.read(len(mark) + 1), mark.encode()):
                self._directory = directory
        return {"is_shared": self._directory is not None}

    def join_group(self, host: str, port: int, size: int, timeout_s: float) -> dict[str, Any]:
        """Join a new NCCL group with the trainer, within at most `GROUP_TIMEOUT_S`."""
        if self._group is not None:
            self._group.abort()
            self._group = None
        timeout_s = min(timeout_s, GROUP_TIMEOUT_S)
        rank = 1 + self._weights.rank
        self._group = NcclGroup(host, port, rank=rank, size=size, device=self._device, timeout_s=timeout_s)
        return {}

    def begin(
        self, push: str, unless: str | None, replaces: str | None, tied_head: str | None, layout: str
    ) -> dict[str, Any]:
        """Begin a push: unpack the model for the first chunk.

        Args:
            push: id of the push.
            unless: version of weights; if they are loaded, no push begins.
            replaces: id of an earlier push of this trainer process, which has failed.
            tied_head: name of the weight that is also the head's; None: they are not tied.
            layout: `layout_hash` of the tensors to come.

        Returns:
            {"is": "ready", "start_id": as in `state`}; {"is": "current"} if the weights `unless` are loaded;
            {"is": "busy"} if another push is under way.

        Raises:
            ValueError: the run's weights had another layout before. They stay as they are.
        """
        ready = {"is": "ready", "start_id": self._start_id}
        if self._push == push:
            return ready
        if self._version is not None and self._version == unless:
            return {"is": "current"}
        if self._push not in (None, replaces) and time.monotonic() - self._last_message_s < _PUSH_LEASE_S:
            return {"is": "busy"}
        run_id = self._run_id
        if self._layout is not None and self._layout[0] == run_id and self._layout[1] != layout:
            raise ValueError(
                f"this run's weights have another layout ({layout[:8]}) than those that it sent before "
                f"({self._layout[1][:8]}), which are kept: the trainer's model is another one"
            )
        self._weights.end()  # an earlier push may not have finished
        self._version, self._push, self._num_chunks = None, push, 0
        self._announced_layout, self._sizes = layout, []
        self._last_message_s = time.monotonic()
        self._weights.begin(tied_head)
        return ready

    def keep_piece(self, push: str, number: int, base64_text: str) -> dict[str, Any]:
        """Keep a piece of the next chunk, at most `PIECE_BYTES`, until all of it has come.

        Returns:
            {"is": "kept"}; `_unknown` if this push is not under way.

        Raises:
            ValueError: the piece before has not come.
        """
        if push != self._push:
            return self._unknown()
        self._last_message_s = time.monotonic()
        if number == 0:
            self._pieces = []
        if number > len(self._pieces):
            raise ValueError(f"piece {number} came where piece {len(self._pieces)} was due")
        self._pieces[number:] = [base64.b64decode(base64_text)]
        return {"is": "kept"}

    def receive_chunk(
        self,
        push: str,
        chunk: int,
        places: list[dict[str, Any]],
        size_bytes: int,
        checksum: int,
        offer: dict[str, Any],
    ) -> dict[str, Any]:
        """Load chunk number `chunk`, unless that was done already.

        Args:
            places: see `Chunk`.
            size_bytes: size of the chunk.
            checksum: see `checksum_of`.
            offer: where its bytes are: {"file": name} in the shared directory, {"pieces": number} that have
                come before, {"ipc": handle}, or {"nccl": True} for a broadcast.

        Returns:
            {"is": "loaded"}; `_unknown` if this push is not under way; {"is": "damaged"} if the bytes are not
            those that were sent; then nothing is loaded.

        Raises:
            ValueError: the chunk before has not come.
        """
        if push != self._push:
            return self._unknown()
        self._last_message_s = time.monotonic()
        if chunk < self._num_chunks:
            return {"is": "loaded"}
        if chunk > self._num_chunks:
            raise ValueError(f"chunk {chunk} came where chunk {self._num_chunks} was due")
        flat = self._bytes_of(offer, size_bytes)
        if len(flat) != size_bytes or checksum_of(flat) != checksum:
            return {"is": "damaged"}
        tensors = Chunk(flat, places).tensors
        try:
            self._weights.load(tensors)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except BaseException:
            self._push = None  # a part of the chunk may be loaded, so a new push is needed
            raise
        self._num_chunks += 1
        self._sizes += [(name, tensor.nbytes) for name, tensor in tensors]
        self._last_message_s = time.monotonic()
        return {"is": "loaded"}

    def finish(self, push: str, version: str, num_chunks: int) -> dict[str, Any]:
        """Pack the weights for use, and note their version."""
        if push == self._finished:
            return {"is": "finished"}
        if push != self._push:
            return self._unknown()
        if num_chunks != self._num_chunks:
            raise ValueError(f"{self._num_chunks} chunks came and {num_chunks} were sent")
        missing, came = self._weights.missing(), layout_hash(self._sizes)
        self._push = None
        self._weights.end()
        if came != self._announced_layout:
            raise ValueError(
                f"other weights came ({len(self._sizes)}, layout {came[:8]}) than were announced (layout "
                f"{self._announced_layout[:8]})"
            )
        if missing:
            raise ValueError(
                f"{len(missing)} of the server's weights were not sent, such as "
                f"{missing[0]!r}: the trainer's model is another one"
            )
        self._mapped = None
        self._version, self._finished, self._layout = version, push, (self._run_id, came)
        return {"is": "finished"}

    @property
    def _run_id(self) -> str:
        holder = self._lease.holder
        return "" if holder is None else holder.id

    def _unknown(self) -> dict[str, Any]:
        """The answer to a message of another push than the one under way: the present state."""
        return {
            "is": "unknown",
            "push": self._push,
            "num_chunks": self._num_chunks,
            "version": self._version,
        }

    # ── Loading ──────────────────────────────────────────────────────────────────────────────────────────

    def _bytes_of(self, offer: dict[str, Any], size_bytes: int) -> Tensor:
        """A copy of the chunk, [size_bytes] uint8: vLLM keeps loaded tensors until a layer is complete."""
        if "file" in offer:
            return self._read_chunk(offer["file"])
        if "pieces" in offer:
            pieces, self._pieces = self._pieces[: offer["pieces"]], []
            return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8).to(self._device)
        if "ipc" in offer:
            return self._map(offer["ipc"])[:size_bytes].to(self._device, copy=True)
        if self._group is None:
            raise RuntimeError("a broadcast was announced before this worker joined the NCCL group")
        flat = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        self._group.start_broadcast(flat)
        self._group.wait()
        return flat

    def _read_chunk(self, name: str) -> Tensor:
        from safetensors.torch import load_file

        if self._directory is None or _CHUNK_FILE.fullmatch(name) is None:
            raise PermissionError(f"{name!r} is no file of a directory that was shared")
        descriptor = _open_plainly(self._directory, name)
        try:
            return load_file(f"/proc/self/fd/{descriptor}")["chunk"]
        finally:
            os.close(descriptor)

    def _map(self, handle: dict[str, Any]) -> Tensor:
        """The trainer's buffer, mapped into this process once, because CUDA counts every mapping of it."""
        if self._mapped is None or self._mapped[0] != handle:
            self._mapped = None
            self._mapped = (handle, open_ipc_handle(handle, visible_gpus().index(handle["gpu"])))
        return self._mapped[1]


def other_weights(wanted: str, present: str | None) -> str:
    """The refusal of a request for completions of weights that the server does not have."""
    has = "no weights of a trainer" if present is None else f"the weights {present!r:.100}"
    return f"The request is for the weights {wanted!r:.100}, and the server has {has}."


def _open_plainly(directory: str, name: str) -> int:
    """A descriptor of the plain file `name` in `directory` itself, without following links or blocking."""
    inside = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=inside)
    finally:
        os.close(inside)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PermissionError(f"{name!r} is no plain file")
    return descriptor
