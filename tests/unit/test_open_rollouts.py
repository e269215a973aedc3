"""The native engine while sequences come and go: too few pages, lost memory, windows in flight."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from engine_models import make_model, make_prompts
from engine_pressure import Pressure, Windowed, awake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_episodes import MAX_TOKENS, Script, assert_each_is_as_alone, play, scripts

from colocate.engines.native import kept_pages
from colocate.engines.native.decoder import Decoder
from colocate.engines.native.model_runner import CONTEXT_PER_QUERY, packs
from colocate.engines.native.pages import pages_for
from colocate.engines.native.scheduler import Prefill
from colocate.engines.native.submissions import Submissions
from colocate.types import Completion, SamplingParams

LONGEST = 11 + MAX_TOKENS
"""Tokens of the longest episode of `scripts`."""


def tight_engine(spare_pages: int, *, page_size: int, max_num_seqs: int, steps_per_look: int):
    """An engine whose cache holds `spare_pages` more than one sequence needs."""
    num_pages = pages_for(LONGEST - 1, page_size) + spare_pages
    engine = awake(
        make_model("qwen3"),
        max_num_seqs=max_num_seqs,
        page_size=page_size,
        kv_cache_tokens=num_pages * page_size,
    )
    engine._backend = Windowed(steps_per_look)
    return engine


def drain(engine) -> dict[int, Completion]:
    turns = {}
    while engine.is_busy:
        turns |= engine.poll()
    return turns


tight_engines = st.builds(
    tight_engine,
    st.sampled_from([0, 1, 3, 9, 100]),
    page_size=st.sampled_from([1, 3, 4, 16]),
    max_num_seqs=st.integers(1, 6),
    steps_per_look=st.integers(1, 9),
)


@settings(max_examples=25)
@given(script=scripts(), engine=tight_engines, temperature=st.sampled_from([0.0, 1.0]))
def test_without_room_episodes_are_each_as_alone(script, engine, temperature):
    sampling = SamplingParams(MAX_TOKENS, temperature=temperature, stop_token_ids=(3, 5, 8))
    assert_each_is_as_alone(engine, script, sampling, logprob_atol=1e-5)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=scripts(), engine=tight_engines, failing_step=st.integers(1, 40))
def test_memory_that_runs_out_in_a_step_changes_nothing(monkeypatch, script, engine, failing_step):
    num_steps, step = 0, Decoder.step

    def failing(decoder, *args):
        nonlocal num_steps
        num_steps += 1
        if num_steps == failing_step:
            raise torch.OutOfMemoryError("injected")
        return step(decoder, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", failing)
        assert_each_is_as_alone(engine, script, SamplingParams(MAX_TOKENS), logprob_atol=1e-5)


@settings(max_examples=12)
@given(script=scripts(), engine=tight_engines, interval=st.integers(1, 4))
def test_what_is_set_aside_or_saved_goes_on_where_it_was(script, engine, interval):
    """Other prompts are generated in between, by other sampling, and the sequences are read from a file."""
    sampling, polled, num_polls = SamplingParams(MAX_TOKENS), engine.poll, 0
    (other,) = make_prompts([5], seed=1)
    expected = engine.generate([other], SamplingParams(6, temperature=0.0))

    def poll() -> dict[int, Completion]:
        nonlocal num_polls
        num_polls += 1
        if num_polls % interval == 0:
            aside = engine.set_aside()
            assert not engine.is_busy
            assert engine.generate([other], SamplingParams(6, temperature=0.0)) == expected
            engine.sleep()
            engine.wake_up()
            file = io.BytesIO()
            torch.save(aside.state_dict(), file)
            file.seek(0)
            read = Submissions()
            read.load_state_dict(torch.load(file, weights_only=True), sampling)
            engine.take_back(read)
        return polled()

    engine.poll = poll
    assert_each_is_as_alone(engine, script, sampling, logprob_atol=1e-5)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_polls=st.integers(1, 9),
    page_size=st.sampled_from([1, 4, 16]),
    lengths=st.lists(st.integers(1, 20), max_size=20),  # all sequences have rows
)
def test_sequences_that_are_set_aside_keep_their_pages(monkeypatch, num_polls, page_size, lengths):
    """Each reads its last token, which was never fed, and what its group shares is there once."""
    engine = awake(make_model("qwen3"), page_size=page_size, kv_cache_tokens=4096)
    monkeypatch.setattr(kept_pages, "SLAB_BYTES", 3 * engine._cache.page_bytes(torch.float32))
    engine.submit(make_prompts([*lengths, 9], 3), SamplingParams(24))
    for _ in range(num_polls):
        engine.poll()
    in_use = engine._rollout.pool.num_pages - engine._rollout.pool.num_free
    aside = engine.set_aside()
    engine.sleep()
    engine.wake_up()
    engine.take_back(aside)
    with monkeypatch.context() as patch:
        pressure = Pressure(patch)
        engine.poll()
    pool = engine._rollout.pool
    assert abs(pool.num_pages - pool.num_free - in_use) <= 2 * 3 * (len(lengths) + 1)  # those of a window
    assert pressure.num_prefilled_tokens == 3 * (len(lengths) + 1)


def test_without_host_memory_sequences_go_on_all_the_same(monkeypatch, caplog):
    prompts, sampling = make_prompts([5, 9], 3), SamplingParams(24, temperature=0.0)
    engine = awake(make_model("qwen3"), page_size=4)
    expected = [list(completion.token_ids) for completion in engine.generate(prompts, sampling)]
    monkeypatch.setattr(kept_pages.host, "available_bytes", lambda: 2**10)
    numbers, turns = engine.submit(prompts, sampling), {}
    while engine.is_busy:
        turns |= engine.poll()
        aside = engine.set_aside()
        assert aside.kept is None
        engine.take_back(aside)
    assert [list(turns[number].token_ids) for number in numbers] == expected
    assert caplog.text.count("their tokens are read anew") == 1


def test_sequences_are_not_taken_back_over_others():
    engine = awake(make_model("qwen3"))
    engine.submit(make_prompts([3]), SamplingParams(4))
    aside = engine.set_aside()
    engine.submit(make_prompts([3], 2), SamplingParams(4))
    with pytest.raises(RuntimeError, match="The engine has 2 sequences"):
        engine.take_back(aside)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=scripts(), page_size=st.sampled_from([1, 4, 16]))
def test_with_room_each_token_is_read_once(monkeypatch, script, page_size):
    """Beside the tokens given, a turn reads the last token of the turn before, which was never fed. A prompt
    may find its beginning in the cache."""
    script = Script(script.arrivals, script.extensions, aborts={})
    with monkeypatch.context() as patch:
        engine = awake(make_model("qwen3"), page_size=page_size, kv_cache_tokens=4096)
        engine.generate(make_prompts([11]), SamplingParams(MAX_TOKENS))  # makes room for the longest
        pressure = Pressure(patch)
        turns = play(engine, script, SamplingParams(MAX_TOKENS))
    given_tokens = [len(given) + 1 for turns in script.extensions.values() for given, _ in turns]
    prompt_tokens = [
        len(prompt.token_ids) - turns[prompt.key, prompt.samples[0]][0].num_cached_tokens
        for _, prompt in script.arrivals
    ]
    assert pressure.num_prefilled_tokens == sum(prompt_tokens) + sum(given_tokens)
    assert pressure.num_preempted == 0


def test_sequences_that_rest_give_their_pages_up_last(monkeypatch):
    # 10 pages of 4 tokens. A sequence of 12 + 12 tokens ends with 6 pages, which it keeps while it rests; two
    # that run find 4, and are preempted in turn before it loses any.
    engine = awake(make_model("qwen3"), max_num_seqs=4, page_size=4, kv_cache_tokens=40)
    sampling = SamplingParams(24)
    (prompt,), others = make_prompts([12]), make_prompts([3, 3], seed=1)
    (resting,) = engine.submit([dataclasses.replace(prompt, max_tokens=(12,))], sampling, keep=True)
    drain(engine)
    engine.submit([dataclasses.replace(other, max_tokens=(8,)) for other in others], sampling)
    pressure = Pressure(monkeypatch)
    drain(engine)
    assert pressure.num_preempted == 1
    before = pressure.num_prefilled_tokens
    engine.extend(resting, [7, 7], 4)
    drain(engine)
    assert pressure.num_prefilled_tokens - before == 2 + 1
    # One that needs 7 pages alone takes some of them: the first 3 of its pages are found again.
    engine.submit(make_prompts([4], seed=2), sampling)
    drain(engine)
    before = pressure.num_prefilled_tokens
    engine.extend(resting, [7], 1)
    drain(engine)
    assert pressure.num_prefilled_tokens - before == 12 + 12 + 2 + 4 + 1 - 3 * 4
    engine.abort([resting])


@pytest.mark.parametrize("max_tokens", [1, 30])
def test_a_prompt_too_long_for_the_open_cache_opens_a_larger_one(max_tokens):
    engine = awake(make_model("qwen3"), page_size=4)
    sampling = SamplingParams(max_tokens)
    short, long = make_prompts([3], 2), make_prompts([60], 2, seed=1)
    expected = engine.generate(short, sampling) + engine.generate(long, sampling)
    numbers = engine.submit(short, sampling)
    turns = engine.poll()
    numbers += engine.submit(long, sampling)
    turns |= drain(engine)
    assert [turns[number].token_ids for number in numbers] == [c.token_ids for c in expected]


def test_a_cache_grows_for_those_that_come_later_at_most_once_for_each_doubling(monkeypatch):
    """Sequences come one after the other: none waits for the pages of another, and few are read anew."""
    engine = awake(make_model("qwen3"), page_size=4)
    sampling = SamplingParams(40)
    prompts = make_prompts([7] * 24, seed=2)
    expected = engine.generate(prompts, sampling)
    pressure, sizes, turns, numbers = Pressure(monkeypatch), [], {}, []
    for prompt in prompts:
        numbers += engine.submit([prompt], sampling)
        turns |= engine.poll()
        if engine._rollout is not None:
            sizes.append(engine._rollout.pool.num_pages)
    assert pressure.num_preempted == 0
    assert len(set(sizes)) <= 6 and sizes[-1] >= 24 * 12 / 2
    turns |= drain(engine)
    assert [turns[number].token_ids for number in numbers] == [c.token_ids for c in expected]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=20),
    max_tokens=st.integers(1, 20),
)
def test_prefills_are_packed_whole_and_in_order(lengths, max_tokens):
    items = [Prefill(range(cached + new), cached, []) for cached, new in lengths]
    pieces = []
    for pack in packs(items, max_tokens):
        assert 0 < sum(piece.num_tokens for piece in pack) <= max_tokens
        assert len(pack) == 1 or sum(piece.stop for piece in pack) <= CONTEXT_PER_QUERY * max_tokens
        pieces += [(id(piece.item), token) for piece in pack for token in range(piece.start, piece.stop)]
    assert pieces == [(id(item), t) for item in items for t in range(item.num_cached, len(item.token_ids))]
