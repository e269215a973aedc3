"""The run's record, its report and pictures, the live progress and the merging of metrics."""

from __future__ import annotations

import io
import itertools
import json
import math
import mmap
import random
import re
import statistics
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.pages.pictures import draw_picture
from colocate.config.grpo_config import GRPOConfig
from colocate.memory.timeline import Category, Timeline
from colocate.options.redaction import redacted
from colocate.reporting import charts, theme
from colocate.reporting.axes import Axis, compact
from colocate.reporting.completions import CompletionTable, print_completions, write_completions_parquet
from colocate.reporting.curves import course, decimate, smooth
from colocate.reporting.metrics import Metrics
from colocate.reporting.plots import Plot
from colocate.reporting.provenance import command_of, commit_of, provenance
from colocate.reporting.report import write_report
from colocate.reporting.run import RecordedRun, read_run
from colocate.reporting.run_log import RunLog, earlier_record

GIB = 2**30


def synthetic_step(step: int, num_steps: int, rng: random.Random) -> tuple[dict, dict]:
    """Invented metrics and timeline of one step, of the size of a 1.5B run on one GPU."""
    progress = 1 / (1 + math.exp(-8 * (step / num_steps - 0.45)))
    length = 180 + 140 * progress + rng.gauss(0, 12)
    seconds = {
        "rollout": 3.2 + length / 150 + rng.expovariate(6),
        "score": 0.25 + rng.expovariate(20),
        "train": 2.3 + length / 300 + rng.gauss(0, 0.05),
        "publish": 0.01,
    }
    if step % 50 == 0:
        seconds["evaluate"] = 6.0
    spans, now = [], 0.0
    for phase, duration in seconds.items():
        categories = {"weights": int(3.1 * GIB), "optimizer": int(18.6 * GIB)}
        if phase in ("rollout", "evaluate"):
            categories["kv_cache"] = 96 * GIB
        held = sum(categories.values())
        extra = {"train": 61 + 9 * progress + rng.gauss(0, 1)}.get(phase, 2.5)
        spans.append(
            {
                "phase": phase,
                "start_s": now,
                "end_s": now + duration,
                "before_bytes": held,
                "after_bytes": held,
                "peak_bytes": held + int(extra * GIB),
                "categories": categories,
            }
        )
        now += duration + 0.02
    metrics = {
        "loss": rng.gauss(0, 0.01),
        "grad_norm": 0.3 * math.exp(rng.gauss(0, 0.4)),
        "learning_rate": 1e-6 * (1 - step / num_steps),
        "num_tokens": 512 * 450 * step,
        "reward": 0.1 + 0.6 * progress + rng.gauss(0, 0.05),
        "reward_std": 0.35 - 0.1 * progress,
        "rewards/accuracy_reward/mean": 0.05 + 0.55 * progress + rng.gauss(0, 0.04),
        "rewards/format_reward/mean": 0.2 + 0.75 * min(1, 2 * progress) + rng.gauss(0, 0.02),
        "frac_reward_zero_std": min(1.0, max(0.0, 0.3 + 0.3 * progress + rng.gauss(0, 0.05))),
        "completions/mean_length": length,
        "completions/min_length": length * 0.3,
        "completions/max_length": min(512, length * 2.1),
        "completions/clipped_ratio": max(0.0, 0.12 - 0.1 * progress + rng.gauss(0, 0.01)),
        "entropy": 1.1 - 0.6 * progress + rng.gauss(0, 0.03),
        "kl": 0.02 * progress + abs(rng.gauss(0, 0.001)),
        "clip_ratio/low_mean": abs(rng.gauss(0, 0.001)),
        "clip_ratio/high_mean": abs(rng.gauss(0.002, 0.001)),
        "sampling/sampling_logp_difference/mean": 0.008 + abs(rng.gauss(0, 0.001)),
        "sampling/sampling_logp_difference/max": 0.3 * math.exp(rng.gauss(0, 0.5)),
        "sampling/importance_sampling_ratio/min": 0.7 + rng.gauss(0, 0.05),
        "sampling/importance_sampling_ratio/mean": 1.0 + rng.gauss(0, 0.003),
        "sampling/importance_sampling_ratio/max": 1.5 + abs(rng.gauss(0, 0.2)),
        "num_hints": rng.random(),
    }
    phases = {**seconds, "train/forward": 0.35 * seconds["train"], "train/backward": 0.55 * seconds["train"]}
    memory = {"device": "cuda:0", "limit_bytes": int(139.8 * GIB), "spans": spans}
    return metrics, {"wall_s": now + 0.1, "phases": phases, "memory": memory}


def write_synthetic_run(directory: Path, num_steps: int = 300) -> Path:
    """A run's record of invented numbers, written through RunLog."""
    rng = random.Random(0)
    log = RunLog(directory)
    log.describe(
        {
            "run_name": "synthetic <numbers> & nothing else",
            "model": "invented-1.5B",
            "dataset": "invented/arithmetic",
            "device": "1 × invented GPU",
            "versions": {"colocate": "0.1.0", "torch": "2.11.0"},
            "options": {"generation_batch_size": 512},
        }
    )
    log.log_eval(0, {"eval_reward": 0.09}, epoch=0.0)
    for step in range(1, num_steps + 1):
        metrics, timeline = synthetic_step(step, num_steps, rng)
        log.log_step(step, metrics, epoch=step / 100, timeline=timeline)
        if step % 50 == 0:
            log.log_eval(step, {"eval_reward": metrics["reward"] + rng.gauss(0, 0.02)}, epoch=step / 100)
        if step % 10 == 0 or step == 1:
            log.log_completions(step, synthetic_completions(step))
    log.close()
    return directory


def synthetic_completions(step: int) -> CompletionTable:
    prompts = [[{"role": "user", "content": f"What is {a} + {step}? Think first."}] for a in range(6)]
    completions = [
        f"<think>{a} and {step} make {a + step}.\nLet me check: yes.</think>\n<answer>{a + step}</answer>"
        for a in range(6)
    ]
    completions[0] = "<script>alert('escaped?')</script>" + "na " * 900
    rewards = {"accuracy_reward": [0.0, 1.0] * 3, "format_reward": [1.0] * 5 + [math.nan]}
    return CompletionTable(prompts, completions, rewards, [-1.0, 1.0] * 3)


