"""What is told of a phase that runs: counts, shares, and the length of a step that is not over."""

import math
import time

import pytest

from colocate.reporting import step_estimate
from colocate.reporting.step_estimate import StepEstimate
from colocate.reporting.work_counts import WorkCounts


def test_counts_say_how_much_of_all_is_done():
    counts = WorkCounts()
    assert counts.words() == "" and math.isnan(counts.share())
    counts.begin("tokens", 4096, is_limit=True)
    counts.begin("completions", 32)
    counts.add("tokens", 1204)
    counts.add("completions", 3)
    assert counts.words() == "1,204 of at most 4,096 tokens, 3 of 32 completions"
    assert counts.share() == pytest.approx(1204 / 4096)
    counts.add("completions", 29)  # they have ended before their limits
    assert counts.share() == 1.0
    counts.add("turns", 7)
    counts.at_work = "accuracy_reward"
    assert counts.words().startswith("accuracy_reward, 1,204") and counts.words().endswith(", 7 turns")
    counts.clear()
    assert counts.words() == ""


def test_items_count_as_done_when_the_next_one_is_asked_for():
    counts, seen = WorkCounts(), []
    for item in counts.each("micro-batches", "abc"):
        seen.append((item, counts.words()))
    assert seen[2] == ("c", "2 of 3 micro-batches") and counts.words() == "3 of 3 micro-batches"


def test_layers_are_parts_of_a_micro_batch():
    counts = WorkCounts()
    for _ in counts.each("micro-batches", range(4)):
        counts.begin("layers", 10, is_part=True)
        counts.add("layers", 5)
        shares = counts.share()
        assert counts.words().endswith("of 4 micro-batches, 5 of 10 layers")
    assert shares == pytest.approx(3.5 / 4) and counts.share() == 1.0


def test_what_is_measured_never_goes_beyond_its_total_and_may_fail():
    counts, sizes = WorkCounts(), iter([10, 130])
    counts.begin("MB", 100)
    counts.measure(lambda: {"MB": next(sizes)})
    assert [counts.words() for _ in range(3)] == ["10 of 100 MB", "100 of 100 MB", "0 of 100 MB"]


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(step_estimate, "time", type("", (), {"monotonic": staticmethod(lambda: now[0])}))
    assert step_estimate.time is not time
    return now


@pytest.mark.parametrize(("rollouts_per_step", "expected"), [(1.0, 40 + 5 + 60), (0.25, 10 + 1.25 + 60)])
def test_a_step_is_guessed_at_by_the_part_that_is_done(clock, rollouts_per_step, expected):
    estimate = StepEstimate(rollouts_per_step)
    estimate.set_phase("rollout")
    clock[0] += 10
    assert estimate.seconds(0.25) == pytest.approx(40 * rollouts_per_step) and not estimate.knows_training
    assert math.isnan(estimate.seconds(0.001)) and math.isnan(estimate.seconds(math.nan))
    clock[0] += 30
    for phase, seconds in (("", 0), ("score", 5), ("", 0), ("train", 15)):
        estimate.set_phase(phase)
        clock[0] += seconds
    assert estimate.knows_training and estimate.elapsed_s == 60
    assert estimate.seconds(0.25) == pytest.approx(expected)
    estimate.end_step()
    assert math.isnan(estimate.seconds(0.5)) and estimate.elapsed_s == 0
