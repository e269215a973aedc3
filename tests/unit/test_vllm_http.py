"""The HTTP client against servers that fail: what is sent again, what is not, and that deadlines hold."""

from __future__ import annotations

import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from typing import Any

import pytest
from fake_server import ScriptedServer, http_response, say_nothing, trickle
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.http.connection import Connection
from colocate.rollout_server.trainer.client import (
    HttpClient,
    MalformedResponse,
    RequestRefused,
    ServerUnreachable,
)

GOOD = http_response(200, b'{"value": 7}')
FAILURES = {
    "server error": http_response(500, b'{"error": {"message": "out of luck"}}'),
    "half-written": http_response(200, b'{"value"', length=12),
    "truncated JSON": http_response(200, b'{"value": '),
    "not JSON": http_response(200, b"<html>"),
    "not text": http_response(200, b"\xff\xfe"),
    "parse rejects": http_response(200, b'{"value": -1}'),
    "closed": None,
    "not HTTP": lambda connection: connection.sendall(b"hello\r\n\r\n"),
}


def parse(answer: Any) -> int:
    if answer["value"] < 0:
        raise MalformedResponse("value is negative")
    return answer["value"]


@pytest.fixture
def serve():
    opened: list[Any] = []

    def make(*answers: Any, **options: Any) -> tuple[ScriptedServer, HttpClient]:
        server = ScriptedServer(answers)
        client = HttpClient(server.base_url, **{"first_delay_s": 0.001, **options})
        opened.extend((server, client))
        return server, client

    yield make
    for thing in reversed(opened):
        thing.close()


@settings(max_examples=30)
@given(kinds=st.lists(st.sampled_from(sorted(FAILURES)), max_size=6))
def test_any_failures_then_an_answer(kinds):
    with (
        closing(ScriptedServer([*(FAILURES[kind] for kind in kinds), GOOD])) as server,
        closing(HttpClient(server.base_url, first_delay_s=0.001, max_attempts=5)) as client,
    ):
        if len(kinds) < 5:
            assert client.call("POST", "/x", {}, deadline_s=100, parse=parse) == 7
        else:
            with pytest.raises(ServerUnreachable, match="within 5 attempts"):
                client.call("POST", "/x", {}, deadline_s=100, parse=parse)
        assert server.num_requests == min(len(kinds) + 1, 5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("server error", "HTTP 500: out of luck"),
        ("half-written", "IncompleteRead"),
        ("parse rejects", "value is negative"),
        ("closed", "RemoteDisconnected"),
    ],
)
def test_the_error_says_what_was_asked_and_what_came(serve, kind, message):
    server, client = serve(FAILURES[kind], max_attempts=2)
    with pytest.raises(ServerUnreachable) as caught:
        client.call("POST", "/v1/things", {}, deadline_s=100, parse=parse)
    assert f"POST {server.base_url}/v1/things" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b'{"error": {"message": "too long: 9 > 8"}}', b'{"detail": "too long: 9 > 8"}', b"too long: 9 > 8"],
)
def test_a_refusal_is_shown_and_not_repeated(serve, content):
    server, client = serve(http_response(400, content), GOOD)
    with pytest.raises(RequestRefused, match="HTTP 400: too long: 9 > 8"):
        client.call("POST", "/x", {}, deadline_s=100, parse=parse)
    assert server.num_requests == 1


def test_nobody_listens(serve):
    server, client = serve(GOOD, max_attempts=3)
    server.close()
    with pytest.raises(ServerUnreachable, match=r"3 attempts.*Connection"):
        client.call("GET", "/x", deadline_s=100, parse=parse)