def read_strictly(path: Path) -> list[dict]:
    """The objects of a JSON-lines file, by a reader that knows no NaN and no Infinity."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# --- the record -------------------------------------------------------------------------------------------


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.floats(width=32).map(torch.tensor),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(value=json_values)
def test_record_is_strict_json_whatever_the_metrics(value):
    with tempfile.TemporaryDirectory() as directory:
        log = RunLog(directory)
        returned = log.log_step(1, {"metric": value}, epoch=0.5, timeline={"wall_s": math.nan})
        log.close()
        [read] = read_strictly(Path(directory) / "metrics.jsonl")
    assert read == returned
    assert read["wall_s"] is None and read["step"] == 1
    if isinstance(value, float):
        assert read["metric"] == (value if math.isfinite(value) else None)


def test_lines_are_on_disk_before_the_log_is_closed(tmp_path):
    log = RunLog(tmp_path)
    log.log_step(1, {"reward": 0.5}, epoch=0.1, timeline={})
    log.log_completions(1, synthetic_completions(1), num_samples=2)
    assert read_strictly(tmp_path / "metrics.jsonl")[0]["reward"] == 0.5
    assert len(read_strictly(tmp_path / "completions.jsonl")) == 2


def test_resume_drops_later_lines_and_repeats_none(tmp_path):
    log = RunLog(tmp_path)
    for step in range(1, 8):
        log.log_step(step, {"reward": step}, epoch=step / 10, timeline={})
        log.log_completions(step, synthetic_completions(step), num_samples=1)
        if step in (5, 7):
            log.log_eval(step, {"eval_reward": step}, epoch=step / 10)
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')  # cut short by a crash
    log = RunLog(tmp_path, resume_step=5)
    log.log_step(6, {"reward": 60}, epoch=0.6, timeline={})
    log.close()
    records = read_strictly(tmp_path / "metrics.jsonl")
    assert [(r["step"], r.get("eval", False)) for r in records] == [
        *[(step, False) for step in range(1, 6)],
        (5, True),
        (6, False),
    ]
    assert records[-1]["reward"] == 60
    assert [r["step"] for r in read_strictly(tmp_path / "completions.jsonl")] == [1, 2, 3, 4, 5]


def test_new_run_sets_the_old_record_aside(tmp_path):
    for reward in (1, 2, 3):
        log = RunLog(tmp_path)
        log.log_step(1, {"reward": reward}, epoch=0.1, timeline={})
        log.close()
    names = ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    assert [[r["reward"] for r in read_strictly(tmp_path / name)] for name in names] == [[1], [2], [3]]


def test_a_step_cannot_be_logged_twice_and_keys_cannot_clash(tmp_path):
    log = RunLog(tmp_path)
    log.log_step(4, {"step": 4, "epoch": 0.1}, epoch=0.1, timeline={})
    with pytest.raises(ValueError, match="resume_step=3"):
        log.log_step(4, {}, epoch=0.1, timeline={})
    with pytest.raises(ValueError, match="phases"):
        log.log_step(5, {"phases": 1}, epoch=0.1, timeline={})
    assert len(read_strictly(tmp_path / "metrics.jsonl")) == 1


def test_a_run_that_cannot_start_leaves_the_record_as_it_is(tmp_path):
    log = RunLog(tmp_path, run_id="first")
    log.describe({"run_id": "first"})
    log.log_step(1, {"reward": 1}, epoch=0.1, timeline={})
    log.close()
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert "of an earlier run, 1 steps: kept as metrics.1.jsonl" in earlier_record(
        tmp_path, has_checkpoints=False
    )
    for resume_step in (None, 0):
        failed = RunLog(tmp_path, resume_step, run_id="second")
        failed.describe({"run_id": "second"})
        failed.log_eval(0, {"eval_reward": 0.5}, epoch=0.0)
        assert not failed.is_lost
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    failed.log_step(1, {"reward": 2}, epoch=0.1, timeline={})
    assert [r.get("reward") for r in read_strictly(tmp_path / "metrics.jsonl")] == [None, 2]
    assert [r["reward"] for r in read_strictly(tmp_path / "metrics.1.jsonl")] == [1]
    assert json.loads((tmp_path / "run.json").read_text())["run_id"] == "second"
    assert earlier_record(tmp_path / "nowhere", has_checkpoints=False) is None


def test_completions_can_be_searched_in_any_script(tmp_path):
    texts = ["蘋果 十二", "half a character \ud83d", "a line\u2028that some programs end", "\x85"]
    log = RunLog(tmp_path)
    zeros = [0.0] * len(texts)
    log.log_completions(1, CompletionTable(texts, texts, {"score": zeros}, zeros), num_samples=9)
    log.close()
    content = (tmp_path / "completions.jsonl").read_text(encoding="utf-8")
    assert "蘋果 十二" in content
    assert [json.loads(line)["prompt"] for line in content.splitlines()] == texts


# --- tables of completions --------------------------------------------------------------------------------


def test_parquet_is_what_trl_writes(tmp_path):
    import pandas

    table = CompletionTable(
        [[{"role": "user", "content": "hi"}]] * 2,
        ["a", "b"],
        {"accuracy_reward": [1.0, math.nan]},
        [0.5, -0.5],
        {"answer": ["x", None]},
    )
    path = write_completions_parquet(tmp_path, 7, table)
    assert path == tmp_path / "completions" / "completions_00007.parquet"
    # TRL 1.16.0, GRPOTrainer.log: the table as a DataFrame, written by pandas.
    theirs = pandas.DataFrame(
        {
            "step": [7, 7],
            "prompt": table.prompts,
            "completion": table.completions,
            "accuracy_reward": [1.0, math.nan],
            "answer": ["x", None],
            "advantage": [0.5, -0.5],
        }
    )
    theirs.to_parquet(tmp_path / "theirs.parquet")
    pandas.testing.assert_frame_equal(
        pandas.read_parquet(path), pandas.read_parquet(tmp_path / "theirs.parquet")
    )


def test_what_tools_and_calls_choose_the_types_of_is_written_as_json(tmp_path):
    def episode(argument, content):
        asked = {"type": "function", "function": {"name": "ask", "arguments": {"x": argument}}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [asked]},
            {"role": "tool", "name": "ask", "content": content},
        ]

    completions = [episode(1, "one"), episode("a", [("b", 2)]), episode([None], [])]
    table = CompletionTable(["p"] * 3, completions, {}, [0.0] * 3)
    rows = pyarrow.parquet.read_table(write_completions_parquet(tmp_path, 1, table)).to_pylist()
    assert [row["completion"][1]["content"] for row in rows] == ["one", '[["b", 2]]', "[]"]
    calls = [row["completion"][0]["tool_calls"][0]["function"] for row in rows]
    assert [c["arguments"] for c in calls] == ['{"x": 1}', '{"x": "a"}', '{"x": [null]}']
    assert completions[0] == episode(1, "one")
    assert "('b', 2)" in printed(table)


def test_parquet_names_the_column_it_cannot_write(tmp_path):
    table = CompletionTable(["p", "p"], ["a", "b"], {}, [0.0, 0.0], {"answer": ["x", 3]})
    with pytest.raises(ValueError, match=r"'answer'.*give all its entries one type"):
        write_completions_parquet(tmp_path, 1, table)


def printed(table: CompletionTable, **options) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_completions(table, 3, console=console, **options)
    return console.file.getvalue()


def test_print_completions_chooses_rows_as_asked():
    table = CompletionTable(
        ["apple", "apple", "cherry"],
        ["[b]one", "two", "three"],
        {"score": [0.125, 1.0, math.nan]},
        [0, 1, -1.0],
    )
    text = printed(table)
    assert all(word in text for word in ("[b]one", "two", "three", "Step 3", "score", "0.12", "nan", "-1.00"))
    unique = printed(table, log_unique_prompts=True)
    assert "one" in unique and "three" in unique and "two" not in unique
    state = random.getstate()
    assert sum(word in printed(table, num_completions_to_print=1) for word in ("one", "two", "three")) == 1
    assert random.getstate() == state
    assert printed(table, num_completions_to_print=0) == ""


@pytest.mark.parametrize("width", [60, 120])
def test_completions_with_many_columns_are_records_in_full_width(width):
    table = CompletionTable(
        prompts=["What is two and three?"],
        completions=["The answer is five, " * 8],
        rewards={"accuracy_reward": [1.0], "think_format_reward": [0.5], "brevity": [-3.0]},
        advantages=[0.7],
        extra={"extracted_answer": ["5"], "judge_note": ["[b]good"]},
    )
    console = Console(file=io.StringIO(), width=width)
    print_completions(table, 7, console=console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert sum(len(line) > width - 10 for line in lines if "answer" in line) >= 160 // width
    text = console.file.getvalue()
    for shown in ("Step 7", "What is two and three?", "accuracy_reward=1.00", "Advantage=0.70", "[b]good"):
        assert shown in text
    wide = Console(file=io.StringIO(), width=200)
    print_completions(table, 7, console=wide)
    assert "accuracy_reward ┃" in wide.file.getvalue()


# --- the timeline -----------------------------------------------------------------------------------------


class Clock:
    """Goes on when it is told to, and only then."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("colocate.memory.timeline.time", clock)
    return clock


