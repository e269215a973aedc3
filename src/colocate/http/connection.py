"""One connection to a server, on which requests and answers follow each other, each with a deadline.

Each turn of an episode is a request, and hundreds are under way at once. The layers and the pool of httpx
would take 6 to 60 times as much of a core.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_CONNECT_S = 5.0


class HttpResponse(NamedTuple):
    """An answer, read whole."""

    status: int
    content: bytes
    is_last: bool
    """The server closes the connection after it."""


class Connection:
    """A connection on which every operation ends by `deadline`, a time of time.monotonic() that is set first.

    It is made with the first request.

    Args:
        host, port: of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._host = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode("ascii")
        self.deadline = 0.0
        self._socket: _DeadlineSocket | None = None

    def send(self, method: str, path: str, payload: bytes | None, headers: Mapping[str, str]) -> None:
        """Send a request in one piece: sending costs more than all the rest.

        Raises:
            OSError: no connection, or the deadline has passed.
        """
        if self._socket is None:
            # Nobody can cancel it, and who is there answers at once.
            plain = socket.create_connection(self._address, min(_CONNECT_S, self.remaining_s()))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = _DeadlineSocket(self, plain)
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        if payload is not None:
            lines.append(f"Content-Length: {len(payload)}")
        head = "\r\n".join(lines).encode("ascii")
        self._socket.settimeout(self.remaining_s())  # a limit for all pieces of a sendall together
        self._socket.sendall(head + b"\r\nHost: " + self._host + b"\r\n\r\n" + (payload or b""))

    def receive(self) -> HttpResponse:
        """Wait for the answer to the request and read it.

        Raises:
            OSError: the connection has failed, or the deadline has passed.
            http.client.HTTPException: the bytes are no answer, or do not tell or reach its end.
        """
        assert self._socket is not None, "a request was sent"
        # With a stream of its own: what follows the answer that was asked for is nobody's answer.
        with http.client.HTTPResponse(self._socket) as answer:
            answer.begin()
            is_old = answer.version == 10  # HTTP/1.0, where the end of the connection is that of the answer
            if answer.length is None and not answer.chunked and not is_old:
                raise http.client.IncompleteRead(answer.read())
            return HttpResponse(answer.status, answer.read(), answer.will_close)

    def is_open(self) -> bool:
        """Whether an idle connection can be used again: it is not closed, and no bytes wait in it."""
        if self._socket is None:
            return False
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def shut(self) -> None:
        """End a read or write that is under way in another thread, with an error there."""
        try:
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed in the meantime

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def remaining_s(self) -> float:
        remaining_s = self.deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the deadline has passed")
        return remaining_s


def answers(url: str, key: str, timeout_s: float) -> bool:
    """Whether a server answers a GET request with status 200, whole and in time.

    Args:
        url: such as "http://localhost:8000/health".
        key: the server's, which is sent as it is; empty: none.
    """
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None, url
    connection = Connection(address.hostname, address.port)
    connection.deadline = time.monotonic() + timeout_s
    try:
        connection.send("GET", address.path, None, {"Authorization": f"Bearer {key}"} if key else {})
        return connection.receive().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _DeadlineSocket(socket.socket):
    """A socket that limits every read to the time left, so that a byte now and then extends no deadline."""

    def __init__(self, connection: Connection, plain: socket.socket) -> None:
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self._connection = connection

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self.settimeout(self._connection.remaining_s())
        return super().recv_into(*args, **kwargs)
