"""The routes of a native rollout server: those of vLLM's server that a trainer asks for."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from colocate.http.gate import CONTENT, Gate
from colocate.http.key import ServerKey
from colocate.rollout_server.native.engine_loop import Aborted, EngineLoop
from colocate.rollout_server.native.requests import Asked, CompletionChoice, asked_in, usage
from colocate.serving.app import application, as_refusal
from colocate.serving.driver import Begun, Job, Update
from colocate.serving.refusal import Refusal
from colocate.serving.server import unless_gone
from colocate.version import __version__


class RolloutApp:
    """Answers one trainer's requests with completions of one engine.

    Args:
        model: the name under which the model is offered.
        max_len: tokens that a prompt and its completion may have together.
        vocab_size: number of token ids that a prompt may consist of.
        key: the server's key, which every request needs.
    """

    def __init__(
        self, loop: EngineLoop, *, model: str, max_len: int, vocab_size: int, key: ServerKey
    ) -> None:
        self._loop, self._model, self._max_len = loop, model, max_len
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/is_paused", self._is_paused, methods=["GET"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/collective_rpc", self._message, methods=["POST"]),
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/wake_up", self._wake_up, methods=["POST"]),
        ]
        self.app = Gate(application(routes), lambda scope: vocab_size, key)

    # ── How it is ────────────────────────────────────────────────────────────────────────────────────────

    async def _health(self, request: Request) -> Response:
        self._loop.check()
        return Response()

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__, "engine": "native"})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": self._model, "max_model_len": self._max_len}]})

    async def _is_paused(self, request: Request) -> Response:
        self._loop.check()
        loop = self._loop
        return JSONResponse(
            {"is_paused": loop.is_paused, "num_steps": loop.num_steps, "is_busy": loop.has_requests}
        )

    # ── Completions ──────────────────────────────────────────────────────────────────────────────────────

    async def _completions(self, request: Request) -> Response:
        asked = asked_in(request.scope[CONTENT], self._model, self._max_len)
        choices = await unless_gone(request.receive, self._drawn(asked))
        answer = {"model": self._model, "choices": [choice.content() for choice in choices]}
        return JSONResponse({**answer, "usage": usage(asked, choices)})

    async def _drawn(self, asked: Asked) -> list[CompletionChoice]:
        """The completions of a request."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update]()

        def put(update: Update) -> None:
            with suppress(RuntimeError):  # the server has ended, and its loop with it
                loop.call_soon_threadsafe(updates.put_nowait, update)

        job = Job(asked.prompt, asked.sampling, put)
        choices = [CompletionChoice(index) for index in range(len(asked.prompt.samples))]
        left = len(choices)
        self._loop.ask(job, asked.weights)
        try:
            while left:
                update = await updates.get()
                if isinstance(update, Aborted):
                    break
                if isinstance(update, Exception):
                    raise as_refusal(update)
                if isinstance(update, Begun):
                    continue
                choice = choices[update.choice]
                choice.token_ids += update.token_ids
                choice.logprobs += update.logprobs or ()
                choice.num_cached_tokens = update.num_cached_tokens
                if update.finish_reason is not None:
                    choice.finish_reason = update.finish_reason
                    left -= 1
        finally:
            if left:
                self._loop.cancel(job)
        return choices

    # ── The run that holds it ────────────────────────────────────────────────────────────────────────────

    async def _message(self, request: Request) -> Response:
        content = request.scope[CONTENT]
        answering = self._loop.do(partial(self._loop.receiver.answer, *content["args"]))
        answer = await asyncio.wait_for(asyncio.wrap_future(answering), content["timeout"])
        return JSONResponse({"results": [answer]})

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "wait"):
            raise Refusal(400, f"A pause has mode=abort or mode=wait, not {mode!r:.50}.")
        await asyncio.wrap_future(self._loop.pause(drains=mode == "wait"))
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        await asyncio.wrap_future(self._loop.resume())
        return JSONResponse({"status": "resumed"})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        """Do nothing: a push makes the engine forget all that it has computed, and cached pages are only
        found for the weights that filled them."""
        return JSONResponse({"success": True})

    async def _sleep(self, request: Request) -> Response:
        await asyncio.wrap_future(self._loop.sleep())
        return JSONResponse({"status": "sleeping"})

    async def _wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or ["weights", "kv_cache"]
        woken = self._loop.wake_up(weights="weights" in tags, kv_cache="kv_cache" in tags)
        await asyncio.wrap_future(woken)
        return JSONResponse({"status": "awake"})
