"""The arena's bookkeeping on a pretended device, and the KV cache in it. On a real one: tests/gpu."""

from __future__ import annotations

import pytest
import torch
from engine_models import greedy_references, make_model, make_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colocate.engines.native import capacity
from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.kv_cache import KVCache
from colocate.memory.arena import Arena, ArenaExhausted, _OutOfDeviceMemory
from colocate.types import SamplingParams

DEVICE = torch.device("cuda", 0)
GRANULARITY = 16
HANDLE = 64
POISON = 0xFF  # as float32: NaN


class PretendedDevice:
    """A driver with `total` bytes, some of them in PyTorch's cache, that refuses what CUDA would refuse."""

    def __init__(self, total: int, cached: int = 0, overhead: int = 0) -> None:
        self.total, self.cached, self.overhead = total, cached, overhead
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.reserved: tuple[int, int] | None = None
        self.is_synchronized = False
        self.num_emptied = 0

    def granularity(self):
        return GRANULARITY

    def reserve(self, num_bytes, alignment):
        assert self.reserved is None and num_bytes % alignment == 0
        self.reserved = (10 * alignment, num_bytes)
        with torch.inference_mode(False):
            self.memory = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        return self.reserved[0]

    def free_addresses(self, address, num_bytes):
        assert not self.mapped and self.reserved == (address, num_bytes)
        self.reserved = None

    def map(self, address, num_bytes):
        start, size = self.reserved
        assert start <= address and address + num_bytes <= start + size
        assert address not in self.mapped and num_bytes % GRANULARITY == 0
        if num_bytes > self.free_bytes():
            raise _OutOfDeviceMemory("cuMemCreate")
        self.mapped[address] = num_bytes
        self._poison(address, num_bytes)

    def set_access(self, address, num_bytes):
        parts = [a for a in self.mapped if address <= a < address + num_bytes]
        assert sum(self.mapped[a] for a in parts) == num_bytes, "access to what is not mapped"
        if self.free_bytes() < self.overhead:  # page tables
            raise _OutOfDeviceMemory("cuMemSetAccess")
        self.accessible |= set(parts)

    def unmap(self, address, num_bytes):
        assert self.is_synchronized, "unmapped under a kernel that may still run"
        assert self.mapped.pop(address) == num_bytes
        self.accessible.discard(address)
        self._poison(address, num_bytes)

    def synchronize(self):
        self.is_synchronized = True

    def empty_cache(self):
        self.cached = 0
        self.num_emptied += 1

    def free_bytes(self):
        return self.total - self.cached - sum(self.mapped.values())

    def allocated_bytes(self):
        return 0

    def tensor(self, address, num_bytes, owner):
        assert (address, num_bytes) == self.reserved
        return self.memory

    def _poison(self, address, num_bytes):
        start = address - self.reserved[0]
        self.memory[start : start + num_bytes] = POISON


@pytest.fixture
def device():
    return PretendedDevice(total=20 * HANDLE)


@pytest.fixture
def arena(device):
    arena = Arena(DEVICE, 16 * HANDLE, HANDLE, driver=device)
    yield arena
    arena.close()


