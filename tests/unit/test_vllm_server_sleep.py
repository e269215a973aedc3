"""A vLLM server on the trainer's GPU sleeps while the trainer trains, and wakes up with the new weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import make_prompts
from fake_server import (  # noqa: F401
    FakeVLLM,
    fake_vllm,
    served_model,
)
from faulty_front import error_500, restart

from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.types import SamplingParams

SAMPLING = SamplingParams(max_tokens=6, seed=3)
MEMORY = (
    "/sleep",
    "/wake_up",
    "/collective_rpc note_sleep",
    "/collective_rpc begin",
    "/collective_rpc finish",
)


@pytest.fixture
def engine(fake, model, tmp_path):
    fake.settings["enable_sleep_mode"] = True
    fake.restart()
    options = dict(server_timeout_s=2, push_timeout_s=10, request_timeout_s=10, on_server_loss="wait")
    engine = RolloutServerEngine(model, base_url=fake.base_url, directory=str(tmp_path), **options)
    engine._client._first_delay_s = 0.001
    yield engine
    engine.close()


def steps(fake: FakeVLLM) -> list[str]:
    """What it was asked that has to do with memory, since the last question."""
    found = [name.rpartition(" ")[2] for name in fake.requests if name in MEMORY]
    fake.requests.clear()
    return found


def changed(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.add_(0.5)


ASLEEP = ["note_sleep", "/sleep", "note_sleep"]
AWAKES = ["/wake_up", "begin", "finish", "/wake_up", "note_sleep"]


def test_it_sleeps_from_the_start_and_between_rollouts_and_gets_the_weights_when_it_wakes_up(
    engine, fake, model
):
    assert engine.takes_turns and fake.awake == set() and steps(fake) == ASLEEP
    prompts = make_prompts([3, 5, 4])
    found = []
    for version in (1, 2):
        changed(model)
        engine.update_weights(version)
        assert steps(fake) == [], "it has no memory for them"
        engine.wake_up()
        assert steps(fake) == AWAKES and fake.awake == {"weights", "kv_cache"} and not fake.is_paused
        found.append(engine.generate(prompts, SAMPLING))
        engine.sleep()
        assert steps(fake) == ASLEEP and fake.awake == set()
        engine.sleep()
        assert steps(fake) == [], "it sleeps already"
    assert found[0] != found[1]
    engine.wake_up()  # as for an evaluation, which nothing was published before
    assert steps(fake) == AWAKES
    assert engine.generate(prompts, SAMPLING) == found[1]
    assert not torch.equal(fake.loaded.weights["lm_head.weight"], torch.zeros(1))
    assert torch.equal(fake.loaded.weights["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/collective_rpc note_sleep"])
@pytest.mark.parametrize("fault", [error_500, restart])
def test_what_befalls_it_on_the_way_costs_no_weights(path, fault, engine, fake, model):
    prompts = make_prompts([3, 5])
    engine.wake_up()
    expected = engine.generate(prompts, SAMPLING)
    for _ in range(2):
        fake.faults[path] = [fault, None, fault]
        engine.sleep()
        assert fake.awake == set()
        engine.wake_up()
        assert engine.generate(prompts, SAMPLING) == expected
        assert torch.equal(fake.loaded.weights["lm_head.weight"], model.lm_head.weight)


def test_a_server_that_was_started_again_asleep_or_not_is_awake_with_the_weights_of_now(engine, fake, model):
    prompts = make_prompts([3, 5])
    engine.wake_up()
    expected = engine.generate(prompts, SAMPLING)
    engine.sleep()
    fake.restart()
    engine.wake_up()
    assert engine.generate(prompts, SAMPLING) == expected


def test_all_ranks_have_stopped_before_it_sleeps_and_have_given_memory_back_before_it_wakes_up(fake, model):
    fake.settings["enable_sleep_mode"] = True
    fake.restart()
    seen: list[str] = []
    take_turns = fake._take_turns

    def note(path: str, query: str) -> tuple[int, Any]:
        seen.append(f"{path}?{query}")
        return take_turns(path, query)

    fake._take_turns = note
    engine = RolloutServerEngine(model, base_url=fake.base_url, barrier=lambda: seen.append("all"))
    try:
        engine.wake_up()
        engine.sleep()
        assert seen == [
            *("/sleep?level=2", "all", "/wake_up?tags=weights", "/wake_up?tags=kv_cache", "all"),
            *("all", "/sleep?level=2", "all"),
        ]
    finally:
        engine.close()


def test_a_server_with_gpus_of_its_own_never_sleeps(fake, model):
    engine = RolloutServerEngine(model, base_url=fake.base_url)
    try:
        engine.wake_up()
        engine.sleep()
        assert not engine.takes_turns and steps(fake) == []
    finally:
        engine.close()
