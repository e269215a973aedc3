"""Checks that a run can train with a server, and that the run may have it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from packaging.version import Version
from torch import nn

from colocate.engines.vllm.environment import check_version
from colocate.engines.vllm.logprobs_mode import MODES
from colocate.http.key import VARIABLE
from colocate.http.lease import LEASE_S, ServerHeld, has_ended
from colocate.rollout_server.trainer.client import (
    HOW_TO_START,
    HttpClient,
    KeyRefused,
    MalformedResponse,
)
from colocate.rollout_server.wire.weight_wire import SHAPE
from colocate.version import __version__
from colocate.weights.context_length import longest_context
from colocate.weights.layouts import causal_lm

logger = logging.getLogger(__name__)

_MOST_SERVERS = 32
"""The most servers behind one address that are told from one that is started again and again."""


class Facts(NamedTuple):
    """Facts about a server that fits a run."""

    served_name: str
    """The name under which it offers the model."""
    max_len: int
    start_id: str
    logprobs_mode: str
    can_sleep: bool
    is_native: bool
    """The native engine is behind it, else vLLM."""


class SeveralServers(ValueError):
    """Several servers answer in turn at an address that was given as one server's."""


class Starts:
    """The starts of the server at an address, in their order: each has another identity than all before it.

    Args:
        url: the address, for messages.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._seen: list[str] = []

    def note(self, start_id: str) -> bool:
        """Note which server has answered; returns whether it is the one that answered before.

        Raises:
            SeveralServers: it answered earlier, and another one did since: it cannot have been started anew.
        """
        if self._seen and start_id == self._seen[-1]:
            return True
        if start_id in self._seen:
            since = [each[:8] for each in self._seen[self._seen.index(start_id) :]]
            raise SeveralServers(
                f"{self._url} leads to {len(since)} servers in turn: to the starts {', '.join(since)}, and "
                f"then to {start_id[:8]} again. A run takes a server for itself, sends it weights, and "
                "checks what each answer was drawn with, which a router in front of servers mixes up. Set "
                "rollout_server_base_url to the addresses of the servers themselves, with commas between "
                "them: the run shares its work out among them."
            )
        self._seen.append(start_id)
        return False


def examine(
    model: nn.Module,
    ask: Callable[..., Any],
    client: HttpClient,
    starts: Starts,
    *,
    deadline_s: float,
    is_main: bool,
) -> Facts:
    """Find out about a server, and whether a policy can be trained with it.

    Args:
        model: the policy.
        ask: sends a GET request for a path, and returns a function's result for the JSON of the answer.
        starts: those that are known of the server.
        deadline_s: for the workers' answers.
        is_main: this process prints warnings.

    Raises:
        SeveralServers: a router is there, and servers behind it.
        ValueError: it does not know this run's key, or see `check_fit`.
        RuntimeError: its vLLM is not supported, or it cannot take weights.
    """
    url, key = client.base_url, client.key
    try:
        version, engine = ask("/version", lambda answer: (_field(answer, "version"), answer.get("engine")))
    except KeyRefused as error:
        raise ValueError(
            f"The server at {url} does not know this run's key, which is the one in {key.source}: "
            f"{error} For a server of another machine or user set {VARIABLE} to its key."
        ) from error
    if (warning := _check_version(version, engine, url)) is not None and is_main:
        logger.warning(f"The server at {url}: {warning}")
    offered = ask("/v1/models", lambda answer: _field(answer, "data")[0])
    described = client.describe(deadline_s=deadline_s)
    first, name = described[0], str(offered["id"])
    check_fit(model, first, name, url)
    _check_context(model, first, int(offered["max_model_len"]), url)
    starts.note(start_id_of(described))
    for _ in range(_MOST_SERVERS):
        client.drop_connections()  # a router may keep each with one server
        if starts.note(start_id_of(client.describe(deadline_s=deadline_s))):
            break
    dtype = str(causal_lm(model).get_input_embeddings().weight.dtype).removeprefix("torch.")
    if is_main and first["dtype"] != dtype:
        logger.warning(
            f"The server at {url} computes in {first['dtype']} and the policy is {dtype}: it draws "
            f"from a policy that is rounded. Start it with {how_to_start(first, '--dtype', dtype)} to have "
            "one policy."
        )
    return Facts(
        name,
        int(offered["max_model_len"]),
        start_id_of(described),
        first["logprobs_mode"],
        first["can_sleep"],
        first["engine"] == "native",
    )


def _check_context(model: nn.Module, worker: Mapping[str, Any], max_len: int, url: str) -> None:
    """Refuse a server whose model may get longer sequences than the policy computes consistently: vLLM
    chooses longrope's factors, for all sequences, by the longest one that it may get."""
    longest = longest_context(causal_lm(model).config)
    if longest.is_exact and longest.num_tokens is not None and max_len > longest.num_tokens:
        raise ValueError(
            f"The server at {url} takes sequences of {max_len} tokens, and the policy computes "
            f"{longest.num_tokens} consistently: {longest.reason}. Start it with "
            f"{how_to_start(worker, '--max-model-len', str(longest.num_tokens))}."
        )


