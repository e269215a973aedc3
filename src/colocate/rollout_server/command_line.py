"""The command line of a rollout server that is started with a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocate.options.values import coerce
from colocate.parallel.ray_cluster import ClusterRequest

MEMORY_SHARE = 0.4
"""Share of a trainer's GPU that a colocated server of vLLM takes while awake, unless vLLM's options say."""


def serve_command(ask: ClusterRequest, values: Mapping[str, Any], host: str, port: int) -> list[str]:
    """Arguments of `colocate` for a server that is started with a run.

    vLLM loads no weights: those of the trainer come before the first request.

    Args:
        ask: the resources that the run asks of its cluster.
        values: the run's options.
    """
    bf16 = coerce("bf16", values.get("bf16"), bool | None)
    dtype = "bfloat16" if (ask.on_gpus if bf16 is None else bf16) else values.get("dtype") or "float32"
    options = ["--dtype", str(dtype)]
    for name, option in (("model_revision", "--revision"), ("vllm_max_model_length", "--max-model-len")):
        options += [option, str(values[name])] if values.get(name) is not None else []
    if coerce("trust_remote_code", values.get("trust_remote_code"), bool | None):
        options.append("--trust-remote-code")
    takes_turns = ask.is_colocated and ask.on_gpus
    options += ["--enable-sleep-mode"] if takes_turns else []
    command = ["rollout-serve", str(values["model_name_or_path"]), "--engine", ask.replica_engine]
    command += ["--host", host, "--port", str(port)]
    if ask.replica_engine == "native":
        return [*command, *options, *([] if ask.on_gpus else ["--use_cpu"])]
    command += ["--tensor-parallel-size", str(ask.replica_size if ask.on_gpus else 1)]
    share = ["--gpu-memory-utilization", str(MEMORY_SHARE)] if takes_turns else []
    return [*command, "--", "--load-format", "dummy", *options, *share, *ask.vllm_options]
