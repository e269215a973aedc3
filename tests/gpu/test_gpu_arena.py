"""The arena and the KV cache in it on a real device."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import colocate
from colocate.engines.native.kv_cache import KVCache
from colocate.kernels.fp8 import int8
from colocate.memory.arena import HANDLE_BYTES, Arena, ArenaExhausted

pytestmark = pytest.mark.gpu

GIB = 2**30
DRIVER_BYTES = 128 * 2**20
"""More than the driver takes for itself: page tables of what is mapped, code of a kernel's first launch."""


@pytest.fixture
def device() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(1, device=device)
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return device


@pytest.fixture
def arena(device) -> Iterator[Arena]:
    """Reserves the device's whole memory."""
    arena = Arena(device, torch.cuda.get_device_properties(device).total_memory)
    yield arena
    arena.close()


def free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def train_a_little(device: torch.device) -> float:
    """Allocates, computes and frees as training does; the result is always the same."""
    x = torch.full((2048, 2048), 0.5, device=device, requires_grad=True)
    (x @ x).square().mean().backward()
    assert x.grad is not None
    return x.grad.sum().item()


def test_a_captured_graph_stays_right_while_its_memory_is_lent(device, arena):
    num_rows, size = 1024, 2 * GIB
    arena.resize(size)
    rows = arena.tensor((num_rows, size // 2 // num_rows), torch.bfloat16)
    sums = torch.zeros(num_rows, device=device)

    def work() -> None:
        torch.sum(rows, dim=1, dtype=torch.float32, out=sums)
        rows[-1].add_(1)

    rows.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    expected_training = train_a_little(device)
    for cycle, kept in enumerate((0, size // 2, 0, size)):
        arena.resize(kept)
        ballast = torch.full((size,), 7, dtype=torch.uint8, device=device)
        assert train_a_little(device) == expected_training
        del ballast
        arena.resize(size)
        rows.copy_(torch.arange(num_rows, device=device)[:, None] % 64 + cycle)
        graph.replay()
        expected = (torch.arange(num_rows, device=device) % 64 + cycle) * float(rows.shape[1])
        torch.testing.assert_close(sums, expected)
        assert (rows[-1] == (num_rows - 1) % 64 + cycle + 1).all() and (rows[-2] == 62 + cycle).all()


def test_most_of_the_device_comes_and_goes_in_a_moment_and_to_the_byte(device, arena):
    num_handles = int(0.7 * free_bytes(device)) // HANDLE_BYTES
    seen = []
    for _ in range(4):
        free = free_bytes(device)
        start = time.perf_counter()
        arena.resize(num_handles * HANDLE_BYTES)
        torch.cuda.synchronize()
        mapped = time.perf_counter()
        taken = free - free_bytes(device)
        assert arena.mapped_bytes == num_handles * HANDLE_BYTES
        assert arena.mapped_bytes <= taken <= arena.mapped_bytes + DRIVER_BYTES
        whole = arena.tensor((arena.mapped_bytes,), torch.uint8)
        whole[-1], whole[0] = 5, 6
        assert (whole[-1].item(), whole[0].item()) == (5, 6)
        unmapping = time.perf_counter()
        arena.resize(0)
        unmapped = time.perf_counter()
        seen.append(free_bytes(device))
        print(f"{num_handles / 4:.0f} GiB: map {mapped - start:.3f} s, unmap {unmapped - unmapping:.3f} s")
        assert mapped - start < 2 and unmapped - unmapping < 2
    assert len(set(seen)) == 1


def test_close_gives_back_every_byte(device):
    def cycle() -> int:
        arena = Arena(device, 64 * GIB)
        for gibibytes in (4, 1, 3):
            arena.resize(gibibytes * GIB)
        arena.tensor((GIB,), torch.bfloat16).fill_(1)
        arena.close()
        return free_bytes(device)

    after_first = cycle()
    assert [cycle() for _ in range(3)] == [after_first] * 3


def test_many_turns_leak_nothing(device, arena):
    seen = []
    for turn in range(60):
        arena.resize((1 + turn % 3) * GIB)
        arena.tensor((GIB // 2,), torch.bfloat16).fill_(turn)
        arena.resize(turn % 2 * HANDLE_BYTES)
        train_a_little(device)
        if turn >= 6 and turn % 2 == 0:
            seen.append((free_bytes(device), torch.cuda.memory_allocated(device)))
    assert len(set(seen)) == 1


def test_partial_release_keeps_what_stays(device, arena):
    arena.resize(2 * GIB)
    numbers = arena.tensor((2 * GIB // 8,), torch.int64)
    torch.arange(len(numbers), out=numbers)
    kept = 3 * HANDLE_BYTES
    arena.resize(kept - 100)
    assert arena.mapped_bytes == kept
    assert torch.equal(numbers[: kept // 8], torch.arange(kept // 8, device=device))
    arena.resize(2 * GIB)
    assert torch.equal(numbers[: kept // 8], torch.arange(kept // 8, device=device))


def test_running_out_is_an_exception_that_leaves_everything_usable(device, arena):
    arena.resize(HANDLE_BYTES)
    first = arena.tensor((HANDLE_BYTES // 4,), torch.float32)
    first.fill_(2.5)
    ballast = torch.ones(int(0.3 * free_bytes(device)), dtype=torch.uint8, device=device)
    free = free_bytes(device)
    with pytest.raises(ArenaExhausted, match="Set kv_cache_tokens or max_num_seqs lower") as caught:
        arena.resize(arena.capacity_bytes)
    assert (caught.value.mapped_bytes, arena.mapped_bytes) == (HANDLE_BYTES, HANDLE_BYTES)
    assert abs(caught.value.free_bytes - free) <= DRIVER_BYTES
    with pytest.raises(ArenaExhausted, match="and the arena reserves"):
        arena.resize(2 * arena.capacity_bytes)
    assert (first == 2.5).all() and ballast[-1].item() == 1
    train_a_little(device)
    # A smaller plan from the error's own numbers.
    arena.resize(caught.value.mapped_bytes + int(0.9 * caught.value.free_bytes))
    arena.tensor((arena.mapped_bytes,), torch.uint8)[-1] = 3
    assert (first == 2.5).all()


def test_blocks_that_pytorch_does_not_use_make_room(device, arena):
    free = free_bytes(device)
    unused = torch.empty(int(0.6 * free), dtype=torch.uint8, device=device)
    del unused
    assert torch.cuda.memory_reserved(device) >= int(0.6 * free)
    arena.resize(int(0.8 * free))
    assert torch.cuda.memory_reserved(device) < int(0.6 * free)


def test_one_per_device(device, arena):
    with pytest.raises(RuntimeError, match=f"{device} has an arena for its KV cache already"):
        Arena(device, GIB)
    arena.close()
    Arena(device, GIB).close()


def test_tensors_keep_the_arena_and_the_last_one_gives_it_back(device):
    free = free_bytes(device)
    arena = Arena(device, 4 * GIB)
    arena.resize(GIB)
    part = arena.tensor((1024,), torch.float32)[100:200]
    alive = weakref.ref(arena)
    del arena
    gc.collect()
    assert alive() is not None and part.fill_(3).sum().item() == 300
    del part
    gc.collect()
    assert alive() is None and free_bytes(device) >= free - DRIVER_BYTES


def test_another_thread_may_resize(device, arena):
    errors: list[BaseException] = []

    def resize() -> None:
        try:
            arena.resize(GIB)
            arena.tensor((GIB // 4,), torch.float32).fill_(1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=resize)
    thread.start()
    thread.join()
    assert not errors and arena.tensor((GIB // 4,), torch.float32).sum().item() == GIB // 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_cache_keeps_its_addresses_and_copies_pages(device, dtype):
    cache = KVCache(num_layers=4, num_kv_heads=2, head_dim=64, page_size=16, scratch_bytes=4096)
    try:
        cache.allocate(3000, dtype, device)
        addresses = [tensor.data_ptr() for i in range(4) for tensor in cache.layer(i)]
        assert cache.scratch.data_ptr() + 4096 == addresses[0]
        assert cache.layer(0)[0].stride(0) == cache.page_bytes(dtype) // dtype.itemsize
        for keep_bytes in (0, HANDLE_BYTES, 0):
            cache.free(keep_bytes)
            assert cache.num_bytes == min(keep_bytes, HANDLE_BYTES)
            cache.allocate(3000, dtype, device)
            assert [tensor.data_ptr() for i in range(4) for tensor in cache.layer(i)] == addresses
        for i in range(4):
            for tensor in cache.layer(i):
                tensor[:3000].normal_()
        before = [tensor[:3000].clone() for i in range(4) for tensor in cache.layer(i)]
        sources, destinations = list(range(0, 400)), list(range(2999, 2599, -1))
        cache.copy_pages(sources, destinations)
        after = [tensor[:3000] for i in range(4) for tensor in cache.layer(i)]
        for old, new in zip(before, after, strict=True):
            old[destinations] = old[sources]
            assert torch.equal(new, old)
    finally:
        cache.close()


def test_pages_in_8_bits_are_copied_with_their_scales(device):
    """One arena holds pages of either type in turn; those of the other type lose their names."""
    cache = KVCache(num_layers=4, num_kv_heads=2, head_dim=64, page_size=16, scratch_bytes=4096)
    try:
        cache.allocate(300, int8.DTYPE, device)
        assert cache.layer(0)[0].stride(0) == cache.page_bytes(int8.DTYPE) == 4 * 2 * 2 * 16 * 65
        for i in range(4):
            for tensor in cache.layer(i):
                tensor[:300].random_(0, 256)
                int8.scales_of(tensor)[:300].random_(0, 255)
        (page,) = cache.pool.allocate(1)
        cache.pool.name(page, b"name")
        cache.pool.release([page])
        before = cache.read_pages([page, 7])
        cache.copy_pages([page, 7], [299, 298])
        assert torch.equal(cache.read_pages([299, 298]), before)
        cache.allocate(2000, int8.DTYPE, device)
        assert cache.pool.find([b"name"]) == [page]
        assert torch.equal(cache.read_pages([page]), before[:1])
        cache.allocate(2000, torch.bfloat16, device)
        assert not cache.pool.has_names
        assert cache.layer(0)[0].dtype == torch.bfloat16
    finally:
        cache.close()


# ── In processes of their own ────────────────────────────────────────────────────────────────────────────

PRELUDE = """
import gc, os, torch
from colocate.memory.arena import Arena
GIB = 2**30
device = torch.device("cuda", 0)
arena = Arena(device, 8 * GIB)
arena.resize(2 * GIB)
kv = arena.tensor((GIB,), torch.bfloat16)
kv.fill_(1)
"""


def run_in_process(script: str, **environment: str) -> str:
    """Output of a script that must end well and without a word on standard error about a failure."""
    paths = [str(Path(colocate.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    for word in ("Traceback", "terminate", "Segmentation", "CUDA error"):
        assert word not in result.stderr, result.stderr
    return result.stdout


EXITS = {
    "mapped": "",
    "closed": "del kv; arena.close()",
    "collected": "del kv, arena; gc.collect()",
    "in a cycle": "cycle = [arena, kv]; cycle.append(cycle); del arena, kv",
    "with a kernel running": "torch.cuda._sleep(2_000_000_000); kv.add_(1)",
    "with a graph": """
        out = torch.zeros(1, device=device)
        out.copy_(kv[:8].float().sum())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out.copy_(kv[:8].float().sum())
        graph.replay()
    """,
    "resized at exit": """
        import atexit
        atexit.register(lambda: (arena.resize(4 * GIB), kv.fill_(2), arena.resize(0)))
    """,
    "from a fork": """
        child = os.fork()
        if child == 0:
            del kv, arena
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert kv[-1].item() == 1
    """,
}


@pytest.mark.parametrize("how", EXITS)
def test_a_process_exits_without_a_crash_and_the_memory_is_back(device, how):
    before = free_bytes(device)
    run_in_process(EXITS[how])
    deadline = time.monotonic() + 20  # the driver takes a moment to take a context down
    while free_bytes(device) < before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert free_bytes(device) >= before


LEND = """
print(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), os.environ.get("PYTORCH_ALLOC_CONF"))
for turn in range(3):
    arena.resize(turn * GIB // 2)
    sizes = [300 * 2**20, 700 * 2**20, 2**20]
    tensors = [torch.full((size,), turn, dtype=torch.uint8, device=device) for size in sizes]
    x = torch.ones(2048, 2048, device=device, requires_grad=True)
    (x @ x).sum().backward()
    assert all((tensor == turn).all() for tensor in tensors) and (x.grad == 4096).all()
    del tensors, x
    arena.resize(2 * GIB)
    kv.fill_(turn)
    assert (kv == turn).all()
free = torch.cuda.mem_get_info()[0]
unused = torch.empty(int(0.6 * free), dtype=torch.uint8, device=device)
del unused
del kv
arena.close()  # one per device
arena = Arena(device, 2 * free)
arena.resize(int(0.8 * free))
arena.tensor((arena.mapped_bytes,), torch.uint8)[-1] = 1
print("done")
"""


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_beside_expandable_segments(device, variable):
    assert "done" in run_in_process(LEND, **{variable: "expandable_segments:True"})


def test_beside_nccl(device, tmp_path):
    assert torch.distributed.is_nccl_available()
    script = f"""
        import torch.distributed as dist
        dist.init_process_group("nccl", init_method="file://{tmp_path}/store", rank=0, world_size=1)
        for turn in range(3):
            gradient = torch.full((2**20,), float(turn), device=device)
            dist.all_reduce(gradient)
            assert (gradient == turn).all()
            arena.resize(0)
            dist.all_reduce(gradient)
            arena.resize(2 * GIB)
            kv.fill_(turn)
            dist.all_reduce(kv[: 2**20])
            assert (kv == turn).all()
        torch.cuda.synchronize()
        dist.destroy_process_group()
        print("done")
    """
    assert "done" in run_in_process(script)
