"""The best checkpoint: which one it is, that it stays, and that the run ends with its weights."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainerState, TrainingArguments

from colocate.checkpoints.best import BestCheckpoint, load_weights
from colocate.checkpoints.sealed import CheckpointError
from colocate.loop import roll_out
from tiny import changed_weights, count_digits, make_config, make_model, make_trainer, sums, weights_of

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class Scripted:
    """A reward that learns from digits while training; evaluations get these values, one after another."""

    __name__ = "scripted"

    def __init__(self, values):
        self._values = iter(values)

    def __call__(self, completions, answer, **kwargs):
        if answer[0] == "held out":
            return [next(self._values)] * len(completions)
        return count_digits(completions)


def make_evaluated(tmp_path, values, **options):
    """A trainer that evaluates and saves at every step."""
    defaults = dict(
        reward_funcs=Scripted(values),
        eval_dataset=sums(1).map(lambda row: {"answer": "held out"}),
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model="eval_reward",
        max_steps=len(values),
    )
    return make_trainer(tmp_path, **{**defaults, **options})


def checkpoints_in(tmp_path) -> list[int]:
    return sorted(int(d.name.rpartition("-")[2]) for d in tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(save_strategy="best"),
        dict(bf16=True, save_only_model=True),
        dict(peft_config=LORA),
        dict(model=make_model("gpt2"), metric_for_best_model="reward"),
    ],
    ids=["full", "best only", "masters", "adapter", "no layout"],
)
@pytest.mark.share(2)
def test_the_run_ends_with_the_best_weights(tmp_path, options):
    trainer = make_evaluated(
        tmp_path, [1.0, 3.0, 2.0], load_best_model_at_end=True, save_total_limit=1, **options
    )
    storages = {name: p.data_ptr() for name, p in trainer.model.named_parameters()}
    trainer.train()
    state = trainer.state
    directory = tmp_path / "checkpoint-2"
    assert (state.best_metric, state.best_global_step) == (3.0, 2)
    assert state.best_model_checkpoint == str(directory) and checkpoints_in(tmp_path) == [2]
    if "peft_config" in options:
        saved = PeftModel.from_pretrained(make_model(), directory)
    else:
        saved = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    saved, now = weights_of(saved), weights_of(trainer.model)
    assert saved.keys() == now.keys() and all(torch.equal(saved[name], now[name]) for name in now)
    # In place, since the engine reads the same storage; and no master would take the weights back.
    assert storages == {name: p.data_ptr() for name, p in trainer.model.named_parameters()}
    leaves = trainer.policy.optimizer.state_dict()["weights"]
    assert all(torch.equal(leaf.to(now[name].dtype), now[name]) for name, leaf in leaves.items())
    assert trainer.engine.policy_version == trainer.policy.version == 3 + 1  # the engine was told
    trainer.save_model(str(tmp_path / "saved"))
    ends = "adapter_model.safetensors" if "peft_config" in options else "model.safetensors"
    assert (tmp_path / "saved" / ends).read_bytes() == (directory / ends).read_bytes()


def test_completions_after_the_end_are_the_best_models(tmp_path):
    """Of adapters the engine has merged weights, which it must make anew."""
    trainer = make_evaluated(
        tmp_path, [2.0, 1.0, 0.0], learning_rate=0.1, load_best_model_at_end=True, peft_config=LORA
    )
    trainer.train()
    request = trainer.run.requests.evaluation(list(trainer.eval_dataset))
    prompts, episodes = request.prompts, roll_out(trainer.run, request)
    turn = episodes[0].nodes[0]
    best = PeftModel.from_pretrained(make_model(), tmp_path / "checkpoint-1")
    ids = torch.tensor([*prompts[0].token_ids, *turn.sampled_ids])
    logprobs = best(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    expected = logprobs[len(prompts[0].token_ids) - 1 :]
    torch.testing.assert_close(torch.tensor(turn.logprobs), expected, atol=1e-4, rtol=0)


def test_a_checkpoint_without_all_weights_is_not_loaded(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", max_steps=1)
    trainer.train()
    before = weights_of(trainer.model)
    larger = make_model(num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"no weights for \d+ .*model\.layers\.2\."):
        load_weights(larger, tmp_path / "checkpoint-1")
    load_weights(trainer.model, tmp_path / "checkpoint-1")
    assert not changed_weights(trainer.model, before)
    (tmp_path / "checkpoint-1" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_weights(trainer.model, tmp_path / "checkpoint-1")


def test_best_only_saves_when_better_and_the_oldest_best_goes(tmp_path):
    trainer = make_evaluated(
        tmp_path, [3.0, 4.0, 1.0, 2.0], save_strategy="best", greater_is_better=False, save_total_limit=2
    )
    trainer.train()
    assert checkpoints_in(tmp_path) == [1, 3]
    assert trainer.state.best_global_step == 3  # of rewards, but less was to be better


def test_early_stopping_and_a_resumed_run(tmp_path):
    values = [3.0, 2.0, 1.0, 0.0, 0.0]

    def run(values, resume=None, **options):
        trainer = make_evaluated(
            tmp_path, values, max_steps=5, callbacks=[EarlyStoppingCallback(2)], **options
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state

    state = run(values, save_total_limit=2)
    assert state.global_step == 3 and checkpoints_in(tmp_path) == [1, 3]  # the best, and the newest
    saved = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    counter = saved["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]
    assert counter == {"early_stopping_patience_counter": 2}

    elsewhere = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    for restored, expected in ((False, 5), (True, 4)):
        state = run(
            values[3:], str(elsewhere / "checkpoint-3"), restore_callback_states_from_checkpoint=restored
        )
        assert state.global_step == expected
        assert (state.best_metric, state.best_global_step) == (3.0, 1)
        assert state.best_model_checkpoint == str(elsewhere / "checkpoint-1")


def test_a_checkpoint_of_an_older_run_is_not_the_best(tmp_path):
    """Evaluated at steps 1 and 2 and saved at 2, where another run left a checkpoint of step 1."""
    make_evaluated(tmp_path, [1.0]).train()
    trainer = make_evaluated(tmp_path, [2.0, 1.0], save_steps=2)
    trainer.train()
    assert trainer.state.best_global_step == 1 and trainer.state.best_model_checkpoint is None


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-3, 3) | st.just(math.nan), max_size=6),
    metric=st.sampled_from(["eval_reward", "reward", "loss"]),
    greater=st.booleans(),
)
def test_the_verdicts_are_those_of_transformers(values, metric, greater):
    args = TrainingArguments(
        metric_for_best_model=metric, greater_is_better=greater, save_strategy="steps", use_cpu=True
    )
    ours, theirs = TrainerState(), TrainerState()
    trainer = type("FakeTrainer", (), dict(args=args, state=theirs))
    best = BestCheckpoint(args)
    for step, value in enumerate(values, start=1):
        ours.global_step = theirs.global_step = step
        metrics = {"eval_reward": value, "eval_loss": -value}
        assert best.judge(ours, metrics) == Trainer._determine_best_metric(trainer, metrics, None)
        assert ours.best_global_step == theirs.best_global_step
        # Theirs is infinite after evaluations that gave no number.
        assert ours.best_metric == (theirs.best_metric if theirs.best_global_step else None)


def test_a_metric_that_evaluation_does_not_give(tmp_path):
    trainer = make_evaluated(tmp_path, [1.0], metric_for_best_model="eval_rewards")
    with pytest.raises(
        ValueError, match=r"'eval_rewards'; did you mean 'eval_reward'\? It gives .*eval_loss"
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(save_strategy="best", metric_for_best_model="reward"), "eval_strategy='no'"),
        (dict(load_best_model_at_end=True), "load_best_model_at_end=True.*eval_strategy='no'"),
        (dict(save_strategy="best", eval_strategy="epoch"), "metric_for_best_model='eval_reward'"),
        (dict(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="steps"), "to match"),
        (
            dict(
                load_best_model_at_end=True,
                eval_strategy="steps",
                eval_steps=2,
                save_strategy="steps",
                save_steps=3,
            ),
            "multiple",
        ),
    ],
    ids=["never evaluated", "never evaluated, loaded", "no metric", "strategies", "steps"],
)
def test_options_that_leave_no_best_checkpoint(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **options)


def test_the_loss_as_default_metric_is_said(tmp_path, caplog):
    config = make_config(tmp_path, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    assert config.metric_for_best_model == "loss" and config.greater_is_better is False
    assert "metric_for_best_model='eval_reward'" in caplog.text
