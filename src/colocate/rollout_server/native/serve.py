"""Starts the native engine as a rollout server: a model with undefined weights, and an HTTP server in front
of it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from colocate.checkpoints.stop_signals import stop_event
from colocate.engines.native.engine import NativeEngine
from colocate.http.key import ServerKey, key_of_new_server, say_who_may_use_it
from colocate.memory.garbage import lasting_objects_left_out
from colocate.rollout_server.native.app import RolloutApp
from colocate.rollout_server.native.engine_loop import EngineLoop
from colocate.rollout_server.native.weights import NativeWeights
from colocate.rollout_server.wire.shared_directory import SHARED_MEMORY, remove_abandoned
from colocate.serving.server import HttpServer, Limits, bound_socket
from colocate.weights.layouts import why_no_layout
from colocate.weights.weight_parts import empty_parts

LIMITS = Limits(max_requests=2**12, max_connections=2**12, known_header_s=600.0, body_s=60.0, reader_s=60.0)
"""A trainer keeps hundreds of connections, on which nothing comes for as long as a step takes. A stranger's
are closed as soon as those of other servers."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class ServedOptions:
    """Options of a native rollout server.

    Attributes:
        dtype: in which it computes; "auto": bfloat16 on a GPU, float32 on a CPU.
        revision: branch, tag or commit of the model on the Hub.
        max_model_len, max_num_seqs, kv_cache_tokens: see `NativeEngine`.
        can_sleep: whether it takes turns with a trainer on its GPU.
    """

    dtype: str = "auto"
    revision: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_cache_tokens: int | None = None
    can_sleep: bool = False
    trust_remote_code: bool = False
    use_cpu: bool = False


class RolloutServer:
    """A model, its engine, and the HTTP server in front of it.

    Args:
        model: the model's directory, or its name on the Hub; only its configuration is read.
        listening: see `bound_socket`. It is closed with the server.
        key: the server's key.

    Raises:
        ValueError: the model has no layout, or an option is out of its range.
        OSError: no configuration is found under the model's name.
    """

    def __init__(self, model: str, listening: Any, options: ServedOptions, key: ServerKey) -> None:
        made = model_of_any_weights(model, options)
        self._engine = engine = NativeEngine(
            made,
            max_num_seqs=options.max_num_seqs,
            kv_cache_tokens=options.kv_cache_tokens,
            max_model_len=options.max_model_len,
        )
        engine.wake_up()
        self.loop = EngineLoop(engine, NativeWeights(made, engine, can_sleep=options.can_sleep), key)
        app = RolloutApp(
            self.loop, model=model, max_len=engine.max_len, vocab_size=engine.vocab_size, key=key
        )
        self._http = HttpServer(app.app, listening, LIMITS)
        self.loop.start()
        self._http.start()

    def close(self) -> None:
        """Stop answering, and free everything."""
        self._http.close()
        self.loop.close()
        self._engine.close()


def serve(model: str, *, host: str, port: int, options: ServedOptions) -> int:
    """Run a server until SIGINT or SIGTERM. Returns the exit code.

    Raises:
        ValueError, OSError: see `RolloutServer`; or the port is taken, or the key cannot be used.
    """
    remove_abandoned(SHARED_MEMORY)  # trainers that were killed may have left a chunk of weights each
    with bound_socket(host, port) as listening:  # before the model is made, which takes a while
        port = listening.getsockname()[1]
        key = key_of_new_server(port)
        with (
            stop_event() as is_over,
            closing(RolloutServer(model, listening, options, key)),
            lasting_objects_left_out(),
        ):
            shown = f"[{host}]" if ":" in host else host
            print(
                f"colocate rollout-serve: {model} is ready at http://{shown}:{port} (native engine)",
                flush=True,
            )
            say_who_may_use_it(key, host)
            while not is_over.wait(1.0):
                pass
    return 0


def model_of_any_weights(name: str, options: ServedOptions) -> Any:
    """A model made of a configuration, with undefined weights: a trainer sends some before the first request.

    Raises:
        ValueError: the native engine has no layout for it.
        OSError: there is no configuration of this name.
    """
    trust = options.trust_remote_code
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust, revision=options.revision or "main")
    device = "cuda" if torch.cuda.is_available() and not options.use_cpu else "cpu"
    dtype = options.dtype if options.dtype != "auto" else {"cuda": "bfloat16", "cpu": "float32"}[device]
    if dtype not in DTYPES:
        raise ValueError(f"--dtype={dtype!r} must be auto, {', '.join(DTYPES)}.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], trust_remote_code=trust)
    if (reason := why_no_layout(model)) is not None:
        raise ValueError(
            f"The native engine cannot run this model: {reason}. Serve {name} with --engine vllm."
        )
    empty_parts(model, config, device)
    return model.eval().requires_grad_(False)
