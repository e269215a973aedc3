"""`Service`: the routes, from a request's body to jobs of the engine's, and from its tokens to an answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from colocate.http.gate import Refused, read_body
from colocate.serving.answers import Answer
from colocate.serving.calls import Call, chat_call, completion_call, parsed
from colocate.serving.choice import Choice, TextPiece
from colocate.serving.driver import Begun, Drawn, Driver, Job, Update
from colocate.serving.fields import Fields
from colocate.serving.gate import KeyCheck, KeyGate
from colocate.serving.handlers import DrawRequest, RequestHandler
from colocate.serving.readers import Readers
from colocate.serving.refusal import Refusal, busy
from colocate.serving.server import Limits, unless_gone
from colocate.serving.texts import Texts

logger = logging.getLogger(__name__)
T = TypeVar("T")
Pieces = AsyncGenerator[tuple[Choice, TextPiece | None], None]
"""A choice, and what is new of it; None: the engine has begun it."""

RETRY_AFTER_S = 5
_TRAINERS_ASK = ("/version", "/collective_rpc")
"""Paths that a trainer with engine="rollout_server" asks for."""


class Service:
    """Answers OpenAI's clients with completions of one engine.

    Args:
        driver: drives the engine; some thread calls its `advance`.
        model: the name that requests must give.
        check_key: tells by a request's key which handler serves it.
        check_engine: raises Refusal if the engine is of no use.
    """

    def __init__(
        self,
        driver: Driver,
        texts: Texts,
        *,
        model: str,
        check_key: KeyCheck,
        limits: Limits | None = None,
        check_engine: Callable[[], None] = lambda: None,
    ) -> None:
        self._driver = driver
        self._texts = texts
        self.model = model
        self.limits = limits or Limits()
        self._check_engine = check_engine
        self._created_s = int(time.time())
        self._num_requests = 0
        # Reading a long prompt takes a while, in which other answers go on.
        num_readers = self.limits.num_readers if texts.are_read_in_parallel else 1
        self._readers = Readers(num_readers, self.limits.late_s)
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._named_model, methods=["GET"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self.app = KeyGate(application(routes), check_key)

    def close(self) -> None:
        """Let go of the threads that read prompts."""
        self._readers.close()

    # ── Routes ───────────────────────────────────────────────────────────────────────────────────────────

    async def _health(self, request: Request) -> Response:
        self._check_engine()
        if delay_s := self._readers.delay_s:
            raise busy(f"Prompts of requests have not been read for {delay_s:.0f} s.", RETRY_AFTER_S)
        return Response()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model]})

    async def _named_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model)

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, completion_call)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat_call)

    @property
    def _model(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": self._created_s, "owned_by": "colocate"}

    def _check_model(self, name: str) -> None:
        if name != self.model:
            raise Refusal(
                404,
                f"There is no model {name!r:.200} here. The service has {self.model!r}.",
                param="model",
                code="model_not_found",
            )

    async def _answer(self, request: Request, read: Callable[[Fields, int], Call]) -> Response:
        self._check_engine()
        if self._num_requests >= self.limits.max_requests:
            raise Refusal(
                429,
                f"{self._num_requests} requests are under way, and the service takes "
                f"{self.limits.max_requests} at a time.",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        self._num_requests += 1
        try:
            turns = await self._turns(request, read)
            if not turns.call.stream:
                answer = JSONResponse(await unless_gone(request.receive, self._whole(turns)))
                self._end_request()
                return answer
            # The status is sent before the first event: what is refused until then can still have its own.
            pieces = turns.pieces()
            first = await unless_gone(request.receive, _next(pieces))
            return _EventStream(self._streamed(turns, first, pieces), self._end_request)
        except BaseException:
            self._end_request()
            raise

    def _end_request(self) -> None:
        self._num_requests -= 1

    async def _turns(self, request: Request, read: Callable[[Fields, int], Call]) -> _Turns:
        """The turns that a request asks for, its prompts read."""
        body = await self._body(request)
        handler: RequestHandler = request.scope["colocate.handler"]

        def read_call() -> tuple[Call, list[DrawRequest]]:
            call = read(parsed(body), handler.max_len)
            self._check_model(call.model)
            return call, [handler.draw_request(call, number) for number in range(call.num_prompts)]

        try:
            # Long prompts of others may be read before it.
            async with asyncio.timeout(self.limits.max_wait_s), handler.reading:
                call, requests = await self._readers.read(read_call)
        except TimeoutError:
            why = f"The request's prompt was not read within {self.limits.max_wait_s:g} s."
            raise busy(why, RETRY_AFTER_S) from None
        answer = Answer(call, self.model, self._texts)
        return _Turns(self._driver, self._texts, handler, call, requests, answer, self.limits.max_wait_s)

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refusal(415, f"The body must be application/json, and is said to be {kind[:100]!r}.")
        try:
            async with asyncio.timeout(self.limits.body_s):
                return await read_body(request.receive, self.limits.max_body_bytes)
        except TimeoutError:
            why = f"The body did not arrive within {self.limits.body_s:g} s."
            raise Refusal(408, why, code="request_timeout") from None
        except Refused as refused:
            raise Refusal(refused.status, str(refused), code="body_not_taken") from None

    # ── Answers ──────────────────────────────────────────────────────────────────────────────────────────

    async def _whole(self, turns: _Turns) -> dict[str, Any]:
        async for _ in turns.pieces():
            pass
        return turns.answer.whole(turns.choices)

    async def _streamed(
        self, turns: _Turns, first: tuple[Choice, TextPiece | None], pieces: Pieces
    ) -> AsyncIterator[bytes]:
        """Server-sent events: a chunk of the answer each, then "[DONE]"; an error ends them."""
        answer = turns.answer
        try:
            for chunk in answer.told(*first):
                yield _event(chunk)
            async for choice, piece in pieces:
                for chunk in answer.told(choice, piece):
                    yield _event(chunk)
            if turns.call.include_usage:
                yield _event(answer.usage_chunk(turns.choices))
            yield b"data: [DONE]\n\n"
        except Refusal as refusal:  # the status was sent already
            yield _event(refusal.content)
        except Exception as error:
            yield _event(as_refusal(error).content)
        finally:
            await pieces.aclose()


class _Turns:
    """The turns of one request while they are drawn."""

    def __init__(
        self,
        driver: Driver,
        texts: Texts,
        handler: RequestHandler,
        call: Call,
        requests: Sequence[DrawRequest],
        answer: Answer,
        max_wait_s: float,
    ) -> None:
        self.call, self.answer = call, answer
        self._driver, self._handler, self._max_wait_s = driver, handler, max_wait_s
        indices = iter(range(len(requests) * call.n))
        self.choices = [
            Choice(next(indices), call, request, texts) for request in requests for _ in range(call.n)
        ]
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        is_followed = call.stream or bool(call.stop)
        self._jobs = [
            Job(
                request.prompt, request.sampling, self._put_for(number), request.keep, request.extends,
                request.given_ids, is_followed,
            )
            for number, request in enumerate(requests)
        ]  # fmt: skip

    def _put_for(self, number: int) -> Callable[[Update], None]:
        def put(update: Update) -> None:
            with suppress(RuntimeError):  # the service has ended, and its loop with it
                self._loop.call_soon_threadsafe(self._updates.put_nowait, (number, update))

        return put

    async def pieces(self) -> Pieces:
        """Draw the request's choices: each is yielded with None at first, then with its new pieces.

        Closing the iterator stops the drawing.
        """
        for job in self._jobs:
            self._driver.ask(job)
        left = {choice.index for choice in self.choices}
        waiting = set(range(len(self._jobs)))
        until_s = self._loop.time() + self._max_wait_s
        try:
            while left:
                number, update = await self._update(until_s if waiting else None)
                if isinstance(update, Exception):
                    raise as_refusal(update)
                if isinstance(update, Begun):
                    waiting.discard(number)
                    for choice in self._of_job(number):
                        yield choice, None
                    continue
                choice = self._of_job(number)[update.choice]
                if choice.is_over:  # at a stop text, and the engine did not know yet
                    continue
                piece = self._take(number, choice, update)
                if choice.is_over:
                    left.discard(choice.index)
                yield choice, piece
        finally:
            if left:
                for job in self._jobs:
                    self._driver.cancel(job)

    async def _update(self, until_s: float | None) -> tuple[int, Update]:
        """The next update, and the number of its job."""
        if until_s is None:
            return await self._updates.get()
        try:
            return await asyncio.wait_for(self._updates.get(), max(0.0, until_s - self._loop.time()))
        except TimeoutError:
            why = f"The engine had no time for this request within {self._max_wait_s:g} s."
            raise busy(why, RETRY_AFTER_S) from None

    def _of_job(self, number: int) -> list[Choice]:
        return self.choices[number * self.call.n :][: self.call.n]

    def _take(self, number: int, choice: Choice, drawn: Drawn) -> TextPiece:
        piece = choice.take(drawn)
        if choice.is_over:
            if choice.is_cut:
                self._driver.cancel(self._jobs[number], drawn.choice)
            self._handler.note(self.call, choice.request, choice.turn)
        return piece


class _EventStream(StreamingResponse):
    """A stream of events that ends its source when the client is gone, and calls `at_end`."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], at_end: Callable[[], None]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache"})
        self._events, self._at_end = events, at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()
            await self._events.aclose()  # type: ignore[attr-defined]  # it is a generator


