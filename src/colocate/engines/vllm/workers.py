"""Calls of the server's workers, through vLLM's `/collective_rpc`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import Any

from colocate.engines.vllm.http import (
    HttpClient,
    KeyRefused,
    MalformedResponse,
    RequestRefused,
    ServerUnreachable,
)
from colocate.engines.vllm.key import VARIABLE
from colocate.engines.vllm.lease import LEASE_S, Run, ServerHeld
from colocate.engines.vllm.messages import Message

HOW_TO_START = (
    "Start it with `colocate serve MODEL`, or, where colocate is installed beside vLLM and with a key of "
    f"your own in {VARIABLE}, with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL "
    "--middleware colocate.engines.vllm.gate.Gate "
    "--worker-extension-cls colocate.engines.vllm.weight_receiver.WeightReceiver "
    "--logprobs-mode processed_logprobs --generation-config vllm`"
)


class WorkerError(RuntimeError):
    """A worker could not do what it was asked, and said why."""


class Workers:
    """All workers of a server. A message reaches every one of them; see `weight_receiver`."""

    def __init__(self, client: HttpClient, run: Run) -> None:
        self._client = client
        self.run = run

    def start(self, do: str, *, deadline_s: float, **arguments: Any) -> Future[list[dict[str, Any]]]:
        """Send a message; the future has each worker's answer, by rank, or raises what `call` raises."""
        return self._client.submit(**self._request(do, deadline_s, arguments))

    def call(
        self, do: str, *, deadline_s: float, max_attempts: int | None = None, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Send a message and wait for each worker's answer, by rank.

        Raises:
            ServerHeld: another run holds the server.
            WorkerError: a worker answered that it failed, or without the server's key.
            ServerUnreachable, RequestRefused: see `HttpClient.call`.
        """
        return self._client.call(**self._request(do, deadline_s, arguments), max_attempts=max_attempts)

    def _request(self, do: str, deadline_s: float, arguments: dict[str, Any]) -> dict[str, Any]:
        message = Message(self._client.key, {"do": do, "run": vars(self.run), **arguments})
        return {
            "method": "POST",
            "path": "/collective_rpc",
            "body": message.call(deadline_s),
            "deadline_s": deadline_s,
            "parse": _parser_for(message, self._client.base_url),
        }

    def describe(self, *, deadline_s: float) -> list[dict[str, Any]]:
        """What each worker says of itself.

        Raises:
            RuntimeError: the server runs without our worker extension or without `/collective_rpc`.
        """
        try:
            return self.call("describe", deadline_s=deadline_s)
        except KeyRefused:
            raise
        except (RequestRefused, ServerUnreachable) as error:
            raise type(error)(
                f"The vLLM server at {self._client.base_url} takes no weights from a trainer: {error} "
                f"{HOW_TO_START}."
            ) from error


def _parser_for(message: Message, base_url: str) -> Callable[[Any], list[dict[str, Any]]]:
    def parse(content: Any) -> list[dict[str, Any]]:
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
                raise ServerHeld(_who_holds(base_url, answer["holder"]), answer["holder"])
        return opened

    return parse


def _who_holds(base_url: str, holder: dict[str, Any]) -> str:
    since = datetime.now() - timedelta(seconds=holder["held_s"])
    who = f"the run in {holder['output_dir']}" if holder["output_dir"] else f"the run {holder['id']}"
    where = f" (process {holder['pid']} on {holder['host']})" if holder["pid"] else ""
    return (
        f"The vLLM server at {base_url} belongs to {who}{where}, since {since:%Y-%m-%d %H:%M:%S}; it was "
        f"heard from {holder['silent_s']:.0f} s ago. A server is one run's at a time: wait until that run "
        f"ends or end it, which lets go of the server (at the latest {LEASE_S:g} s after it was last heard "
        "from), or start another server with another --port."
    )
