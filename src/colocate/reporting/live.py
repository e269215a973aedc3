"""A report that follows a run: drawn anew when the record has grown, for browsers of this machine."""

from __future__ import annotations

import secrets
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from colocate.reporting.page import page
from colocate.reporting.run_log import METRICS_FILE

POLL_S = 2.0
"""Seconds between two looks at the records, and between two questions of an open page."""
MAX_CONNECTIONS = 32
"""Connections that are answered at the same time; further ones are closed."""
LIMIT_S = 30.0
"""Seconds for which a connection may last."""
_FOLLOW = (
    "<script>(() => { let seen = null; setInterval(async () => { try {"
    "const now = await (await fetch('version')).text();"
    "if (seen !== null && now !== seen) location.reload(); seen = now;"
    f"}} catch {{}} }}, {int(1000 * POLL_S)}); }})();</script>"
)


class LiveReport:
    """The page of runs as they are now.

    Args:
        run_dirs: the runs whose records are watched.
        write: draws them, and returns the file of the page.
    """

    def __init__(self, run_dirs: list[Path], write: Callable[[], Path]) -> None:
        self._run_dirs, self._write = run_dirs, write
        self._lock = threading.Lock()
        self._drawn: tuple[str, bytes] | None = None

    def version(self) -> str:
        """Changes when a record has grown."""
        sizes = []
        for directory in self._run_dirs:
            try:
                found = (directory / METRICS_FILE).stat()
                sizes.append(f"{found.st_ino}-{found.st_size}")
            except FileNotFoundError:
                sizes.append("none")
        return " ".join(sizes)

    def page(self) -> bytes:
        """The page, drawn anew if a record has grown; a page that says so while a run has taken no step."""
        with self._lock:
            version = self.version()
            if self._drawn is None or self._drawn[0] != version:
                try:
                    html = self._write().read_text(encoding="utf-8")
                except (FileNotFoundError, ValueError) as error:
                    html = page("Waiting for a step", f"<p>{escape(str(error))}</p>", scripts=())
                self._drawn = version, f"{html}{_FOLLOW}".encode("utf-8", "replace")
            return self._drawn[1]


class ReportServer(ThreadingHTTPServer):
    """A server of the page on 127.0.0.1, which is to be started by `serve_forever`.

    The page has a secret path, as other users of this machine can reach the port.

    Attributes:
        url: the page's address.
    """

    daemon_threads = True

    def __init__(self, report: LiveReport, port: int) -> None:
        self.report, self.path = report, f"/{secrets.token_urlsafe(16)}/"
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}{self.path}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if not too many are at work."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and close the connection if that takes long: a client may send and read slowly."""
        limit = threading.Timer(LIMIT_S, _shut, [request])
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that have ended; other errors are shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        # A web site that has its name point to this machine must not read the report.
        if host not in ("127.0.0.1", "localhost"):
            return self._answer(403, "text/plain", b"The Host is not this machine.")
        if not secrets.compare_digest(self.path[: len(self.server.path)].encode(), self.server.path.encode()):
            return self._answer(403, "text/plain", b"Open the address that colocate report has printed.")
        rest = self.path[len(self.server.path) :]
        if rest == "version":
            return self._answer(200, "text/plain", self.server.report.version().encode())
        if rest == "":
            return self._answer(200, "text/html; charset=utf-8", self.server.report.page())
        return self._answer(404, "text/plain", b"There is only one page.")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")  # the path is a secret
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


def serve(report: LiveReport, port: int) -> ReportServer:
    """A server of the page. See `ReportServer`.

    Raises:
        OSError: the port is taken.
    """
    try:
        return ReportServer(report, port)
    except OSError as error:
        why = f"Port {port} of 127.0.0.1 cannot be opened ({error.strerror}): set another --port."
        raise OSError(why) from error
