"""Reward models and reference sleep while completions are generated and trained on: `offload_scorers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import make_model, make_trainer, without_timings
from transformers import AutoModelForSequenceClassification

import tiny
from colocate.config.grpo_config import GRPOConfig
from colocate.memory.sleeping import SleepingWeights


def run(output_dir: Any, *, offload: bool, watch: Any = None, **options: Any) -> Any:
    """A run with a reward model, a reference and evaluations, in full fine-tuning."""
    defaults = {
        "reward_funcs": [tiny.make_reward_model(), tiny.count_digits],
        "reward_processing_classes": [tiny.make_tokenizer(), None],
        **{"beta": 0.1, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "seed": 3},
    }
    trainer = tiny.make_trainer(
        output_dir, eval_dataset=tiny.sums(4), offload_scorers=offload, **defaults | options
    )
    if watch is not None:
        watch(trainer)
    trainer.train()
    return trainer


def test_a_run_is_bit_for_bit_the_same_with_sleeping_scorers(tmp_path):
    ours, theirs = (run(tmp_path / str(offload), offload=offload) for offload in (True, False))
    for name, weight in ours.model.state_dict().items():
        assert torch.equal(weight, theirs.model.state_dict()[name]), name
    logs = [[without_timings(record) for record in each.state.log_history] for each in (ours, theirs)]
    assert logs[0] == logs[1] and any("eval_reward" in record for record in logs[0])
    assert any(record.get("kl", 0) > 0 for record in logs[0]), "the reference was read"
    start = dict(tiny.make_model().named_parameters())
    assert all(torch.equal(weight, start[name]) for name, weight in ours.ref_model.named_parameters())


def test_each_sleeps_while_another_works(tmp_path, monkeypatch):
    """What is away: all of reward model and reference, in rollout and training, for evaluations as well."""
    seen: dict[str, set[int]] = {}

    def watch(trainer: Any) -> None:
        parts = trainer.run
        weights = [*parts.judge.reward_functions.models[0].parameters(), *parts.policy.reference.weights()]
        storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}
        seen["all"] = {sum(storages.values())}
        for owner, name in (
            (parts.player, "play"),
            (parts.judge, "score"),
            (parts.policy, "reference_logprobs"),
            (parts.policy, "update"),
        ):
            note(owner, name, parts.scorers)

    def note(owner: Any, name: str, scorers: SleepingWeights) -> None:
        original = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            seen.setdefault(name, set()).add(scorers.num_bytes_away)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    run(tmp_path, offload=True, watch=watch)
    assert seen["play"] == seen["update"] == seen["all"] and seen["all"] != {0}
    assert seen["score"] == seen["reference_logprobs"] == {0}


def test_a_reward_model_in_a_mapped_file_sleeps_and_scores_as_it_would_awake(tmp_path, caplog):
    """It is given by its name or loaded by the user."""
    directory = tmp_path / "reward"
    tiny.make_reward_model().save_pretrained(directory)
    tiny.make_tokenizer().save_pretrained(directory)
    loaded = AutoModelForSequenceClassification.from_pretrained(directory)
    assert not any(weight.untyped_storage().resizable() for weight in loaded.parameters())
    logs = [
        run(
            tmp_path / str(i),
            offload=offload,
            reward_funcs=reward_funcs,
            reward_processing_classes=None,
            max_steps=2,
        ).state.log_history
        for i, (reward_funcs, offload) in enumerate(
            [([str(directory)], False), ([str(directory)], True), ([loaded], True)]
        )
    ]
    rewards = [[record["reward"] for record in log if "reward" in record] for log in logs]
    assert rewards[0] == rewards[1] == rewards[2] and len(rewards[0]) == 2
    lines = [line for line in caplog.messages if "offload_scorers=True frees nothing on a CPU" in line]
    assert len(lines) == 2


def test_without_scorers_there_is_nothing_to_move(tmp_path):
    trainer = make_trainer(tmp_path, offload_scorers=True, max_steps=1)
    trainer.train()
    assert trainer.run.scorers.num_bytes_away == 0


def test_a_reward_model_that_shares_the_policys_weights_is_refused(tmp_path):
    policy = make_model()
    weights = SleepingWeights(list(policy.parameters()), torch.device("cpu"), in_use=policy.parameters())
    with pytest.raises(ValueError, match="shares its memory with one that is in use"):
        weights.sleep()


def test_a_reference_that_moves_cannot_sleep(tmp_path):
    with pytest.raises(ValueError, match=r"offload_scorers=True keeps .* sync_ref_model=True moves it"):
        GRPOConfig(
            output_dir=str(tmp_path),
            offload_scorers=True,
            sync_ref_model=True,
            beta=0.1,
            use_cpu=True,
            bf16=False,
        )