async def _next(pieces: Pieces) -> tuple[Choice, TextPiece | None]:
    """The first piece; where there is none, the source is at its end and has let go of the engine."""
    return await anext(pieces)


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def application(routes: Sequence[Route]) -> Starlette:
    """The application with these routes, whose errors have the shape of OpenAI's."""
    handlers: Any = {Refusal: _tell_refusal, HTTPException: _tell_http_error, Exception: _tell_error}
    routed = Starlette(routes=routes, exception_handlers=handlers)
    routed.router.redirect_slashes = False  # a redirect is no answer of OpenAI's, and names the Host given
    return routed


def as_refusal(error: Exception) -> Refusal:
    """The refusal by which a caller is told of an error of the engine's."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ValueError):  # the engine has checked this request and refuses it
        return Refusal(400, str(error))
    logger.error("A request could not be answered.", exc_info=error)
    return Refusal(500, f"The request could not be answered: {error}", code="engine_error")


async def _tell_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = dict(error.headers)
    if error.status in (408, 413):
        headers["connection"] = "close"  # the body was not read
    return JSONResponse(error.content, error.status, headers)


async def _tell_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message = f"{request.method} {path!r:.200} is not served here: {error.detail}."
    if path in _TRAINERS_ASK:
        message += " A server for trainers is started by `colocate rollout-serve`."
    return JSONResponse(Refusal(error.status_code, message).content, error.status_code, error.headers)


async def _tell_error(request: Request, error: Exception) -> Response:
    refusal = Refusal(500, f"The request could not be answered: {type(error).__name__}.")
    return JSONResponse(refusal.content, refusal.status)