def handles_for(num_bytes: int) -> int:
    return -(-num_bytes // HANDLE)


class ArenaMachine(RuleBasedStateMachine):
    """Any order of growing, shrinking, writing, closing and of PyTorch taking memory."""

    def __init__(self):
        super().__init__()
        self.device = PretendedDevice(total=20 * HANDLE, overhead=GRANULARITY)
        self.arena = Arena(DEVICE, 16 * HANDLE, HANDLE, driver=self.device)
        self.address = self.arena.address
        self.written: dict[int, int] = {}

    def teardown(self):
        self.arena.close()

    @rule(num_bytes=st.integers(0, 18 * HANDLE))
    def resize(self, num_bytes):
        before = self.arena.mapped_bytes
        asked = handles_for(num_bytes) * HANDLE
        fits = asked <= before or (asked <= 16 * HANDLE and asked <= 20 * HANDLE - self.taken - GRANULARITY)
        try:
            self.arena.resize(num_bytes)
        except ArenaExhausted as error:
            assert not fits
            assert (error.asked_bytes, error.mapped_bytes) == (asked, before)
            assert error.free_bytes == self.device.free_bytes()
            assert self.arena.mapped_bytes == before
        else:
            assert fits
            assert self.arena.mapped_bytes == asked
            self.written = {i: value for i, value in self.written.items() if i < asked}

    taken = 0

    @rule(cached=st.integers(0, 6 * HANDLE), taken=st.integers(0, 10 * HANDLE))
    def use_memory(self, cached, taken):
        """PyTorch holds `taken` in tensors and up to `cached` more that it could give back."""
        available = 20 * HANDLE - self.arena.mapped_bytes
        self.taken = min(taken, available)
        self.device.total = 20 * HANDLE - self.taken
        self.device.cached = min(cached, available - self.taken)

    @precondition(lambda self: self.arena.mapped_bytes)
    @rule(where=st.integers(0, 16 * HANDLE), value=st.integers(0, 254))
    def write(self, where, value):
        where %= self.arena.mapped_bytes
        self.arena.tensor((16 * HANDLE,), torch.uint8)[where] = value
        self.written[where] = value

    @rule()
    def close_and_start_anew(self):
        self.arena.close()
        self.arena.close()
        assert self.arena.is_closed and self.device.reserved is None and not self.device.mapped
        self.arena = Arena(DEVICE, 16 * HANDLE, HANDLE, driver=self.device)
        self.written = {}

    @invariant()
    def what_is_mapped_is_a_prefix_and_accessible(self):
        num_handles = self.arena.mapped_bytes // HANDLE
        expected = {self.address + i * HANDLE for i in range(num_handles)}
        assert set(self.device.mapped) == self.device.accessible == expected
        assert self.arena.address == self.address

    @invariant()
    def what_stayed_mapped_is_as_it_was_written(self):
        if self.arena.mapped_bytes:
            tensor = self.arena.tensor((16 * HANDLE,), torch.uint8)
            assert {i: int(tensor[i]) for i in self.written} == self.written


ArenaMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=20)
test_any_sequence_of_operations = ArenaMachine.TestCase


def test_pytorchs_unused_memory_is_asked_for_only_when_needed(device, arena):
    device.cached = 10 * HANDLE
    arena.resize(10 * HANDLE)
    assert device.num_emptied == 0
    arena.resize(11 * HANDLE)
    assert device.num_emptied == 1


def test_running_out_says_what_was_asked_what_there_is_and_what_to_set():
    device = PretendedDevice(total=10 * 2**30, cached=2**30)
    device.memory = torch.empty(0)
    device.reserve = lambda num_bytes, alignment: 0
    device.map = lambda address, num_bytes: (_ for _ in ()).throw(_OutOfDeviceMemory("cuMemCreate"))
    device.free_addresses = lambda address, num_bytes: None
    arena = Arena(DEVICE, 16 * 2**30, driver=device)
    message = (
        r"cuda:0 was asked for 12\.00 GiB: 0\.00 GiB are mapped, 12\.00 GiB more are missing; 10\.00 GiB are "
        r"free on the device.*Set kv_cache_tokens or max_num_seqs lower"
    )
    with pytest.raises(ArenaExhausted, match=message) as caught:
        arena.resize(12 * 2**30 - 5)
    assert isinstance(caught.value, MemoryError)
    with pytest.raises(ArenaExhausted, match=r"and the arena reserves 16\.00 GiB"):
        arena.resize(17 * 2**30)
    arena.close()


def test_another_failure_of_the_driver_also_rolls_back(device, arena):
    arena.resize(2 * HANDLE)
    map_one = device.map

    def fail_at_the_fifth(address, num_bytes):
        if len(device.mapped) == 4:
            raise RuntimeError("cuMemCreate failed on cuda:0: CUDA_ERROR_UNKNOWN.")
        map_one(address, num_bytes)

    device.map = fail_at_the_fifth
    with pytest.raises(RuntimeError, match="CUDA_ERROR_UNKNOWN"):
        arena.resize(8 * HANDLE)
    assert arena.mapped_bytes == 2 * HANDLE == sum(device.mapped.values())