def test_phases_cover_the_wall_time(clock):
    seen = []
    timeline = Timeline("cpu", on_phase=seen.append)
    with timeline.phase("rollout"):
        clock.sleep(5)
    with timeline.phase("train"):
        with timeline.phase("train/forward"):
            clock.sleep(3)
        clock.sleep(2)
    with timeline.phase("rollout"):
        clock.sleep(1)
    record = timeline.drain()
    phases = record["phases"]
    assert phases == {"rollout": 6, "train": 5, "train/forward": 3} and record["wall_s"] == 11
    assert seen == ["rollout", "", "train", "train/forward", "train", "", "rollout", ""]
    spans = record["memory"]["spans"]
    assert [span["phase"] for span in spans] == ["rollout", "train", "rollout"]
    assert all(a["end_s"] <= b["start_s"] for a, b in itertools.pairwise(spans))
    assert sum(span["end_s"] - span["start_s"] for span in spans) == pytest.approx(
        phases["rollout"] + phases["train"], abs=1e-6
    )


def test_time_between_steps_belongs_to_the_next_step_but_set_up_to_none(clock):
    timeline = Timeline("cpu")
    clock.sleep(5)
    with timeline.phase("train"):
        clock.sleep(1)
    assert timeline.drain()["wall_s"] == 1
    clock.sleep(2)
    with timeline.phase("train"):
        clock.sleep(1)
    record = timeline.drain()
    assert record["wall_s"] == 3 and record["memory"]["spans"][0]["start_s"] == 2
    assert timeline.drain()["phases"] == {}


def test_peak_is_that_of_its_own_phase():
    num_bytes = 64 * 2**20
    held = {"kv_cache": 0}
    timeline = Timeline("cpu", [Category("kv_cache", lambda: held["kv_cache"])])
    # Not from the allocator, which may hold pages that earlier tests have touched.
    with timeline.phase("rollout"), mmap.mmap(-1, num_bytes) as pages:
        pages.write(bytes(num_bytes))
        held["kv_cache"] = num_bytes
        timeline.sample()
        held["kv_cache"] = 0
    with timeline.phase("train"):
        pass
    rollout, train = timeline.drain()["memory"]["spans"]
    assert rollout["peak_bytes"] - rollout["before_bytes"] > 0.9 * num_bytes
    assert train["peak_bytes"] < rollout["peak_bytes"] - 0.9 * num_bytes
    assert rollout["categories"] == {"kv_cache": num_bytes} and train["categories"] == {"kv_cache": 0}
    assert (
        rollout["before_bytes"] <= rollout["peak_bytes"] and rollout["after_bytes"] <= rollout["peak_bytes"]
    )


def test_phases_that_would_count_twice_are_refused():
    timeline = Timeline("cpu")
    with (
        timeline.phase("train"),
        pytest.raises(ValueError, match="'train/rollout'"),
        timeline.phase("rollout"),
    ):
        pass
    with pytest.raises(ValueError, match="open that first"), timeline.phase("train/forward"):
        pass
    with timeline.phase("train"), pytest.raises(RuntimeError, match="close the phase"):
        timeline.drain()
    with pytest.raises(RuntimeError, match="none is open"):
        timeline.sample()