def how_to_start(worker: Mapping[str, Any], *options: str) -> str:
    """The command that starts a server of a worker's engine with certain options of the engine."""
    is_native = worker["engine"] == "native"
    dashes = "" if is_native else "-- "
    return f"`colocate rollout-serve MODEL --engine {worker['engine']} {dashes}{' '.join(options)}`"


def _check_version(version: str, engine: str | None, url: str) -> str | None:
    """A warning about a server's version, if there is one.

    Args:
        engine: "native" if the version is this library's own; None: vLLM's, which does not tell.
    """
    if engine == "native":
        is_ours = version == __version__
        return None if is_ours else f"it is colocate {version}, and this run is {__version__}. Use one."
    try:
        return check_version(Version(version))
    except ImportError as error:
        raise RuntimeError(f"The server at {url} is of no use: {error}") from error


def start_id_of(answers: Sequence[Mapping[str, Any]]) -> str:
    """The identity of a server's start, from its workers' answers."""
    return "+".join(str(answer.get("start_id")) for answer in answers)


def _field(answer: Any, name: str) -> Any:
    if not isinstance(answer, dict) or not answer.get(name):
        raise MalformedResponse(f"it has no {name}")
    return answer[name]


def check_fit(model: nn.Module, worker: dict[str, Any], served_name: str, url: str) -> None:
    """Refuse a server of another model, or with settings that training cannot work with.

    Args:
        model: the policy.
        worker: the first worker's `Receiver.describe`.
        served_name: the name under which the server offers its model.

    Raises:
        ValueError: what is different, and how to start the server.
    """
    config: Any = causal_lm(model).config.get_text_config()
    served = worker["shape"]
    differences = [
        f"{name} {served[name]} instead of {getattr(config, name)}"
        for name in SHAPE
        if None not in (served[name], getattr(config, name, None)) and served[name] != getattr(config, name)
    ]
    if differences:
        raise ValueError(
            f"The server at {url} serves another model, {served_name!r}: it has {', '.join(differences)}. "
            "Start it with the model that is trained: `colocate rollout-serve "
            f"{config.name_or_path or 'MODEL'} --engine {worker['engine']}`."
        )
    if worker["engine"] == "native":
        return
    if worker["num_replicas"] > 1:
        raise ValueError(
            f"The server at {url} runs {worker['num_replicas']} replicas, of which weights would reach one "
            "for sure. Start it without --data-parallel-size; for more GPUs there is --tensor-parallel-size, "
            "and rollout_server_base_url may name several servers."
        )
    for setting, suitable in (("logprobs_mode", MODES), ("generation_config", ("vllm",))):
        if worker[setting] not in suitable:
            raise ValueError(
                f"The server at {url} runs with {setting}={worker[setting]!r}, and training needs "
                f"{' or '.join(map(repr, suitable))}. {HOW_TO_START}."
            )


def take(client: HttpClient, *, deadline_s: float, waits: bool) -> None:
    """Take a server for the client's run, also from a run that has ended without releasing it.

    Args:
        deadline_s: for each message.
        waits: wait for the end of a lease that may be this run's own, from before it was moved here.

    Raises:
        ServerHeld: the server belongs to another run.
    """
    until_s, instead_of = time.monotonic() + 1.1 * LEASE_S, None
    while True:
        try:
            client.message("claim", instead_of=instead_of, deadline_s=deadline_s)
            return
        except ServerHeld as error:
            holder, own = error.holder, client.run
            is_mine_or_over = has_ended(holder["process"]) or (
                holder["process"] == own.process != ""  # a notebook's earlier trainer
            )
            if is_mine_or_over and holder["id"] != instead_of:
                instead_of = holder["id"]
                continue
            # The holder has this run's output_dir, on another machine. Whether its process has ended cannot
            # be seen from here.
            may_be_over = own.output_dir and holder["output_dir"] == own.output_dir
            if not (waits and may_be_over) or holder["host"] == own.host or time.monotonic() > until_s:
                raise
            logger.warning(f"{error} Waiting, as it is this very run that was there.")
        time.sleep(LEASE_S / 4)
