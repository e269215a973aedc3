"""What makes the native engine work hard, and counts what it does then."""

from __future__ import annotations

from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.model_runner import ModelRunner
from colocate.engines.native.pages import PagePool
from colocate.engines.native.scheduler import Scheduler
from colocate.engines.native.torch_backend import TorchBackend


def awake(model, **options) -> NativeEngine:
    engine = NativeEngine(model, **options)
    engine.wake_up()
    return engine


class Pressure:
    """Counts what the scheduler does."""

    def __init__(self, monkeypatch) -> None:
        self.num_preempted = 0
        self.num_prefilled_tokens = 0
        self.most_pages_used = 0
        make_room, prefill, allocate = Scheduler.make_room, ModelRunner.prefill, PagePool.allocate

        def counted_make_room(scheduler, num_steps):
            preempted = make_room(scheduler, num_steps)
            self.num_preempted += len(preempted)
            return preempted

        def counted_prefill(runner, items):
            self.num_prefilled_tokens += sum(len(item.token_ids) - item.num_cached for item in items)
            return prefill(runner, items)

        def counted_allocate(pool, count):
            pages = allocate(pool, count)
            self.most_pages_used = max(self.most_pages_used, pool.num_pages - pool.num_free)
            return pages

        monkeypatch.setattr(Scheduler, "make_room", counted_make_room)
        monkeypatch.setattr(ModelRunner, "prefill", counted_prefill)
        monkeypatch.setattr(PagePool, "allocate", counted_allocate)


class Windowed(TorchBackend):
    """Works behind the device as on a GPU, so rows finish while later steps are under way."""

    windows_in_flight = 1

    def __init__(self, steps_per_look: int) -> None:
        super().__init__()
        self.steps_per_look = steps_per_look

    def rotate_and_store(self, qkv, rotation, positions, slots, k_cache, v_cache):
        live = (slots >= 0).nonzero()[:, 0]
        part = qkv[live]
        super().rotate_and_store(part, rotation, positions[live], slots[live], k_cache, v_cache)
        qkv[live] = part
