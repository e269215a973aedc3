"""Calls of the server's workers, through vLLM's `/collective_rpc`."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

from colocate.engines.vllm.http import HttpClient, MalformedResponse, RequestRefused, ServerUnreachable

HOW_TO_START = (
    "Start it with `colocate serve MODEL`, or with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL "
    "--worker-extension-cls colocate.engines.vllm.weight_receiver.WeightReceiver "
    "--logprobs-mode processed_logprobs --generation-config vllm` where colocate is installed beside vLLM"
)


class WorkerError(RuntimeError):
    """A worker could not do what it was asked, and said why."""


class Workers:
    """All workers of a server. A message reaches every one of them; see `weight_receiver`."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    def start(self, do: str, *, deadline_s: float, **arguments: Any) -> Future[list[dict[str, Any]]]:
        """Send a message; the future has each worker's answer, by rank, or raises what `call` raises."""
        message = json.dumps({"do": do, **arguments})
        body = {"method": "colocate_receive", "args": [message], "timeout": deadline_s}
        return self._client.submit("POST", "/collective_rpc", body, deadline_s=deadline_s, parse=_answers)

    def call(self, do: str, *, deadline_s: float, **arguments: Any) -> list[dict[str, Any]]:
        """Send a message and wait for each worker's answer, by rank.

        Raises:
            WorkerError: a worker answered that it failed.
            ServerUnreachable, RequestRefused: see `HttpClient.call`.
        """
        return self.start(do, deadline_s=deadline_s, **arguments).result()

    def describe(self, *, deadline_s: float) -> list[dict[str, Any]]:
        """What each worker says of itself.

        Raises:
            RuntimeError: the server runs without our worker extension or without `/collective_rpc`.
        """
        try:
            return self.call("describe", deadline_s=deadline_s)
        except (RequestRefused, ServerUnreachable) as error:
            raise type(error)(
                f"The vLLM server at {self._client.base_url} takes no weights from a trainer: {error} "
                f"{HOW_TO_START}."
            ) from error


def _answers(content: Any) -> list[dict[str, Any]]:
    answers = content.get("results") if isinstance(content, dict) else None
    if not isinstance(answers, list) or not answers or not all(isinstance(a, dict) for a in answers):
        raise MalformedResponse("it has no worker's answer")
    errors = [f"worker {rank}: {a['error']}" for rank, a in enumerate(answers) if "error" in a]
    if errors:
        raise WorkerError("; ".join(errors))
    return answers
