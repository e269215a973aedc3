"""An injected out-of-memory at each place of a step: the step ends with the weights it would have had."""

from dataclasses import replace

import pytest
import torch
from test_policy import SAMPLES, make_model, make_policy, objective

from colocate.engines.native.model_runner import ModelRunner
from colocate.memory.train_plan import ACTIVATION_POLICIES, TrainPlan
from colocate.policy import policy as policy_module
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.stack.layer import DecoderLayer
from colocate.types import Completion, Prompt, SamplingParams
from tiny import make_trainer

PLAN = TrainPlan("keep", tokens_per_microbatch=40, logprob_chunk_size=128)


def failing(monkeypatch, owner, name: str, *, call: int, times: int = 1):
    """Make the `call`-th call of `owner.name` and those after it fail, `times` in all."""
    original, calls = getattr(owner, name), 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if call <= calls < call + times:
            raise torch.OutOfMemoryError(f"injected in {name}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def updated_weights(policy) -> dict[str, torch.Tensor]:
    for _ in range(2):
        policy.update(SAMPLES, objective)
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


PLACES = {
    "forward": (DecoderLayer, "forward", 4),
    "log-probs": (policy_module, "token_logprobs", 2),
    "backward": (DecoderLayer, "backward", 3),
    "optimizer": (PolicyOptimizer, "prepare_step", 3),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_update_is_repeated_with_the_same_result(place, monkeypatch, caplog):
    make = lambda: make_policy(make_model("qwen2"), plan=PLAN, learning_rate=0.1)  # noqa: E731
    want = updated_weights(make())
    owner, name, call = PLACES[place]
    failing(monkeypatch, owner, name, call=call)
    policy = make()
    got = updated_weights(policy)
    assert policy.plan != PLAN and "injected" in caplog.text and policy.version == 2
    for parameter, value in want.items():
        torch.testing.assert_close(got[parameter], value, rtol=1e-5, atol=1e-6)


def test_old_logprobs_are_repeated(monkeypatch):
    policy = make_policy(make_model(), plan=PLAN)
    want = policy.logprobs(SAMPLES)
    failing(monkeypatch, DecoderLayer, "forward", call=3)
    for (logprobs, _), (expected, _) in zip(policy.logprobs(SAMPLES), want, strict=True):
        torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-6)
    assert policy.plan.activation_policy == "selective"


def test_when_nothing_helps_the_error_says_what_was_tried(monkeypatch):
    policy = make_policy(make_model(), plan=PLAN)
    failing(monkeypatch, DecoderLayer, "backward", call=1, times=10_000)
    with pytest.raises(torch.OutOfMemoryError, match=r"injected.*Lower\s+max_completion_length"):
        policy.update(SAMPLES, objective)
    assert policy.plan.activation_policy == ACTIVATION_POLICIES[-1]
    assert policy.plan.smaller(15) is None


def test_the_kv_cache_goes_first(tmp_path, monkeypatch):
    """A plan that is right needs no smaller one: the engine had kept too much."""
    trainer = make_trainer(tmp_path)
    engine, plan = trainer.engine, trainer.policy.plan
    kept: list[int] = [5]
    monkeypatch.setattr(engine, "sleep", lambda keep_bytes=0: kept.append(keep_bytes))
    monkeypatch.setattr(type(engine), "kv_cache_bytes", property(lambda self: kept[-1]))
    trainer.run.handover.keep_bytes = 5
    failing(monkeypatch, DecoderLayer, "backward", call=1)
    trainer.train()
    assert kept[1:3] == [5, 0] and set(kept[2:]) == {0}
    assert trainer.policy.plan == plan


@pytest.mark.parametrize("times", [1, 6])
def test_a_rollout_is_repeated_with_the_same_completions(times, tmp_path, monkeypatch, caplog):
    prompts = [Prompt(tuple(range(1, 40)), key, range(3)) for key in range(3)]
    sampling = SamplingParams(max_tokens=12, seed=1)

    def completions() -> list[Completion]:
        engine = make_trainer(tmp_path).engine
        engine.wake_up()
        return engine.generate(prompts, sampling)

    want = completions()
    failing(monkeypatch, ModelRunner, "prefill", call=1, times=times)
    assert [c.token_ids for c in completions()] == [c.token_ids for c in want]
    assert "injected in prefill" in caplog.text
    assert ("The KV cache is cut" in caplog.text) == (times == 6)


def test_a_rollout_that_cannot_shrink_says_so(tmp_path, monkeypatch):
    engine = make_trainer(tmp_path, kv_cache_tokens=64).engine
    engine.wake_up()
    failing(monkeypatch, ModelRunner, "prefill", call=1, times=1000)
    with pytest.raises(torch.OutOfMemoryError, match=r"injected.*Lower max_num_seqs"):
        engine.generate([Prompt((1, 2, 3), 0)], SamplingParams(max_tokens=4))


def test_the_policy_asks_its_planner_before_and_after_a_step():
    class Planner:
        def with_prompts(self, train_plan, prompt_tokens):
            self.prompt_tokens = prompt_tokens
            return replace(train_plan, tokens_per_microbatch=30)

        def refined(self, train_plan, memory, num_tokens):
            self.learned = (train_plan.tokens_per_microbatch, memory, num_tokens)
            return replace(train_plan, activation_policy="full")

    planner = Planner()
    policy = make_policy(make_model(), plan=PLAN, planner=planner)
    update = policy.update(SAMPLES, objective)
    assert planner.prompt_tokens == max(len(sample.prompt_ids) for sample in SAMPLES)
    assert policy.plan == replace(PLAN, tokens_per_microbatch=30)
    policy.learn({"spans": []}, update)
    assert planner.learned == (30, {"spans": []}, update.largest_microbatch)
    assert policy.plan == replace(PLAN, tokens_per_microbatch=30, activation_policy="full")