@pytest.mark.parametrize(
    "answer",
    [
        trickle(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"),
        trickle(b"HTTP/1.1 200 OK\r\nX-Endless: "),
        trickle(b""),
        say_nothing,
        FAILURES["server error"],
    ],
    ids=["body trickles", "header trickles", "status trickles", "silence", "errors only"],
)
def test_the_deadline_holds(serve, answer: bytes | Callable):
    _, client = serve(answer, max_attempts=10**6)
    started_s = time.monotonic()
    with pytest.raises(ServerUnreachable, match=r"deadline of 0\.5 s"):
        client.call("POST", "/x", {}, deadline_s=0.5, parse=parse)
    assert 0.4 < time.monotonic() - started_s < 30.0  # what trickles has no end


def test_connections_are_used_again_and_closed_ones_are_noticed(serve):
    server, client = serve(*[GOOD] * 4, None, GOOD)
    for _ in range(4):
        assert client.call("GET", "/x", deadline_s=100, parse=parse) == 7
    assert server.num_connections == 1
    # The fifth request finds its connection closed at once, and goes out again on a new one.
    assert client.call("GET", "/x", deadline_s=100, parse=parse) == 7
    assert (server.num_connections, server.num_requests) == (2, 6)


def test_many_requests_are_in_flight_and_no_more_than_allowed(serve):
    lock, now, most, are_four = threading.Lock(), [0], [0], threading.Event()

    def slow(connection: Any) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == 4:
                are_four.set()
        are_four.wait(60)
        time.sleep(0.1)  # for a fifth, which should not come
        with lock:
            now[0] -= 1
        connection.sendall(GOOD)

    _, client = serve(slow, max_in_flight=4)
    futures = [client.submit("GET", "/x", deadline_s=100, parse=parse) for _ in range(12)]
    assert [future.result() for future in futures] == [7] * 12
    assert most[0] == 4


def test_cancelling_wakes_whoever_waits(serve):
    _, client = serve(say_nothing)
    waiting = [client.submit("GET", "/x", deadline_s=600, parse=parse) for _ in range(3)]
    time.sleep(0.2)
    client.cancel_all()
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(60)


def test_what_is_sent_is_what_was_given(serve):
    server, client = serve(GOOD)
    client.call("POST", "/path", {"prompt": [1, 2], "top_p": 0.5}, deadline_s=100, parse=parse)
    head, content = server.received[0].split(b"\r\n\r\n", 1)
    assert head.startswith(b"POST /path HTTP/1.1")
    assert json.loads(content) == {"prompt": [1, 2], "top_p": 0.5}


@pytest.mark.parametrize("url", ["https://host:8000", "host:8000", "localhost"])
def test_only_plain_http(url):
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        HttpClient(url)


# ── Answers that are cut ─────────────────────────────────────────────────────────────────────────────────


class Received:
    """A socket from which an answer comes."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._content)


def read(content: bytes) -> tuple[int, bytes, bool]:
    connection = Connection("host", 80)
    connection._socket = Received(content)  # type: ignore[assignment]
    return tuple(connection.receive())


def rendered(
    status: int, pieces: list[bytes], framing: str, headers: list[tuple[str, str]], is_last: bool
) -> bytes:
    body = b"".join(pieces)
    if framing == "length":
        headers = [*headers, ("content-LENGTH", f" {len(body)} ")]
    elif framing == "chunks":
        headers = [*headers, ("Transfer-Encoding", "chunked")]
        sizes = [b"%x;x=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece]
        body = b"".join(sizes) + b"0\r\nX-Trailer: 1\r\n\r\n"
    if is_last:
        headers = [*headers, ("Connection", "Close")]
    lines = [f"HTTP/1.1 {status} Some reason", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


WORDS = st.text("abcXYZ-0", min_size=1, max_size=8)
STATUSES, PIECES = st.sampled_from([200, 206, 400, 503]), st.lists(st.binary(max_size=40), max_size=4)
HEADERS = st.lists(st.tuples(WORDS.map("X-{}".format), st.text("abc: ;é", max_size=12)), max_size=4)


@given(
    status=STATUSES, pieces=PIECES, framing=st.sampled_from(["length", "chunks"]), headers=HEADERS,
    is_last=st.booleans(), is_announced=st.booleans(), data=st.data(),
)  # fmt: skip
def test_an_answer_is_read_whole_or_not_at_all(status, pieces, framing, headers, is_last, is_announced, data):
    answer = rendered(status, pieces, framing, headers, is_last)
    answer = b"HTTP/1.1 100 Continue\r\n\r\n" * is_announced + answer
    whole = status, b"".join(pieces), is_last
    assert read(answer) == whole
    cut = answer[: data.draw(st.integers(0, len(answer) - 1), label="bytes that came")]
    with suppress(http.client.HTTPException):
        assert read(cut)[:2] == whole[:2], "what is missing is none of the body"


@given(status=STATUSES, pieces=PIECES, headers=HEADERS)
def test_an_answer_that_does_not_tell_its_end_is_none(status, pieces, headers):
    with pytest.raises(http.client.IncompleteRead):
        read(rendered(status, pieces, "close", headers, is_last=True))


def test_a_request_is_one_that_pythons_own_server_reads():
    import http.server

    seen: list[tuple[str, str, dict[str, str], bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers["Host"], dict(self.headers), content))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        connection = Connection("127.0.0.1", server.server_port)
        connection.deadline = time.monotonic() + 100
        connection.send("POST", "/a?b=c", b"[1, 2]", {"X-Name": "value"})
        assert connection.receive() == (200, b"", False)
        connection.close()
    ((path, host, headers, content),) = seen
    assert (path, host, content) == ("/a?b=c", f"127.0.0.1:{server.server_port}", b"[1, 2]")
    assert headers["X-Name"] == "value"
    with pytest.raises(OSError), socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        to_nobody = Connection("127.0.0.1", nobody.getsockname()[1])
        to_nobody.deadline = time.monotonic() + 100
        to_nobody.send("GET", "/", None, {})
