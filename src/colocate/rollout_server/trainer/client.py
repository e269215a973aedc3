"""A trainer's requests to a server that may be slow, restarting or gone, and messages to its workers.

It uses the standard library alone. Every request has a deadline, which must also end a read from a server
that sends a byte now and then. That needs access to the socket, which the usual HTTP clients do not give
(see `connection`).
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from colocate.http.connection import Connection
from colocate.http.key import VARIABLE, ServerKey, key_of_server_at
from colocate.http.lease import LEASE_S, LeaseHolder, ServerHeld
from colocate.http.messages import RUN_HEADER, Message, authorization
from colocate.options.redaction import redacted

T = TypeVar("T")

_MAX_DELAY_S = 8.0
HOW_TO_START = (
    "Start it with `colocate rollout-serve MODEL`, or, where colocate is installed beside vLLM and with a "
    f"key of your own in {VARIABLE}, with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL "
    "--middleware colocate.rollout_server.vllm.gate.VLLMGate "
    "--worker-extension-cls colocate.rollout_server.vllm.weight_receiver.WeightReceiver "
    "--logprobs-mode processed_logprobs --generation-config vllm`"
)


class ServerUnreachable(RuntimeError):
    """The server gave no usable answer: no connection, an error 5xx, half an answer, or none in time."""


class _AttemptFailed(Exception):
    """One attempt gave no usable answer; the message says what happened."""


class RequestRefused(RuntimeError):
    """The server understood the request and refused it (4xx), so repeating it is of no use."""


class CompletionRefused(RequestRefused):
    """A server that has the right weights refused to complete a prompt, as any other would."""


class KeyRefused(RequestRefused):
    """The server does not know the key that the request was signed with (401)."""


class MalformedResponse(ValueError):
    """Raised by a `parse` function for an answer after which the request should be repeated."""


class WorkerError(RuntimeError):
    """A worker answered that it could not do what a message asked; the text says why."""


class _HttpCall:
    """A call under way, which another thread can end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        """End the call: its connection closes, so that the server stops working on it."""
        with self._lock:
            self._is_cancelled.set()
            if self._connection is not None:
                self._connection.shut()

    def use(self, connection: Connection | None) -> None:
        """Note the connection that `cancel` must shut, or that there is none now."""
        with self._lock:
            self._connection = connection

    def pause(self, delay_s: float) -> None:
        """Wait `delay_s` seconds, or until the call is cancelled."""
        self._is_cancelled.wait(delay_s)

    def check(self, asked: str) -> None:
        """Raises CancelledError, naming the request `asked`, if the call was cancelled."""
        if self._is_cancelled.is_set():
            raise CancelledError(f"{asked} was cancelled.")


