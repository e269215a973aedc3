"""The twelve points that an adapter of TensorRT-LLM can get wrong, each a test.

They run over the stand-in of two releases, and with `-m trtllm` over the package that is installed, on a GPU.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_models import greedy_completions, greedy_references, make_model, make_prompts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from trtllm_case import (
    LocalServer,
    StandInEngine,
    arguments_for,
    make_real_engine,
)
from trtllm_stand_in import GPUS, NEWEST, OLDEST, RayPlacementConfig, installed

from colocate.parallel.ray_cluster import RayPlace
from colocate.policy.model.loading import stop_token_ids
from colocate.types import SamplingParams
from colocate_trtllm import memory_tags, ray_server
from colocate_trtllm.ray_server import Placement
from colocate_trtllm.sampling import SamplingRequest, sampling_arguments

REAL = "installed"
RELEASES = (
    pytest.param(NEWEST, id=NEWEST),
    pytest.param(OLDEST, id=OLDEST),
    pytest.param(REAL, id=REAL, marks=[pytest.mark.trtllm, pytest.mark.gpu]),
)
LONG = SamplingParams(max_tokens=100, temperature=0)


@pytest.fixture(params=RELEASES)
def release(request) -> str:
    return request.param


@pytest.fixture
def model(release):
    model = make_model("qwen3", head_dim=64 if release == REAL else 12)
    return model.to("cuda", torch.bfloat16) if release == REAL else model


@pytest.fixture
def engine(release, model) -> Iterator[Any]:
    """Asleep, as every engine begins."""
    made = make_real_engine(model) if release == REAL else StandInEngine.make(model, release=release)
    yield made
    made.close()


def move(model: Any, seed: int) -> None:
    """Change every weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.1)


def assert_greedy(engine: Any, model: Any) -> None:
    """It says what transformers' `generate` says with the trainer's present weights."""
    prompts = make_prompts([1, 7, 12])
    assert greedy_completions(engine, prompts, 9) == greedy_references(model, prompts, 9)


def request(ticket: int, length: int, sampling: SamplingParams, max_tokens: int = 100) -> SamplingRequest:
    (prompt,) = make_prompts([length])
    arguments = sampling_arguments(sampling, max_tokens=max_tokens, seed=0, logprobs_mode=None)
    return SamplingRequest(ticket, prompt.token_ids, arguments)


def chunks_of(engine: Any) -> Iterator[list[Any]]:
    """Names and handles of the tensors of each chunk of the weights of the engine's model."""
    for handles in engine._chunks_of_all():
        yield handles[engine._memory.gpu]


def each_chunk(engine: Any, send: Callable[[int, Any], None]) -> int:
    """Send the weights of the engine's model by hand; returns the number of chunks."""
    number = 0
    for number, chunk in enumerate(chunks_of(engine), 1):
        send(number - 1, chunk)
    return number


def call(engine: Any, method: str, *arguments: Any) -> Any:
    return engine.server.call(method, *arguments, timeout_s=60.0)


# ── 1: placement by keywords alone, lists of equal length, a share in (0, 1] ─────────────────────────────


@given(
    bundles=st.lists(st.lists(st.integers(-1, 3), max_size=4), max_size=3),
    num_groups=st.integers(0, 3),
    share=st.sampled_from([-0.5, 0.0, 1 / 3, 1.0, 1.5]),
)
def test_point_1_placement_is_named_arguments_that_tensorrt_llm_accepts(bundles, num_groups, share):
    groups = [object() for _ in range(num_groups)]
    is_right = num_groups == len(bundles) > 0 and 0 < share <= 1
    is_right &= all(own and min(own) >= 0 and len(set(own)) == len(own) for own in bundles)
    if not is_right:
        with pytest.raises(ValueError, match=r"lists of bundles|bundles of placement group|gpu_share"):
            Placement(groups, bundles, share)
        return
    arguments = Placement(groups, bundles, share).arguments()
    assert arguments.keys() == {"placement_groups", "placement_bundle_indices", "per_worker_gpu_share"}
    accepted = RayPlacementConfig(defer_workers_init=True, **arguments)
    assert accepted.bundles == [bundle for own in bundles for bundle in own]


