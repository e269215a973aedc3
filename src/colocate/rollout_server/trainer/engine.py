"""Rollouts by a server on other GPUs or another machine: prompts and completions are sent as token ids.

A completion depends only on the weights, the prompt and the seeds, so any part of a rollout may be requested
again. But a rollout must not use weights that are not the policy's. The server's workers know the name of
their weights (see `receiver`), and the engine compares it before and after each rollout, and with
turns that end one by one whenever some have ended.
"""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from colocate.engines.base import EngineLost
from colocate.engines.turns import Turn, TurnEngine
from colocate.engines.vllm.logprobs_mode import PROCESSED, ReportedLogprobs
from colocate.http.lease import LEASE_S, LeaseKeeper, this_run
from colocate.rollout_server.trainer.client import (
    CompletionRefused,
    HttpClient,
    KeyRefused,
    RequestRefused,
    ServerUnreachable,
)
from colocate.rollout_server.trainer.completions import Request, completions_in, requests_of
from colocate.rollout_server.trainer.fit import Starts, examine, take
from colocate.rollout_server.trainer.open_turns import ServerTurns
from colocate.rollout_server.trainer.transports import TransportName
from colocate.rollout_server.trainer.watch import ALONE, ServerWatch, Timeouts, await_all, await_ready
from colocate.rollout_server.trainer.weight_push import PushInterrupted, WeightPusher
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.layouts import num_embeddings
from colocate.weights.source import BUCKET_BYTES, WeightSource

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RELEASE_S = 5.0
"""Deadline for releasing the server. If it fails, the lease ends by itself."""
MAX_IN_FLIGHT = 512
"""Requests under way at once, as many as `colocate rollout-serve` lets the server decode."""
_MAX_LOSSES = 5
"""The losses of the server in one rollout or one push after which the run gives up."""


class ServerRestarted(RuntimeError):
    """The server answers, but without the weights that the rollout began with."""


# KeyRefused is among them because a restarted server may have a new key.
_LOSSES = (ServerUnreachable, ServerRestarted, PushInterrupted, KeyRefused)


