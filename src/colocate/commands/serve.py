"""`colocate serve`: a model for people's OpenAI clients, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate.checkpoints.stop_signals import stop_event
from colocate.commands.arguments import MODEL_HELP, add_base, add_command
from colocate.engines.registry import OLDER_NAMES
from colocate.http.key import VARIABLE, ServerKey, is_loopback, key_from_environment
from colocate.options.requirements import AT_LEAST_ONE, check_range
from colocate.serving.installed import check_installed

if TYPE_CHECKING:
    from colocate.config.grpo_config import GRPOConfig
    from colocate.engines.base import RolloutEngine
    from colocate.inference.loading import LoadedModel

ENGINES = ("auto", "native", "transformers", "vllm", "rollout_server")

KV_CACHE_TOKENS = {"cpu": 2**15, "cuda": 2**18}
"""Default size in tokens of the native engine's cache, by device: raised to the context's length, and lowered
to the memory there is."""

_TEMPLATE_REMEDY = "have `colocate serve` started with --chat_template FILE"

SUMMARY = "serve a model to OpenAI clients"


def add_parser(commands: Any) -> None:
    """Declare the command's options."""
    details = (
        ": /v1/chat/completions, /v1/completions, /v1/models. For a server that a trainer sends its weights "
        "to see `colocate rollout-serve`."
    )
    command = add_command(commands, "serve", "MODEL [options]", SUMMARY, details)
    add = command.add_argument
    add("model", help=MODEL_HELP)
    add_base(command)
    add(
        *("--engine",), type=_named, choices=ENGINES, default="auto",
        help="what generates (default: native where that can)",
    )  # fmt: skip
    add(
        "--host",
        default="127.0.0.1",
        help=f"address to listen on (default: %(default)s, for this machine alone; others need {VARIABLE})",
    )
    add(
        "--port", type=int, default=8000, help="port to listen on (default: %(default)s; 0: any that is free)"
    )
    add("--served_model_name", help="the name that requests give (default: MODEL)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: the checkpoint's)")
    add("--max_num_seqs", type=int, help="sequences that decode at the same time (default: the engine's)")
    add("--max_model_len", type=int, help="tokens of prompt and completion (default: the model's)")
    add("--kv_cache_tokens", type=int, help="tokens that the native engine has memory for")
    add("--max_requests", type=int, default=256, help="requests under way at once (default: %(default)s)")
    add("--max_wait", type=float, default=60.0, help="seconds that a request may wait (default: %(default)s)")
    add("--chat_template", type=Path, help="a file with the chat template (Jinja), in place of the model's")
    add("--chat_template_kwargs", help="arguments for the chat template, as a JSON object")
    add(
        *("--rollout_server_base_url", "--vllm_server_base_url"),
        metavar="URL",
        help="with --engine rollout_server: the servers, with commas between them",
    )
    add("--trust_remote_code", action="store_true", help="run code that comes with the model")
    add("--use_cpu", action="store_true", help="use no GPU")


def _named(engine: str) -> str:
    return OLDER_NAMES.get(engine, engine)