def test_point_1_an_engine_is_placed_over_several_groups():
    model = make_model("qwen3")
    with installed(NEWEST):
        server = LocalServer()
        placement = Placement([object(), object()], [[3], [0]], 1 / 3)
        told = server.call("start", arguments_for(model, tensor_parallel_size=2), placement.arguments())
        assert told.gpus == (GPUS[3], GPUS[0])
        server.close()


# ── 2: handles by "GPU-…" and UUID, [(name, (fn, args))], args[6] set by the receiver ────────────────────


def test_point_2_the_seventh_argument_is_the_device():
    """It is what the receiver sets, here as in TensorRT-LLM; PyTorch's own signature says so."""
    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"


def test_point_2_handles_are_by_gpu_and_name(engine, model):
    gpu = engine._memory.gpu
    assert gpu.startswith("GPU-") and engine._started.gpus == (gpu,)
    named = dict(model.named_parameters())
    call(engine, "take_weights")
    call(engine, "begin", 1)

    chunk = next(chunks_of(engine))
    for name, (rebuild, arguments) in chunk:
        assert name in named and callable(rebuild) and len(arguments) > 6
    with pytest.raises(Exception, match=rf"worker's GPU is {gpu}, and handles came for GPU-another"):
        call(engine, "chunk", 1, 0, {"GPU-another": chunk})
    with pytest.raises(RuntimeError, match="no weights are due"):  # that was the end of the push
        call(engine, "chunk", 1, 1, {gpu: chunk})
    engine.wake_up()
    assert_greedy(engine, model)


# ── 3: chunks, then None exactly once; an error in between leaves no mixture ─────────────────────────────


@pytest.mark.parametrize("when", ["before any chunk", "in the middle", "at the end"])
def test_point_3_an_error_leaves_the_old_version_whole_or_nothing_to_serve(engine, model, when):
    engine.wake_up()
    engine.update_weights(version=1)
    old = greedy_completions(engine, make_prompts([5]), 9)
    move(model, 1)
    call(engine, "begin", 2)
    if when == "before any chunk":
        call(engine, "abort", 2)
        assert greedy_completions(engine, make_prompts([5]), 9) == old
    else:

        def send(number: int, chunk: Any) -> None:
            handles = chunk
            if when == "in the middle" and number == 3:
                handles = [(name, (_fail, arguments)) for name, (_, arguments) in handles]
            call(engine, "chunk", 2, number, {engine._memory.gpu: handles})

        if when == "in the middle":
            with pytest.raises(Exception, match="injected"):
                each_chunk(engine, send)
        else:
            number = each_chunk(engine, send)
            with pytest.raises(
                RuntimeError, match=rf"{number + 1} chunks of version 2 .* {number} of version 2"
            ):
                call(engine, "commit", 2, number + 1)
            call(engine, "abort", 2)
        for version in (1, 2):
            with pytest.raises(RuntimeError, match=r"has weights of version None"):
                call(engine, "submit", "turns-0", version, [request(0, 5, LONG)])
    engine.update_weights(version=3)  # all of it again makes it whole
    assert_greedy(engine, model)
    assert call(engine, "status").version == 3


def _fail(*_: Any) -> torch.Tensor:
    raise RuntimeError("injected")


@settings(max_examples=10)
@given(again=st.lists(st.integers(0, 3), max_size=6))
def test_point_3_chunks_sent_again_are_acknowledged_and_gaps_refused(again):
    model = make_model("qwen3")
    engine = StandInEngine.make(model)
    try:
        call(engine, "take_weights")
        call(engine, "begin", 1)

        def send(number: int, chunk: Any) -> None:
            handles = {engine.memory.gpu: chunk}
            with pytest.raises(
                RuntimeError, match=rf"Chunk {number + 1} of version 1 came where chunk {number}"
            ):
                call(engine, "chunk", 1, number + 1, handles)
            with pytest.raises(RuntimeError, match=rf"of version 2 came where chunk {number} of 1 is due"):
                call(engine, "chunk", 2, number, handles)
            assert call(engine, "chunk", 1, number, handles) == number + 1
            for older in again:
                if older <= number:
                    assert call(engine, "chunk", 1, older, {}) == number + 1

        number = each_chunk(engine, send)
        loaded = len(engine.server.inner._llm.workers[0].engine.sizes)
        assert loaded == len(list(model.parameters())), "each weight once"
        for _ in range(2):
            call(engine, "commit", 1, number)
        assert engine.events.count("finalize") == 1, "None exactly once"
    finally:
        engine.close()


