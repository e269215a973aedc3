"""An HTTP server that fails on purpose, with something sound behind it: a stand-in, or a real server."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class FaultyFront:
    """Answers for a stand-in, or for a real server, and fails as a test says in `faults`.

    For a path (for `/collective_rpc` with the message's name behind it) they are a list of functions (server,
    handler, status, answer) that send something else than the answer, one per request; None lets one pass.
    """

    def __init__(self) -> None:
        self.faults: dict[str, list[Callable[..., None] | None]] = {}
        self.requests: list[str] = []
        self.suffered: list[tuple[str, Callable[..., None]]] = []
        """The faults that have come, each with its path."""
        self.slowest_s = 0.0
        """The longest that what is behind has taken for an answer."""
        self.gone_until_s = 0.0
        """Until then, by time.monotonic(), every connection is closed without an answer."""
        self.earlier: dict[str, tuple[BaseHTTPRequestHandler, bytes]] = {}
        """The request before for each path, as a network may deliver it once more."""
        self._lock = threading.RLock()
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                front.answer(self, b"")

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                front.answer(self, self.rfile.read(length) if length < 2**27 else b"")

            do_HEAD = do_OPTIONS = do_GET

            def log_message(self, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None: ...

        self.http = Server(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def was_gone(self, max_attempts: int, answer_s: float) -> bool:
        """Whether a client had reason to take it for lost: it was killed, restarted or hung, it answered no
        request of one kind as often as a client asks, or it took longer than a client waits.

        Args:
            max_attempts, answer_s: see `Timeouts`.
        """
        unanswered = Counter(name for name, fault in self.suffered if fault is not late)
        is_lost = any(getattr(fault, "is_loss", False) for _, fault in self.suffered)
        return is_lost or max(unanswered.values(), default=0) >= max_attempts or self.slowest_s > answer_s

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def restart(self) -> None:
        """Forget everything, as a new process would."""
        raise NotImplementedError

    def become_another(self) -> None:
        """Start again with another model."""
        raise NotImplementedError

    def ask(self, handler: BaseHTTPRequestHandler, content: bytes) -> tuple[int, Any] | None:
        """Status and answer of what is behind the faults; None: there is none, or nobody waits for it."""
        raise NotImplementedError

    def answer(self, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        if time.monotonic() < self.gone_until_s:
            handler.close_connection = True
            return
        path = handler.path.partition("?")[0]
        name = path
        if path == "/collective_rpc":
            with contextlib.suppress(Exception):
                name = f"{path} {json.loads(json.loads(content)['args'][0])['do']}"
        self.requests.append(name)
        faults = self.faults.get(name)
        fault = faults.pop(0) if faults else None
        if fault is late and name in self.earlier:
            self.ask(*self.earlier[name])
        self.earlier[name] = (copy.copy(handler), content)  # which goes on with the next request
        if fault is not None:
            self.suffered.append((name, fault))
        if fault is not None and getattr(fault, "is_instead", False):
            fault(self, handler, 0, None)
            return
        begin_s = time.monotonic()
        answer = self.ask(handler, content)
        self.slowest_s = max(self.slowest_s, time.monotonic() - begin_s)
        if answer is None or time.monotonic() < self.gone_until_s:
            handler.close_connection = True
        elif fault is None:
            send_json(handler, *answer)
        else:
            fault(self, handler, *answer)


# ── Faults ───────────────────────────────────────────────────────────────────────────────────────────────


def send_json(handler: BaseHTTPRequestHandler, status: int, answer: Any, part: float = 1) -> None:
    content = b"" if answer is None else json.dumps(answer).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content[: int(part * len(content))])


def half_of_it(front: FaultyFront, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    send_json(handler, status, answer, part=0.5)
    handler.close_connection = True


def nothing(front: FaultyFront, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    handler.close_connection = True


def error_500(front: FaultyFront, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    send_json(handler, 500, {"error": {"message": "out of luck"}})


@pytest.fixture(name="hang")
def hanging_fault() -> Iterator[Callable[..., None]]:
    """A fault that leaves a request without an answer until the test ends."""
    release = threading.Event()

    def fault(front: FaultyFront, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
        release.wait(120)
        handler.close_connection = True

    yield fault
    release.set()


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[..., None]:
    """A fault that spoils an answer."""

    def fault(front: FaultyFront, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
        change(answer)
        send_json(handler, status, answer)

    return fault


def late(front: FaultyFront, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    """The request before has come a second time, ahead of this one."""
    send_json(handler, status, answer)


def restart(front: FaultyFront, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    """The server is gone before it has answered, and back at once with the weights it started with."""
    with front._lock:
        front.restart()
    handler.close_connection = True


restart.is_loss = True  # type: ignore[attr-defined]
restart_before = partial(restart)
restart_before.is_instead = restart_before.is_loss = True  # type: ignore[attr-defined]


def doubled(front: FaultyFront, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    """The server has done what it was told, and its answer is lost, so that it is told again."""
    handler.close_connection = True


def die(seconds: float) -> Callable[..., None]:
    """A fault after which the server is gone for a while, and back with the weights it started with."""

    def fault(front: FaultyFront, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
        with front._lock:
            front.restart()
            front.gone_until_s = time.monotonic() + seconds
        handler.close_connection = True

    fault.is_instead = fault.is_loss = True  # type: ignore[attr-defined]
    return fault


def hang(front: FaultyFront, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    """The server says nothing for longer than it is waited for."""
    time.sleep(2.5)
    handler.close_connection = True


def become_another(front: FaultyFront, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    """The server is started again, with another model."""
    with front._lock:
        front.become_another()
    handler.close_connection = True


hang.is_loss = become_another.is_loss = True  # type: ignore[attr-defined]
