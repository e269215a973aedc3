"""Points of memory within a phase: what the timeline records of them, and the picture drawn from that."""

from __future__ import annotations

import mmap
import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.memory.timeline import MAX_POINTS, Category, PooledBytes, Timeline
from colocate.reporting.memory_charts import MemoryCurve, rollout_memory_chart
from colocate.reporting.run import MAX_STEPS_DRAWN, read_run
from colocate.reporting.run_log import RunLog

GIB = 2**30


class FakeDevice:
    """Memory and clock of a GPU that does what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.highest = self.arena = self.unbacked = 0
        self.now_ms = 0.0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                self.at_ms = device.now_ms

            def elapsed_time(self, end: Event) -> float:
                return end.at_ms - self.at_ms

        fakes = {
            "mem_get_info": lambda _: (1000 + self.unbacked - self.allocated - self.arena, 1000),
            "memory_stats": lambda _: {
                "allocated_bytes.all.current": self.allocated,
                "allocated_bytes.all.peak": self.highest,
                "reserved_bytes.all.current": self.allocated,
            },
            "reset_peak_memory_stats": lambda _: setattr(self, "highest", self.allocated),
            "synchronize": lambda _: None,
            "current_stream": lambda _: None,
            "Event": Event,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def allocate(self, size: int, *, ms: float = 0.0) -> None:
        self.allocated += size
        self.highest = max(self.highest, self.allocated)
        self.now_ms += ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def test_points_are_in_the_devices_time_and_each_has_the_peak_before_it(device: FakeDevice) -> None:
    gradients = 0
    categories = [
        Category("weights", lambda: 100),
        Category("gradients", lambda: gradients, within_phases=True),
    ]
    timeline = Timeline("cuda:0", categories)
    timeline.mark("outside of all phases")
    device.allocate(100)
    with timeline.phase("train"):
        timeline.mark("begin")
        device.allocate(300, ms=1000)
        timeline.mark("forward")
        device.allocate(50)
        device.allocate(-50, ms=500)
        timeline.mark("logprobs", transient="logits")
        device.allocate(20)
        device.allocate(-250, ms=2000)
        gradients = 70
        timeline.mark("backward")
    [span] = timeline.drain()["memory"]["spans"]
    begin, forward, logprobs, backward = span["points"]
    assert [p["at_s"] - span["start_s"] for p in span["points"]] == pytest.approx([0.0, 1.0, 1.5, 3.5])
    assert [p["in_use_bytes"] for p in span["points"]] == [100, 400, 400, 170]
    assert [p["peak_bytes"] for p in span["points"]] == [100, 400, 450, 420]
    assert (logprobs["transient"], backward["transient"]) == ("logits", "workspace")
    assert [p["categories"] for p in (begin, forward, backward)] == [
        {"gradients": 0},
        {"gradients": 0},
        {"gradients": 70},
    ]
    # Points take nothing from what the span itself says.
    assert (span["peak_bytes"], span["peak_allocated_bytes"], span["after_bytes"]) == (450, 450, 170)
    assert span["categories"] == {"weights": 100, "gradients": 70}


def test_a_pool_without_memory_behind_it_is_not_in_use(device: FakeDevice) -> None:
    # vLLM's sleep takes 600 from the device, and PyTorch's allocator counts them all the same.
    device.allocate(600)
    device.unbacked = 600
    device.allocate(100)
    timeline = Timeline("cuda:0", pooled=PooledBytes(allocated=600, reserved=600))
    with timeline.phase("rollout"):
        device.unbacked = 0
        device.allocate(30)
        device.allocate(-30)
        timeline.sample()
        device.unbacked = 600
    with timeline.phase("train"):
        device.allocate(200)
        timeline.mark("forward")
        device.allocate(-200)
    rollout, train = timeline.drain()["memory"]["spans"]
    assert [rollout[key] for key in ("before_bytes", "peak_bytes", "after_bytes")] == [100, 730, 100]
    assert [train[key] for key in ("before_bytes", "peak_bytes", "after_bytes")] == [100, 300, 100]
    assert (train["points"][0]["in_use_bytes"], train["points"][0]["peak_bytes"]) == (300, 300)
    assert (train["allocated_bytes"], train["peak_allocated_bytes"]) == (100, 300)


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=3 * MAX_POINTS))
def test_of_many_points_the_first_and_the_last_stay_and_no_peak_is_lost(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = FakeDevice(monkeypatch)
        timeline = Timeline("cuda:0")
        with timeline.phase("train"):
            for number, size in enumerate(sizes):
                device.allocate(size)
                device.allocate(-size, ms=1)
                timeline.mark(str(number))
        [span] = timeline.drain()["memory"]["spans"]
    points = span["points"]
    half = MAX_POINTS // 2
    kept = list(range(len(sizes)))
    if len(kept) > MAX_POINTS:
        kept = kept[:half] + kept[-half:]
    assert [int(point["name"]) for point in points] == kept
    edges = [-1, *kept]
    for before, here, point in zip(edges, kept, points, strict=False):
        assert point["peak_bytes"] == max(sizes[before + 1 : here + 1])
        assert point["num_left_out"] == here - before - 1


def test_points_without_a_gpu() -> None:
    timeline = Timeline("cpu")
    with timeline.phase("train"):
        timeline.mark("begin")
        # Not from the heap, which may have that much left over from other tests.
        block = torch.frombuffer(mmap.mmap(-1, 64 * 2**20), dtype=torch.uint8).fill_(1)
        timeline.mark("forward")
        del block
    [span] = timeline.drain()["memory"]["spans"]
    begin, forward = span["points"]
    assert span["start_s"] <= begin["at_s"] <= forward["at_s"] <= span["end_s"]
    assert forward["in_use_bytes"] - begin["in_use_bytes"] > 48 * 2**20
    assert forward["peak_bytes"] == forward["in_use_bytes"]


@pytest.mark.gpu
def test_points_on_a_real_gpu() -> None:
    timeline = Timeline("cuda")
    with timeline.phase("train"):
        timeline.mark("begin")
        torch.cuda._sleep(400_000_000)  # cycles, about 0.2 s; launched, not waited for
        block = torch.ones(256 * 2**20, dtype=torch.uint8, device="cuda")
        timeline.mark("forward")
        del block
        timeline.mark("backward")
    [span] = timeline.drain()["memory"]["spans"]
    begin, forward, backward = span["points"]
    assert begin["at_s"] - span["start_s"] < 0.05 < forward["at_s"] - begin["at_s"]
    assert forward["in_use_bytes"] - begin["in_use_bytes"] == 256 * 2**20
    assert backward["in_use_bytes"] == begin["in_use_bytes"]
    assert span["peak_bytes"] - span["before_bytes"] >= 256 * 2**20


# ── The picture ──────────────────────────────────────────────────────────────────────────────────────────


def point(at_s: float, in_use: float, peak: float, gradients: float, transient: str) -> dict[str, Any]:
    return {
        "name": transient,
        "at_s": at_s,
        "in_use_bytes": int(in_use * GIB),
        "peak_bytes": int(peak * GIB),
        "transient": transient,
        "categories": {"gradients": int(gradients * GIB)},
        "num_left_out": 0,
    }


def span(
    phase: str, start: float, end: float, peak: float, points: list[dict[str, Any]], **categories: float
):
    held = sum(size for name, size in categories.items() if name != "gradients")
    return {
        "phase": phase,
        "start_s": start,
        "end_s": end,
        "before_bytes": int(held * GIB),
        "after_bytes": int(held * GIB),
        "peak_bytes": int(peak * GIB),
        "categories": {name: int(size * GIB) for name, size in categories.items()},
        **({"points": points} if points else {}),
    }


TRAIN = span(
    "train", 4.0, 8.0, 62.0,
    [
        point(4.0, 22.0, 22.0, 0.0, "workspace"),
        point(5.0, 54.0, 55.0, 0.0, "workspace"),  # forward: 32 of activations
        point(5.5, 54.0, 60.0, 0.0, "logits"),  # 6 of logits, come and gone
        point(7.5, 28.0, 62.0, 6.0, "workspace"),  # backward: 6 of gradients, 8 of gradients of activations
        point(7.9, 22.0, 29.0, 0.0, "workspace"),  # optimizer
    ],
    weights=3.0, optimizer=19.0, gradients=6.0,
)  # fmt: skip
ROLLOUT = span("rollout", 0.0, 4.0, 100.0, [], weights=3.0, optimizer=19.0, kv_cache=76.0)


def svg_of(
    directory: Any, *spans: dict[str, Any], later: list[list[dict[str, Any]]] | None = None
) -> ElementTree.Element:
    """The chart of a step of eight seconds with these spans, and of later ones."""
    log = RunLog(directory)
    for step, of_step in enumerate([list(spans), *(later or [])], start=1):
        memory = {"device": "cuda:0", "limit_bytes": 140 * GIB, "spans": of_step}
        timeline = {"wall_s": 8.0, "phases": {}, "memory": memory}
        log.log_step(step, {"reward": 0.5}, epoch=0.1, timeline=timeline)
    log.close()
    chart = rollout_memory_chart(read_run(directory), (768, 320))
    assert chart is not None
    return ElementTree.fromstring(chart.svg())


def test_curve_takes_for_activations_what_no_category_holds() -> None:
    curve = MemoryCurve(TRAIN)
    assert curve.xs == [4.0, 4.0, 5.0, 5.5, 7.5, 7.9, 8.0]
    assert curve.heights["weights"] == [3.0] * 7
    assert curve.heights["gradients"] == [0.0, 0.0, 0.0, 0.0, 6.0, 0.0, 0.0]
    assert curve.heights["activations"] == pytest.approx([0.0, 0.0, 32.0, 32.0, 0.0, 0.0, 0.0])
    # After each point's interval: 55 - 54, 60 - 54, 62 - 54, 29 - 28.
    assert [extra for _, extra in curve.transients] == pytest.approx([0.0, 1.0, 6.0, 8.0, 1.0])
    assert curve.highest == pytest.approx(62.0)


def test_what_was_there_before_the_phase_is_no_activation() -> None:
    """Two GiB that no category knows, of the CUDA context and libraries, through the whole phase."""
    gib = 2**30
    points = [
        {**point, **{key: point[key] + 2 * gib for key in ("in_use_bytes", "peak_bytes")}}
        for point in TRAIN["points"]
    ]
    ends = {key: TRAIN[key] + 2 * gib for key in ("before_bytes", "after_bytes", "peak_bytes")}
    curve = MemoryCurve({**TRAIN, **ends, "points": points})
    assert curve.heights["other"] == pytest.approx([2.0] * 7)
    assert curve.heights["activations"] == pytest.approx(MemoryCurve(TRAIN).heights["activations"])


def test_picture_stacks_what_holds_memory_under_the_limit(tmp_path: Any) -> None:
    svg = svg_of(tmp_path, ROLLOUT, TRAIN)
    titles = [title.text for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert "rollout: KV cache 76 GiB" in titles
    assert "train: gradients at most 6 GiB" in titles
    assert "train: activations at most 32 GiB" in titles
    assert "train: logits 6 GiB" in titles
    assert "train: workspace, other 8 GiB" in titles
    legend = [text.text for text in svg.iter() if text.get("class") == "key"]
    assert legend == [
        *("weights", "optimizer", "KV cache", "gradients", "activations", "logits", "workspace, other")
    ]
    assert "device: 140 GiB" in [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]

    # The highest edge drawn in training is the phase's peak, and nothing lies above the limit's line.
    ticks = [text for text in svg.iter() if text.get("class") == "y-tick"]
    (low, at_low), (high, at_high) = [(float(t.text), float(t.get("y"))) for t in (ticks[0], ticks[-1])]  # type: ignore[arg-type]
    gib_per_pixel = (high - low) / (at_low - at_high)
    shapes = [path for path in svg.iter() if path.tag.endswith("path") and path.get("d", "").endswith("Z")]
    tops = [min(float(y) for y in re.findall(r" (-?[\d.]+)", path.get("d", ""))) for path in shapes]
    assert (at_low - min(tops)) * gib_per_pixel + low == pytest.approx(62.0, abs=0.5)


def headings_of(svg: ElementTree.Element) -> list[tuple[str, str]]:
    names, details = (
        [t.text for t in svg.iter() if t.get("class") == kind] for kind in ("heading", "detail")
    )
    return list(zip(names, details, strict=True))  # type: ignore[arg-type]


def test_picture_has_all_steps_that_train_on_the_rollout(tmp_path: Any) -> None:
    """Three rollouts, two steps each; typical is the second or the third."""
    score = span("score", 4.0, 4.1, 23.0, [], weights=3.0, optimizer=19.0)
    short, later = {**TRAIN, "end_s": 7.95}, {**TRAIN, "start_s": 7.96, "peak_bytes": 64 * GIB, "points": []}
    first, second = [ROLLOUT, score, short, later], [{**TRAIN, "peak_bytes": 63 * GIB}]
    svg = svg_of(tmp_path, *first, later=[second, first, second, first, second])
    # Nothing is written above a phase that is too short for it, and phases in a row have one name.
    assert headings_of(svg) == [("rollout", "100 GiB"), ("train", "64 GiB"), ("train", "63 GiB")]
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "Memory through one rollout (steps 3 to 4)" in texts and "seconds since step 3 began" in texts
    assert "Peaks in GiB: rollout 100, score 23, train 64" in str(svg.get("aria-label"))
    # The second step's training is drawn from second 12 to 16 of 16.
    frame = next(part for part in svg.iter() if part.get("class") == "area")
    left, right = (float(frame.get(f"data-{side}", "nan")) for side in ("left", "right"))
    starts = [
        float(re.match(r"M([\d.]+) ", path.get("d", ""))[1])  # type: ignore[index]
        for path in svg.iter()
        if path.tag.endswith("path") and path.get("class") == "f-slate"
    ]
    assert (starts[-1] - left) / (right - left) == pytest.approx(12 / 16, abs=0.002)
    assert frame.get("data-to") == "16.0"


def test_text_of_the_picture_does_not_overlap(tmp_path: Any) -> None:
    """A rollout that fills the device, and names above it: none is written over another."""
    svg = svg_of(tmp_path, {**ROLLOUT, "peak_bytes": 140 * GIB}, TRAIN)
    assert [name for name, _ in headings_of(svg)] == ["rollout", "train"]
    rows = {
        text.get("class") or text.text: float(text.get("y", "nan")) for text in svg.iter() if text.get("y")
    }
    in_order = [rows[name] for name in ("key", "heading", "detail", "device: 140 GiB")]
    assert all(below - above >= 12 for above, below in pairwise(in_order))


def test_picture_of_a_run_with_many_steps_per_rollout_stays_small(tmp_path: Any) -> None:
    svg = svg_of(tmp_path, ROLLOUT, TRAIN, later=[[TRAIN]] * (MAX_STEPS_DRAWN + 5))
    assert headings_of(svg) == [("train", "62 GiB")] * MAX_STEPS_DRAWN


BROKEN = st.sampled_from([None, "text", -1.0, 1e308, [], {}, True, 5.0])


@settings(max_examples=60)
@given(
    points=st.lists(
        st.dictionaries(
            st.sampled_from(["at_s", "in_use_bytes", "peak_bytes", "transient", "categories"]), BROKEN
        )
        | BROKEN,
        max_size=4,
    )
    | BROKEN
)
def test_no_point_breaks_the_picture(points: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = TRAIN["points"][:2]
    broken = {**TRAIN, "points": [*points, *whole] if isinstance(points, list) else points}
    svg_of(tmp_path_factory.mktemp("run"), ROLLOUT, broken)
