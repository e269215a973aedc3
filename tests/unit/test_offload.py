"""Tensors on the host and back: the same objects with the same bits, or a refusal that moved nothing."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.memory import host, offload
from colocate.memory.offload import HostStore

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    """So that tensors cross from one slab to the next."""
    monkeypatch.setattr(offload, "SLAB_BYTES", 4096)
    monkeypatch.setattr(offload, "_SMALLEST_SLAB_BYTES", 512)


def device_bytes(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def random_tensor(size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).clone()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(DTYPES)), min_size=1, max_size=8))
def test_every_bit_comes_back_into_the_same_tensors(shapes):
    tensors = [random_tensor(size, dtype, i) for i, (size, dtype) in enumerate(shapes)]
    parameter = torch.nn.Parameter(torch.randn(10, 7).t())
    tensors.append(parameter)
    store = HostStore("cpu")
    for round_trip in range(2):
        before = [tensor.detach().clone() for tensor in tensors]
        size_bytes = device_bytes(tensors)
        store.offload(tensors)
        assert device_bytes(tensors) == 0 and store.num_bytes == size_bytes
        parameter.grad = torch.ones_like(parameter)  # a backward pass goes on meanwhile
        if round_trip:
            store.prefetch()
        store.fetch()
        assert store.num_bytes == 0
        for tensor, want in zip(tensors, before, strict=True):
            assert torch.equal(tensor.detach().contiguous().view(-1).view(torch.uint8),
                               want.contiguous().view(-1).view(torch.uint8))  # fmt: skip
        with torch.no_grad():
            parameter += 1  # what went out the second time is not what went out the first time
    assert parameter.stride() == (1, 7) and torch.equal(parameter.grad, torch.ones(7, 10))


def test_host_memory_is_kept_and_grows_by_what_is_missing():
    store = HostStore("cpu")
    tensors = [torch.randn(1000) for _ in range(3)]
    store.offload(tensors[:2])
    first_bytes = store.reserved_bytes
    assert 8000 <= first_bytes <= 8000 + 2 * 512
    store.fetch()
    store.offload(tensors[:2])
    store.fetch()
    assert store.reserved_bytes == first_bytes
    store.offload(tensors)
    assert 12000 <= store.reserved_bytes <= 12000 + 4096
    held = [slab.data_ptr() for slab in store._slabs]
    store.offload(tensors)  # away already
    assert [slab.data_ptr() for slab in store._slabs] == held
    store.fetch()
    assert device_bytes(tensors) == 12000


def test_storages_shared_within_move_once():
    whole = torch.randn(400)
    first, second = whole[:100], whole[100:]
    store = HostStore("cpu")
    want = whole.clone()
    store.offload([first, second])
    assert store.num_bytes == 1600
    store.fetch()
    assert torch.equal(whole, want) and torch.equal(second, want[100:])


def test_what_others_hold_is_refused_and_nothing_moves(tmp_path):
    store, alone, shared = HostStore("cpu"), torch.randn(100), torch.randn(100)
    with pytest.raises(ValueError, match="shares its memory with one that is in use"):
        store.offload([alone, shared], in_use=[shared[:10]])
    with pytest.raises(ValueError, match="40 of a storage's 400 bytes"):
        store.offload([alone, shared[:10]])
    mapped = torch.from_file(str(tmp_path / "file"), shared=True, size=100)
    with pytest.raises(ValueError, match=r"not PyTorch's own.*Set offload_optimizer=False"):
        store.offload([alone, mapped])
    assert device_bytes([alone]) == 400 and store.reserved_bytes == 0


def test_too_little_host_memory_is_said_with_the_arithmetic(monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 6000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    store, small = HostStore("cpu"), torch.randn(500)
    store.offload([small])  # 2 × 2,048 bytes
    store.fetch()
    monkeypatch.setattr(offload, "SLAB_BYTES", 2**30)
    with pytest.raises(MemoryError, match=r"2 process\(es\) × .* GiB = .*offload_optimizer=False"):
        store.offload([small, torch.randn(3000)])
    assert device_bytes([small]) == 2000 and store.num_bytes == 0


def test_a_device_too_full_to_fetch_leaves_everything_away(monkeypatch):
    class Storage:
        """Of a device with 100 bytes left."""

        free_bytes = 100

        def __init__(self, size_bytes):
            self.inner = torch.ones(size_bytes, dtype=torch.uint8).untyped_storage()

        def resize_(self, size_bytes):
            needed = size_bytes - self.inner.nbytes()
            if needed > Storage.free_bytes:
                raise torch.OutOfMemoryError("injected")
            Storage.free_bytes -= needed
            self.inner.resize_(size_bytes)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    storages = [Storage(80), Storage(80)]
    store = HostStore("cpu")
    moved = [offload._Moved(s, [torch.full((80,), i, dtype=torch.uint8)]) for i, s in enumerate(storages)]
    for one in moved:
        one.storage.inner.resize_(0)
    store._away = moved
    monkeypatch.setattr(offload._Moved, "parts", lambda self: [
        (torch.empty(0, dtype=torch.uint8).set_(self.storage.inner), self.host_parts[0])
    ])  # fmt: skip
    with pytest.raises(torch.OutOfMemoryError):
        store.prefetch()
    assert Storage.free_bytes == 100 and store.num_bytes == 160
    Storage.free_bytes = 160
    store.fetch()
    assert store.num_bytes == 0
    assert [bytes(s.inner.tolist()) for s in storages] == [bytes(80), b"\x01" * 80]


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({}, 1000, 500),
        ({"memory.max": "max"}, 1000, 500),
        ({"memory.max": "800", "memory.current": "700",
          "memory.stat": "anon 600\ninactive_file 60\nactive_file 20"}, 800, 180),
        ({"memory.max": "10000", "memory.current": "9000", "memory.stat": "anon 600"}, 1000, 500),
        ({"memory.max": "800", "memory.current": "900"}, 800, 0),
    ],
)  # fmt: skip
def test_the_containers_limit_counts(monkeypatch, tmp_path, files, limit, available):
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    memory = SimpleNamespace(total=1000, available=500)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: memory)
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert host.limit_bytes() == limit and host.available_bytes() == available