def test_a_phase_that_fails_is_still_recorded():
    timeline = Timeline("cpu")
    with pytest.raises(KeyError), timeline.phase("train"):
        raise KeyError
    assert list(timeline.drain()["phases"]) == ["train"]


def test_memory_in_use_on_a_gpu_is_the_allocators_and_what_lives_outside_of_it(monkeypatch):
    """A device of 100 units: the allocator's reserve, an arena outside of it, and 2 of CUDA's own."""
    state = {"allocated": 10, "reserved": 15, "highest": 10, "arena": 0}
    fakes = {
        "mem_get_info": lambda device: (100 - state["reserved"] - state["arena"] - 2, 100),
        "memory_stats": lambda device: {
            "allocated_bytes.all.current": state["allocated"],
            "allocated_bytes.all.peak": state["highest"],
            "reserved_bytes.all.current": state["reserved"],
        },
        "reset_peak_memory_stats": lambda device: state.update(highest=state["allocated"]),
        "synchronize": lambda device: None,
        "current_stream": lambda device: None,
        "Event": lambda enable_timing: SimpleNamespace(record=lambda stream: None),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    timeline = Timeline("cuda:0")
    with timeline.phase("rollout"):
        state["arena"] = 60
        timeline.sample()
        state["arena"] = 0
    with timeline.phase("train"):
        state.update(reserved=80, highest=70)
    memory = timeline.drain()["memory"]
    rollout, train = memory["spans"]
    assert (memory["device"], memory["limit_bytes"]) == ("cuda:0", 100)
    assert (rollout["before_bytes"], rollout["peak_bytes"], rollout["after_bytes"]) == (12, 72, 12)
    assert (train["before_bytes"], train["peak_bytes"], train["after_bytes"]) == (12, 72, 12)
    assert (train["allocated_bytes"], train["reserved_bytes"], train["peak_allocated_bytes"]) == (10, 80, 70)


@pytest.mark.gpu
def test_peak_and_time_on_a_real_gpu():
    timeline = Timeline("cuda")
    with timeline.phase("train"):
        block = torch.ones(256 * 2**20, dtype=torch.uint8, device="cuda")
        del block
        torch.cuda._sleep(200_000_000)  # cycles, about 0.1 s; launched, not waited for
    record = timeline.drain()
    [span] = record["memory"]["spans"]
    assert 256 * 2**20 <= span["peak_bytes"] - span["before_bytes"] < 600 * 2**20
    assert span["peak_bytes"] < record["memory"]["limit_bytes"]
    assert record["phases"]["train"] > 0.05


# --- plots ------------------------------------------------------------------------------------------------


def tick_values(svg: ElementTree.Element, axis: str) -> list[tuple[float, float]]:
    """(value, pixel) of every tick, from its text and its place alone."""
    units = {"k": 1e3, "M": 1e6, "G": 1e9, "%": 0.01}
    ticks = []
    for text in svg.iter("{http://www.w3.org/2000/svg}text"):
        if text.get("class") == f"{axis}-tick":
            shown = text.text or ""
            scale = units.get(shown[-1], 1.0)
            ticks.append((float(shown.rstrip("kMG%")) * scale, float(text.get(axis))))
    return ticks


def pixel_to_value(svg: ElementTree.Element, axis: str):
    (v0, p0), *_, (v1, p1) = tick_values(svg, axis)
    return lambda pixel: v0 + (pixel - p0) * (v1 - v0) / (p1 - p0)


def drawn_lines(svg: ElementTree.Element, css_class: str) -> list[list[tuple[float, float]]]:
    """The lines of a class as values, read back through the ticks."""
    x, y = pixel_to_value(svg, "x"), pixel_to_value(svg, "y")
    lines = []
    for path in svg.iter("{http://www.w3.org/2000/svg}path"):
        # Keys of the legend are drawn with a relative "h".
        if path.get("class") == css_class and "h" not in path.get("d"):
            points = [point.split() for point in path.get("d")[1:].split("L")]
            lines.append([(x(float(px)), y(float(py))) for px, py in points])
    return lines


@settings(max_examples=60)
@given(
    ys=st.lists(st.floats(-1, 1) | st.just(math.nan), min_size=2, max_size=60).filter(
        lambda ys: sum(map(math.isfinite, ys)) >= 2
    ),
    scale=st.sampled_from([1e-6, 0.02, 1.0, 700.0, 3e5, 4e9]),
    shift=st.sampled_from([0.0, 3.0]),
)
def test_a_line_shows_its_values_where_the_ticks_say(ys, scale, shift):
    ys = [scale * (y + shift) for y in ys]
    xs = [float(10 + 2 * i) for i in range(len(ys))]
    plot = Plot("t", Axis.around(xs, tight=True), Axis.around(ys))
    plot.line(xs, ys, "blue")
    svg = ElementTree.fromstring(plot.svg())
    ticks = tick_values(svg, "y")
    assert 2 <= len(ticks) <= 8 and len({value for value, _ in ticks}) == len(ticks)
    steps = [b[0] - a[0] for a, b in itertools.pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)  # also: the texts have decimals enough
    drawn = [point for line in drawn_lines(svg, "curve s-blue") for point in line]
    x, y = pixel_to_value(svg, "x"), pixel_to_value(svg, "y")
    for circle in svg.iter("{http://www.w3.org/2000/svg}circle"):
        drawn.append((x(float(circle.get("cx"))), y(float(circle.get("cy")))))
    finite = [(px, py) for px, py in zip(xs, ys, strict=True) if math.isfinite(py)]
    assert len(drawn) == len(finite)
    tolerance_x = 0.2 * (xs[-1] - xs[0]) / 250
    tolerance_y = 0.2 * (max(v for v, _ in ticks) - min(v for v, _ in ticks)) / 150
    for (dx, dy), (vx, vy) in zip(sorted(drawn), finite, strict=True):
        assert dx == pytest.approx(vx, abs=tolerance_x) and dy == pytest.approx(vy, abs=tolerance_y)


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    num_points=st.integers(1, 5000),
    max_points=st.integers(8, 600),
    holes=st.booleans(),
)
def test_decimation_keeps_the_ends_and_the_extremes(seed, num_points, max_points, holes):
    rng = random.Random(seed)
    ys = [math.nan if holes and rng.random() < 0.3 else rng.gauss(0, 1) for _ in range(num_points)]
    xs = list(range(num_points))
    kept_x, kept_y = decimate(xs, ys, max_points)
    finite, kept = [y for y in ys if math.isfinite(y)], [y for y in kept_y if math.isfinite(y)]
    assert len(kept_x) <= max_points + 4 and kept_x == sorted(set(kept_x))
    assert all(ys[x] == y or math.isnan(y) for x, y in zip(kept_x, kept_y, strict=True))
    if finite:
        assert (min(kept), max(kept), kept[0], kept[-1]) == (min(finite), max(finite), finite[0], finite[-1])


