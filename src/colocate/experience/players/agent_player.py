"""Episodes that an agent of the user's plays by itself, with an OpenAI client.

    agent(row, endpoint) ──HTTP──▶ Service ──Session.draw_request──▶ Driver ──▶ engine
                                      └──────Session.note──▶ Episode

The agent owns its loop: what it asks, how often and with which tools. The service listens on this machine's
loopback address alone, and each episode has a key of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from colocate.engines.base import RolloutEngine
from colocate.episodes.episode import Episode
from colocate.experience.players.agent_session import DrawOptions, Session
from colocate.experience.players.play import Player
from colocate.experience.requests import RolloutRequest
from colocate.http.key import ServerKey
from colocate.serving.app import RETRY_AFTER_S, Service
from colocate.serving.driver import Driver
from colocate.serving.handlers import RequestHandler, StatelessHandler
from colocate.serving.refusal import busy
from colocate.serving.server import HttpServer, Limits, bound_socket
from colocate.serving.texts import Texts
from colocate.types import Prompt, SamplingParams
from colocate.users_code.background import BackgroundLoop
from colocate.users_code.last_resort import InterpreterWatch

logger = logging.getLogger(__name__)

MODEL = "policy"
"""The name by which agents ask for the model that is trained."""
MAX_THREADS = 64
"""Agents without `async` that run at a time."""
LONGEST_WAIT_S = 0.5
"""Seconds for which the player sleeps at a time when nothing is asked of the engine."""
GRACE_S = 5.0
"""Seconds after their time for which agents are waited for; then nothing can end them."""
MAX_REQUESTS = 4096
"""Calls under way at once, over all agents of a rank."""
MAX_WAIT_S = 60.0
"""Seconds that a call waits while the engine is asleep; then it gets 503, with a Retry-After."""


@dataclass(frozen=True)
class Endpoint:
    """The arguments `base_url` and `api_key` of an agent's client, and the name of the model.

    Example:

        client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        client.chat.completions.create(model=endpoint.model, messages=row["prompt"])
    """

    base_url: str
    api_key: str
    model: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables by which OpenAI's clients in another process find the endpoint."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}


Agent = Callable[[dict[str, Any], Endpoint], Any]
"""The dataset's row and the endpoint -> columns for reward functions, a mapping, or None; may be async."""


