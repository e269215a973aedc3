"""A report that follows a run: drawn anew when the record has grown, for browsers of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from colocate.reporting.page import page
from colocate.reporting.run_log import METRICS_FILE

POLL_S = 2.0
"""Seconds between two looks at the records, and between two questions of an open page."""
_FOLLOW = (
    "<script>(() => { let seen = null; setInterval(async () => { try {"
    "const now = await (await fetch('/version')).text();"
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


def serve(report: LiveReport, port: int) -> ThreadingHTTPServer:
    """A server of the page on 127.0.0.1, which is to be started by `serve_forever`.

    Raises:
        OSError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            # A web site that has its name point to this machine must not read the report.
            if host not in ("127.0.0.1", "localhost"):
                return self._answer(403, "text/plain", b"The Host is not this machine.")
            if self.path == "/version":
                return self._answer(200, "text/plain", report.version().encode())
            if self.path == "/":
                return self._answer(200, "text/html; charset=utf-8", report.page())
            return self._answer(404, "text/plain", b"There is only one page.")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of each request."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        why = f"Port {port} of 127.0.0.1 cannot be opened ({error.strerror}): set another --port."
        raise OSError(why) from error
