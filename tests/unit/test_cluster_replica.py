"""How a server is found to be ready or to hang, and how often it is started again: without Ray."""

from __future__ import annotations

import asyncio
import http.server
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from colocate.clusters import replica as replica_module
from colocate.clusters.actor import ProcessActor
from colocate.clusters.process import Ending
from colocate.clusters.replica import VARIABLE, Replica


@pytest.fixture
def answers() -> Iterator[tuple[str, list[int]]]:
    """The address of a server, and the statuses of its next answers; it answers 200 when none is left."""
    statuses: list[int] = []
    seen: list[tuple[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            self.send_response(statuses.pop(0) if statuses else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", statuses
        server.shutdown()
    assert set(seen) == {("/is_paused", "Bearer the key")}


class Handle:
    """Stands in for Ray's handle of an actor that is in this process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        class Method:
            remote: Callable[..., Awaitable[Any]] = staticmethod(
                lambda *arguments: asyncio.to_thread(getattr(self._actor, name), *arguments)
            )

        return Method


@pytest.fixture
def replica(answers, tmp_path, monkeypatch) -> Iterator[Replica]:
    """A replica whose process serves nothing: the server of `answers` is asked in its place."""
    pytest.importorskip("ray")
    actor = ProcessActor()
    actor._process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    monkeypatch.setattr(Replica, "_sit", lambda self: setattr(self, "actor", Handle(actor)))
    monkeypatch.setattr(replica_module, "ANSWER_S", 20.0)
    monkeypatch.setattr(replica_module, "QUESTION_S", 0.01)
    monkeypatch.setattr(replica_module, "PATIENCE", 3)
    replica = Replica(0, {}, (), tmp_path / "log")
    replica.url, replica.process = answers[0], actor._process
    yield replica
    actor.end()


def test_a_server_that_was_ready_and_does_not_answer_any_more_is_killed(answers, replica, monkeypatch):
    """Errors before it is ready do not count, nor do two on end where it may leave two; no proxy is asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    _, statuses = answers
    statuses += [503] * 5 + [200] + [500] * 2 + [200] + [500] * 3 + [200]
    asyncio.run(replica._watch("the key"))
    assert replica.is_ready and replica.process.poll() == -9
    assert replica.ending("was ended by SIGKILL").text.startswith(
        "replica 0 did not answer any more, though it ran, and was killed. "
    )
    assert statuses == [200], "it was asked until the third of three"


def test_a_server_that_is_never_ready_is_killed_in_the_end(answers, replica, monkeypatch):
    monkeypatch.setattr(replica_module, "START_S", 0.0)
    answers[1].extend([503] * 1000)
    asyncio.run(replica._watch("the key"))
    assert not replica.is_ready and replica.process.poll() == -9
    assert replica.ending("was ended by SIGKILL").text.startswith(
        "replica 0 did not answer for half an hour, and was killed. "
    )


def test_a_server_that_never_was_ready_is_asked_as_long_as_it_is_watched(answers, replica):
    _, statuses = answers
    statuses += [503] * 100_000

    async def watch() -> None:
        task = asyncio.create_task(replica._watch("the key"))
        while len(statuses) > 99_980:
            await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    asyncio.run(watch())
    assert not replica.is_ready and not replica.fault and replica.process.poll() is None


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        # Each start: whether the server was ready before it was lost.
        ([True, False, False], ["again 1", "again 2", "given up"]),
        (
            [True, True, True, False, True, False, False],
            ["again 1"] * 3 + ["again 2", "again 1", "again 2", "given up"],
        ),
        ([False], []),
    ],
)
def test_a_server_is_given_up_that_is_lost_again_and_again_without_having_been_ready(
    starts, said, tmp_path, monkeypatch, capsys
):
    script = iter(starts)
    monkeypatch.setattr(Replica, "_sit", lambda self: None)

    async def run(self: Replica, *_: Any) -> Ending:
        self.is_ready = next(script)
        return Ending(137, "replica 0 was ended by SIGKILL", was_lost=True)

    async def watch(self: Replica, key: str) -> None:
        assert key == "the key"
        await asyncio.Future()

    monkeypatch.setattr(Replica, "run", run)
    monkeypatch.setattr(Replica, "_watch", watch)

    async def keep() -> Ending | None:
        task = asyncio.create_task(Replica(0, {}, (), tmp_path / "log").keep([], {VARIABLE: "the key"}, 2))
        while not task.done() and "given up" not in "".join(told):
            await asyncio.sleep(0.01)
            told.append(capsys.readouterr().err)
        return task.result() if task.done() else None

    told: list[str] = []
    ending = asyncio.run(keep())
    assert next(script, None) is None, "each was played"
    lines = [line for line in "".join(told).splitlines() if line.startswith("It is")]
    words = {"given up": "It is given up (--max_restarts); the run goes on while one is left."}
    words |= {f"again {n}": f"It is started again in its place ({n} of 2 times)." for n in (1, 2)}
    assert lines == [words[each] for each in said]
    assert ending == (None if said else Ending(1, "replica 0 was ended by SIGKILL")), (
        "who never was, ends the run"
    )
