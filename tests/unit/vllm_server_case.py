"""A real vLLM server for tests: the tiny model of `engine_models`, on the CPU or a GPU, started once."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from engine_models import MAX_POSITION, make_model

from colocate.engines.vllm.environment import installed_version
from colocate.http.key import key_file
from colocate.parallel.launching import free_port

START_S = 300.0
"""Within which a server of a tiny model is up, even where two cores are shared."""

TINY = (
    *("--enforce-eager", "--max-num-seqs", "8", "--max-num-batched-tokens", "1024"),
    *("--block-size", "32"),  # the prefix cache has whole blocks, of which a context has a few so
    *("--gpu-memory-utilization", "0.2"),
)
"""vLLM's options for a tiny model."""
TINY_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Two test processes' threads would wait for each other on few cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # The worker is in the engine's process, as on one GPU; to import vLLM for one more takes ten seconds.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def make_server_model() -> Any:
    """The model that `ServerProcess` serves by default; its head size is one that vLLM's attention takes."""
    return make_model("qwen3", hidden_size=64, head_dim=32)


def as_vllm(directory: Path) -> dict[str, str]:
    """An environment in which `vllm serve` starts, and not only the module that it runs.

    The distribution for CPUs is named vllm-cpu, and the command looks for one named vllm.
    """
    version = f"{installed_version()}+cpu"
    information = directory / f"vllm-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


class ServerProcess:
    """`colocate vllm-serve` in a process group of its own.

    Args:
        options: vLLM's, beside those for a tiny model; they win.
        environment: variables beside this process's.
    """

    def __init__(
        self,
        directory: Path,
        port: int | None = None,
        options: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.options, self.environment = options, environment
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"server-{self.port}-{time.monotonic_ns()}.log"
        command = [
            *(sys.executable, "-m", "colocate", "vllm-serve", str(directory)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--"),
            *("--dtype", "float32", "--max-model-len", str(MAX_POSITION), *TINY, *options),
        ]
        variables = {**os.environ, **TINY_VARIABLES, **(environment or {})}
        variables.pop("TRITON_INTERPRET", None)
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-6000:]}"
            try:
                with urllib.request.urlopen(f"{self.base_url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-6000:]}")

    def descendants(self) -> list[psutil.Process]:
        """vLLM's own processes."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """End everything at once, as a machine that goes down does."""
        descendants = self.descendants()
        kill_all(descendants)
        self.process.kill()
        self.process.wait()
        psutil.wait_procs(descendants, timeout=120)  # the port is free only then

    def stop(self) -> int:
        """End it as Ctrl-C does; returns the exit code."""
        descendants = self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(200)
        finally:
            kill_all(descendants)
            key_file(socket.gethostname(), self.port).unlink(missing_ok=True)


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def shared_server(number: int = 0) -> ServerProcess:
    """A server for a whole test session, of weights that nobody trains: each engine sends its own."""
    return _started(number)


@functools.cache
def _started(number: int) -> ServerProcess:
    directory = Path(tempfile.mkdtemp(prefix="vllm-server-"))
    make_server_model().save_pretrained(directory)
    server = ServerProcess(directory)
    atexit.register(server.stop)
    server.wait_until_ready()
    return server


def make_server_engine(model: Any) -> Any:
    """For the contract suite: an engine of the shared server, to which it sends `model`'s weights."""
    from colocate.rollout_server.trainer.engine import RolloutServerEngine

    return RolloutServerEngine(model, base_url=shared_server().base_url)


def make_server_pool(model: Any) -> Any:
    """For the contract suite: a pool of two servers' engines."""
    from colocate.rollout_server.trainer.engine import RolloutServerEngine
    from colocate.rollout_server.trainer.pool import EnginePool
    from colocate.rollout_server.trainer.watch import timeouts_among

    timeouts = timeouts_among(2)
    engines = [
        RolloutServerEngine(model, base_url=shared_server(number).base_url, run_id="run", timeouts=timeouts)
        for number in range(2)
    ]
    return EnginePool(engines)
