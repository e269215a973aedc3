"""A vLLM server for the benchmarks, for as long as a block lasts."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from colocate.parallel.launching import free_port

START_S = 420.0
STOP_S = 60.0


@contextmanager
def vllm_server(
    directory: Path, *vllm_options: str, gpu: str, log: Path, environment: Mapping[str, str]
) -> Iterator[str]:
    """The address of `colocate vllm-serve` with the model of a directory.

    Args:
        vllm_options: more of vLLM's.
        gpu: which one, as CUDA_VISIBLE_DEVICES names it.
        log: where its output goes.

    Raises:
        RuntimeError: it ended, or does not answer within `START_S`.
    """
    port = free_port()
    words = ["-m", "colocate", "vllm-serve", str(directory), "--host", "127.0.0.1", "--port", str(port)]
    # Its CPU build reads the size of the KV cache here, and would else take most of the machine's memory.
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **environment, "CUDA_VISIBLE_DEVICES": gpu}
    print("colocate", *words[2:], "--", *vllm_options, flush=True)
    start_s = time.perf_counter()
    with (
        log.open("w") as output,
        subprocess.Popen(
            [sys.executable, *words, "--", *vllm_options],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            _await(process, url, log)
            print(f"  ready after {time.perf_counter() - start_s:.1f} s", flush=True)
            yield url
        finally:
            process.terminate()  # it ends vLLM
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.perf_counter() + START_S
    while process.poll() is None and time.perf_counter() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    state = "does not answer" if process.poll() is None else f"ended ({process.returncode})"
    raise RuntimeError(f"The server {state}, see {log}:\n{log.read_text()[-3000:]}")
