"""How much the engine may keep, from records of invented steps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from colocate.memory.handover import GROWTH, MARGIN, Handover
from tiny import StubEngine, make_trainer

GIB = 2**30
LIMIT = 140 * GIB
ENGINE = StubEngine(lambda prompt, member: [])


def span(phase, before, peak, after=None, kv_cache=0, rollout_weights=0):
    """Of a phase with the given GiB in use, those of the engine among them."""
    after = before if after is None else after
    return {
        "phase": phase,
        "before_bytes": before * GIB,
        "peak_bytes": peak * GIB,
        "after_bytes": after * GIB,
        "categories": {
            "kv_cache": kv_cache * GIB,
            "rollout_weights": rollout_weights * GIB,
            "weights": 3 * GIB,
        },
    }


def record(*spans, device="cuda:0"):
    return {"device": device, "limit_bytes": LIMIT, "spans": list(spans)}


def test_nothing_is_kept_before_training_was_seen():
    handover = Handover(ENGINE)
    assert handover.keep_bytes == 0
    handover.learn(record(span("rollout", 20, 135, 20, kv_cache=100)))
    assert handover.keep_bytes == 0


def test_what_training_leaves_free_less_the_margin_is_kept():
    handover = Handover(ENGINE)
    handover.learn(record(span("rollout", 20, 130, 20, kv_cache=100), span("train", 20, 60)))
    # 20 stay, 40 come and go and may become 60; 14 of 140 are the margin.
    assert (MARGIN, GROWTH) == (0.1, 0.5)
    assert handover.keep_bytes == (140 - 20 - 60 - 14) * GIB


def test_what_was_kept_is_not_what_training_needed():
    handover, again = Handover(ENGINE), Handover(ENGINE)
    handover.learn(record(span("train", 20, 60)))
    again.learn(record(span("train", 20 + 46, 60 + 46, kv_cache=32, rollout_weights=14)))
    assert again.keep_bytes == handover.keep_bytes > 0


def test_moments_made_by_the_first_step_count_for_the_second():
    first, second = Handover(ENGINE), Handover(ENGINE)
    first.learn(record(span("train", 20, 60, after=32)))
    second.learn(record(span("train", 32, 72, after=32)))
    assert first.keep_bytes == second.keep_bytes


def test_on_a_cpu_nothing_is_kept(tmp_path):
    handover = Handover(ENGINE)
    handover.learn(record(span("train", 1, 2), device="cpu"))
    assert handover.keep_bytes == 0

    trainer = make_trainer(tmp_path)
    kept, sleep = [], trainer.engine.sleep
    trainer.engine.sleep = lambda keep_bytes: (kept.append(keep_bytes), sleep(keep_bytes))
    trainer.train()
    assert kept == [0, 0]


def test_the_loop_passes_on_what_it_learned_from_the_steps_before(tmp_path):
    trainer = make_trainer(tmp_path)
    kept, learned = [], []
    trainer.engine.sleep = lambda keep_bytes: kept.append(keep_bytes)

    class Counting:
        keep_bytes = 0

        def learn(self, memory):
            learned.append([part["phase"] for part in memory["spans"]])
            self.keep_bytes += 7

    trainer.run = replace(trainer.run, handover=Counting())
    trainer.train()
    assert kept == [0, 7]
    assert [phases[0] for phases in learned] == ["rollout", "rollout"] and "train" in learned[0]


phases = st.builds(
    lambda before, transient, after, kv_cache: span(
        "train", before + kv_cache, before + transient + kv_cache, after + kv_cache, kv_cache
    ),
    *[st.integers(0, 150)] * 4,
)


@given(st.lists(st.lists(phases, min_size=1, max_size=4), min_size=1, max_size=6))
def test_what_is_kept_never_grows_and_leaves_room_for_every_peak_so_far(steps):
    handover, before = Handover(ENGINE), LIMIT
    seen = []
    for spans in steps:
        handover.learn(record(*spans))
        seen += [part["peak_bytes"] - part["categories"]["kv_cache"] for part in spans]
        assert 0 <= handover.keep_bytes <= before
        assert handover.keep_bytes == 0 or handover.keep_bytes + max(seen) <= 0.9 * LIMIT + 1
        before = handover.keep_bytes