def test_one_per_device_and_purpose_and_a_new_one_after_close(device):
    first = Arena(DEVICE, HANDLE, HANDLE, driver=device)
    message = r"cuda:0 has an arena for its KV cache already: <Arena on cuda:0.*0x280>.*close"
    with pytest.raises(RuntimeError, match=message):
        Arena(DEVICE, HANDLE, HANDLE, driver=PretendedDevice(HANDLE))
    elsewhere = Arena(torch.device("cuda", 1), HANDLE, HANDLE, driver=PretendedDevice(HANDLE))
    weights = Arena(DEVICE, HANDLE, HANDLE, driver=PretendedDevice(HANDLE), purpose="rollout weights")
    first.close()
    second = Arena(DEVICE, HANDLE, HANDLE, driver=device)
    first.close()
    with pytest.raises(RuntimeError, match="already"):  # a second close has not unregistered the second
        Arena(DEVICE, HANDLE, HANDLE, driver=PretendedDevice(HANDLE))
    for arena in (second, elsewhere, weights):
        arena.close()


def test_a_closed_arena_refuses(arena):
    arena.resize(HANDLE)
    arena.close()
    with pytest.raises(RuntimeError, match="is closed"):
        arena.resize(HANDLE)
    with pytest.raises(RuntimeError, match=r"closed.* has no memory"):
        arena.tensor((1,), torch.uint8)


def test_dropped_without_close_it_is_released_even_from_a_cycle(device):
    arena = Arena(DEVICE, 4 * HANDLE, HANDLE, driver=device)
    arena.resize(HANDLE)
    cycle = [arena]
    cycle.append(cycle)
    del arena, cycle
    Arena(DEVICE, HANDLE, HANDLE, driver=PretendedDevice(HANDLE)).close()
    assert device.reserved is None and not device.mapped


@pytest.mark.parametrize(
    ("capacity", "handle"), [(0, HANDLE), (HANDLE, 0), (HANDLE, GRANULARITY + 1), (-1, HANDLE)]
)
def test_impossible_sizes_are_refused(device, capacity, handle):
    with pytest.raises(ValueError, match=rf"capacity_bytes={capacity} and handle_bytes={handle}.*16 bytes"):
        Arena(DEVICE, capacity, handle, driver=device)


def test_tensors_lie_where_they_were_asked_for(device, arena):
    arena.resize(4 * HANDLE)
    whole = arena.tensor((4 * HANDLE,), torch.uint8)
    whole.copy_(torch.arange(4 * HANDLE) % 251)
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        part = arena.tensor((3, 4), dtype, offset_bytes=HANDLE)
        expected = whole[HANDLE : HANDLE + 12 * dtype.itemsize].view(dtype).view(3, 4)
        assert part.data_ptr() == expected.data_ptr() and part.stride() == expected.stride()
    with pytest.raises(ValueError, match=r"\[17, 64\] of torch.uint8 at byte 0 ends at byte 1088.*1024"):
        arena.tensor((17, HANDLE), torch.uint8)
    with torch.inference_mode():
        inside = arena.tensor((4,), torch.float32)
    inside.fill_(1.0)


# ── The KV cache in an arena ─────────────────────────────────────────────────────────────────────────────

CPU = torch.device("cpu")
CACHE_HANDLE = 4096


class ArenaCache(KVCache):
    """Lies in an arena of a pretended device, whose bytes are a CPU's: what was never written is NaN."""

    def _arena_on(self, device):
        if self._arena is None:
            self.pretended = PretendedDevice(total=2**20)
            self._arena = Arena(DEVICE, 2**20, CACHE_HANDLE, driver=self.pretended)
        return self._arena


SIZES = dict(num_layers=3, num_kv_heads=2, head_dim=4, page_size=8)


def make_cache(num_pages, kind=ArenaCache, scratch_bytes=0):
    cache = kind(**SIZES, scratch_bytes=scratch_bytes)
    cache.allocate(num_pages, torch.float32, CPU)
    return cache


