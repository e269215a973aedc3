"""The gate in front of a rollout server: it passes requests signed with the key, to the routes of training.

A server may answer from several processes, each with its own gate. Which run holds the server must be known
to all of them, so the workers keep it, and a gate asks them with a message as a trainer does.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from colocate.http import lease
from colocate.http.key import VARIABLE, ServerKey, is_loopback, key_from_environment
from colocate.http.messages import RUN_HEADER, WORKER_METHOD, Message, signed_digest

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 2**26
"""Largest body of a request, more than a trainer ever sends: a piece of weights has 23 MB."""
MAX_PROMPT_BYTES = 2**24
"""Largest body of a request for completions: a prompt of a million tokens has 8 MB."""
_SMALL_BYTES = 2**17
"""Bodies up to this are read by the event loop itself; larger ones would let all others wait."""

CONTENT = "colocate.content"
"""Where a request's scope has the JSON object of its body, which the gate has parsed: of completions, and of
messages to the workers."""

KNOWN = "colocate.known"
"""Set in a request's scope once it is found to carry the key, or to be signed with it."""

_OPEN = {("GET", "/health")}  # answers with an empty body
_FREE = {("GET", path) for path in ("/version", "/v1/models", "/metrics", "/load", "/is_paused")}
_GENERATING = {("POST", "/v1/completions"), ("POST", "/v1/chat/completions")}
_OF_THE_HOLDER = {
    ("POST", path) for path in ("/pause", "/resume", "/reset_prefix_cache", "/sleep", "/wake_up")
}
_WORKERS = ("POST", "/collective_rpc")


