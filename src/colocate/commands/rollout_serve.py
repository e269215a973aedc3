"""`colocate rollout-serve`: a server that generates for remote trainers, with their weights.

colocate rollout-serve MODEL                              the native engine
colocate rollout-serve MODEL --engine vllm -- OPTIONS     vLLM, with its own options; also `vllm-serve`
"""

from __future__ import annotations

import argparse
from typing import Any

from colocate.commands.arguments import add_command
from colocate.options.requirements import AT_LEAST_ONE, check_range

SUMMARY = "run a server that completes a trainer's prompts with the trainer's weights (engine=rollout_server)"
ENGINES = ("native", "vllm")
_NATIVE_ONLY = {
    "dtype": "--dtype",
    "revision": "--revision",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "kv_cache_tokens": "--kv-cache-memory-bytes",
    "enable_sleep_mode": "--enable-sleep-mode",
    "trust_remote_code": "--trust-remote-code",
    "use_cpu": None,
}
"""The native engine's options, and the names of the same options of vLLM; None: it has no such option."""


def add_parser(commands: Any) -> None:
    """Add the command, and its older name, to the command line."""
    _add_parser(commands, "rollout-serve", SUMMARY, "native")
    _add_parser(commands, "vllm-serve", "the same as rollout-serve --engine vllm", "vllm")


def _add_parser(commands: Any, name: str, summary: str, engine: str) -> None:
    command = add_command(commands, name, "MODEL [options] [-- VLLM_OPTIONS]", summary)
    add = command.add_argument
    add("model", help="the model that is trained: its name on the Hub, or its directory")
    add("--engine", choices=ENGINES, default=engine, help="what generates (default: %(default)s)")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, for this machine alone; 0.0.0.0: any)",
    )
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add(
        *("--tensor-parallel-size", "--tensor_parallel_size"), type=int, default=1,
        help="GPUs that share the model, with vLLM",
    )  # fmt: skip
    native = command.add_argument_group("the native engine", "vLLM's options follow a --")
    add = native.add_argument
    add("--dtype", help="bfloat16, float16 or float32 (default: bfloat16 on a GPU, float32 on a CPU)")
    add("--revision", help="branch, tag or commit of the model on the Hub")
    add(
        "--max_model_len",
        "--max-model-len",
        type=int,
        help="tokens of prompt and completion (default: the model's)",
    )
    add(
        *("--max_num_seqs", "--max-num-seqs"), type=int,
        help="sequences that decode at the same time (default: the engine's)",
    )  # fmt: skip
    add("--kv_cache_tokens", type=int, help="tokens that it has memory for (default: what requests can use)")
    add(
        *("--enable_sleep_mode", "--enable-sleep-mode"), action="store_true",
        help="take turns with a trainer on the same GPU",
    )  # fmt: skip
    add(
        *("--trust_remote_code", "--trust-remote-code"), action="store_true",
        help="run code that comes with the model",
    )  # fmt: skip
    add("--use_cpu", action="store_true", help="use no GPU")


def run(known: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    return _serve_vllm(known) if known.engine == "vllm" else _serve_native(known)


def _serve_vllm(known: argparse.Namespace) -> int:
    for name, of_vllm in _NATIVE_ONLY.items():
        if getattr(known, name) not in (None, False):
            instead = "and vLLM has no such option" if of_vllm is None else f"give `-- {of_vllm}` for vLLM"
            raise ValueError(f"--{name} is for the native engine; {instead}.")

    from colocate.rollout_server.vllm.serve import serve

    return serve(
        known.model,
        host=known.host,
        port=known.port,
        tensor_parallel_size=known.tensor_parallel_size,
        vllm_options=known.vllm_options,
    )


def _serve_native(known: argparse.Namespace) -> int:
    if known.vllm_options:
        raise ValueError(
            f"`-- {' '.join(known.vllm_options[:1])}` is for vLLM, and the native engine was asked for: set "
            "--engine vllm, or leave out what follows the --."
        )
    if known.tensor_parallel_size != 1:
        raise ValueError(
            f"--tensor-parallel-size={known.tensor_parallel_size} needs --engine vllm: a native server has "
            "its whole model on one GPU. For more GPUs start a server on each, and name all of them in "
            "rollout_server_base_url."
        )
    for name in ("max_model_len", "max_num_seqs", "kv_cache_tokens"):
        check_range(f"--{name}", getattr(known, name), AT_LEAST_ONE)

    from colocate.serving.installed import check_installed

    check_installed("colocate rollout-serve")

    from colocate.rollout_server.native.serve import ServedOptions, serve

    options = ServedOptions(
        dtype=known.dtype or "auto",
        revision=known.revision,
        max_model_len=known.max_model_len,
        max_num_seqs=known.max_num_seqs,
        kv_cache_tokens=known.kv_cache_tokens,
        can_sleep=known.enable_sleep_mode,
        trust_remote_code=known.trust_remote_code,
        use_cpu=known.use_cpu,
    )
    return serve(known.model, host=known.host, port=known.port, options=options)