def test_smoothing_is_the_mean_of_the_window():
    ys = [1.0, 5.0, math.nan, 3.0, 7.0]
    smoothed = smooth(ys, 3)
    assert smoothed[:2] == [3.0, 3.0] and math.isnan(smoothed[2]) and smoothed[3:] == [5.0, 5.0]


def test_log_axis_puts_a_decade_at_equal_distances():
    axis = Axis.around([0.002, 40.0, -1.0, math.nan], log=True)
    assert (axis.low, axis.high) == (pytest.approx(1e-3), pytest.approx(100))
    assert axis.fraction(0.1) == pytest.approx(2 / 5) and axis.fraction(10) == pytest.approx(4 / 5)
    small = Axis.around([2e-7, 3e-5], log=True)
    assert [small.text(tick) for tick in small.ticks] == ["1e-7", "1e-6", "1e-5", "1e-4"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.4123, "0.412"), (28_412, "28.4k"), (1234, "1234"), (2_500_000, "2.5M"), (1.2e-6, "1.20e-6"), (0, "0"),
     (math.nan, "–"), (999.6, "1000"), (-0.5, "-0.5"), (7e9, "7G")],
)  # fmt: skip
def test_compact(value, text):
    assert compact(value) == text


# --- the report -------------------------------------------------------------------------------------------


VOID_TAGS = {"meta", "br", "img", "link", "hr", "input"}


