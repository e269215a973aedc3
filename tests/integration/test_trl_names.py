"""Scripts for TRL's trainer read, call and override the same names here, with the same meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerState
from trl.trainer.utils import RepeatSampler

from colocate.run.loaders import train_loader
from colocate.trainer import GRPOTrainer
from colocate.trl.names import NOT_CALLED, NOT_OVERRIDDEN
from tiny import count_digits, make_config, make_model, make_reward_model, make_tokenizer, make_trainer, sums


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> GRPOTrainer:
    """A trainer with a reward model and a reference, after two steps."""
    trainer = make_trainer(
        tmp_path_factory.mktemp("run"),
        reward_funcs=[count_digits, make_reward_model()],
        reward_processing_classes=[None, make_tokenizer()],
        reward_weights=[1.0, 0.5],
        eval_dataset=sums(3),
        beta=0.1,
        entropy_coef=0.01,
        use_adaptive_entropy=True,
        entropy_target=100.0,
        entropy_coef_delta=0.005,
    )
    trainer.train()
    return trainer


def test_names_say_what_the_parts_know(trained):
    start = make_model()
    assert trained.ref_model is not trained.model
    for mine, original in zip(trained.ref_model.parameters(), start.parameters(), strict=True):
        assert torch.equal(mine, original)
    assert trained.entropy_coef == pytest.approx(0.01 + 2 * 0.005)  # raised in each step
    function, model = trained.reward_funcs
    assert function is count_digits and model.config.num_labels == 1
    assert trained.reward_func_names == ["count_digits", "Qwen3ForSequenceClassification"]
    assert trained.reward_weights.tolist() == [1.0, 0.5]
    assert trained.reward_processing_classes[0] is None
    assert trained.reward_processing_classes[1].pad_token == "<pad>"
    assert trained.model_wrapped is trained.model
    assert trained.num_generations == trained.num_generations_eval == 4
    assert (trained.beta, trained.epsilon_low, trained.epsilon_high) == (0.1, 0.2, 0.2)
    assert not trained.aux_loss_enabled and trained.is_local_process_zero()
    callback = trained.callback_handler.callbacks[0]
    assert trained.pop_callback(callback) is callback


def test_log_adds_to_the_history(trained):
    trained.log({"of_mine": 3.0})
    assert trained.state.log_history[-1]["of_mine"] == 3.0
    assert trained.state.log_history[-1]["step"] == trained.state.global_step


def test_a_part_of_the_run_is_not_replaced_alone(trained):
    for name in ("engine", "policy", "journal"):
        with pytest.raises(AttributeError, match=f"Another {name} comes too late"):
            setattr(trained, name, None)
        assert getattr(trained, name) is getattr(trained.run, name)


def test_the_eval_loader_has_each_row_once_per_completion(trained):
    rows = [row["prompt"] for batch in trained.get_eval_dataloader() for row in batch]
    assert rows == [prompt for prompt in sums(3)["prompt"] for _ in range(4)]
    streamed = trained.get_eval_dataloader(sums(3).to_iterable_dataset())
    assert [row["prompt"] for batch in streamed for row in batch] == rows and streamed.num_workers == 0
    with pytest.raises(ValueError, match="no eval_dataset 'other'"):
        trained.get_eval_dataloader("other")


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_train_loader_has_trls_rows(tmp_path, shuffle):
    args = make_config(
        tmp_path,
        num_generations=2,
        steps_per_generation=3,
        num_iterations=2,
        shuffle_dataset=shuffle,
        dataloader_num_workers=2,
    )
    loader = train_loader(sums(20), args)
    theirs = RepeatSampler(
        sums(20), mini_repeat_count=2, batch_size=6, repeat_count=6, shuffle=shuffle, seed=args.seed
    )
    assert loader.num_workers == 2
    for _ in range(2):  # each epoch has an order of its own
        indices = list(theirs)
        batches = list(loader.batch_sampler)
        assert [index for batch in batches for index in batch] == indices
        assert len(loader) == len(batches) == 3 * 6
    if not shuffle:
        stream = train_loader(sums(20).to_iterable_dataset(), args)
        rows = list(sums(20))
        expected = [[rows[i] for i in batch] for batch in batches]
        assert list(stream) == expected and stream.num_workers == 0


def test_training_step_is_called_for_each_slice_with_its_rows(tmp_path):
    rows, losses = [], []

    class Watched(GRPOTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            assert model is self.model
            loss = super().training_step(model, inputs, num_items_in_batch)
            rows.append(inputs)
            losses.append(float(loss))
            return loss

    options = dict(gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2, max_steps=8)
    trainer = Watched(
        model=make_model(),
        reward_funcs=count_digits,
        args=make_config(tmp_path / "watched", shuffle_dataset=False, **options),
        train_dataset=sums(),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    rollouts = [[sums()[i] for i in part for _ in range(4)] for part in (range(4), range(4, 8))]
    assert rows == [rollouts[0]] * 8 + [rollouts[1]] * 8
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[1::2] == pytest.approx(logged) and not any(losses[::2])
    with pytest.raises(RuntimeError, match="train\\(\\) generates them"):
        trainer.training_step(trainer.model, [])


def test_a_training_step_that_trains_nothing_is_an_error(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(GRPOTrainer, "training_step", lambda *_: torch.zeros(()))
    with pytest.raises(RuntimeError, match=r"called super\(\).training_step 0 times for 1 slices"):
        trainer.train()


@pytest.mark.parametrize(
    "name", ["compute_loss", "_generate_and_score_completions", "log", "create_optimizer"]
)
def test_overriding_what_is_never_called_is_refused(name):
    with pytest.raises(TypeError, match=f"Mine overrides {name}, which colocate's trainer never calls: "):
        type("Mine", (GRPOTrainer,), {name: lambda self: None})


def test_what_is_refused_does_not_exist_and_says_what_does(trained):
    for name in NOT_CALLED:
        assert not hasattr(trained, name)
    assert all(hasattr(trained, name) for name in NOT_OVERRIDDEN.keys() - NOT_CALLED.keys())
    with pytest.raises(AttributeError, match=r"no attribute '_metrics': .*log_metric"):
        _ = trained._metrics
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = trained.nonsense
    with pytest.raises(AttributeError, match=r"beta=0.5 comes too late.*GRPOConfig"):
        trained.beta = 0.5


def test_missing_arguments_are_named_in_trls_words(tmp_path):
    for nothing in (None, []):
        with pytest.raises(ValueError, match="No reward source provided"):
            make_trainer(tmp_path, reward_funcs=nothing)
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        make_trainer(tmp_path, train_dataset=None)
    with pytest.raises(ValueError, match="must match"):
        make_trainer(tmp_path, reward_funcs=[count_digits] * 2, reward_processing_classes=make_tokenizer())


def test_the_state_can_be_replaced(tmp_path):
    trainer = make_trainer(tmp_path)
    mine = TrainerState(best_metric=0.25)
    trainer.state = mine
    assert trainer.state is mine and mine.max_steps == 2 and mine.is_world_process_zero
    trainer.train()
    assert mine.global_step == 2 and mine.best_metric == 0.25


def test_streams_settle_their_options_as_in_trl(tmp_path, caplog):
    stream: Any = Dataset.to_iterable_dataset(sums())
    trainer = make_trainer(tmp_path, train_dataset=stream, dataloader_num_workers=4, shuffle_dataset=False)
    assert trainer.args.dataloader_num_workers == 0
    assert trainer.args.accelerator_config.dispatch_batches is False
    assert "Iterable datasets require `dataloader_num_workers=0`" in caplog.text
    args = make_config(tmp_path)
    args.accelerator_config.dispatch_batches = True
    with pytest.raises(ValueError, match="Iterable datasets require `dispatch_batches=False`"):
        make_trainer(tmp_path, args=args, train_dataset=sums(), eval_dataset={"a": stream})