class RolloutServerEngine(TurnEngine):
    """Generates on a rollout server, whose weights it keeps equal to the model's.

    A server usually has GPUs of its own, so `sleep` gives nothing back and `wake_up` takes nothing. One that
    can sleep (`--enable-sleep-mode`) is taken for one on the trainers' GPUs and takes turns with them:
    `sleep` lets it drop its weights and its KV cache, and `wake_up` lets it take memory for weights, sends
    them, and lets it take memory for the KV cache.

    `generate` sends one request for all completions of a prompt. A turn of an open sequence is a request of
    its own, and `poll` returns those that were answered. Before `sleep` and `update_weights` return, requests
    under way are given up: `poll` sends these turns anew, so that none is drawn by two policies.

    Args:
        model: the policy, possibly inside a PEFT wrapper. Its weights are read when they are pushed.
        base_url: such as "http://localhost:8000".
        is_main: this process pushes the weights after an update; true in exactly one process of the run.
        barrier: waits for all processes of the run.
        run_id: names the run and its weights on the server, equal in all processes of the run; None: a random
            one, for a run of one process.
        output_dir: the run's directory, named in the error of another run that finds the server taken.
        on_server_loss: "error", or "wait" until the server is back, push again, and repeat what was lost.
        server_timeout_s: seconds to wait for a server to start, to come back, or to go on after a pause.
        request_timeout_s: seconds for one prompt's completions, queueing in the server and retries included.
        push_timeout_s: seconds for sending all weights.
        transport, group_host, group_port, directory: see `WeightPusher`.
        bucket_bytes: see `WeightSource`.
        max_in_flight: largest number of requests under way at once; further ones wait for their turn here.
        timeouts: how soon the server counts as lost.

    Raises:
        ServerUnreachable: no server answered within `server_timeout_s`.
        ServerHeld: the server belongs to another run.
        ValueError: the server has another model, settings that training cannot work with, or another key; or
            several servers are at the address.
        RuntimeError: the server's vLLM is not supported, or the server cannot take weights.
    """

    shares_weights = False
    takes_turns = False
    """Whether the server sleeps while the trainers train."""
    _num_updates = 0
    _checked_start_id = ""

    def __init__(
        self,
        model: nn.Module,
        *,
        base_url: str,
        is_main: bool = True,
        barrier: Callable[[], object] = lambda: None,
        run_id: str | None = None,
        output_dir: str = "",
        on_server_loss: Literal["error", "wait"] = "error",
        server_timeout_s: float = 240.0,
        request_timeout_s: float = 3600.0,
        push_timeout_s: float = 600.0,
        transport: TransportName = "auto",
        group_host: str | None = None,
        group_port: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        directory: str | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        timeouts: Timeouts = ALONE,
    ) -> None:
        # Several pushes at once have the memory of one together.
        self._source: WeightSource | None = WeightSource(model, max(bucket_bytes // timeouts.num_pushes, 1))
        self._is_main = is_main
        self._barrier = barrier
        self._run_id = run_id or uuid.uuid4().hex
        self._on_server_loss = on_server_loss
        self._server_timeout_s = server_timeout_s
        self._request_timeout_s = request_timeout_s
        self._reported = self._report_in(PROCESSED)
        self._vocab_size = num_embeddings(model)
        self._timeouts = timeouts
        self._client = HttpClient(
            base_url,
            max_in_flight=max_in_flight,
            max_attempts=timeouts.max_attempts,
            first_delay_s=timeouts.first_delay_s,
            run=this_run(self._run_id, output_dir),
        )
        self._starts = Starts(self._client.base_url)
        self._open_turns = ServerTurns(self._client, self._watch())
        self._pusher = WeightPusher(
            self._client,
            starts=self._starts,
            transport=transport,
            group_host=group_host,
            group_port=group_port,
            directory=directory,
            timeout_s=push_timeout_s,
            message_s=timeouts.message_s,
            answer_s=timeouts.answer_s,
        )
        self._meet_server()
        # `finalize` also releases the server at the end of a process that did not call `close`.
        self._let_go = weakref.finalize(self, _lease_keeper(self._client).close) if is_main else lambda: None

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Complete every prompt. See `RolloutEngine.generate`.

        Raises:
            RuntimeError: the server was lost and `on_server_loss` is "error", or it did not come back.
        """
        self._check(prompts, sampling)
        return self._surviving("generate", lambda: self._generate(prompts, sampling))

    def abort(self, sequences: Iterable[int]) -> None:
        sequences = list(sequences)
        self._open_turns.abort(sequences)
        super().abort(sequences)

    def sleep(self, keep_bytes: int = 0) -> None:
        """Refuse `generate`, give turns under way up, and let a server that takes turns sleep.

        All processes of the run must call this where a server takes turns. `keep_bytes` has no effect: such a
        server keeps nothing.
        """
        self._open_turns.abort()
        was_awake = self._is_awake
        super().sleep(keep_bytes)
        if self.takes_turns and was_awake:
            self._barrier()  # others may still be drawing
            if self._is_main:
                self._surviving("sleep", self._pusher.put_to_sleep)
            self._barrier()

    def wake_up(self) -> None:
        """Allow `generate`, and wake a server up that takes turns, which is then sent the present weights.

        All processes of the run must call this where a server takes turns.
        """
        if self.takes_turns and not self._is_awake:
            self._check_open()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the server cannot use what PyTorch holds here
            self._barrier()
            if self._is_main:
                self._surviving("wake up", self._push)
            self._barrier()
        super().wake_up()

    def update_weights(self, version: int) -> None:
        """Send the model's present weights, with adapters merged, and drop prefixes computed with older ones.

        All processes of the run must call this; the main one sends. A server that sleeps is sent them when it
        wakes up.
        """
        self.note_update(version)
        if self._is_awake or not self.takes_turns:
            if self._is_main:
                self._surviving("take weights", self._push)
            self._barrier()

    def note_update(self, version: int) -> None:
        """Take notice of new weights, which are sent when the server is asked for something or `rejoin`s."""
        self._check_open()
        self._open_turns.abort()
        self._num_updates += 1
        self.policy_version = version

    @property
    def num_restarts(self) -> int:  # type: ignore[override]
        """The number of times that the server was lost and came back."""
        return self._pusher.num_restarts

    @property
    def name(self) -> str:
        """The server's address, for messages."""
        return self._client.base_url

    def is_back(self) -> bool:
        """Whether the lost server and its workers answer again. Any thread may call this."""
        try:
            self._ask("/health", max_attempts=1)
            self._client.describe(deadline_s=self._timeouts.answer_s)
        except (RuntimeError, ValueError, CancelledError):
            return False
        return True

    def rejoin(self) -> None:
        """Check the server again, take it, and send it the present weights.

        Raises:
            EngineLost: it cannot be used; the message has the reason.
        """
        max_len = self._max_len
        try:
            self._pusher.reset()
            self._client.read_key()
            self._check_server(waits=False)
            if self._max_len < max_len:
                raise ValueError(
                    f"It came back with a context of {self._max_len} tokens, and had {max_len} before."
                )
            self._push()
            self._is_awake = True
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise EngineLost(str(error)) from error
        finally:
            self._max_len = max_len  # of which sequences have been promised

    def close(self) -> None:
        """Release the server, which keeps running and is then free for another run."""
        super().close()
        self._open_turns.abort()
        self._source = None
        self._pusher.reset()
        self._let_go()
        self._client.close()

    # ── Rollout ──────────────────────────────────────────────────────────────────────────────────────────

    def _generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        start_id = self._push()
        self._count_requests(prompts, sampling)
        futures = [self._send(request, sampling) for request in self._requests(prompts, sampling)]
        try:
            with self._refusals_told(start_id):
                await_all(futures, self._watch(), self._ask, self._count_ended)
            self._check_unchanged(start_id)
        except BaseException:
            self._open_turns.abort()
            self._client.cancel_all()
            raise
        completions = (completion for future in futures for completion in future.result())
        return self._reported.of(completions, sampling)

    def _draw(self, waiting: Mapping[int, Turn], sampling: SamplingParams) -> dict[int, Completion]:
        return self._surviving("generate", lambda: self._draw_open(waiting, sampling))

    def _draw_open(self, waiting: Mapping[int, Turn], sampling: SamplingParams) -> dict[int, Completion]:
        """Send turns that are not under way, and return those that have ended; after an error none is."""

        def start(prompt: Prompt) -> Future[list[Completion]]:
            (request,) = self._requests([prompt], sampling)
            return self._send(request, sampling)

        turns = self._open_turns
        try:
            if not turns.are_under_way:
                turns.start_id, turns.watch = self._push(), self._watch()
            turns.send(waiting, start)
            with self._refusals_told(turns.start_id):
                ended = turns.take(self._timeouts.poll_s)
            if ended:
                self._check_unchanged(turns.start_id)
                turns.watch.heard()
            elif turns.watch.is_silent:
                turns.watch.look(self._ask)
        except BaseException:
            turns.abort()
            raise
        return dict(zip(ended, self._reported.of(ended.values(), sampling), strict=True))

    def _requests(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Iterator[Request]:
        return requests_of(
            prompts, sampling, self._served_name, weights=self._version, is_native=self._is_native
        )

    def _send(self, request: Request, sampling: SamplingParams) -> Future[list[Completion]]:
        return self._client.submit(
            "POST",
            "/v1/completions",
            request.body,
            deadline_s=self._request_timeout_s,
            parse=partial(
                completions_in, request=request, sampling=sampling, policy_version=self.policy_version
            ),
        )

    @contextmanager
    def _refusals_told(self, start_id: str) -> Iterator[None]:
        """Tells apart a refusal of the request, and one by another server that has replaced this one."""
        try:
            yield
        except KeyRefused:
            raise
        except RequestRefused as error:
            self._check_unchanged(start_id)
            raise CompletionRefused(str(error)) from error

    def _check_unchanged(self, start_id: str) -> None:
        """Raises ServerRestarted unless the server is that of the start `start_id`, with these weights."""
        state = self._pusher.state()
        if state[0] != start_id:
            raise ServerRestarted(f"The server at {self._client.base_url} restarted during a rollout.")
        if state[1] != self._version:
            raise ServerRestarted(f"The weights of {self._client.base_url} changed during a rollout.")

    def _watch(self) -> ServerWatch:
        silence_s = min(self._timeouts.silence_s, self._server_timeout_s / 4)
        return ServerWatch(self._client.base_url, silence_s=silence_s, max_pause_s=self._server_timeout_s)

    # ── Weights ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _version(self) -> str:
        """The name of the present weights on the server. Publications are counted, as somebody may have
        changed the weights of a policy's version."""
        return f"{self._run_id}:{self._num_updates}"

    def _push(self) -> str:
        """Push the weights, unless the server has them. Returns the identity of the server's start."""
        assert self._source is not None
        return self._pusher.push(self._source, self._version, self._check_start)

    def _check_start(self, start_id: str) -> None:
        if start_id != self._checked_start_id:
            self._check_server()  # it may have another model now

    # ── The server ───────────────────────────────────────────────────────────────────────────────────────

    def _surviving(self, what: str, action: Callable[[], T]) -> T:
        """Run `action`; if the server is lost meanwhile, raise with advice, or wait for it and repeat.

        Args:
            what: the action, in words for the message.
        """
        for _ in range(_MAX_LOSSES):
            try:
                return action()
            except (CompletionRefused, torch.OutOfMemoryError):
                raise
            except (RuntimeError, ValueError) as error:
                if self._timeouts.has_substitute:
                    self._pusher.reset()
                    raise EngineLost(str(error)) from error
                if not isinstance(error, _LOSSES):
                    raise
                url = self._client.base_url
                if self._on_server_loss == "error":
                    raise RuntimeError(
                        f"The server at {url} was lost when it should {what}: {error} Look into its "
                        "log, start it again (`colocate rollout-serve`) and resume from the last "
                        "checkpoint; or set vllm_on_server_loss='wait', with which a run goes on as soon as "
                        "the server is back."
                    ) from error
                logger.warning(
                    f"The server at {url} was lost when it should {what}: {error} Waiting for it for up "
                    f"to {self._server_timeout_s:g} s."
                )
                last = error
                self._pusher.reset()
                self._await_server()
                self._client.read_key()
                self._check_server()
        raise RuntimeError(
            f"The server at {self._client.base_url} was lost {_MAX_LOSSES} times in a row; the last "
            f"time: {last} Look into its log."
        ) from last

    def _meet_server(self) -> None:
        """Wait for the server and check it; one that takes turns sleeps then, as it is the trainer's turn."""
        try:
            self._await_server()
            self._check_server()
            if self._is_main and self.takes_turns:
                self._pusher.put_to_sleep()
        except BaseException:
            self._client.close()
            raise

    def _await_server(self) -> None:
        """Wait until the server is ready. Raises what `await_ready` raises."""
        await_ready(
            self._ask,
            self._client.base_url,
            timeout_s=self._server_timeout_s,
            answer_s=self._timeouts.answer_s,
            is_main=self._is_main,
        )

    def _check_server(self, *, waits: bool = True) -> None:
        """Check that the server fits this run, take it, and note its properties.

        Args:
            waits: see `take`.
        """
        assert self._source is not None
        answer_s = self._timeouts.answer_s
        facts = examine(
            self._source.model,
            self._ask,
            self._client,
            self._starts,
            deadline_s=answer_s,
            is_main=self._is_main,
        )
        if facts.logprobs_mode != self._reported.mode:
            self._reported = self._report_in(facts.logprobs_mode)
        take(self._client, deadline_s=answer_s, waits=waits)
        self.takes_turns = facts.can_sleep
        self._checked_start_id = facts.start_id
        self._served_name, self._is_native = facts.served_name, facts.is_native
        self._max_len = facts.max_len
        self._max_len_reason = f"the server's context = {self._max_len}"

    def _report_in(self, mode: str) -> ReportedLogprobs:
        how_to_start = "Start the server with `colocate rollout-serve MODEL -- --logprobs-mode {}`"
        return ReportedLogprobs(mode, how_to_start=how_to_start, is_main=self._is_main)

    def _ask(
        self,
        path: str,
        parse: Callable[[Any], Any] = lambda answer: answer,
        *,
        deadline_s: float | None = None,
        max_attempts: int | None = None,
    ) -> Any:
        deadline_s = deadline_s or self._timeouts.answer_s
        return self._client.call("GET", path, deadline_s=deadline_s, parse=parse, max_attempts=max_attempts)


def _lease_keeper(client: HttpClient) -> LeaseKeeper:
    return LeaseKeeper(
        renew=lambda: client.message("claim", deadline_s=LEASE_S / 4),
        release=lambda: client.message("release", deadline_s=_RELEASE_S, max_attempts=1),
    )
