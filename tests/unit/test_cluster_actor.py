"""How the actor of a server finds out that it is ready, and that it hangs: without Ray."""

from __future__ import annotations

import http.server
import subprocess
import threading
from collections.abc import Iterator

import pytest

from colocate.clusters.actor import ProcessActor


@pytest.fixture
def answers() -> Iterator[tuple[str, list[int]]]:
    """The address of a server, and the statuses of its next answers; it answers 200 when none is left."""
    statuses: list[int] = []
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(statuses.pop(0) if statuses else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/is_paused", statuses
        server.shutdown()
    assert set(seen) == {"Bearer the key"}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_server_that_was_ready_and_does_not_answer_any_more_is_killed(answers, process, monkeypatch):
    """Errors before it is ready do not count, nor do two on end where it may leave two; no proxy is asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    url, statuses = answers
    statuses += [503] * 5 + [200] + [500] * 2 + [200] + [500] * 3 + [200]
    actor = ProcessActor()
    actor._watch(process, url, "the key", 2.0, 3)
    assert actor._is_ready and actor._was_hung and process.wait(60) == -9
    assert statuses == [200], "it was asked until the third of three"


def test_a_server_that_ends_is_not_asked_any_more(answers, process):
    url, statuses = answers
    statuses += [503] * 1000
    actor = ProcessActor()
    watch = threading.Thread(target=actor._watch, args=(process, url, "the key", 0.5, 3))
    watch.start()
    while len(statuses) > 998:
        pass
    process.kill()
    watch.join(60)
    assert not watch.is_alive() and not actor._is_ready and not actor._was_hung