# ── 4: sleep and wake without new weights, as between two evaluations ────────────────────────────────────


def test_point_3_a_chunk_that_comes_while_it_is_loaded_counts_once():
    """Its sender has lost patience and sends again: the next chunk is not yet there."""
    model = make_model("qwen3")
    engine = StandInEngine.make(model)
    try:
        call(engine, "take_weights")
        call(engine, "begin", 1)
        server, slow = engine.server.inner, asyncio.Event()
        rpc = server._llm.collective_rpc

        async def late(method: str, **arguments: Any) -> Any:
            await asyncio.sleep(0.01)
            return await rpc(method, **arguments)

        async def twice(number: int, chunk: Any) -> list[int]:
            arguments = 1, number, {GPUS[0]: chunk}
            return await asyncio.gather(server.chunk(*arguments), server.chunk(*arguments))

        server._llm.collective_rpc, server.twice = late, twice
        num_chunks = each_chunk(
            engine,
            lambda number, chunk: call(engine, "twice", number, chunk) == [number + 1] * 2 or slow.set(),
        )
        assert not slow.is_set(), "a chunk was counted twice"
        call(engine, "commit", 1, num_chunks)
        engine.policy_version = 1
        call(engine, "take_kv")
        engine._is_awake = True
        assert_greedy(engine, model)
    finally:
        engine.close()


def test_point_4_a_sleep_that_fails_in_the_middle_leaves_nothing_to_serve(monkeypatch):
    engine = StandInEngine.make(make_model("qwen3"))
    try:
        engine.wake_up()
        llm = engine.server.inner._llm

        async def fail(tags: Any = None) -> None:
            raise RuntimeError("half of the memory was given back")

        monkeypatch.setattr(llm, "release", fail)
        with pytest.raises(RuntimeError, match="half of the memory"):
            engine.sleep()
        with pytest.raises(RuntimeError, match="before the weights had come"):
            call(engine, "take_kv")
    finally:
        engine.close()


def test_point_4_weights_come_again_after_a_sleep_without_a_new_version(engine, model):
    engine.wake_up()
    first = greedy_completions(engine, make_prompts([4, 9]), 9)
    for _ in range(2):
        engine.sleep()
        assert call(engine, "status").version is None
        engine.wake_up()
        assert greedy_completions(engine, make_prompts([4, 9]), 9) == first
    assert_greedy(engine, model)


# ── 5: weights, then all ranks, then the KV cache ────────────────────────────────────────────────────────


def test_point_5_memory_is_taken_in_order(engine):
    with pytest.raises(RuntimeError, match="before the weights had come"):
        call(engine, "take_kv")
    with pytest.raises(RuntimeError, match="before memory was taken for them"):
        call(engine, "begin", 1)


@pytest.mark.parametrize("release", [NEWEST, OLDEST])
def test_point_5_weights_then_all_ranks_then_the_kv_cache(release):
    engine = StandInEngine.make(make_model("qwen3"), release=release)
    try:
        engine.events.clear()
        engine.wake_up()
        order = ["resume weights", "finalize", "barrier", "resume kv"]
        assert [event for event in engine.events if event in order] == order
    finally:
        engine.close()


def test_point_5_another_ranks_error_stops_this_one_before_the_kv_cache(monkeypatch):
    engine = StandInEngine.make(make_model("qwen3"))
    try:

        def agree(error: Exception | None) -> None:
            raise error or RuntimeError("rank 1 could not publish")

        monkeypatch.setattr(engine._everyone, "agree", agree)
        with pytest.raises(RuntimeError, match="rank 1 could not publish"):
            engine.wake_up()
        assert "resume kv" not in engine.events
        with pytest.raises(RuntimeError, match="asleep"):
            engine.generate(make_prompts([3]), LONG)
    finally:
        engine.close()


# ── 6: the version is stamped, and prefixes of older weights are forgotten ───────────────────────────────


@pytest.mark.parametrize("is_asleep", [False, True], ids=["awake", "asleep"])
def test_point_6_versions_are_stamped_and_prefixes_forgotten(engine, model, is_asleep):
    engine.wake_up()
    for version in (1, 2):
        if is_asleep:
            engine.sleep()
        move(model, version)
        engine.update_weights(version)
        engine.wake_up()
        completions = engine.generate(make_prompts([7, 12]), SamplingParams(9, temperature=0))
        assert {c.policy_version for c in completions} == {version}
        # The prompts are those of before, whose prefixes were in the cache.
        assert [list(c.token_ids) for c in completions] == greedy_references(model, make_prompts([7, 12]), 9)


