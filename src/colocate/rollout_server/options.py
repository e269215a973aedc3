"""The options of rollouts by servers, and the engine that is made of them."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from colocate.engines.options import EngineOptions
from colocate.options.redaction import redacted
from colocate.options.requirements import PORT, TIMEOUT, OneOf
from colocate.options.run_file import REPLICAS

if TYPE_CHECKING:
    from colocate.engines.registry import EngineParts
    from colocate.rollout_server.trainer.engine import RolloutServerEngine
    from colocate.rollout_server.trainer.pool import EnginePool


@dataclass
class ServerOptions(EngineOptions):
    """The options that rollouts by servers alone read."""

    # ── Rollout by servers (engine="rollout_server") ───────────────────────────────────────────────────────

    rollout_server_base_url: str | None = None
    """The server's address, such as "http://node7:8000", or those of several, separated by commas. None:
    `rollout_server_host` and `rollout_server_port`."""
    rollout_server_host: str = "0.0.0.0"
    """The server's host, if no address is given; 0.0.0.0: this machine."""
    rollout_server_port: Annotated[int, PORT] = 8000
    """The server's port, if no address is given."""
    rollout_server_timeout: Annotated[float, TIMEOUT] = 240.0
    """Seconds to wait for the server: until it answers at the start, until it is back after a failure, and
    until it goes on after somebody has paused it."""
    vllm_on_server_loss: Annotated[str, OneOf(("error", "wait"))] = "error"
    """The reaction to the death or hanging of the server, or of the last of several. "error": stop the run.
    "wait": wait until one is back, and generate again what was lost."""
    vllm_group_host: str | None = None
    """The address at which the server's workers reach this process for NCCL. None: the address that this
    machine has towards the server."""
    vllm_group_port: Annotated[int, PORT] = 51216


def server_urls(text: str | None) -> list[str]:
    """The addresses in the option `rollout_server_base_url`.

    Raises:
        ValueError: there is none in a text, or one is there twice.
    """
    urls = [url.strip().rstrip("/") for url in (text or "").split(",") if url.strip()]
    if text is not None and not urls:
        raise ValueError(
            f"rollout_server_base_url={text!r} names no server. Set an address such as http://node7:8000, "
            "several with commas between them, or None for rollout_server_host and rollout_server_port."
        )
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(
                f"rollout_server_base_url names {redacted(url)} {urls.count(url)} times, and a server is "
                "asked once for each sequence. Name every server once."
            )
    return urls


def build(parts: EngineParts) -> RolloutServerEngine | EnginePool:
    """The engine of the one server, or the pool of several; the run's ranks are its clients."""
    from accelerate.utils import broadcast_object_list

    from colocate.rollout_server.trainer.engine import MAX_IN_FLIGHT, RolloutServerEngine
    from colocate.rollout_server.trainer.pool import EnginePool
    from colocate.rollout_server.trainer.watch import ALONE, timeouts_among

    options: ServerOptions = parts.options
    accelerator = parts.accelerator
    # The launcher that has started servers for this run knows best.
    urls = server_urls(os.environ.get(REPLICAS) or options.rollout_server_base_url) or [
        f"http://{options.rollout_server_host}:{options.rollout_server_port}"
    ]
    is_alone = len(urls) == 1
    # All processes push to one server, under one name.
    (run_id,) = broadcast_object_list([uuid.uuid4().hex])
    engines: list[RolloutServerEngine] = []
    try:
        for number, url in enumerate(urls):
            engine = RolloutServerEngine(
                parts.model,
                base_url=url,
                is_main=accelerator.is_main_process,
                barrier=accelerator.wait_for_everyone if is_alone else lambda: None,
                run_id=run_id,
                output_dir=os.path.abspath(parts.output_dir),
                on_server_loss=options.vllm_on_server_loss,  # type: ignore[arg-type]  # the option's range
                server_timeout_s=options.rollout_server_timeout,
                group_host=options.vllm_group_host,
                group_port=options.vllm_group_port and options.vllm_group_port + number,
                max_in_flight=options.max_num_seqs or MAX_IN_FLIGHT,
                timeouts=ALONE if is_alone else timeouts_among(len(urls)),
            )
            engines.append(engine)
    except BaseException:
        for engine in engines:
            engine.close()  # lets go of the servers
        raise
    if is_alone:
        return engines[0]
    return EnginePool(
        engines,
        rank=accelerator.process_index,
        barrier=accelerator.wait_for_everyone,
        on_loss=options.vllm_on_server_loss,  # type: ignore[arg-type]  # the option's range
        timeout_s=options.rollout_server_timeout,
    )