class PageParser(HTMLParser):
    """Checks that tags nest, and collects text, tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open_tags and self.open_tags.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text += data


def parse_page(path: Path) -> PageParser:
    parser = PageParser()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert parser.open_tags == []
    return parser


def charts_in(path: Path, title: str) -> list[ElementTree.Element]:
    pictures = re.findall(r"<svg.*?</svg>", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    elements = [ElementTree.fromstring(picture) for picture in pictures]
    return [element for element in elements if str(element.get("aria-label")).startswith(title + ". ")]


@pytest.fixture(scope="module")
def synthetic_run(tmp_path_factory) -> Path:
    return write_synthetic_run(tmp_path_factory.mktemp("run"), num_steps=120)


def test_report_is_one_well_formed_page_that_needs_nothing_else(synthetic_run):
    path = write_report(synthetic_run)
    assert path == synthetic_run / "report.html"
    page = parse_page(path)
    assert "link" not in page.tags and "img" not in page.tags
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset", "onclick"}
    addresses = [value for name, value in page.attributes if "//" in value and name != "xmlns"]
    assert addresses == []
    assert "@import" not in path.read_text() and "url(" not in path.read_text()
    # What the run wrote is shown as text, not run.
    assert "<script>alert('escaped?')</script>" in page.text
    assert "synthetic <numbers> & nothing else" in page.text
    assert "prefers-color-scheme:dark" in path.read_text()


def test_report_says_the_right_numbers(synthetic_run):
    page = parse_page(write_report(synthetic_run))
    records = read_strictly(synthetic_run / "metrics.jsonl")
    steps = [r for r in records if not r.get("eval")]
    evals = [r["eval_reward"] for r in records if r.get("eval")]
    wall = sum(r["wall_s"] for r in steps)
    first, last = (sum(r["reward"] for r in part) / 10 for part in (steps[:10], steps[-10:]))
    rollout = sum(r["phases"]["rollout"] for r in steps)
    peak = max(span["peak_bytes"] for r in steps for span in r["memory"]["spans"]) / GIB
    for text in (
        f"{first:.3g} → {last:.3g}",
        f"{evals[0]:.3g} → {evals[-1]:.3g}",
        f"{steps[-1]['num_tokens'] / wall / 1000:.3g}k tokens/s",
        f"{wall / 120:.3g} s",
        f"{100 * rollout / wall:.0f}% in rollout",
        f"{100 * rollout / wall:.1f}%",
        f"{peak:.0f} GiB",
        "of 140 GiB, in rollout",
        "120 steps",
        "invented-1.5B",
    ):
        assert text in page.text, text


def test_reward_curve_passes_through_the_rewards(synthetic_run):
    records = read_strictly(synthetic_run / "metrics.jsonl")
    rewards = [(r["step"], r["reward"]) for r in records if not r.get("eval")]
    evals = [(r["step"], r["eval_reward"]) for r in records if r.get("eval")]
    wide, narrow = charts_in(write_report(synthetic_run), "Reward")
    for svg in (wide, narrow):
        [line] = drawn_lines(svg, "faint s-blue")
        assert len(line) == 120
        for (x, y), (step, reward) in zip(line, rewards, strict=True):
            assert x == pytest.approx(step, abs=0.1) and y == pytest.approx(reward, abs=0.002)
        x, y = pixel_to_value(svg, "x"), pixel_to_value(svg, "y")
        circles = svg.findall(".//{http://www.w3.org/2000/svg}circle")[1:]  # the first is the legend's
        assert [(x(float(c.get("cx"))), y(float(c.get("cy")))) for c in circles] == [
            (pytest.approx(step, abs=0.1), pytest.approx(value, abs=0.002)) for step, value in evals
        ]


def test_time_bars_are_as_high_as_the_steps_are_long(synthetic_run):
    steps = [r for r in read_strictly(synthetic_run / "metrics.jsonl") if not r.get("eval")]
    wide, _ = charts_in(write_report(synthetic_run), "Where each step's time went")
    (_, p0), *_, (_, p1) = ticks = tick_values(wide, "y")
    seconds_per_pixel = (ticks[-1][0] - ticks[0][0]) / (p0 - p1)
    bars: dict[int, dict[str, float]] = {}
    for rect in wide.iter("{http://www.w3.org/2000/svg}rect"):
        title = rect.find("{http://www.w3.org/2000/svg}title")
        if title is not None:
            step, phase = re.match(r"step (\d+): (\w+) ", title.text).groups()
            bars.setdefault(int(step), {})[phase] = float(rect.get("height")) * seconds_per_pixel
    assert len(bars) == 120
    for record in steps:
        bar = bars[record["step"]]
        assert sum(bar.values()) == pytest.approx(record["wall_s"], abs=0.01)
        assert bar["rollout"] == pytest.approx(record["phases"]["rollout"], abs=0.005)
        assert "train/forward" not in bar


def test_memory_of_a_step_adds_up_to_its_peaks(synthetic_run):
    [svg, _] = [c for c in map(ElementTree.fromstring, re.findall(
        r"<svg.*?</svg>", write_report(synthetic_run).read_text(), flags=re.DOTALL
    )) if "Memory through one step" in c.get("aria-label")]  # fmt: skip
    number = int(re.search(r"step (\d+)", svg.get("aria-label")).group(1))
    records = read_strictly(synthetic_run / "metrics.jsonl")
    [record] = [r for r in records if r["step"] == number and not r.get("eval")]
    totals: dict[str, float] = {}
    for title in svg.iter("{http://www.w3.org/2000/svg}title"):
        phase, value = re.match(r"(\w+): .* ([\d.]+) GiB", title.text).groups()
        totals[phase] = totals.get(phase, 0.0) + float(value)
    for span in record["memory"]["spans"]:
        assert totals[span["phase"]] == pytest.approx(span["peak_bytes"] / GIB, rel=0.02)


ODD_SPAN = {"phase": 1, "start_s": 2.0, "end_s": 1.0, "peak_bytes": 5, "categories": [1]}
BROKEN_VALUES = st.sampled_from(
    [
        *(None, "text", True, [], {}, -1.0, 0, 1e308, 10**400),
        *({"rollout": "x"}, {"rollout": None}, {"spans": [1]}, {"spans": 3, "limit_bytes": "y"}),
        {"spans": [{"phase": "a", "start_s": 0, "end_s": 1, "peak_bytes": None}]},
        {"spans": [ODD_SPAN]},
    ]
)
BROKEN_NAMES = st.sampled_from(
    [
        *("reward", "reward_std", "phases", "memory", "wall_s", "num_tokens", "kl", "grad_norm", "my_metric"),
        *("completions/mean_length", "sampling/sampling_logp_difference/mean", "eval_reward", "eval"),
    ]
)


@settings(max_examples=80)
@given(records=st.lists(st.dictionaries(BROKEN_NAMES, BROKEN_VALUES), min_size=1, max_size=5))
def test_no_record_breaks_the_report(records):
    with tempfile.TemporaryDirectory() as directory:
        lines = [json.dumps({"step": i, **record}) for i, record in enumerate(records)]
        lines += ["", "[1]", '{"no": "step"}', '{"step": null}', '{"step": 1, "rew']
        (Path(directory) / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99}']))
        (Path(directory) / "completions.jsonl").write_text(
            '{"step": 1, "rewards": 3}\n{"step": 1, "prompt": [{}]}\n9'
        )
        (Path(directory) / "run.json").write_text("[not an object")
        page = parse_page(write_report(directory))
    assert "4 unreadable lines" in page.text


def test_a_rollout_that_feeds_several_steps_is_drawn_through_all_of_them(tmp_path):
    record = {"epoch": 0.0, "time": 0.0, "wall_s": 1.0, "phases": {"train": 1.0}, "loss": 0.5}
    memory = {"device": "cpu", "limit_bytes": 100}
    for step in range(1, 9):
        begins = step % 2 == 1
        phases = ["rollout", "train"] if begins else ["train"]
        spans = [
            {
                "phase": phase,
                "start_s": i,
                "end_s": i + 1,
                "before_bytes": 1,
                "after_bytes": 1,
                "peak_bytes": 1,
            }
            for i, phase in enumerate(phases)
        ]
        rewarded = {"reward": step / 10, "reward_std": 0.1} if begins else {}
        line = {**record, **rewarded, "step": step, "memory": {**memory, "spans": spans}}
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    run = read_run(tmp_path)
    assert run.metric("reward") == [0.1, 0.1, 0.3, 0.3, 0.5, 0.5, 0.7, 0.7]
    assert run.typical_step() in (4, 6)  # of the last half of those with a rollout: steps 5 and 7
    assert run.typical_steps() in (range(4, 6), range(6, 8)), "with the step that trains on the same rollout"


def test_missing_or_empty_record_is_a_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"No metrics.jsonl in {tmp_path}")):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"eval": true, "step": 0}\nnonsense\n')
    with pytest.raises(ValueError, match=r"no record of an optimizer step.*1 of evaluations, 1 unreadable"):
        write_report(tmp_path)


def test_one_step_and_the_header_from_config_yaml(tmp_path):
    log = RunLog(tmp_path)
    log.log_step(1, {"reward": 0.25}, epoch=0.1, timeline={})
    log.close()
    (tmp_path / "config.yaml").write_text("model_name_or_path: some/model\ndataset_name: some/data\n")
    page = parse_page(write_report(tmp_path))
    assert all(
        text in page.text for text in ("some/model", "some/data", "1 step", "0.25 → 0.25", tmp_path.name)
    )


def test_long_run_stays_small_and_keeps_its_spike(tmp_path):
    rng = random.Random(1)
    pool = []
    for step in range(1, 301):
        metrics, timeline = synthetic_step(step, 300, rng)
        pool.append(json.dumps({**timeline, **metrics})[1:])
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 25_001):
            # The later of two equal keys counts.
            line = pool[rng.randrange(300)][:-1]
            file.write(f'{{"step": {step}, {line}, "reward": {9.5 if step == 13_457 else rng.random()}}}\n')
    path = write_report(tmp_path)
    assert path.stat().st_size < 6_000_000
    parse_page(path)
    for svg in charts_in(path, "Reward"):
        [line] = drawn_lines(svg, "faint s-blue")
        assert max(y for _, y in line) == pytest.approx(9.5, abs=0.1)


def test_picture_is_one_svg_of_reward_time_and_memory(synthetic_run):
    text = draw_picture(synthetic_run)
    svg = ElementTree.fromstring(text)
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    spoken = [str(part.get("aria-label")) for part in svg if part.get("aria-label")]
    titles = [text.partition(". ")[0] for text in spoken]
    assert titles[0] == "Reward" and titles[1].startswith("Memory through one step (step ")
    for outer, inner in (("width", "x"), ("height", "y")):
        ends = [float(part.get(inner)) + float(part.get(outer)) for part in svg if part.get("aria-label")]
        assert max(ends) + 20 == float(svg.get(outer))
    assert "var(" not in text and "url(" not in text and "<script" not in text and "href" not in text


def test_pictures_say_in_words_what_their_curves_do(synthetic_run):
    path = write_report(synthetic_run)
    steps = [r for r in read_strictly(synthetic_run / "metrics.jsonl") if not r.get("eval")]
    first, last = (sum(r["reward"] for r in part) / 10 for part in (steps[:10], steps[-10:]))
    for svg in charts_in(path, "Reward"):
        assert f"reward rises from {first:.3g} to {last:.3g}" in str(svg.get("aria-label"))
    [rate] = charts_in(path, "Learning rate")
    assert "learning rate falls from " in str(rate.get("aria-label"))
    [time, _] = charts_in(path, "Where each step's time went")
    wall = sum(r["wall_s"] for r in steps)
    share = 100 * sum(r["phases"]["rollout"] for r in steps) / wall
    assert f"rollout {share:.0f}%" in str(time.get("aria-label"))
    assert course("x", [1.0, 1.0]) == "x stays at 1"
    assert course("x", [math.nan]) == "x has no values"
    assert course("x", [1.0, 9.0, 1.0]) == "x begins at 1 and ends at 1, between 1 and 9"


def relative_luminance(color: str) -> float:
    """WCAG 2.2's, of "#rrggbb"."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((relative_luminance(one), relative_luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_colour_can_be_told_from_the_card_and_text_can_be_read(scheme):
    card = theme._INK["card"][scheme]
    low = {name: contrast(pair[scheme], card) for name, pair in theme.COLORS.items()}
    assert min(low.values()) >= 3.0, low  # WCAG 2.2, 1.4.11: graphics
    for ink in ("text", "muted"):  # 1.4.3: text
        assert contrast(theme._INK[ink][scheme], card) >= 4.5
    [opacity] = re.findall(r"\.faint\{[^}]*opacity:([.\d]+)", theme.plot_rules())
    for name in ("blue", "slate"):  # a long run's single steps
        mixed = "#" + "".join(
            f"{round(float(opacity) * int(a, 16) + (1 - float(opacity)) * int(b, 16)):02x}"
            for a, b in zip(
                re.findall("..", theme.COLORS[name][scheme][1:]), re.findall("..", card[1:]), strict=True
            )
        )
        assert contrast(mixed, card) >= 3.0, name