# ── 7: cancelled requests give what they have, with as many log-probs ────────────────────────────────────


def test_point_7_cancelled_requests_tell_tokens_and_as_many_logprobs(engine, model):
    engine.wake_up()
    call(engine, "submit", "mine", 0, [request(ticket, 5, LONG) for ticket in range(3)])
    call(engine, "submit", "another", 0, [request(0, 5, LONG, max_tokens=3)])
    (whole,) = _collected(engine, "another", 1)
    told = call(engine, "cancel", "mine", [0, 2, 77])
    assert [each.ticket for each in told] == [0, 2]
    (reference,) = greedy_references(model, make_prompts([5]), 100)
    for each in told:
        assert len(each.logprobs) == len(each.token_ids) <= 100
        assert list(each.token_ids) == reference[: len(each.token_ids)]
    assert any(each.finish == "cancelled" for each in told)
    (rest,) = _collected(engine, "mine", 1)
    assert (rest.ticket, len(rest.token_ids), len(rest.logprobs)) == (1, 100, 100)
    assert (whole.finish, len(whole.token_ids), len(whole.logprobs)) == ("length", 3, 3)
    assert call(engine, "cancel", "mine") == []


def _collected(engine: Any, box: str, count: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(200):
        found += call(engine, "collect", box, 0.5)
        if len(found) >= count:
            return found
    raise AssertionError(f"{len(found)} of {count} came")


# ── 8: tokens that end a completion are the run's, ends of a chat's turns among them ─────────────────────


def test_point_8_a_completion_ends_where_the_run_says_and_nowhere_else(engine, model):
    """Ends of turns are what the model declares beside the tokenizer's EOS (`stop_token_ids`)."""
    engine.wake_up()
    (free,) = greedy_completions(engine, make_prompts([5]), 40)
    eos, end_of_turn = 0, free[6]
    model.generation_config.eos_token_id = [end_of_turn, eos]
    stops = stop_token_ids(SimpleNamespace(eos_token_id=eos), model)
    assert set(stops) == {eos, end_of_turn}
    sampling = SamplingParams(40, temperature=0, stop_token_ids=stops)
    (stopped,) = engine.generate(make_prompts([5]), sampling)
    length = min(free.index(token) + 1 for token in stops if token in free)
    assert (list(stopped.token_ids), stopped.finish_reason) == (free[:length], "stop")
    # The model's own configuration, which TensorRT-LLM reads, ends nothing.
    (whole,) = engine.generate(make_prompts([5]), SamplingParams(40, temperature=0))
    assert (list(whole.token_ids), whole.finish_reason) == (free, "length")


# ── 9: nothing is drawn while the engine is paused ───────────────────────────────────────────────────────


def test_point_9_nothing_is_drawn_while_paused(engine):
    def refused() -> str:
        with pytest.raises(RuntimeError) as caught:
            call(engine, "submit", "mine", 0, [request(0, 5, LONG)])
        return str(caught.value)

    assert "the server is asleep" in refused()
    call(engine, "take_weights")
    call(engine, "begin", 0)
    assert "the server is asleep" in refused()
    call(engine, "abort", 0)
    engine.wake_up()
    call(engine, "begin", 1)
    assert "the server is taking weights" in refused()
    call(engine, "abort", 1)
    with pytest.raises(
        RuntimeError, match=r"version 5 were asked for; the server is awake and has .* version 0"
    ):
        call(engine, "submit", "mine", 5, [request(0, 5, LONG)])


def test_point_9_a_pause_by_somebody_else_is_told():
    engine = StandInEngine.make(make_model("qwen3"))
    try:
        engine.wake_up()
        engine.server.inner._llm._is_paused = True
        with pytest.raises(RuntimeError, match=r"AsyncLLM is paused. Call resume_generation"):
            engine.generate(make_prompts([3]), LONG)
    finally:
        engine.close()


# ── 10: two publications, and a tensor larger than a bucket ──────────────────────────────────────────────


@pytest.mark.parametrize("bucket_bytes", [520, 4096, 2**20])
def test_point_10_greedy_is_the_models_after_each_of_two_publications(bucket_bytes):
    model = make_model("qwen3")
    largest = max(parameter.nbytes for parameter in model.parameters())
    engine = StandInEngine.make(model, bucket_bytes=bucket_bytes)
    try:
        for version in (1, 2):
            move(model, version)
            engine.update_weights(version)
            engine.sleep()
            engine.wake_up()
            assert_greedy(engine, model)
        num_tensors = len(list(model.parameters()))
        num_loads = len(engine.server.inner._llm.workers[0].engine.sizes) / num_tensors
        assert num_loads == 3, "each weight came whole: awake once, and twice when the engine woke"
        assert (largest > bucket_bytes) == (bucket_bytes <= 4096), "some do not fit"
        assert max(engine.memory.sizes) < max(largest, bucket_bytes) + 256 * num_tensors, (
            "the bound, and room to align tensors"
        )
    finally:
        engine.close()


# ── 11: unequal nodes ────────────────────────────────────────────────────────────────────────────────────


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), size=st.integers(1, 9))
@example(sizes=[8, 4], size=4)
@example(sizes=[4, 8], size=4)
@example(sizes=[6, 6], size=4)
def test_point_11_engines_have_every_bundle_once_and_in_order(sizes, size):
    """An engine's workers are in the bundles of its ranks, which are counted group by group."""
    ray = pytest.importorskip("ray")
    place = RayPlace("", "", tuple(f"node{number}" for number in range(len(sizes))), tuple(sizes), shares=2)
    every = [(f"node{node}", bundle) for node, count in enumerate(sizes) for bundle in range(count)]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray.util, "get_placement_group", lambda name: name)
        for index in range(len(every) // size):
            placed = ray_server._placement(place, SimpleNamespace(index=index, size=size))
            assert placed.num_workers == size and placed.gpu_share == 0.5
            own = zip(placed.groups, placed.bundle_indices, strict=True)
            found += [(name, bundle) for name, bundles in own for bundle in bundles]
    assert found == every[: len(every) // size * size]


# ── 12: releases without hooks ───────────────────────────────────────────────────────────────────────────


def test_point_12_a_release_without_hooks_is_used_without_them():
    """What 1.2.1 lacks is not called; an update that failed is ended all the same, and the next is whole."""
    model = make_model("qwen3")
    engine = StandInEngine.make(model, release=OLDEST)
    try:
        engine.wake_up()
        inner = engine.server.inner._llm.workers[0].engine
        assert not hasattr(inner.model_engine.model_loader, "begin_update_weights")
        inner.fail_at = inner.num_loaded + 4
        with pytest.raises(RuntimeError, match="injected"):
            engine.update_weights(version=1)
        assert not hasattr(inner.model_engine.model, "first_pre_reload_weights")
        inner.fail_at = None
        engine.update_weights(version=2)
        assert_greedy(engine, model)
        assert not {"begin", "abort", "pause"} & set(engine.events)
    finally:
        engine.close()


def test_point_12_a_release_with_hooks_has_them_called():
    engine = StandInEngine.make(make_model("qwen3"), release=NEWEST)
    try:
        engine.wake_up()
        engine.events.clear()
        inner = engine.server.inner._llm.workers[0].engine
        inner.fail_at = inner.num_loaded + 4
        with pytest.raises(RuntimeError, match="injected"):
            engine.update_weights(version=1)
        assert engine.events[:2] == ["begin", "abort"] and "finalize" not in engine.events
    finally:
        engine.close()


@pytest.mark.parametrize("release", [NEWEST, OLDEST])
def test_the_tags_of_weights_and_kv_are_all_that_can_be_given_back(release):
    with installed(release):
        weights, kv = memory_tags.weight_tags(), memory_tags.kv_tags()
        assert kv == ["kv_cache"] and "model" in weights and not set(kv) & set(weights)
        assert ("model_weights" in weights) == (release == NEWEST)
        assert not [tag for tag in weights if tag.startswith("_")]
        assert list(memory_tags.sleep_arguments()) == [
            "sleep_config" if release == NEWEST else "enable_sleep"
        ]


def test_start_is_asleep_without_weights(release, engine):
    assert call(engine, "status")._asdict() == {"version": None, "is_awake": False, "num_running": 0}
    assert (engine._started.release == release) == (release != REAL)
