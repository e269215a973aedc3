"""Whether a vLLM server is one that a run can train with, and whether the run may have it."""

from __future__ import annotations

import logging
import time
from typing import Any

from torch import nn

from colocate.engines.vllm.logprobs_mode import MODES
from colocate.engines.vllm_server.client import HOW_TO_START, Workers
from colocate.engines.vllm_server.lease import LEASE_S, ServerHeld, has_ended
from colocate.engines.vllm_server.weight_wire import SHAPE
from colocate.weights.layouts import causal_lm

logger = logging.getLogger(__name__)


def check_fit(model: nn.Module, worker: dict[str, Any], served_name: str, url: str) -> None:
    """Refuse a server of another model, or with settings that training cannot work with.

    Args:
        model: the policy.
        worker: the first worker's `weight_receiver.describe`.
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
            f"Start it with the model that is trained: `colocate serve {config.name_or_path or 'MODEL'}`."
        )
    if worker["num_replicas"] > 1:
        raise ValueError(
            f"The server at {url} runs {worker['num_replicas']} replicas, of which weights would reach one "
            "for sure. Start it without --data-parallel-size; for more GPUs there is --tensor-parallel-size, "
            "and vllm_server_base_url may name several servers."
        )
    for setting, suitable in (("logprobs_mode", MODES), ("generation_config", ("vllm",))):
        if worker[setting] not in suitable:
            raise ValueError(
                f"The server at {url} runs with {setting}={worker[setting]!r}, and training needs "
                f"{' or '.join(map(repr, suitable))}. {HOW_TO_START}."
            )


def take(workers: Workers, *, deadline_s: float, waits: bool) -> None:
    """Take the workers' server for their run, also from a run that has ended without releasing it.

    Args:
        deadline_s: for each message.
        waits: for the end of a lease that may be this very run's, of before it was moved here.

    Raises:
        ServerHeld: the server belongs to another run.
    """
    until_s, instead_of = time.monotonic() + 1.1 * LEASE_S, None
    while True:
        try:
            workers.call("claim", instead_of=instead_of, deadline_s=deadline_s)
            return
        except ServerHeld as error:
            holder, own = error.holder, workers.run
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
