"""`colocate vllm-serve`: a vLLM server for trainers elsewhere."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    summary = "run a vLLM server for trainers elsewhere (engine=vllm_server)"
    command = commands.add_parser(
        "vllm-serve",
        help=summary,
        description=summary,
        usage="colocate vllm-serve MODEL [--host HOST] [--port PORT] [--tensor-parallel-size N] "
        "[-- VLLM_OPTIONS]",
        allow_abbrev=False,
    )
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.add_argument("model", help="the model that is trained: its name on the Hub, or its directory")
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, for this machine alone; 0.0.0.0: any)",
    )
    command.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    command.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model")


def run(known: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from colocate.engines.vllm_server.serve import serve

    return serve(
        known.model,
        host=known.host,
        port=known.port,
        tensor_parallel_size=known.tensor_parallel_size,
        vllm_options=known.vllm_options,
    )
