"""The optimizer's memory on CUDA: free while it is on the host, back bit for bit, never short in a step."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_optimizer import assert_equal, bits
from torch import nn
from transformers import TrainingArguments
from transformers.utils import is_bitsandbytes_available

from colocate.memory.offload import HostStore
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from tiny import make_trainer

pytestmark = pytest.mark.gpu

OPTIMIZERS = [
    "adamw_torch_fused",
    "adamw_torch",
    "sgd",
    pytest.param(
        "adamw_bnb_8bit",
        marks=pytest.mark.skipif(not is_bitsandbytes_available(), reason="bitsandbytes is not installed"),
    ),
]
SIZE = 2048
NUM_LAYERS = 6
MIB = 2**20


@pytest.fixture(autouse=True)
def own_memory() -> Iterator[None]:
    # Whatever earlier tests left in a large segment keeps it, and this test's tensors may lie beside it.
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def make(tmp_path: Path, optim: str) -> tuple[nn.Module, PolicyOptimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(SIZE, SIZE) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    args = TrainingArguments(
        output_dir=str(tmp_path), optim=optim, learning_rate=1e-3, weight_decay=0.1, report_to=[],
        lr_scheduler_type="constant",
    )  # fmt: skip
    return model, PolicyOptimizer(model, args, 10)


def backward(model: nn.Module, step: int, optimizer: PolicyOptimizer) -> None:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(64, SIZE, generator=generator).to("cuda", torch.bfloat16)
    with optimizer.collecting_gradients():
        model(inputs).float().pow(2).mean().backward()


def used_bytes() -> int:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_driver_gets_the_memory_of_masters_and_moments(tmp_path, optim):
    model, optimizer = make(tmp_path, optim)
    backward(model, 0, optimizer)
    optimizer.step()
    before, resident_bytes = bits(optimizer), optimizer.num_bytes
    used, allocated = used_bytes(), torch.cuda.memory_allocated()
    optimizer.offload()
    freed_bytes = resident_bytes - optimizer.num_bytes
    # What stays are step counters and 8-bit Adam's tables.
    assert 0 <= resident_bytes - freed_bytes < MIB
    assert allocated - torch.cuda.memory_allocated() == pytest.approx(freed_bytes, abs=MIB)
    # PyTorch's segments hold small tensors, too, and stay when one of them does.
    assert used - used_bytes() > 0.8 * freed_bytes
    # Others write to that memory meanwhile.
    scratch = torch.full((freed_bytes,), 255, dtype=torch.uint8, device="cuda")
    del scratch
    optimizer.prefetch()
    optimizer._host.fetch()
    assert optimizer.num_bytes == resident_bytes
    assert_equal(bits(optimizer), before)


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_five_steps_are_the_same_bits_with_and_without(tmp_path, optim):
    kept, kept_optimizer = make(tmp_path, optim)
    moved, moved_optimizer = make(tmp_path, optim)
    for step in range(5):
        moved_optimizer.offload()
        if step != 3:
            moved_optimizer.prefetch()  # beside forward and backward; else within the step
        backward(moved, step, moved_optimizer)
        moved_optimizer.step()
        backward(kept, step, kept_optimizer)
        kept_optimizer.step()
    assert_equal(bits(moved_optimizer), bits(kept_optimizer))


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_a_step_allocates_nothing_once_the_state_exists(tmp_path, optim):
    model, optimizer = make(tmp_path, optim)
    for step in range(2):
        backward(model, step, optimizer)
        optimizer.step()
    backward(model, 2, optimizer)
    torch.cuda.synchronize()
    count = torch.cuda.memory_stats()["allocation.all.allocated"]
    optimizer.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == count


def limit_to(num_bytes: int) -> None:
    """No more memory for PyTorch than what is allocated now and `num_bytes`."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)


@pytest.mark.parametrize("optim", [name for name in OPTIMIZERS if name != "sgd"])
def test_running_out_of_memory_for_the_state_changes_nothing(tmp_path, optim):
    model, optimizer = make(tmp_path, optim)
    backward(model, 0, optimizer)
    optimizer.step()
    want = bits(optimizer)
    del model, optimizer
    model, optimizer = make(tmp_path, optim)
    backward(model, 0, optimizer)
    before = bits(optimizer)
    limit_to(2 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert_equal(bits(optimizer), before)
    torch.cuda.set_per_process_memory_fraction(1.0)
    optimizer.step()
    assert_equal(bits(optimizer), want)


def test_running_out_of_memory_for_the_way_back_changes_nothing(tmp_path):
    model, optimizer = make(tmp_path, "adamw_torch_fused")
    backward(model, 0, optimizer)
    optimizer.step()
    before, resident_bytes = bits(optimizer), optimizer.num_bytes
    optimizer.offload()
    limit_to(resident_bytes // 2)
    optimizer.prefetch()
    assert optimizer.num_bytes < MIB
    with pytest.raises(torch.OutOfMemoryError):
        optimizer._host.fetch()
    assert optimizer.num_bytes < MIB
    torch.cuda.set_per_process_memory_fraction(1.0)
    optimizer._host.fetch()
    assert_equal(bits(optimizer), before)


def test_time_of_18_gigabytes():
    """What 1.5 billion parameters have in masters and moments. Asserts the bits, prints the time."""
    tensors = [torch.randint(2**31, (64 * MIB,), dtype=torch.int32, device="cuda") for _ in range(67)]
    sums = [tensor.sum() for tensor in tensors]
    gigabytes = sum(tensor.nbytes for tensor in tensors) / 1e9
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    store = HostStore("cuda")

    def timed(work) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def products() -> None:
        for _ in range(400):  # about half a second
            torch.mm(a, a)

    products()
    alone_s = timed(products)
    for name in ("first, with pinning", "second", "third"):
        offload_s = timed(lambda: store.offload(tensors))
        print(f"\n{gigabytes:.1f} GB offload {name}: {offload_s:.3f} s, {gigabytes / offload_s:.1f} GB/s")
        fetch_s = timed(store.fetch)
        print(f"{gigabytes:.1f} GB back: {fetch_s:.3f} s, {gigabytes / fetch_s:.1f} GB/s")
    store.offload(tensors)
    torch.cuda.synchronize()
    start = time.perf_counter()
    store.prefetch()
    launch_s = time.perf_counter() - start

    def both() -> None:
        products()
        store.fetch()

    print(
        f"prefetch returns after {launch_s * 1e3:.1f} ms; products alone {alone_s:.3f} s, beside the copy "
        f"{timed(both):.3f} s; host memory held {store.reserved_bytes / 1e9:.1f} GB"
    )
    assert all(torch.equal(tensor.sum(), want) for tensor, want in zip(tensors, sums, strict=True))


def test_the_trainer_rolls_out_without_the_optimizers_state(tmp_path):
    trainer = make_trainer(
        tmp_path, use_cpu=False, bf16=True, max_steps=4, gradient_checkpointing=False, offload_optimizer=True
    )
    trainer.train()
    trainer.engine.close()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    for step in steps[1:]:
        assert step["phases"]["offload"] > 0
        spans = {span["phase"]: span for span in step["memory"]["spans"]}
        away, there = (spans[name]["categories"]["optimizer"] for name in ("rollout", "train"))
        assert away < there / 2