@settings(max_examples=100)
@given(st.lists(st.floats(-100, 100) | st.sampled_from([0.0, 1.0]), min_size=2, max_size=40))
def test_the_reward_band_stays_within_the_rewards_seen(rewards):
    bands = []

    class Recorder(Plot):
        def band(self, xs, lows, highs, *how, **options):
            bands.append((lows, highs))

    record = {"step": 1, "reward": statistics.fmean(rewards), "reward_std": statistics.stdev(rewards)}
    info = {"options": {"generation_batch_size": len(rewards)}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "Plot", Recorder)
        charts.reward_chart(RecordedRun(Path("unused"), info, [record], [], 0), (360, 250))
    [([low], [high])] = bands
    assert min(rewards) - 1e-9 <= low <= high <= max(rewards) + 1e-9


def test_throughput_curve_agrees_with_its_tile_where_a_rollout_feeds_several_steps(tmp_path):
    rng = random.Random(2)
    log = RunLog(tmp_path)
    tokens, wall = 0, 0.0
    for step in range(1, 241):
        begins = step % 4 == 1
        tokens += rng.randint(5000, 9000) if begins else 0
        seconds = rng.uniform(1.0, 2.0) if begins else rng.uniform(0.1, 0.2)
        wall += seconds
        metrics = {"reward": 0.5, **({"num_tokens": tokens} if begins else {})}
        log.log_step(step, metrics, epoch=0.0, timeline={"wall_s": seconds, "phases": {"rollout": seconds}})
    log.close()
    tile = tokens / wall
    run = read_run(tmp_path)
    per_step = run.tokens_per_second
    assert sum(s * w for s, w in zip(per_step, run.wall_s, strict=True)) / wall == pytest.approx(tile)
    assert min(per_step) > 0.4 * tile and max(per_step) < 2.5 * tile  # no teeth, and no zeros
    path = write_report(tmp_path)
    assert f"{compact(tile)} tokens/s" in parse_page(path).text
    [svg] = charts_in(path, "Throughput")
    [line] = drawn_lines(svg, "curve s-green")
    assert statistics.fmean(y for _, y in line) == pytest.approx(tile, rel=0.05)


@pytest.mark.parametrize("width", [360, 470, 1128])
def test_title_and_note_never_overlap(width):
    for title, note in (("Where each step's time went", "seconds, bars: means of 3 steps"), ("Loss", "GiB")):
        plot = Plot(title, Axis.around([0, 1]), Axis.around([0, 1]), width=width, note=note)
        svg = ElementTree.fromstring(plot.svg())
        [head] = [e for e in svg.iter() if e.text == title and e.tag.endswith("text")]
        [aside] = [e for e in svg.iter() if e.text == note]
        # Seven pixels and a half a character are more than the 13 px bold font takes on average.
        free = width - 7.5 * len(title) - 6.5 * len(note)
        assert aside.get("y") == head.get("y") if free > 20 else aside.get("y") > head.get("y")


def test_options_that_json_has_no_form_for_are_written_as_text(tmp_path):
    kwargs = {"dtype": torch.bfloat16, "max_memory": {0: (torch.float16, 1)}}
    options = provenance(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, model_init_kwargs=kwargs))[
        "options"
    ]
    expected = {"dtype": "torch.bfloat16", "max_memory": {"0": ["torch.float16", 1]}}
    assert json.loads(json.dumps(options))["model_init_kwargs"] == expected