class Refused(Exception):
    """A request that does not pass, with the HTTP status and the message to answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Gate:
    """ASGI middleware that checks every request before the server's application sees it.

    Args:
        app: the application, which answers messages to its workers at `/collective_rpc`.
        vocab_size: the number of the model's token ids, by a request's scope.
        key: the server's key; None: the one in the environment.

    Raises:
        ValueError: there is no key.
    """

    def __init__(self, app: App, vocab_size: Callable[[Scope], int], key: ServerKey | None = None) -> None:
        key = key or key_from_environment()
        if key is None:
            raise ValueError(
                f"Nobody could use the server: set {VARIABLE}, or start it with `colocate rollout-serve`."
            )
        self._app, self._vocab_size, self._key = app, vocab_size, key
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        try:
            body = await self._admit(scope, receive)
        except Refused as refusal:
            _say(f"{_described(scope)} was refused: {refusal}")
            return await _answer_refusal(scope, send, refusal)
        if body is None:
            return await self._app(scope, receive, send)
        await self._app(scope, _once(body, receive), send)
        if _route(scope) == ("POST", "/pause") and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._end_abandoned_pause(scope))

    # ── Who comes in ─────────────────────────────────────────────────────────────────────────────────────

    async def _admit(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body of a request that may pass; None if it was not read."""
        if scope["type"] != "http":
            raise Refused(403, f"There is no {scope['type']} here.")
        headers = headers_of(scope)
        check_it_is_no_browser(scope, headers)
        route = _route(scope)
        if route in _OPEN:
            return None
        digest = self._check_key(scope, headers)
        scope[KNOWN] = True
        if route not in _FREE | _GENERATING | _OF_THE_HOLDER | {_WORKERS}:
            raise Refused(403, "This is none of the routes that `colocate rollout-serve` offers.")
        most_bytes = min(MAX_BODY_BYTES, MAX_PROMPT_BYTES) if route in _GENERATING else MAX_BODY_BYTES
        body = await read_body(receive, most_bytes)
        if digest is not None and await _unless_small(body, _sha256, body) != digest:
            raise Refused(401, "The body is not the one that was signed.")
        if body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "A body must be application/json.")
        if route == _WORKERS:
            scope[CONTENT] = await _unless_small(body, _parsed, body)
            _check_worker_call(scope[CONTENT])
        elif route in _GENERATING:
            scope[CONTENT] = await _unless_small(body, _parsed, body)
            await _unless_small(body, check_token_ids, scope[CONTENT], self._vocab_size(scope))
            await self._check_generation(scope, scope[CONTENT])
        elif route in _OF_THE_HOLDER:
            await self._check_holder(scope, headers)
        return body

    def _check_key(self, scope: Scope, headers: dict[str, str]) -> str | None:
        """SHA-256 of the body that was signed; None if the request carries the key itself."""
        header = headers.get("authorization", "")
        scheme, _, credentials = header.partition(" ")
        if scheme.lower() == "bearer" and self._key.is_text(credentials.strip()):
            return None
        digest = signed_digest(self._key, header, scope["method"], _target(scope))
        if digest is None:
            raise Refused(401, "The key is missing or wrong.")
        return digest

    async def _check_generation(self, scope: Scope, content: dict[str, Any]) -> None:
        """Refuse a request for completions that would harm the engine, or that it must not answer."""

    async def _check_holder(self, scope: Scope, headers: dict[str, str]) -> None:
        """Refuse a request of a run that does not hold the server; if nobody holds it, the run takes it."""
        run_id = headers.get(RUN_HEADER.lower())
        if not run_id:
            raise Refused(403, f"Only a run that holds the server may do that, and says so in {RUN_HEADER}.")
        answers = await self._ask_workers(scope, "claim", run={"id": run_id})
        if any("holder" in answer for answer in answers):
            raise Refused(409, "Another run holds the server.")
        if any("error" in answer for answer in answers):
            raise Refused(503, f"The workers do not say whose the server is: {answers}")

    # ── A pause whose holder is gone ─────────────────────────────────────────────────────────────────────

    async def _end_abandoned_pause(self, scope: Scope) -> None:
        """Resume a paused server when no run holds it any more, because no run will do it then."""
        while True:
            await asyncio.sleep(lease.LEASE_S / 4)
            try:
                status, content = await self._call_app(scope, "GET", "/is_paused")
                if status == 200 and not json.loads(content).get("is_paused"):
                    return
                answers = await self._ask_workers(scope, "abandon")
                if all(answer.get("is") == "free" for answer in answers):
                    _say("the server was paused and its run is silent; it resumes")
                    await self._call_app(scope, "POST", "/resume")
                    return
            except Exception as error:  # the engine may be on its way down
                _say(f"whether the server must resume could not be found out: {error!r}")

    async def _ask_workers(self, scope: Scope, do: str, **arguments: Any) -> list[dict[str, Any]]:
        message = Message(self._key, {"do": do, **arguments})
        status, content = await self._call_app(scope, *_WORKERS, message.call(timeout_s=lease.LEASE_S))
        if status != 200:
            raise Refused(503, f"The workers do not answer: HTTP {status}.")
        return [message.opened(answer) for answer in json.loads(content)["results"]]

    async def _call_app(
        self, scope: Scope, method: str, path: str, asked: dict[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """The application's answer, (status, body), to a request that the gate makes itself."""
        body = b"" if asked is None else json.dumps(asked).encode()
        inner = {
            **scope,
            "method": method,
            "path": scope.get("root_path", "") + path,
            "raw_path": (scope.get("root_path", "") + path).encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "state": dict(scope.get("state") or {}),
            CONTENT: asked,
        }
        status, parts = 0, []

        async def wait_for_ever() -> MutableMapping[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def collect(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        await self._app(inner, _once(body, wait_for_ever), collect)
        return status, b"".join(parts)


def check_it_is_no_browser(scope: Scope, headers: dict[str, str]) -> None:
    """Refuse a browser's requests: any web site can make a browser send them to this machine.

    Raises:
        Refused: the request has an Origin, or came to a loopback address under a foreign name.
    """
    if "origin" in headers:
        raise Refused(403, "Requests of web pages (with an Origin) are not answered.")
    host = headers.get("host", "").lower()
    bracketed = re.fullmatch(r"\[([^\]]*)\]?(:.*)?", host)
    name = bracketed[1] if bracketed else host.partition(":")[0]
    # At a loopback address only a name of this machine is plausible: with any other, somebody has made
    # the name of a web site point to this machine.
    address = (scope.get("server") or ("",))[0] or ""
    if is_loopback(address) and not is_loopback(name) and not _is_own_name(name):
        raise Refused(403, "The Host is not this machine.")


def _is_own_name(name: str) -> bool:
    """Whether the whole name is this machine's; a web site's may begin like it."""
    own = socket.gethostname().lower()
    return name in (own, own.partition(".")[0]) or name == _full_name()


@functools.cache
def _full_name() -> str:
    return socket.getfqdn().lower()


def check_token_ids(content: Any, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary: without a tokenizer an engine does not check them, and may
    crash.

    Raises:
        Refused: a token id is outside the vocabulary.
    """
    names = ["prompt", "allowed_token_ids", "logprob_token_ids"]
    if content.get("min_tokens"):
        names.append("stop_token_ids")  # vLLM uses them as indices only then
    for name in names:
        ids = content.get(name)
        if not isinstance(ids, list) or (name == "prompt" and all(isinstance(text, str) for text in ids)):
            continue  # absent, or text
        for numbers in [part for part in ids if isinstance(part, list)] or [ids]:
            # Only whole numbers pass: libraries would convert "7" and 7.0.
            wrong = [number for number in numbers if type(number) is not int or not 0 <= number < vocab_size]
            if wrong:
                raise Refused(
                    400,
                    f"{name} has the token id {str(wrong[0])[:50]}, but the model's vocabulary is 0 to "
                    f"{vocab_size - 1}.",
                )


def _check_worker_call(content: dict[str, Any]) -> None:
    """Refuse a call of the workers unless it calls our method, has no other fields, and has a time limit."""
    timeout_s = content.get("timeout")
    if content.get("method") != WORKER_METHOD:
        raise Refused(403, f"Of the workers' methods only {WORKER_METHOD} may be called.")
    if content.keys() != {"method", "args", "timeout"}:
        raise Refused(400, "A call of the workers has a method, args and a timeout.")
    if not isinstance(timeout_s, int | float) or not math.isfinite(timeout_s) or timeout_s <= 0:
        raise Refused(400, "The timeout must be a positive number of seconds.")
    args = content["args"]
    if not isinstance(args, list) or [type(part) for part in args] != [str, str]:
        raise Refused(400, "The args of a call of the workers are a message and its signature, two texts.")


async def _unless_small(body: bytes, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function, in another thread if the body is large."""
    if len(body) <= _SMALL_BYTES:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise Refused(400, "The body is no JSON object.")
    return content


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        Refused: it has more than `max_bytes`, or the connection has ended within it.
    """
    parts, size_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "The connection ended within the request.")
        parts.append(message.get("body", b""))
        size_bytes += len(parts[-1])
        if size_bytes > max_bytes:
            raise Refused(413, f"The body has more than {max_bytes} bytes.")
        if not message.get("more_body"):
            return b"".join(parts)


def _once(body: bytes, then: Receive) -> Receive:
    """A `receive` that gives `body`, which was read already, and then goes on with `then`."""
    is_given = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal is_given
        if is_given:
            return await then()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _answer_refusal(scope: Scope, send: Send, refusal: Refused) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008})
    content = json.dumps({"error": {"message": str(refusal)}}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),  # the body may not have been read
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _say(text: str) -> None:
    """Print a line to the server's log; an engine's imports may have silenced loggers in this process."""
    print(f"colocate rollout-serve: {time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request, their names in lower case."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def is_of_the_holder(scope: Scope) -> bool:
    """Whether a request is for a route that only the run that holds the server may use."""
    return scope["type"] == "http" and _route(scope) in _OF_THE_HOLDER


def _route(scope: Scope) -> tuple[str, str]:
    return scope.get("method", ""), scope["path"].removeprefix(scope.get("root_path", ""))


def _target(scope: Scope) -> str:
    """Path and query of a request, in the form that a trainer signs."""
    query = scope.get("query_string", b"").decode("latin-1")
    return _route(scope)[1] + (f"?{query}" if query else "")


def _described(scope: Scope) -> str:
    """A request and its sender, escaped so that it stays one line of the log whatever was sent."""
    host, port = scope.get("client") or ("unknown", 0)
    query = "?..." if scope.get("query_string") else ""  # it may have a key in it
    what = f"{scope.get('method', scope['type'])} {_route(scope)[1]}{query}"
    return f"{what[:200]!a} from {host}:{port}"