class HttpClient:
    """A pool of connections to one server; every call has one deadline for all its attempts.

    It is only for requests that may safely be repeated. A request is sent again after a lost connection, a
    status 5xx, or an answer that is cut short or that `parse` rejects, with exponential backoff and jitter.
    Requests are signed once `read_key` was called; see `messages`.

    Args:
        base_url: such as "http://localhost:8000".
        max_in_flight: largest number of `submit`'s requests that are under way at once.
        max_attempts: how often a request is sent at most.
        first_delay_s: pause before the second attempt. It doubles with each further attempt up to 8 s, and
            each pause is multiplied by a random number between 0.5 and 1.5.
        run: the run that asks, named in every request and message.

    Raises:
        ValueError: `base_url` is not a plain http address, or has a password in it.
    """

    def __init__(
        self,
        base_url: str,
        *,
        max_in_flight: int = 256,
        max_attempts: int = 5,
        first_delay_s: float = 0.25,
        run: LeaseHolder | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(
                f"The server's address is {redacted(base_url)!r}, but it must look like http://HOST:PORT. "
                "Behind TLS, forward a local port to it (ssh -L) and give that."
            )
        if parts.username or parts.password:
            raise ValueError(
                "The server's address has a user or a password in it, and addresses end up in logs. Its key "
                "goes into COLOCATE_SERVER_KEY."
            )
        self.base_url = redacted(base_url.rstrip("/"))  # for messages
        # A server can listen on 0.0.0.0, all addresses of the machine, but a request goes to one address.
        self.host = "127.0.0.1" if parts.hostname == "0.0.0.0" else parts.hostname
        self.port = parts.port or 80
        self.run = run or LeaseHolder("")
        self._key: ServerKey | None = None
        self._prefix = parts.path.rstrip("/")
        self._max_attempts = max_attempts
        self._first_delay_s = first_delay_s
        self._jitter = random.Random()  # its own generator: the run's global ones must not advance
        self._pool = ThreadPoolExecutor(max_in_flight, thread_name_prefix="vllm-http")
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._calls: dict[Future[Any] | _HttpCall, _HttpCall] = {}
        """Calls under way: those of `submit` by their futures, others by themselves."""

    @property
    def key(self) -> ServerKey:
        """The server's key, with which requests are signed.

        Raises:
            ValueError: there is no key, or others could have written or read its file.
        """
        if self._key is None:
            self._key = key_of_server_at(self.host, self.port)
        return self._key

    def read_key(self) -> ServerKey:
        """Read the key again, because a restarted server may have a new one. Raises what `key` raises."""
        self._key = None
        return self.key

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        deadline_s: float,
        parse: Callable[[Any], T],
        max_attempts: int | None = None,
    ) -> T:
        """Send one request and return the result of `parse` for the JSON of the answer.

        Args:
            body: sent as JSON; None: the request has no body.
            deadline_s: seconds for all attempts, the pauses between them, and reading the answer.
            parse: gets the decoded JSON (None for an empty answer). If it raises MalformedResponse, the
                request is repeated.
            max_attempts: how often the request is sent at most; None: as often as the client says.

        Raises:
            ServerUnreachable: no usable answer in `max_attempts` attempts or `deadline_s` seconds.
            RequestRefused: a 4xx answer; KeyRefused for 401.
            CancelledError: `cancel_all` was called during the call.
        """
        call = _HttpCall()
        with self._lock:
            self._calls[call] = call
        try:
            return self._send(call, method, path, body, deadline_s, parse, max_attempts)
        finally:
            self._forget(call)

    def _send(
        self,
        call: _HttpCall,
        method: str,
        path: str,
        body: Any,
        deadline_s: float,
        parse: Callable[[Any], T],
        max_attempts: int | None = None,
    ) -> T:
        started = time.monotonic()
        deadline = started + deadline_s
        attempts = self._max_attempts if max_attempts is None else max_attempts
        payload = None if body is None else json.dumps(body).encode()
        asked = f"{method} {self.base_url}{path}"
        failure = "nothing was tried"
        for attempt in range(attempts):
            if attempt:
                delay_s = min(_MAX_DELAY_S, self._first_delay_s * 2 ** (attempt - 1))
                delay_s *= self._jitter.uniform(0.5, 1.5)
                call.pause(max(0.0, min(delay_s, deadline - time.monotonic())))
            call.check(asked)
            if time.monotonic() >= deadline:
                break
            try:
                return self._attempt(call, method, path, payload, deadline, parse)
            except _AttemptFailed as error:
                failure = str(error)
        call.check(asked)
        elapsed_s = time.monotonic() - started
        limit = f"the deadline of {deadline_s:g} s" if elapsed_s >= deadline_s else f"{attempts} attempts"
        raise ServerUnreachable(
            f"{asked} had no usable answer within {limit} ({elapsed_s:.1f} s passed); the last failure was "
            f"{failure}."
        )

    def _attempt(
        self,
        call: _HttpCall,
        method: str,
        path: str,
        payload: bytes | None,
        deadline: float,
        parse: Callable[[Any], T],
    ) -> T:
        try:
            status, content = self._exchange(call, method, path, payload, deadline)
        except (OSError, http.client.HTTPException) as error:
            name = type(error).__name__
            raise _AttemptFailed(f"{name}: {error}" if str(error) else name) from error
        if status >= 500:
            raise _AttemptFailed(f"HTTP {status}: {_message(content)}")
        if status >= 400:
            kind = KeyRefused if status == 401 else RequestRefused
            raise kind(f"{method} {self.base_url}{path} was refused with HTTP {status}: {_message(content)}")
        try:
            return parse(json.loads(content) if content else None)
        except (MalformedResponse, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise _AttemptFailed(f"an answer that makes no sense: {error}") from error

    def submit(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        deadline_s: float,
        parse: Callable[[Any], T],
    ) -> Future[T]:
        """Start `call` with these arguments in a thread of the pool."""
        call = _HttpCall()
        future = self._pool.submit(self._send, call, method, path, body, deadline_s, parse)
        with self._lock:
            self._calls[future] = call
        future.add_done_callback(self._forget)
        return future

    # ── Messages to the workers ──────────────────────────────────────────────────────────────────────────

    def message(
        self, do: str, *, deadline_s: float, max_attempts: int | None = None, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Send a message to all workers of the server and return their answers by rank (see `receiver`).

        Args:
            do: the method of `receiver.Receiver` that the workers call, with `arguments`.

        Raises:
            ServerHeld: another run holds the server.
            WorkerError: a worker answered that it failed, or its answer is not signed with the server's key.
            ServerUnreachable, RequestRefused: see `call`.
        """
        return self.call(**self._request(do, deadline_s, arguments), max_attempts=max_attempts)

    def submit_message(self, do: str, *, deadline_s: float, **arguments: Any) -> Future[list[dict[str, Any]]]:
        """Start `message` with these arguments in a thread of the pool."""
        return self.submit(**self._request(do, deadline_s, arguments))

    def describe(self, *, deadline_s: float) -> list[dict[str, Any]]:
        """The workers' `Receiver.describe`, by rank.

        Raises:
            RuntimeError: the server runs without our worker extension or without `/collective_rpc`.
        """
        try:
            return self.message("describe", deadline_s=deadline_s)
        except KeyRefused:
            raise
        except (RequestRefused, ServerUnreachable) as error:
            raise type(error)(
                f"The server at {self.base_url} takes no weights from a trainer: {error} {HOW_TO_START}."
            ) from error

    def _request(self, do: str, deadline_s: float, arguments: dict[str, Any]) -> dict[str, Any]:
        message = Message(self.key, {"do": do, "run": vars(self.run), **arguments})
        return {
            "method": "POST",
            "path": "/collective_rpc",
            "body": message.call(deadline_s),
            "deadline_s": deadline_s,
            "parse": partial(self._opened, message),
        }

    def _opened(self, message: Message, content: Any) -> list[dict[str, Any]]:
        answers = content.get("results") if isinstance(content, dict) else None
        if not isinstance(answers, list) or not answers or not all(isinstance(a, dict) for a in answers):
            raise MalformedResponse("it has no worker's answer")
        opened, errors = [], []
        for rank, answer in enumerate(answers):
            try:
                opened.append(message.opened(answer))
            except ValueError as error:
                errors.append(f"worker {rank}: {error}")
        errors += [f"worker {rank}: {a['error']}" for rank, a in enumerate(opened) if "error" in a]
        if errors:
            raise WorkerError("; ".join(errors))
        for answer in opened:
            if "holder" in answer:
                raise ServerHeld(_who_holds(self.base_url, answer["holder"]), answer["holder"])
        return opened

    # ── Calls under way ──────────────────────────────────────────────────────────────────────────────────

    def cancel(self, future: Future[Any]) -> None:
        """End what `submit` began. Its connection closes, so that the server stops working on it."""
        if not future.cancel() and (call := self._calls.get(future)) is not None:
            call.cancel()

    def cancel_all(self) -> None:
        """End all calls under way. Their connections close, so that the server stops working on them."""
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.cancel()

    def _forget(self, call: Future[Any] | _HttpCall) -> None:
        with self._lock:
            self._calls.pop(call, None)

    def close(self) -> None:
        """Cancel all calls under way and close every connection."""
        self.cancel_all()
        self._pool.shutdown(cancel_futures=True)
        self.drop_connections()

    def drop_connections(self) -> None:
        """Close every connection that is idle; the next request makes one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _exchange(
        self, call: _HttpCall, method: str, path: str, payload: bytes | None, deadline: float
    ) -> tuple[int, bytes]:
        connection = self._take_connection()
        is_reusable = False
        try:
            call.use(connection)
            connection.deadline = deadline
            headers = {} if payload is None else {"Content-Type": "application/json"}
            if self.run.id:
                headers[RUN_HEADER] = self.run.id
            if self._key is not None:
                headers["Authorization"] = authorization(self._key, method, path, payload or b"")
            connection.send(method, self._prefix + path, payload, headers)
            call.check(path)  # while the connection was being made there was nothing to shut
            answer = connection.receive()
            is_reusable = not answer.is_last
            return answer.status, answer.content
        finally:
            call.use(None)
            if is_reusable:
                with self._lock:
                    self._idle.append(connection)
            else:
                connection.close()

    def _take_connection(self) -> Connection:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.is_open():
                    return connection
                connection.close()
        return Connection(self.host, self.port)


def _message(content: bytes) -> str:
    """The message in an error answer, wherever in the JSON servers usually put it."""
    text = content.decode(errors="replace").strip()
    try:
        found: Any = json.loads(text)
    except json.JSONDecodeError:
        return text[:500] or "(no message)"
    for key in ("error", "detail", "message"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:2000]


def _who_holds(base_url: str, holder: dict[str, Any]) -> str:
    since = datetime.now() - timedelta(seconds=holder["held_s"])
    who = f"the run in {holder['output_dir']}" if holder["output_dir"] else f"the run {holder['id']}"
    where = f" (process {holder['pid']} on {holder['host']})" if holder["pid"] else ""
    return (
        f"The server at {base_url} belongs to {who}{where}, since {since:%Y-%m-%d %H:%M:%S}; it was "
        f"heard from {holder['silent_s']:.0f} s ago. A server is one run's at a time: wait until that run "
        f"ends or end it, which lets go of the server (at the latest {LEASE_S:g} s after it was last heard "
        "from), or start another server with another --port."
    )
