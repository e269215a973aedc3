"""Measures where a step's time and memory go, phase by phase.

    timeline = Timeline(device, [Category("weights", weight_bytes)], on_phase=progress.set_phase)
    with timeline.phase("rollout"): ...
    with timeline.phase("train"):
        with timeline.phase("train/forward"): ...
    record = timeline.drain()

`drain` returns, for the time since the previous `drain`:

    {"wall_s": 7.3,
     "phases": {"rollout": 4.1, "train": 3.0, "train/forward": 1.2},        # seconds; "a/b" is part of "a"
     "memory": {"device": "cuda:0", "limit_bytes": 150109880320,
                "spans": [{"phase": "rollout", "start_s": 0.0, "end_s": 4.1,     # since the step began
                           "before_bytes": ..., "after_bytes": ..., "peak_bytes": ...,
                           "categories": {"weights": 3087428608, "kv_cache": 107374182400}},
                          {"phase": "train", ...}]}}

On a GPU the bytes are those in use on the device: what PyTorch's allocator has handed out plus everything
that lives outside of it (the KV arena, vLLM's pools, the CUDA context, other processes). On a CPU they are
the resident set of the process. A span on a GPU also has `allocated_bytes` and `reserved_bytes` (at its end)
and `peak_allocated_bytes`, PyTorch's own numbers without those pools. A category has the largest value that
was seen in the span.

Within a phase, `mark` leaves points, which a span then has as `points`:

    {"name": "backward", "at_s": 5.2, "in_use_bytes": ..., "peak_bytes": ..., "transient": "workspace",
     "categories": {"gradients": ...}, "num_left_out": 0}

`in_use_bytes` were in use when the device reached that point, `peak_bytes` is the most since the point before
it (or since the phase began); the memory that came and went in between was mostly for `transient`.
`categories` has only those that are measured `within_phases`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from colocate.memory import host
from colocate.weights.weight_parts import local_part

MAX_POINTS = 24
"""The most points that a span keeps: half of them from its beginning and half from its end. A step of a
hundred micro-batches would otherwise fill the run's record with points that no picture can show."""


class PooledBytes(NamedTuple):
    """Bytes of memory pools, such as vLLM's, whose memory is mapped and unmapped without PyTorch's allocator.

    The allocator counts such pools in full, even while there is no memory behind them.
    """

    allocated: int = 0
    reserved: int = 0


NOTHING_POOLED = PooledBytes()


class Category(NamedTuple):
    """A use of memory that is shown separately, such as weights or the KV cache."""

    name: str
    num_bytes: Callable[[], int]
    """Returns how many bytes the category takes now; called at the beginning and the end of every phase."""
    within_phases: bool = False
    """Whether `num_bytes` is also called at every `mark`, because the category changes within phases."""


