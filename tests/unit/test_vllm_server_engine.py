"""Server engine and worker extension against a server that fails on purpose: nothing is lost or mixed."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine_models import make_model, make_prompts
from fake_server import (  # noqa: F401
    BUCKET_BYTES,
    FakeVLLM,
    engines_of_fake,
    fake_vllm,
    served_model,
)
from faulty_front import changed, error_500, half_of_it, hanging_fault, nothing, restart, restart_before  # noqa: F401
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colocate.rollout_server.trainer.client import RequestRefused, ServerUnreachable
from colocate.rollout_server.trainer.completions import requests_of
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.rollout_server.trainer.transports import FileTransport
from colocate.rollout_server.trainer.watch import Timeouts
from colocate.types import SamplingParams
from colocate.weights.source import WeightSource

COMPLETIONS = "/v1/completions"
SAMPLING = SamplingParams(max_tokens=6, seed=3)


def loaded_exactly(fake: FakeVLLM, model: Any) -> bool:
    return all(torch.equal(fake.loaded.weights[name], p) for name, p in model.named_parameters())


def num_chunks(model: Any) -> int:
    return len(list(WeightSource(model, BUCKET_BYTES).buckets()))


# ── Without faults ───────────────────────────────────────────────────────────────────────────────────────


def test_weights_arrive_whole_before_the_first_rollout(make_engine, fake, model):
    engine = make_engine()
    engine.generate(make_prompts([3]), SAMPLING)
    assert loaded_exactly(fake, model)
    assert set(fake.loaded.num_loads.values()) == {1}
    assert fake.requests.count("/collective_rpc receive_chunk") == num_chunks(model) > 3
    assert not fake.is_paused and fake.num_prefix_cache_resets == 1
    engine.generate(make_prompts([3]), SAMPLING)
    assert set(fake.loaded.num_loads.values()) == {1}, "pushed again without need"


def test_every_update_is_pushed(make_engine, fake, model):
    engine = make_engine()
    before = engine.generate(make_prompts([3]), SAMPLING)
    with torch.no_grad():
        model.lm_head.weight.add_(0.5)
    engine.update_weights(version=4)
    assert loaded_exactly(fake, model)
    (after,) = engine.generate(make_prompts([3]), SAMPLING)
    assert after.policy_version == 4
    assert after.token_ids != before[0].token_ids


def test_one_process_pushes_and_all_wait(make_engine, fake, model):
    arrived = []
    others = [make_engine(is_main=False, run_id="run", barrier=lambda: arrived.append(1)) for _ in range(2)]
    for engine in others:
        engine.update_weights(version=1)
    assert "/collective_rpc begin" not in fake.requests
    main = make_engine(run_id="run", barrier=lambda: arrived.append(1))
    main.update_weights(version=1)
    assert len(arrived) == 3
    results = [engine.generate(make_prompts([4]), SAMPLING) for engine in [main, *others]]
    assert results[0] == results[1] == results[2]
    assert set(fake.loaded.num_loads.values()) == {1}


def test_processes_that_start_together_push_once(make_engine, fake, model):
    engines = [make_engine(run_id="run") for _ in range(4)]
    with ThreadPoolExecutor(len(engines)) as pool:
        results = list(pool.map(lambda engine: engine.generate(make_prompts([4]), SAMPLING), engines))
    assert len(results) == 4 and all(result == results[0] for result in results)
    assert set(fake.loaded.num_loads.values()) == {1}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limits=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    first=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_a_member_draws_the_same_in_whatever_request(make_engine, limits, first, temperature):
    engine = make_engine()
    (prompt,) = make_prompts([5])
    samples = range(first, first + len(limits))
    sampling = dataclasses.replace(SAMPLING, temperature=temperature)
    group = dataclasses.replace(prompt, samples=samples, max_tokens=tuple(limits))
    together = engine.generate([group], sampling)
    for sample, limit, completion in zip(samples, limits, together, strict=True):
        (alone,) = engine.generate([dataclasses.replace(prompt, samples=range(sample, sample + 1))], sampling)
        assert completion.token_ids == alone.token_ids[:limit]
        assert len(completion.token_ids) == limit


# ── Answers that are wrong once, or always ───────────────────────────────────────────────────────────────

WRONG_ANSWERS = {
    "half-written": (half_of_it, "IncompleteRead"),
    "no answer": (nothing, "RemoteDisconnected"),
    "500": (error_500, "HTTP 500: out of luck"),
    "one completion too few": (
        changed(lambda answer: answer["choices"].pop()),
        "2 completions were asked for and 1 came",
    ),
    "one too many": (
        changed(lambda answer: answer["choices"].append({**answer["choices"][0], "index": 2})),
        "2 completions were asked for and 3 came",
    ),
    "the same twice": (
        changed(lambda answer: answer["choices"][1].update(index=0)),
        r"2 completions .* indices \[0, 0\]",
    ),
    "no token ids": (changed(lambda answer: answer["choices"][0].pop("token_ids")), "without token_ids"),
    "log-probs missing": (
        changed(lambda answer: answer["choices"][0]["logprobs"]["token_logprobs"].pop()),
        "5 log-probs came with 6 tokens",
    ),
    "aborted": (changed(lambda answer: answer["choices"][0].update(finish_reason="abort")), "reason 'abort'"),
    "cut short": (changed(lambda answer: _cut(answer["choices"][0])), "a completion of 5 tokens .at most 6"),
    "not a dict": (changed(lambda answer: answer.update(choices="none")), "no list of choices"),
}


def _cut(choice: dict[str, Any]) -> None:
    choice["token_ids"].pop()
    choice["logprobs"]["token_logprobs"].pop()


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_a_wrong_answer_is_asked_for_again(make_engine, fake, name):
    engine = make_engine()
    prompts = make_prompts([3, 5, 2], 2)
    expected = engine.generate(prompts, SAMPLING)
    num_before = fake.requests.count(COMPLETIONS)
    fake.faults[COMPLETIONS] = [None, WRONG_ANSWERS[name][0], WRONG_ANSWERS[name][0]]
    assert engine.generate(prompts, SAMPLING) == expected
    assert fake.requests.count(COMPLETIONS) - num_before == 3 + 2


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_what_is_always_wrong_ends_in_a_message(make_engine, fake, name):
    engine = make_engine()
    fault, message = WRONG_ANSWERS[name]
    fake.faults[COMPLETIONS] = [fault] * 5
    with pytest.raises(RuntimeError, match=rf"(?s){message}.*vllm_on_server_loss='wait'"):
        engine.generate(make_prompts([3], 2), SAMPLING)


# ── A server that dies ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fault", [restart, restart_before])
@pytest.mark.parametrize("num_answered", [0, 2])
def test_a_restart_within_a_rollout_is_survived(make_engine, fake, model, fault, num_answered):
    engine = make_engine(on_server_loss="wait", max_in_flight=1)
    prompts = make_prompts([3, 5, 2], 2)
    expected = engine.generate(prompts, SAMPLING)
    assert engine.num_restarts == 0
    fake.faults[COMPLETIONS] = [None] * num_answered + [fault]
    # The restarted server would complete the rest with the weights it started with, had it not been noticed.
    assert engine.generate(prompts, SAMPLING) == expected
    assert loaded_exactly(fake, model) and set(fake.loaded.num_loads.values()) == {1}
    assert engine.num_restarts == 1
    fake.restart()
    engine.generate(prompts, SAMPLING)
    assert engine.num_restarts == 2, "a restart between rollouts was not noticed"


def test_a_restart_within_a_rollout_is_an_error_by_default(make_engine, fake):
    engine = make_engine()
    engine.generate(make_prompts([3]), SAMPLING)
    fake.faults[COMPLETIONS] = [restart]
    with pytest.raises(RuntimeError, match=r"(?s)restarted during a rollout.*vllm_on_server_loss='wait'"):
        engine.generate(make_prompts([3]), SAMPLING)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_restart_anywhere_within_a_push_is_survived(make_engine, fake, model, data):
    message = data.draw(st.sampled_from(["begin", "receive_chunk", "finish", "state"]), label="message")
    num_answered = data.draw(st.integers(0, 3), label="number answered before") if message != "finish" else 0
    fault = data.draw(st.sampled_from([restart, restart_before]), label="after or before it was done")
    engine = make_engine(on_server_loss="wait")
    expected = engine.generate(make_prompts([3, 5]), SAMPLING)
    fake.loaded.num_loads.clear()
    fake.faults[f"/collective_rpc {message}"] = [None] * num_answered + [fault]
    engine.update_weights(version=1)
    completions = engine.generate(make_prompts([3, 5]), SAMPLING)
    fake.faults.clear()
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert loaded_exactly(fake, model)
    assert not fake.is_paused
    assert set(fake.loaded.num_loads.values()) == {1}, "the present server loaded a weight twice"


def test_a_broken_push_is_an_error_by_default_and_can_be_repeated(make_engine, fake, model):
    engine = make_engine()
    fake.faults["/collective_rpc receive_chunk"] = [None, restart]
    with pytest.raises(RuntimeError, match=r"(?s)take weights.*restarted.*vllm_on_server_loss='wait'"):
        engine.update_weights(version=1)
    engine.update_weights(version=1)
    assert loaded_exactly(fake, model)


def test_after_a_chunk_that_came_damaged_all_are_sent_again(make_engine, fake, model, monkeypatch):
    engine, offer, num_offers = make_engine(), FileTransport.offer, 0

    def damaged(transport, flat):
        nonlocal num_offers
        num_offers += 1
        if num_offers == 2:
            flat = flat.clone()
            flat[7] ^= 1
        return offer(transport, flat)

    monkeypatch.setattr(FileTransport, "offer", damaged)
    engine.generate(make_prompts([3]), SAMPLING)
    assert loaded_exactly(fake, model)
    assert num_offers == 2 + num_chunks(model)


@pytest.mark.parametrize("fault", [half_of_it, nothing, error_500])
@pytest.mark.parametrize("message", ["begin", "receive_chunk", "finish"])
def test_a_lost_reply_does_not_load_anything_twice(make_engine, fake, model, message, fault):
    engine = make_engine()
    fake.faults[f"/collective_rpc {message}"] = [fault, None, fault]
    engine.update_weights(version=1)
    assert loaded_exactly(fake, model)
    assert set(fake.loaded.num_loads.values()) == {1}


def test_between_begin_and_finish_nothing_is_generated(make_engine, fake, model):
    engine = make_engine()
    engine.generate(make_prompts([3]), SAMPLING)
    fake.faults["/collective_rpc receive_chunk"] = [None, *[error_500] * 5]
    with pytest.raises(RuntimeError, match="HTTP 500"):
        engine.update_weights(version=1)
    assert fake.is_paused
    assert fake.message("state", engine._run_id)["version"] is None
    # The next rollout mends it first.
    engine.generate(make_prompts([3]), SAMPLING)
    assert loaded_exactly(fake, model) and not fake.is_paused


def test_a_server_that_stays_away_is_waited_for_no_longer_than_said(make_engine, fake):
    engine = make_engine(on_server_loss="wait", server_timeout_s=2.0)
    engine.generate(make_prompts([3]), SAMPLING)
    fake.faults["/health"] = [error_500] * 1000
    fake.faults[COMPLETIONS] = [nothing] * 1000
    with pytest.raises(ServerUnreachable, match="rollout_server_timeout=2 s"):
        engine.generate(make_prompts([3]), SAMPLING)


def test_a_server_that_hangs_is_noticed(make_engine, fake, hang):
    engine = make_engine(timeouts=Timeouts(answer_s=2.0, silence_s=0.1))
    engine.generate(make_prompts([3]), SAMPLING)
    fake.faults[COMPLETIONS] = [hang] * 10
    fake.faults["/health"] = [hang] * 10
    with pytest.raises(RuntimeError, match=r"(?s)/health had no usable answer.*vllm_on_server_loss"):
        engine.generate(make_prompts([3]), SAMPLING)


def test_a_server_that_always_falls_is_given_up(make_engine, fake):
    engine = make_engine(on_server_loss="wait")
    engine.generate(make_prompts([3]), SAMPLING)
    fake.faults[COMPLETIONS] = [restart] * 100
    with pytest.raises(RuntimeError, match="lost 5 times in a row"):
        engine.generate(make_prompts([3]), SAMPLING)


# ── A server that is not the right one ───────────────────────────────────────────────────────────────────


def test_no_server(model, caplog):
    with pytest.raises(ServerUnreachable, match=r"rollout_server_timeout=1\.2 s.*colocate rollout-serve"):
        RolloutServerEngine(model, base_url="http://127.0.0.1:9", server_timeout_s=1.2)
    assert caplog.text.count("waiting for it for up to 1.2 s") == 1


def test_another_model_is_served(make_engine, fake):
    fake.config = make_model("qwen3", num_hidden_layers=3, vocab_size=50).config
    fake.restart()
    message = r"another model, 'served'.*vocab_size 50 instead of 97, num_hidden_layers 3 instead of 2"
    with pytest.raises(ValueError, match=message):
        make_engine()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logprobs_mode": "raw_logits"}, r"'raw_logits'.*needs 'processed_logprobs' or.*--logprobs-mode"),
        ({"generation_config": "auto"}, r"generation_config='auto'.*--generation-config vllm"),
        ({"data_parallel_size": 2}, "2 replicas.*--data-parallel-size"),
    ],
)
def test_unsuitable_settings(make_engine, fake, settings, message):
    fake.settings = settings
    fake.restart()
    with pytest.raises(ValueError, match=message):
        make_engine()


@pytest.mark.parametrize(
    ("mode", "options", "remedy"),
    [
        ("processed_logprobs", {"temperature": 0.6}, None),
        ("processed_logprobs", {"temperature": 0}, None),
        ("processed_logprobs", {"top_k": 5}, "--logprobs-mode raw_logprobs"),
        ("processed_logprobs", {"repetition_penalty": 1.2, "temperature": 0}, "--logprobs-mode raw_logprobs"),
        ("processed_logprobs", {"min_p": 0.1, "temperature": 0.6}, "set temperature=1, or engine='native'"),
        ("raw_logprobs", {"top_p": 0.9, "repetition_penalty": 1.2}, None),
        ("raw_logprobs", {"repetition_penalty": 1.2, "temperature": 0}, None),
        ("raw_logprobs", {"temperature": 0.6}, "--logprobs-mode processed_logprobs"),
    ],
)
def test_only_log_probs_of_the_policy_are_taken(make_engine, fake, caplog, mode, options, remedy):
    fake.settings = {"logprobs_mode": mode}
    fake.restart()
    engine = make_engine()
    for _ in range(2):
        (completion,) = engine.generate(make_prompts([3]), SamplingParams(max_tokens=3, **options))
        assert (completion.logprobs is None) == (remedy is not None)
    assert [remedy in message for message in caplog.messages] == ([True] if remedy else [])


def test_another_precision_is_said(make_engine, fake, caplog):
    make_engine()
    assert caplog.messages == []
    fake.settings = {"dtype": torch.bfloat16}
    fake.restart()
    make_engine()
    assert "computes in bfloat16 and the policy is float32" in caplog.text
    assert "--dtype float32" in caplog.text


def test_too_old(make_engine, fake):
    fake.version = "0.11.2"
    with pytest.raises(RuntimeError, match=r"vLLM 0\.11\.2 is too old: 0\.25 to 0\.33"):
        make_engine()


def test_plain_vllm_serve_is_told_what_it_lacks(make_engine, fake, monkeypatch):
    real, lacks = fake._do, "/collective_rpc"
    monkeypatch.setattr(fake, "_do", lambda path, body: (404, None) if path == lacks else real(path, body))
    with pytest.raises(RuntimeError, match=r"(?s)takes no weights.*VLLM_SERVER_DEV_MODE=1.*WeightReceiver"):
        make_engine()


def test_files_need_a_shared_directory(make_engine, fake, monkeypatch):
    receiver = "colocate.rollout_server.wire.receiver.Receiver"
    monkeypatch.setattr(f"{receiver}.share", lambda self, **_: {"is_shared": False})
    engine = make_engine(transport="file")
    with pytest.raises(ValueError, match="it does not see"):
        engine.generate(make_prompts([3]), SAMPLING)


def test_where_nothing_is_shared_weights_go_in_the_messages(make_engine, fake, monkeypatch):
    receiver = "colocate.rollout_server.wire.receiver.Receiver"
    monkeypatch.setattr(f"{receiver}.share", lambda self, **_: {"is_shared": False})
    make_engine().generate(make_prompts([3]), SAMPLING)
    assert "/collective_rpc keep_piece" in fake.requests


def test_a_server_lost_while_files_are_tried_leaves_none(make_engine, fake):
    engine = make_engine()
    fake.faults["/collective_rpc share"] = [error_500] * 5
    with pytest.raises(RuntimeError, match="was lost"):
        engine.generate(make_prompts([3]), SAMPLING)  # `make_engine` looks at the directory in the end


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_gpu_transports_need_gpus(make_engine, transport):
    engine = make_engine(transport=transport)
    with pytest.raises(ValueError, match=f"by {transport}: the trainer is on cpu"):
        engine.generate(make_prompts([3]), SAMPLING)


def test_a_worker_says_what_went_wrong(make_engine, fake, monkeypatch):
    def refuse(tensors: Any) -> set[str]:
        raise KeyError("no such weight: x")

    monkeypatch.setattr(fake.loaded, "load_weights", refuse)
    with pytest.raises(RuntimeError, match=r"worker 0: KeyError.*no such weight: x"):
        make_engine().generate(make_prompts([3]), SAMPLING)


def test_a_push_that_leaves_weights_out_is_an_error(make_engine, fake):
    fake.names.append("model.extra.weight")
    fake.restart()
    with pytest.raises(RuntimeError, match=r"1 of the server's weights were not sent.*extra"):
        make_engine().generate(make_prompts([3]), SAMPLING)


def test_requests_name_their_weights_which_salt_the_prefix_cache(make_engine, fake, model):
    """vLLM keeps pages under the salt of their request, so that none is found by a request for others."""
    engine, salts = make_engine(run_id="run"), []
    fake.draw = lambda body: salts.append(body["cache_salt"]) or True
    for version in range(3):
        engine.update_weights(version)
        engine.generate(make_prompts([3, 5]), SAMPLING)
    assert salts == ["run:1", "run:1", "run:2", "run:2", "run:3", "run:3"]


def test_a_request_for_other_weights_is_refused_by_name(make_engine, fake, model):
    engine = make_engine(run_id="run")
    prompts = make_prompts([3, 5, 4, 7], 2)
    engine.update_weights(1)
    before = fake.reached.count("/collective_rpc")
    engine.generate(prompts, SAMPLING)
    asked = fake.reached.count("/collective_rpc") - before
    assert asked <= 4, "before and after the rollout, and once for all of its requests"

    def complete(weights: str) -> Any:
        (request,) = requests_of(prompts[:1], SAMPLING, "served", weights=weights, is_native=False)
        return engine._client.call(
            "POST", "/v1/completions", request.body, deadline_s=10, parse=lambda answer: answer
        )

    assert complete("run:1")["choices"]
    refusal = r"409: The request is for the weights 'run:7', and the server has the weights 'run:1'\."
    with pytest.raises(RequestRefused, match=refusal):
        complete("run:7")
    engine.update_weights(2)
    with pytest.raises(
        RequestRefused, match="for the weights 'run:1', and the server has the weights 'run:2'"
    ):
        complete("run:1")
    fake.restart()
    with pytest.raises(RequestRefused, match="the server has no weights of a trainer"):
        complete("run:2")
