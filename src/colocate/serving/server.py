"""`HttpServer`: uvicorn in a thread of its own, with bounds on what a connection may take."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp, Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from colocate.http.gate import KNOWN
from colocate.serving.refusal import Refusal

T = TypeVar("T")
_START_S = 30.0
_STOP_S = 5.0


@dataclass(frozen=True)
class Limits:
    """Sizes and times. A request beyond one is refused, or disconnected where no answer can be given."""

    max_requests: int = 256
    """Requests under way at once; further ones get 429."""
    max_connections: int = 1024
    """Connections at once. For a further one the oldest is closed on which no request with a key has come and
    none is under way; where there is none of these, requests on it get 503."""
    max_header_bytes: int = 2**15
    """Bytes of a request's first line and headers."""
    max_body_bytes: int = 2**23
    header_s: float = 10.0
    """Seconds from a connection's beginning, or from the last answer, to the end of a request's headers."""
    known_header_s: float = 10.0
    """Seconds for that on a connection which has carried a request with the key."""
    body_s: float = 30.0
    """Seconds for a request's body."""
    reader_s: float = 30.0
    """Seconds for which a client may read nothing of what waits for it."""
    num_readers: int = 4
    """Bodies that are read at the same time; a tokenizer in Python reads one."""
    late_s: float = 10.0
    """Seconds after which /health tells that bodies are not read."""
    max_wait_s: float = 60.0
    """Seconds that a request waits for the engine, which may be asleep or draw others; then it gets 503."""


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 on a connection that is closed if its client is too slow to ask, or to read.

    uvicorn bounds the size of headers and the time between requests, but not the time of a request's headers,
    nor that for which a client reads nothing.
    """

    limits = Limits()
    idle_strangers: dict[BoundedProtocol, None]
    """Connections that have carried no request with the key, and carry none now; the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reading: asyncio.TimerHandle | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._is_known = False
        while self.idle_strangers and len(self.connections) >= self.limits.max_connections:
            oldest = next(iter(self.idle_strangers))
            del self.idle_strangers[oldest]
            self.connections.discard(oldest)
            oldest.transport.abort()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle_strangers.pop(self, None)
        self._stop(self._asking)
        self._stop(self._reading)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:  # a request has begun
            self.idle_strangers.pop(self, None)
            self._stop(self._asking)

    def on_response_complete(self) -> None:
        self._is_known = self._is_known or bool(self.cycle.scope.get(KNOWN))
        self._await_request()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self.limits.reader_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop(self._reading)
        super().resume_writing()

    def _await_request(self) -> None:
        self._stop(self._asking)
        limit_s = self.limits.known_header_s if self._is_known else self.limits.header_s
        self._asking = self.loop.call_later(limit_s, self.transport.abort)
        if not self._is_known:
            self.idle_strangers[self] = None

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


class HttpServer:
    """A server that runs until `close`, or until the process ends.

    Args:
        listening: a bound socket; see `bound_socket`. It is closed with the server.
    """

    def __init__(self, app: ASGIApp, listening: socket.socket, limits: Limits) -> None:
        self.port: int = listening.getsockname()[1]
        protocol = type("Protocol", (BoundedProtocol,), {"limits": limits, "idle_strangers": {}})
        config = uvicorn.Config(
            app,
            http=protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # no client can choose the address that is logged for it
            server_header=False,
            limit_concurrency=limits.max_connections,
            timeout_keep_alive=math.ceil(max(limits.header_s, limits.known_header_s)),
            h11_max_incomplete_event_size=limits.max_header_bytes,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._error: BaseException | None = None
        self._listening = listening
        self._thread = threading.Thread(target=self._run, name="serving-http", daemon=True)

    def start(self) -> None:
        """Begin to answer.

        Raises:
            RuntimeError: uvicorn does not start.
        """
        self._thread.start()
        for _ in range(int(_START_S / 0.01)):
            if self._server.started:
                return
            self._thread.join(0.01)
            if not self._thread.is_alive():
                break
        raise RuntimeError(f"The HTTP server did not start: {self._error}") from self._error

    def close(self) -> None:
        """Stop answering; requests under way have a second."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)
        self._listening.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listening])
        except BaseException as error:
            self._error = error


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0: any that is free.

    Raises:
        ValueError: the port is taken, or the address is not this machine's.
    """
    try:
        found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # asyncio sends answers at once (TCP_NODELAY) only where a socket says that its protocol is TCP. Else
        # a body waits for the acknowledgement of its headers, which takes 40 ms.
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"{host!r} is no address to listen on ({error.strerror}).") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise ValueError(
            f"Port {port} of {host} cannot be had ({error.strerror}): something listens there already, or "
            "the address is not this machine's. End the other program, or choose another --port."
        ) from error
    return listening


async def unless_gone(receive: Receive, answering: Coroutine[Any, Any, T]) -> T:
    """The result of `answering`, which is cancelled if the client leaves before.

    Raises:
        Refusal: the client has left, and nobody will read this.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work, leaving = asyncio.create_task(answering), asyncio.create_task(gone())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise Refusal(499, "The client has closed the connection.")
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)
