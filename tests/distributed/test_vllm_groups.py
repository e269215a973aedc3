"""Two processes over gloo that share an engine: unequal requests, none at all, and errors."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from colocate.engines.vllm.groups import TensorParallelGroup
from colocate.parallel.launching import free_port
from processes import FORKS


def _worker(
    rank: int, port: int, world_size: int, size: int, requests: list[list[str]], results: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    calls: list[list[str]] = []

    def generate(everything: list[str]) -> list[str]:
        calls.append(everything)
        return [request.upper() for request in everything]

    group = TensorParallelGroup(size)
    error = ValueError("prompt 5 is empty") if "bad" in requests[rank] else None
    try:
        mine = group.run(requests[rank], generate, error=error)
    except ValueError as refused:
        mine = str(refused)
    results.put((rank, group.index, mine, calls))
    dist.barrier()
    dist.destroy_process_group()


def run(requests: list[list[str]], size: int) -> list[tuple[int, Any, list[list[str]]]]:
    port = free_port()
    results = FORKS.Queue()
    processes = [
        FORKS.Process(target=_worker, args=(rank, port, len(requests), size, requests, results), daemon=True)
        for rank in range(len(requests))
    ]
    for process in processes:
        process.start()
    try:
        gathered = sorted(results.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()
    return [(index, mine, calls) for _, index, mine, calls in gathered]


@pytest.mark.parametrize("requests", [[["a", "b"], ["c"]], [[], ["c", "d", "e"]], [["a"], []]])
def test_each_rank_gets_what_it_asked_for(requests):
    everything = requests[0] + requests[1]
    for rank, (index, mine, calls) in enumerate(run(requests, 2)):
        assert (index, mine) == (0, [request.upper() for request in requests[rank]])
        assert calls == [everything], "both must give their vLLM the same requests in the same order"


def test_nothing_asked_by_anyone_starts_nothing():
    assert run([[], []], 2) == [(0, [], []), (0, [], [])]


def test_groups_of_one_do_not_wait_for_each_other():
    assert run([["a"], ["b"]], 1) == [(0, ["A"], [["a"]]), (1, ["B"], [["b"]])]


def test_one_ranks_error_ends_the_wait_of_all():
    first, second = run([["a"], ["bad"]], 2)
    assert first == (0, "Rank 1 of this group: prompt 5 is empty", [])
    assert second == (0, "prompt 5 is empty", [])
