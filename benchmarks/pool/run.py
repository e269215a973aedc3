"""Rollouts over three stand-ins of vLLM's server: what the pool costs, and how soon it is over a loss."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common.results import Record, origin
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.rollout_server.trainer.pool import EnginePool
from colocate.rollout_server.trainer.watch import timeouts_among
from colocate.rollout_server.wire.weight_wire import SHAPE
from colocate.types import Prompt, SamplingParams

NUM_SERVERS = 3
NUM_REQUESTS = 512
SLOTS = 64
"""Requests that a server decodes at a time."""
SECONDS = 0.5
"""Seconds of a request once it is decoded."""
PROMPT_TOKENS, NEW_TOKENS = 256, 256
IDEAL_S = math.ceil(NUM_REQUESTS / (NUM_SERVERS * SLOTS)) * SECONDS


def make_model() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=False,
        )
    )  # fmt: skip


@contextmanager
def stand_ins(model: Any, directory: Path) -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    """Processes and addresses of servers; they end with the block."""
    shape = {name: getattr(model.config, name, None) for name in SHAPE}
    about = directory / "about.json"
    names = [name for name, _ in model.named_parameters()]
    about.write_text(json.dumps({"shape": shape, "names": names, "max_len": 2048}))
    words = ["-m", "benchmarks.pool.stand_in", "--about", str(about)]
    words += ["--slots", str(SLOTS), "--seconds", str(SECONDS)]
    found: list[tuple[subprocess.Popen[str], str]] = []
    try:
        for _ in range(NUM_SERVERS):
            process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
            found.append((process, ""))
        for number, (process, _) in enumerate(found):
            assert process.stdout is not None
            found[number] = process, f"http://127.0.0.1:{process.stdout.readline().strip()}"
        yield found
    finally:
        for process, _ in found:
            process.kill()
            process.wait()


@contextmanager
def pool_of(model: Any, addresses: list[str]) -> Iterator[EnginePool]:
    timeouts = timeouts_among(len(addresses))
    engines = [RolloutServerEngine(model, base_url=url, run_id="run", timeouts=timeouts) for url in addresses]
    pool = EnginePool(engines)
    pool.wake_up()
    pool.update_weights(1)
    try:
        yield pool
    finally:
        pool.close()


def requests() -> list[Prompt]:
    return [Prompt(tuple(range(PROMPT_TOKENS)), key) for key in range(NUM_REQUESTS)]


def whole_rollout(pool: EnginePool) -> dict[str, float]:
    """Wall time of a rollout, and what it cost this process."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    completions = pool.generate(requests(), SamplingParams(NEW_TOKENS))
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    assert len(completions) == NUM_REQUESTS
    return {"wall_s": wall_s, "client_ms": 1000 * cpu_s / NUM_REQUESTS}


def rollout_with_a_loss(pool: EnginePool, process: subprocess.Popen[str]) -> dict[str, float]:
    """A server is killed in the middle: seconds until all that it drew is on its way elsewhere."""
    numbers = pool.submit(requests(), SamplingParams(NEW_TOKENS))
    found, begin_s = set(pool.poll()), time.perf_counter()
    killed_s = failover_s = 0.0
    while pool.is_busy:
        found |= set(pool.poll())
        if not killed_s and time.perf_counter() - begin_s > IDEAL_S / 3:
            process.kill()
            killed_s = time.perf_counter()
        elif killed_s and not failover_s and len(pool._present) < NUM_SERVERS:
            found |= set(pool.poll())  # it places what was lost
            failover_s = time.perf_counter() - killed_s
    assert found == set(numbers)
    return {"failover_s": failover_s, "wall_s": time.perf_counter() - begin_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ["COLOCATE_SERVER_KEY"] = "the-key-of-servers-that-are-none"
    record: Record = {"kind": "requests", **origin(), "rollouts": [], "losses": []}
    model = make_model()
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(options.repetitions):
            with ExitStack() as stack:
                servers = stack.enter_context(stand_ins(model, Path(directory)))
                pool = stack.enter_context(pool_of(model, [url for _, url in servers]))
                whole_rollout(pool)  # makes connections and threads
                # Else now and then a rollout pays for a look at all objects of the libraries: 0.35 s.
                gc.collect()
                gc.freeze()
                record["rollouts"].append(whole_rollout(pool))
                record["losses"].append(rollout_with_a_loss(pool, servers[1][0]))
                print(record["rollouts"][-1], record["losses"][-1], flush=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
