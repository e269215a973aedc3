"""One connection to a server, on which requests and answers follow each other, each with a deadline.

It writes and reads HTTP/1.1 (RFC 9112) itself, as each turn of an episode is a request, which should not
pass through the layers of a general client.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

_CONNECT_S = 5.0
_MAX_LINE_BYTES = 2**16
_MAX_HEADERS = 100


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
            http.client.HTTPException: the bytes are no answer, or end in the middle.
        """
        assert self._socket is not None, "a request was sent"
        # A stream of its own: what follows the answer that was asked for is nobody's answer.
        with self._socket.makefile("rb") as stream:
            return _answer_in(stream)

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


def _answer_in(stream: BinaryIO) -> HttpResponse:
    while True:
        version, status = _status_in(stream)
        headers = _headers_in(stream)
        if status >= 200:  # else it only announces an answer
            break
    encoding = headers.get("transfer-encoding", "").lower()
    length = headers.get("content-length")
    is_last = version == "HTTP/1.0" or headers.get("connection", "").lower() == "close"
    if status in (204, 304):  # which have no body, whatever is said of its length
        content, is_last = b"", True
    elif encoding == "chunked":
        content = _chunks_in(stream)
    elif length is not None and not encoding:
        content = _bytes_in(stream, _number(length, 10))
    else:
        content, is_last = stream.read(), True
    return HttpResponse(status, content, is_last)


def _line_in(stream: BinaryIO) -> str:
    """The next line, without its end."""
    line = stream.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise http.client.LineTooLong("line")
    if not line.endswith(b"\n"):
        raise http.client.IncompleteRead(line)
    return line.rstrip(b"\r\n").decode("latin-1")


def _status_in(stream: BinaryIO) -> tuple[str, int]:
    """Version and status of an answer."""
    try:
        line = _line_in(stream)
    except http.client.IncompleteRead as error:
        if error.partial:
            raise
        raise http.client.RemoteDisconnected("the server closed the connection without an answer") from error
    version, _, rest = line.partition(" ")
    status = rest.partition(" ")[0]
    if not version.startswith("HTTP/1.") or len(status) != 3 or not status.isdecimal() or status < "100":
        raise http.client.BadStatusLine(line[:200])
    return version, int(status)


def _headers_in(stream: BinaryIO) -> dict[str, str]:
    """The headers of an answer, by their names in lower case; of several of one name the last."""
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        if not (line := _line_in(stream)):
            return headers
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    raise http.client.HTTPException(f"more than {_MAX_HEADERS} headers")


def _chunks_in(stream: BinaryIO) -> bytes:
    """A body that comes in chunks, each with its size."""
    pieces = []
    while size := _number(_line_in(stream).partition(";")[0].strip(), 16):
        pieces.append(_bytes_in(stream, size))
        if _line_in(stream):
            raise http.client.HTTPException("a chunk is longer than it says")
    _headers_in(stream)  # trailers
    return b"".join(pieces)


def _bytes_in(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise http.client.IncompleteRead(content, size - len(content))
    return content


def _number(text: str, base: int) -> int:
    try:
        number = int(text, base)
    except ValueError:
        number = -1
    if number < 0:
        raise http.client.HTTPException(f"{text[:50]!r} is no size")
    return number