class Timeline:
    """Measures phases that follow one another, and parts within them, which are named "phase/part"."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        categories: Sequence[Category] = (),
        *,
        on_phase: Callable[[str], None] | None = None,
        pooled: PooledBytes = NOTHING_POOLED,
    ) -> None:
        """Prepare a timeline, whose first step begins with the first phase.

        Args:
            on_phase: called with the name of every phase that begins; when it ends, with the name of the
                phase around it, or "".
            pooled: pools that PyTorch counts in full. The memory that they really use is taken from the
                device's own count.
        """
        device = torch.device(device)
        self._memory: _CudaMeter | _HostMemory = (
            _CudaMeter(device, pooled) if device.type == "cuda" else _HostMemory()
        )
        self._on_phase = on_phase or (lambda name: None)
        self._categories = {part.name: part.num_bytes for part in categories}
        self._within_phases = {part.name: part.num_bytes for part in categories if part.within_phases}
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._spans: list[dict[str, Any]] = []
        # Set by the first phase: what came before (loading a model) is not part of the first step.
        self._step_start: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body as phase `name`; phases with one name in a step add up.

        The device is synchronised at both ends of a phase, so that its time includes the work it launched.
        Parts ("train/forward") are not synchronised: their time is that of the host.
        """
        self._check_nesting(name)
        is_part = bool(self._open)
        if not is_part:
            self._memory.synchronize()
        start = time.perf_counter()
        if self._step_start is None:
            self._step_start = start
        if not is_part:
            self._begin_span(name, start - self._step_start)
        self._open.append(name)
        self._on_phase(name)
        try:
            yield
        finally:
            self._open.pop()
            if not is_part:
                self._memory.synchronize()
            end = time.perf_counter()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            if not is_part:
                self._end_span(end - self._step_start)
            self._on_phase(self._open[-1] if self._open else "")

    def sample(self) -> None:
        """Measure memory now, within a phase, to see what exists at neither end of the phase."""
        if not self._spans or not self._open:
            raise RuntimeError("Timeline.sample() belongs inside `with timeline.phase(...)`: none is open.")
        span = self._spans[-1]
        span["peak_bytes"] = max(span["peak_bytes"], self._memory.sample())
        self._see_categories(span)

    def mark(self, name: str, transient: str = "workspace") -> None:
        """Record a point of the present phase: the work called `name` has just been launched. Nothing waits
        for it.

        Outside of all phases nothing is recorded.

        Args:
            transient: the use of memory that came and went since the point before, if any did.
        """
        if not self._open:
            return
        span = self._spans[-1]
        clock, in_use, peak = self._memory.mark()
        categories = {name: int(num_bytes()) for name, num_bytes in self._within_phases.items()}
        points = span.setdefault("points", [])
        points.append(
            {
                "name": name,
                "at_s": clock,  # read when the phase has ended
                "in_use_bytes": in_use,
                "peak_bytes": peak,
                "transient": transient,
                "categories": categories,
                "num_left_out": 0,
            }
        )
        for category, size_bytes in categories.items():
            span["categories"][category] = max(span["categories"].get(category, 0), size_bytes)
        if len(points) > MAX_POINTS:
            left_out, follower = points.pop(MAX_POINTS // 2), points[MAX_POINTS // 2]
            follower["num_left_out"] += left_out["num_left_out"] + 1
            follower["peak_bytes"] = max(follower["peak_bytes"], left_out["peak_bytes"])

    def drain(self) -> dict[str, Any]:
        """Return the record since the last `drain`, as the module describes it, and begin a new step."""
        if self._open:
            raise RuntimeError(f"Timeline.drain() inside phase {self._open[-1]!r}: close the phase first.")
        now = time.perf_counter()
        record = {
            "wall_s": 0.0 if self._step_start is None else now - self._step_start,
            "phases": self._seconds,
            "memory": {
                "device": self._memory.name,
                "limit_bytes": self._memory.limit_bytes,
                "spans": self._spans,
            },
        }
        self._seconds, self._spans, self._step_start = {}, [], now
        return record

    def _check_nesting(self, name: str) -> None:
        if self._open and not name.startswith(f"{self._open[-1]}/"):
            raise ValueError(
                f"Phase {name!r} begins inside phase {self._open[-1]!r} and its time would count twice: "
                f"close {self._open[-1]!r} first, or name the part '{self._open[-1]}/{name}'."
            )
        if not self._open and "/" in name:
            whole = name.rpartition("/")[0]
            raise ValueError(f"{name!r} is a part of phase {whole!r}, which is not open: open that first.")

    def _begin_span(self, phase: str, start_s: float) -> None:
        before = self._memory.begin()
        span = {
            "phase": phase,
            "start_s": start_s,
            "end_s": start_s,
            "before_bytes": before,
            "peak_bytes": before,
        }
        self._spans.append(span)
        self._see_categories(span)

    def _end_span(self, end_s: float) -> None:
        span = self._spans[-1]
        self._see_categories(span)
        measured = self._memory.end()
        measured["peak_bytes"] = max(span["peak_bytes"], measured["peak_bytes"])
        span.update(measured, end_s=end_s)
        for point in span.get("points", ()):
            point["at_s"] = span["start_s"] + point["at_s"]()

    def _see_categories(self, span: dict[str, Any]) -> None:
        seen = span.setdefault("categories", {})
        for name, num_bytes in self._categories.items():
            seen[name] = max(seen.get(name, 0), int(num_bytes()))


def resident_bytes_besides(model: Any) -> int:
    """Bytes of host memory that this process has now, without the weights of `model` if it is loaded."""
    weights = model.parameters() if isinstance(model, torch.nn.Module) else ()
    storages = (local_part(weight).untyped_storage() for weight in weights)
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return max(0, int(psutil.Process().memory_info().rss) - sum(held.values()))


class _HostMemory:
    """The resident set of this process."""

    name = "cpu"

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.limit_bytes = host.limit_bytes()
        self._highest = 0

    def synchronize(self) -> None:
        pass

    def begin(self) -> int:
        try:
            # Resets the kernel's high-water mark (proc(5)), so that each phase has a peak of its own. Where
            # this is not allowed or not Linux, the peak is the largest of the samples.
            Path("/proc/self/clear_refs").write_text("5")
            self._has_high_water_mark = True
        except OSError:
            self._has_high_water_mark = False
        self._highest = 0
        self._start_s = time.perf_counter()
        self._last = self.sample()
        return self._last

    def mark(self) -> tuple[Callable[[], float], int, int]:
        """(seconds since the phase began, known once it has ended; bytes in use now; most bytes since the
        last mark)."""
        before, self._last = self._last, self.sample()
        seconds = time.perf_counter() - self._start_s
        return lambda: seconds, self._last, max(before, self._last)

    def sample(self) -> int:
        now = self._process.memory_info().rss
        self._highest = max(self._highest, now)
        return now

    def end(self) -> dict[str, int]:
        now = self.sample()
        peak = _high_water_mark_bytes() if self._has_high_water_mark else 0
        return {"after_bytes": now, "peak_bytes": max(self._highest, peak)}


class _CudaMeter:
    """Memory in use on one CUDA device."""

    def __init__(self, device: torch.device, pooled: PooledBytes) -> None:
        self._pooled = pooled
        self._device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self.name = str(self._device)
        self.limit_bytes = torch.cuda.mem_get_info(self._device)[1]
        self._outside = 0
        self._peak_allocated = 0

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def begin(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._outside = self._peak_allocated = 0
        self._start = self._event()
        return self.sample()

    def mark(self) -> tuple[Callable[[], float], int, int]:
        """(seconds since the phase began; bytes in use now; most bytes in use since the last mark).

        The seconds are the device's, so they are known only once the device has been synchronised.
        """
        # PyTorch's allocator hands memory out in the order in which work is launched, ahead of the device.
        # The event says when the device gets there, so that the picture's time is the device's.
        allocator = self._allocator()
        now = self._in_use(allocator)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak_allocated = max(self._peak_allocated, allocator.peak)
        start, moment = self._start, self._event()
        return lambda: start.elapsed_time(moment) / 1e3, now, self._outside + allocator.peak

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def sample(self) -> int:
        return self._in_use(self._allocator())

    def end(self) -> dict[str, int]:
        allocator = self._allocator()
        now = self._in_use(allocator)
        peak_allocated = max(self._peak_allocated, allocator.peak)
        return {
            "after_bytes": now,
            "peak_bytes": self._outside + peak_allocated,
            "allocated_bytes": allocator.allocated,
            "reserved_bytes": allocator.reserved,
            "peak_allocated_bytes": peak_allocated,
        }

    def _in_use(self, allocator: _AllocatorBytes) -> int:
        # Memory that the allocator keeps in reserve is free to PyTorch, so it does not count as in use; what
        # the device misses beyond that reserve lives outside the allocator.
        free, total = torch.cuda.mem_get_info(self._device)
        outside = max(0, total - free - allocator.reserved)
        self._outside = max(self._outside, outside)
        return outside + allocator.allocated

    def _allocator(self) -> _AllocatorBytes:
        # PyTorch's functions for single numbers each collect all of its statistics, which takes 0.2 ms.
        stats = torch.cuda.memory_stats(self._device)
        return _AllocatorBytes(
            allocated=stats.get("allocated_bytes.all.current", 0) - self._pooled.allocated,
            peak=stats.get("allocated_bytes.all.peak", 0) - self._pooled.allocated,
            reserved=stats.get("reserved_bytes.all.current", 0) - self._pooled.reserved,
        )


class _AllocatorBytes(NamedTuple):
    """Bytes of PyTorch's allocator now, without those of pools that it counts in full."""

    allocated: int
    peak: int
    """The most allocated since the last reset."""
    reserved: int


def _high_water_mark_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