def run(known: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    check_installed("colocate serve")
    key = _key_for(known.host)
    for name in ("max_num_seqs", "max_model_len", "kv_cache_tokens", "max_requests"):
        check_range(f"--{name}", getattr(known, name), AT_LEAST_ONE)
    if not 0 < known.max_wait < 86400:
        raise ValueError(f"--max_wait={known.max_wait:g} must be more than 0 and less than 86400 seconds.")
    kwargs = _template_kwargs(known.chat_template_kwargs)
    template = _template(known.chat_template)

    from colocate.serving.server import bound_socket

    with bound_socket(known.host, known.port) as listening:  # before the model is loaded, which takes a while
        _serve(known, key, (template, kwargs), listening)
    return 0


def _serve(
    known: argparse.Namespace,
    key: ServerKey | None,
    chat_template: tuple[str | None, Mapping[str, Any]],
    listening: Any,
) -> None:
    """Serve until a signal comes; `chat_template`: the template (None: the model's own), its arguments."""
    from colocate.checkpoints.saved_model import find_model

    options = _options(known)
    saved = find_model(known.model, known.base)

    from colocate.inference.loading import load
    from colocate.memory.garbage import lasting_objects_left_out
    from colocate.serving.app import Service
    from colocate.serving.driver import Driver
    from colocate.serving.engine_thread import EngineThread, step_limit_s
    from colocate.serving.gate import with_key
    from colocate.serving.handlers import StatelessHandler
    from colocate.serving.server import HttpServer, Limits
    from colocate.serving.texts import Texts

    loaded = load(saved, options, is_any_base=known.any_base)
    config = loaded.config
    template, kwargs = chat_template
    if template is not None:
        loaded.tokenizer.chat_template = template
    texts = Texts(loaded.tokenizer, loaded.stop_token_ids, kwargs, _TEMPLATE_REMEDY)
    engine = _engine(loaded)
    try:
        limits = Limits(max_requests=known.max_requests, max_wait_s=known.max_wait)
        handler = StatelessHandler(texts, max_len=_max_len(engine, config), vocab_size=engine.vocab_size)
        driver = Driver(engine)
        thread = EngineThread(driver, step_limit_s(engine, loaded.model.device))
        name = known.served_model_name or known.model
        service = Service(
            driver, texts, model=name, check_key=with_key(key, handler), limits=limits,
            check_engine=thread.check,
        )  # fmt: skip
        server = HttpServer(service.app, listening, limits)
        thread.start()
        server.start()
        host = f"[{known.host}]" if ":" in known.host else known.host
        with lasting_objects_left_out():
            print(f"colocate serve: {name} is ready at http://{host}:{server.port}/v1", flush=True)
            _say_who_may_use_it(key, known.host)
            _await_signal()
            print("colocate serve: stopping.", flush=True)
        server.close()
        thread.close()
        service.close()
        print("colocate serve: stopped.", flush=True)
    finally:
        engine.close()


def _key_for(host: str) -> ServerKey | None:
    """The key that requests need, or None. An address that other machines reach must have one."""
    key = key_from_environment()
    if key is None and not is_loopback(host):
        raise ValueError(
            f"--host {host} is reached from other machines, and without a key anybody could use the model. "
            f"Set the environment variable {VARIABLE} to one, such as `openssl rand -hex 32` prints; clients "
            "give it as API key. Or leave --host out, and forward the port (ssh -L)."
        )
    return key


def _template(file: Path | None) -> str | None:
    if file is None:
        return None
    if not file.is_file():
        raise ValueError(f"There is no file {str(file)!r}; --chat_template names one with a Jinja template.")
    return file.read_text(encoding="utf-8")


def _template_kwargs(text: str | None) -> dict[str, Any]:
    from colocate.data.encoding import check_template_arguments

    try:
        kwargs = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--chat_template_kwargs is no JSON: {error}.") from error
    if not isinstance(kwargs, dict):
        raise ValueError(f"--chat_template_kwargs={text!r:.100} must be a JSON object.")
    check_template_arguments(kwargs, "--chat_template_kwargs")
    return kwargs


def _options(known: argparse.Namespace) -> dict[str, Any]:
    """Options of the command line as `inference.loading.load` takes them."""
    tokens = known.kv_cache_tokens
    if known.engine not in ("auto", "native") and tokens is not None:
        raise ValueError(
            f"--kv_cache_tokens is for the native engine; --engine {known.engine} does not read it."
        )
    if (known.engine == "rollout_server") != (known.rollout_server_base_url is not None):
        raise ValueError(
            "--rollout_server_base_url and --engine rollout_server belong together: give both, or none."
        )
    return dict(
        engine=known.engine,
        dtype=known.dtype,
        trust_remote_code=known.trust_remote_code,
        use_cpu=known.use_cpu,
        max_num_seqs=known.max_num_seqs,
        kv_cache_tokens=tokens,
        vllm_max_model_length=known.max_model_len,
        rollout_server_base_url=known.rollout_server_base_url,
    )


def _engine(loaded: LoadedModel) -> RolloutEngine:
    """The engine that the configuration names; awake, and with the model's weights."""
    from colocate.run.engine import engine_of_auto
    from colocate.types import SamplingParams

    model, config = loaded.model, loaded.config
    if config.engine == "auto":
        config.engine, reason = engine_of_auto(model, use_vllm=False)
        if reason is not None:
            print(f"colocate serve: {reason}", flush=True)
    length = loaded.context_length
    if config.engine == "native" and config.kv_cache_tokens is None:
        config.kv_cache_tokens = max(KV_CACHE_TOKENS.get(loaded.accelerator.device.type, 2**15), length)
    engine = loaded.make_engine(SamplingParams(max_tokens=length, stop_token_ids=loaded.stop_token_ids))
    if not engine.shares_weights:
        engine.update_weights(0)
    return engine


def _max_len(engine: RolloutEngine, config: GRPOConfig) -> int:
    """Tokens that prompt and completion may have: the engine's context, or fewer if its cache is smaller."""
    from colocate.engines.native.engine import NativeEngine

    most = engine.max_len if config.vllm_max_model_length is None else config.vllm_max_model_length
    if isinstance(engine, NativeEngine):
        most = min(most, engine.num_cache_tokens + 1)  # the last token drawn has no key and value
    return min(most, engine.max_len)


def _say_who_may_use_it(key: ServerKey | None, host: str) -> None:
    if key is None:
        print(
            f"colocate serve: every user of this machine may use it; set {VARIABLE} to have a key", flush=True
        )
        return
    print(f"colocate serve: every request needs the key in {key.source} as API key", flush=True)
    if not is_loopback(host):
        print(
            f"colocate serve: {host} is reached from other machines, and nothing is encrypted: who reads the "
            "network reads the key. Where that matters put a proxy with TLS in front, or forward the port "
            "(ssh -L)",
            flush=True,
        )


def _await_signal() -> None:
    """Wait for SIGINT or SIGTERM."""
    with stop_event() as is_over:
        while not is_over.wait(1.0):
            pass