def test_report_shows_command_commit_and_options_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.orig_argv", ["/env/bin/python", "/env/bin/colocate", "train", "run.yaml", "--hub_token", "hf_x"]
    )
    args = GRPOConfig(output_dir=str(tmp_path), learning_rate=3e-4, hub_token="hf_x", use_cpu=True)
    told = redacted(provenance(args))
    assert told["command"] == "colocate train run.yaml --hub_token <HUB_TOKEN>"
    assert told["options"]["learning_rate"] == 3e-4 and told["options"]["hub_token"] == "<HUB_TOKEN>"
    assert "temperature" not in told["options"]  # it is at its default
    log = RunLog(tmp_path)
    log.describe({**told, "commit": "0123abc-dirty"})
    log.log_step(1, {"reward": 0.25}, epoch=0.1, timeline={})
    log.close()
    page = parse_page(write_report(tmp_path))
    for text in (told["command"], "Commit 0123abc-dirty", "learning_rate", "0.0003"):
        assert text in page.text, text


def test_commit_is_that_of_the_repository_around(tmp_path):
    assert commit_of(tmp_path) is None

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    commit = git("rev-parse", "HEAD")
    assert commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == f"{commit}-dirty"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/env/bin/python", "/env/bin/colocate", "train", "a b.yaml"], "colocate train 'a b.yaml'"),
        (["/usr/bin/python3", "train.py", "--seed", "1"], "python3 train.py --seed 1"),
        (["python", "-m", "colocate", "train"], "python -m colocate train"),
        ([], ""),
    ],
)
def test_command_is_what_was_typed(words, command):
    assert command_of(words) == command


# --- metrics ----------------------------------------------------------------------------------------------

numbers = st.floats(-1e3, 1e3, width=32)
events = st.lists(
    st.tuples(st.sampled_from("ab"), numbers | st.just(math.nan), st.integers(1, 50)), min_size=1, max_size=30
)


def gathered(rows) -> Metrics:
    metrics = Metrics()
    for name, value, count in rows:
        if math.isfinite(value):
            metrics.add_mean(f"{name}/mean", torch.tensor(value * count, dtype=torch.float64), count)
        metrics.add_min(f"{name}/min", torch.tensor(value))
        metrics.add_max(f"{name}/max", torch.tensor(value))
    return metrics


@settings(max_examples=80)
@given(rows=events, cuts=st.lists(st.integers(0, 30), max_size=4), as_floats=st.booleans())
def test_metrics_of_any_split_are_those_of_the_whole(rows, cuts, as_floats):
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    merged = Metrics()
    for start, end in itertools.pairwise(edges):
        part = gathered(rows[start:end])
        merged.merge(part.to_host() if as_floats else part)
    computed = merged.compute()
    for name in {name for name, _, _ in rows}:
        finite = [(value, count) for n, value, count in rows if n == name and math.isfinite(value)]
        if not finite:
            assert math.isnan(computed[f"{name}/min"]) and f"{name}/mean" not in computed
            continue
        # The mean is weighted by the counts, not a mean of means; NaN is no extreme.
        weighted = math.fsum(v * c for v, c in finite) / sum(c for _, c in finite)
        assert computed[f"{name}/mean"] == pytest.approx(weighted, rel=1e-9, abs=1e-9)
        assert computed[f"{name}/min"] == min(v for v, _ in finite)
        assert computed[f"{name}/max"] == max(v for v, _ in finite)


def test_metrics_on_the_host_are_floats_and_the_mean_of_nothing_is_nan():
    metrics = gathered([("a", 2.0, 3), ("a", 4.0, 1)])
    metrics.add_mean("empty", torch.tensor(0.0), torch.tensor(0.0))
    host = metrics.to_host()
    assert host._sums["a/mean"] == (10.0, 4.0) and all(type(v) is float for v in host._sums["a/mean"])
    assert type(host._minima["a/min"]) is float and type(host._maxima["a/max"]) is float
    computed = host.compute()
    assert math.isnan(computed.pop("empty"))
    assert (
        computed
        == {"a/mean": 2.5, "a/min": 2.0, "a/max": 4.0}
        == {k: v for k, v in metrics.compute().items() if k != "empty"}
    )


def test_a_line_nested_too_deeply_for_a_parser_is_left_out(tmp_path):
    good = '{"step": 1, "reward": 0.5}\n'
    (tmp_path / "metrics.jsonl").write_text(f'{good}{{"step": 2, "x": {"[" * 100_000}{"]" * 100_000}}}\n')
    (tmp_path / "run.json").write_text("[" * 100_000)
    assert read_run(tmp_path).metric("reward") == [0.5]
    RunLog(tmp_path, resume_step=1).close()
    assert (tmp_path / "metrics.jsonl").read_text() == good


def test_runs_side_by_side_have_the_titles_of_one_run_and_gaps_where_nothing_ended(tmp_path):
    from colocate.reporting.comparison import write_comparison

    for name, clipped in (("a", 1.0), ("b", 0.5)):
        (tmp_path / name).mkdir()
        records = [
            {
                "step": step, "wall_s": 1.0, "reward": 0.1 * step, "entropy": 1.0, "kl": 0.0,
                "completions/clipped_ratio": clipped, "frac_reward_zero_std": 0.25,
                "completions/mean_terminated_length": 0.0 if clipped == 1 else 40.0,
                "rewards/accuracy_reward/mean": 0.5,
            }
            for step in (1, 2, 3)
        ]  # fmt: skip
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    page = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "c.html").read_text()
    for title in (
        "Completions cut off at the limit",
        "Groups of equal rewards",
        "Reward by accuracy_reward",
        "Length of those that ended, mean",
    ):
        assert title in page
    assert "completions/clipped_ratio" not in page and "frac_reward_zero_std" not in page
    assert "0 at every step of all runs: KL to the reference." in page
    assert all(math.isnan(v) for v in read_run(tmp_path / "a").metric("completions/mean_terminated_length"))
    assert read_run(tmp_path / "b").metric("completions/mean_terminated_length") == [40.0] * 3