def test_a_smaller_cache_is_a_prefix_of_the_same_addresses():
    cache = make_cache(20, scratch_bytes=1024)
    page_bytes = cache.page_bytes(torch.float32)
    assert page_bytes == 3 * 2 * 2 * 8 * 4 * 4
    assert cache.num_bytes == -(-(1024 + 20 * page_bytes) // CACHE_HANDLE) * CACHE_HANDLE
    addresses = [tensor.data_ptr() for i in range(3) for tensor in cache.layer(i)]
    # Page after page: a layer's keys, then its values, then the next layer's.
    assert [a - addresses[0] for a in addresses] == [i * page_bytes // 6 for i in range(6)]
    assert addresses[0] == cache.scratch.data_ptr() + 1024 and cache.scratch.shape == (1024,)
    for keys in (cache.layer(1)[0], cache.layer(2)[1]):
        assert keys.shape[1:] == (2, 8, 4) and keys.stride() == (page_bytes // 4, 32, 4, 1)
        keys[:20] = torch.arange(20.0)[:, None, None, None]
    cache.free(keep_bytes=1024 + 7 * page_bytes)
    # Whole handles, rounded down, of which the scratch takes the first bytes.
    kept = (1024 + 7 * page_bytes) // CACHE_HANDLE * CACHE_HANDLE
    assert cache.num_bytes == kept
    assert cache.num_pages == (kept - 1024) // page_bytes == 4
    assert (cache.layer(2)[1][:4] == torch.arange(4.0)[:, None, None, None]).all()
    cache.allocate(20, torch.float32, CPU)
    assert cache.num_pages == 20
    assert [tensor.data_ptr() for i in range(3) for tensor in cache.layer(i)] == addresses
    cache.free()
    assert (cache.num_pages, cache.num_bytes) == (0, 0) and not cache.is_on(torch.float32, CPU)
    cache.allocate(4, torch.bfloat16, CPU)
    assert cache.is_on(torch.bfloat16, CPU) and cache.layer(0)[0].dtype == torch.bfloat16
    assert cache.layer(0)[0].data_ptr() == addresses[0]
    cache.close()
    assert cache.num_bytes == 0 and cache.pretended.reserved is None


def test_what_the_cache_may_keep_is_not_more_than_it_has():
    cache = make_cache(num_pages=3)
    taken = cache.num_bytes
    cache.free(keep_bytes=2**30)
    assert (cache.num_pages, cache.num_bytes) == (3, taken)
    cache.free(keep_bytes=0)
    cache.free(keep_bytes=2**30)
    assert cache.num_bytes == 0
    cache.close()


def test_exhausted_it_is_as_it_was():
    cache = make_cache(num_pages=3)
    cache.layer(0)[0][:3] = 1.5
    with pytest.raises(ArenaExhausted):
        cache.allocate(2**20, torch.float32, CPU)
    assert cache.num_pages == 3 and (cache.layer(0)[0][:3] == 1.5).all()
    cache.close()


@pytest.fixture
def take(monkeypatch):
    """`take_pages` on a pretended GPU that seems to have `usable_bytes`, whatever it has."""

    def take(cache, num_pages, usable_bytes):
        monkeypatch.setattr(capacity, "HANDLE_BYTES", CACHE_HANDLE)
        monkeypatch.setattr(capacity, "_usable_bytes", lambda cache, device: usable_bytes)
        return capacity.take_pages(cache, num_pages, torch.float32, DEVICE)

    return take


@pytest.mark.parametrize("had_pages", [0, 5])
@pytest.mark.parametrize("num_handles_free", [2, 3, 10, 40])
def test_memory_taken_meanwhile_cuts_the_cache_to_what_is_left(take, caplog, had_pages, num_handles_free):
    cache = make_cache(1 + had_pages, scratch_bytes=1024)
    device = cache.pretended
    device.total = (num_handles_free * CACHE_HANDLE) + cache.num_bytes
    num_pages = take(cache, 200, usable_bytes=2**20)
    assert num_pages == cache.num_pages > 0
    # Never more than nine tenths, in whole handles, and not a page less than these hold.
    page_bytes = cache.page_bytes(torch.float32)
    most_bytes = int(0.9 * device.total) // CACHE_HANDLE * CACHE_HANDLE
    assert cache.num_bytes <= most_bytes
    assert 1024 + num_pages * page_bytes <= most_bytes < 1024 + (num_pages + 1) * page_bytes
    assert f"The KV cache is cut to {num_pages} pages" in caplog.text
    assert "was asked for" in caplog.text
    # It is whole: the last page can be written.
    cache.layer(2)[1][num_pages - 1] = 1.0
    cache.close()


def test_what_memory_allows_is_known_beforehand_as_a_rule(take, caplog):
    cache = make_cache(num_pages=1)
    page_bytes = cache.page_bytes(torch.float32)
    assert take(cache, 200, usable_bytes=10 * CACHE_HANDLE - 1) == 9 * CACHE_HANDLE // page_bytes
    assert take(cache, 3, usable_bytes=10 * CACHE_HANDLE) == 3 == cache.num_pages
    assert "is cut" not in caplog.text
    cache.close()


def test_with_no_room_for_a_handle_the_cache_stays_as_it_was(take):
    cache = make_cache(1, scratch_bytes=1024)
    cache.free()
    cache.pretended.total = CACHE_HANDLE - 1
    with pytest.raises(ArenaExhausted, match=r"was asked for.*Set kv_cache_tokens or max_num_seqs lower"):
        take(cache, 8, usable_bytes=2**20)
    assert cache.num_bytes == 0
    cache.close()


@pytest.mark.parametrize("kind", [KVCache, ArenaCache])
@given(data=st.data())
@settings(max_examples=20)
def test_copied_pages_are_equal_in_all_layers_and_others_untouched(kind, data):
    num_pages = data.draw(st.integers(2, 12))
    order = data.draw(st.permutations(range(num_pages)))
    num_copies = data.draw(st.integers(1, num_pages // 2))
    destinations = order[:num_copies]
    sources = [data.draw(st.sampled_from(order[num_copies:])) for _ in destinations]
    cache = make_cache(num_pages, kind)
    before = [[tensor[:num_pages].normal_().clone() for tensor in cache.layer(i)] for i in range(3)]
    copy_in_pieces = data.draw(st.integers(1, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("colocate.engines.native.kv_cache.PAGES_PER_COPY", copy_in_pieces)
        cache.copy_pages(sources, destinations)
    for i in range(3):
        for tensor, expected in zip(cache.layer(i), before[i], strict=True):
            expected[list(destinations)] = expected[sources]
            assert torch.equal(tensor[:num_pages], expected)
    cache.close()


@pytest.mark.parametrize("scratch_bytes", [-512, 100])
def test_scratch_that_would_misalign_the_pages_is_refused(scratch_bytes):
    with pytest.raises(ValueError, match=f"scratch_bytes={scratch_bytes} must be a multiple of 512"):
        KVCache(**SIZES, scratch_bytes=scratch_bytes)


@pytest.mark.parametrize("kv_cache_tokens", [None, 24])
def test_an_engine_generates_the_same_from_an_arena(monkeypatch, kv_cache_tokens):
    class ZeroedCache(ArenaCache):
        def allocate(self, num_pages, *arguments, **options):
            super().allocate(num_pages, *arguments, **options)
            # Attention in plain PyTorch multiplies masked values by 0: they must not be NaN.
            self._data[:, :, :num_pages] = 0

    model, prompts = make_model("qwen3"), make_prompts([1, 9, 6], 3)
    sampling = SamplingParams(max_tokens=8, temperature=0)
    expected = greedy_references(model, prompts, 8)
    monkeypatch.setattr("colocate.engines.native.engine.KVCache", ZeroedCache)
    engine = NativeEngine(model, max_num_seqs=4, page_size=4, kv_cache_tokens=kv_cache_tokens)
    for keep_bytes in (0, CACHE_HANDLE, 2**30, 0):
        engine.wake_up()
        assert [list(c.token_ids) for c in engine.generate(prompts, sampling)] == expected
        taken = engine.kv_cache_bytes
        engine.sleep(keep_bytes)
        assert engine.kv_cache_bytes == min(keep_bytes, taken) and taken > CACHE_HANDLE
    engine.close()
    assert engine.kv_cache_bytes == 0