class AgentPlayer(Player):
    """Lets an agent play a request's episodes, all at the same time.

    An exception of an agent, or the time limit, ends its episode with the calls that were made; reward
    functions get the error's text as `agent_error`. An agent that ends without a call is started once more.

    Args:
        sampling: how tokens are drawn. Its `max_tokens` bound all tokens of a history after its prompt.
        context_length: tokens that a prompt and all that follows may have together.
        timeout_s: seconds for an episode; None: no limit.
        port: where the endpoint listens; 0: at any port that is free.
        key: the key of other clients, whose calls are not recorded; None: there are none.
    """

    words = "an agent of yours plays the episodes"

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingParams,
        agent: Agent,
        texts: Texts,
        *,
        context_length: int,
        timeout_s: float | None,
        port: int = 0,
        key: ServerKey | None = None,
    ) -> None:
        self.sampling = sampling
        self._engine, self._agent, self._texts = engine, agent, texts
        self._options = DrawOptions(
            sampling, min(context_length, engine.max_len), engine.vocab_size, lambda: engine.policy_version
        )
        self._timeout_s = timeout_s
        self._driver = Driver(engine)
        self._sessions: dict[bytes, Session] = {}
        """Sessions that are open, by digests of their keys."""
        self._port, self._key = port, key
        self._stateless = StatelessHandler(
            texts, max_len=self._options.context_length, vocab_size=engine.vocab_size
        )
        self._listening: tuple[Service, HttpServer] | None = None
        self._loop = BackgroundLoop(name="agents")
        self._threads = asyncio.Semaphore()
        self._num_users = 0

    def __enter__(self) -> AgentPlayer:
        self._num_users += 1
        return self

    def __exit__(self, *error: object) -> None:
        """Close the endpoint and end the agents' threads and loops, at the end of the outermost context."""
        self._num_users -= 1
        if self._num_users == 0:
            self._stop()

    def play(self, request: RolloutRequest) -> list[Episode]:
        """Return the episodes of a request, prompt by prompt; the engine must be awake.

        Raises:
            RuntimeError: an agent has ended twice without a call, or all of them have failed, or some cannot
                be ended.
        """
        pairs = [
            (row, replace(prompt, samples=range(sample, sample + 1), max_tokens=None))
            for row, prompt in zip(request.rows, request.prompts, strict=True)
            for sample in prompt.samples
        ]
        episodes: dict[int, Episode] = {}
        for attempt in (1, 2):
            left = [number for number in range(len(pairs)) if number not in episodes]
            played = self._play([pairs[number] for number in left])
            episodes.update(
                (number, episode) for number, episode in zip(left, played, strict=True) if episode.nodes
            )
            if len(episodes) == len(pairs):
                break
            if attempt == 2:
                error = next(episode.extra["agent_error"] for episode in played if not episode.nodes)
                raise RuntimeError(
                    "The agent has ended twice without a call of the model, and an episode without one "
                    "cannot be trained on. "
                    f"{error or 'It has raised nothing: does it use the base_url and the api_key?'}"
                )
        found = [episode.extra["agent_error"] for episode in episodes.values()]
        if found and all(found):
            raise RuntimeError(f"The agent has failed in all {len(found)} episodes of a rollout: {found[0]}")
        return [episodes[number] for number in range(len(pairs))]

    def _play(self, pairs: list[tuple[dict[str, Any], Prompt]]) -> list[Episode]:
        """The episodes of some members, whether or not their agents have asked for anything."""
        sessions = [Session(prompt, self._texts, self._options) for _, prompt in pairs]
        self._sessions.update((_digest(session.key), session) for session in sessions)
        self._threads = asyncio.Semaphore(MAX_THREADS)  # a loop that was blocked is replaced by another one
        base_url = f"http://127.0.0.1:{self._listen().port}/v1"
        futures: list[Future] = []
        watch = InterpreterWatch(None if self._timeout_s is None else self._timeout_s + GRACE_S)
        watch.start()
        try:
            for (row, _), session in zip(pairs, sessions, strict=True):
                endpoint = Endpoint(base_url, session.key, MODEL)
                future = self._loop.submit(self._run(dict(row), endpoint, session))
                future.add_done_callback(lambda _: self._driver.wake())
                futures.append(future)
            until_s = self._latest_end_s(len(futures))
            counts = self._engine.counts
            counts.begin("episodes", len(futures))
            while num_left := sum(not future.done() for future in futures):
                counts.leave("episodes", num_left)
                self._driver.advance(LONGEST_WAIT_S)
                if time.monotonic() > until_s:
                    raise RuntimeError(self._why_blocked())
        finally:
            watch.stop()
            self._end(sessions, futures)
        return [
            _finished(session, *future.result()) for session, future in zip(sessions, futures, strict=True)
        ]

    def _why_blocked(self) -> str:
        return (
            f"Agents have not ended {GRACE_S:g} s after agent_timeout_s={self._timeout_s:g}, and nothing can "
            "interrupt them. Does an async agent compute or sleep without `await`? That blocks all others: "
            "make it a function without `async`, which has a thread of its own."
        )

    def _latest_end_s(self, num_agents: int) -> float:
        """The latest time, by `time.monotonic`, at which agents that can be interrupted have ended."""
        if self._timeout_s is None:
            return math.inf
        num_waves = 1 if _is_async(self._agent) else math.ceil(num_agents / MAX_THREADS)
        return time.monotonic() + num_waves * self._timeout_s + GRACE_S

    async def _run(self, row: dict[str, Any], endpoint: Endpoint, session: Session) -> Any:
        """One agent, from its beginning to its end; its session ends with it."""
        try:
            if _is_async(self._agent):
                return await self._within_limit(self._agent(row, endpoint))
            async with self._threads:
                result = await self._within_limit(_in_thread(self._agent, row, endpoint))
            return await self._within_limit(result) if inspect.isawaitable(result) else result
        finally:
            session.close()

    async def _within_limit(self, result: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await result
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"It took longer than agent_timeout_s={self._timeout_s:g} s.") from None
            raise

    def _end(self, sessions: list[Session], futures: list[Future]) -> None:
        for session in sessions:
            session.close()
            self._sessions.pop(_digest(session.key), None)
        for future in futures:
            future.cancel()
        self._driver.fail(busy("The engine is asleep: the trainer trains.", RETRY_AFTER_S))

    # ── The endpoint ─────────────────────────────────────────────────────────────────────────────────────

    def _handler_of(self, key: str | None) -> RequestHandler | None:
        if key is None:
            return None
        if self._key is not None and self._key.is_text(key):
            return self._stateless
        # By a digest: how long the search takes says nothing about the keys.
        return self._sessions.get(_digest(key))

    def _listen(self) -> HttpServer:
        """The endpoint, which is opened if it is not."""
        if self._listening is None:
            limits = Limits(
                max_requests=MAX_REQUESTS, max_connections=2 * MAX_REQUESTS, max_wait_s=MAX_WAIT_S
            )
            check = self._handler_of
            service = Service(self._driver, self._texts, model=MODEL, check_key=check, limits=limits)
            server = HttpServer(service.app, bound_socket("127.0.0.1", self._port), limits)
            server.start()
            self._listening = service, server
        return self._listening[1]

    def _stop(self) -> None:
        if self._listening is not None:
            service, server = self._listening
            self._listening = None
            server.close()
            service.close()
        self._loop.pause()


def _is_async(agent: Agent) -> bool:
    """Whether an agent is a coroutine function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__)


async def _in_thread(agent: Agent, row: dict[str, Any], endpoint: Endpoint) -> Any:
    """The result of an agent that runs in a thread of its own, a daemon: one that hangs does not keep the
    process from ending."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if not ended.done():  # else nobody waits any more
            ended.set_result((result, error))

    def run() -> None:
        result, error = None, None
        try:
            result = agent(row, endpoint)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="agent", daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _finished(session: Session, columns: Any, error: BaseException | None) -> Episode:
    """The episode of a session that is over, with its agent's result or error."""
    episode = session.episode
    if error is None and columns is not None and not isinstance(columns, dict):
        kind = type(columns).__name__
        error = TypeError(
            f"An agent returns a dict of columns for reward functions, or None, and not {kind}."
        )
        columns = None
    if error is not None:
        if isinstance(error, KeyboardInterrupt):
            raise error
        logger.warning(f"An agent has failed: {type(error).__name__}: {error}")
    episode.extra = {
        **(columns or {}),
        "agent_error": None if error is None else f"{type(error).__name__}: {error}",
    }
    return episode
