"""Several trainers of one model in one process, as in a notebook whose cells are run again."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import make_dataset, make_model, make_trainer, read_metrics
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from colocate import GRPOConfig

STEPS = dict(max_steps=2, save_strategy="no", per_device_train_batch_size=4, gradient_accumulation_steps=1)


def bf16_model() -> Any:
    """A model whose masters are apart from its weights, as on a GPU."""
    return make_model("llama").to(torch.bfloat16)


def trained(directory: Path, model: nn.Module) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    make_trainer(directory, model=model, **STEPS).train()
    return read_metrics(directory), [p.detach().clone() for p in model.parameters()]


def assert_trained_as(directory: Path, model: nn.Module, want: tuple[Any, list[torch.Tensor]]) -> None:
    metrics, weights = want
    assert read_metrics(directory) == metrics and all(m["grad_norm"] > 0 for m in metrics)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


def test_a_second_trainer_of_a_model_trains_it_as_a_first_one_would(tmp_path):
    model = bf16_model()
    first = make_trainer(tmp_path / "first", model=model, **STEPS)
    first.train()
    want = trained(tmp_path / "alone", copy.deepcopy(model))
    make_trainer(tmp_path / "second", model=first.model, **STEPS).train()
    assert_trained_as(tmp_path / "second", model, want)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_weights_that_were_changed_before_training_are_what_is_trained(tmp_path, beta):
    """`beta` keeps a reference, which is the model that the trainer was made with."""
    model, other = bf16_model(), bf16_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    options = STEPS | {"beta": beta, "learning_rate": 1e-4}
    trainer = make_trainer(tmp_path / "changed", model=model, **options)
    model.load_state_dict(other.state_dict())
    trainer.train()
    alone = make_trainer(tmp_path / "alone", model=other, **options)
    if beta:
        alone.policy.reference = make_trainer(
            tmp_path / "reference", model=bf16_model(), **options
        ).policy.reference
    alone.train()
    assert_trained_as(
        tmp_path / "changed", model, (read_metrics(tmp_path / "alone"), list(other.parameters()))
    )


@pytest.mark.parametrize("kind", [GRPOConfig, TrainingArguments])
def test_a_configuration_that_is_made_meanwhile_changes_nothing(tmp_path, kind):
    trainer = make_trainer(tmp_path / "first", model=bf16_model(), eval_dataset=make_dataset(4), **STEPS)
    assert kind(output_dir=str(tmp_path / "second"), use_cpu=True).world_size == 1
    trainer.evaluate()
    trainer.train()
    trainer.save_model()
    assert len(read_metrics(tmp_path / "first")) == 2


def test_options_that_are_set_too_late_are_refused(tmp_path):
    """transformers' trainer reads some of them when it begins to train; here its parts are made with them."""
    trainer = make_trainer(tmp_path, **STEPS)
    trainer.args.learning_rate, trainer.args.num_generations = 0.5, 2
    with pytest.raises(
        ValueError, match=r"learning_rate from .* to 0.5, num_generations from 4 to 2. Set it in"
    ):
        trainer.train()
    trainer = make_trainer(tmp_path, hub_token="a secret of before", **STEPS)
    trainer.args.hub_token = "a secret"
    with pytest.raises(ValueError, match="hub_token from '<HUB_TOKEN>' to '<HUB_TOKEN>'") as error:
        trainer.train()
    assert "secret" not in str(error.value)
    trainer = make_trainer(tmp_path, **STEPS)
    trainer.args.temperature = 0.5
    with pytest.raises(ValueError, match=r"temperature from 1.0 to 0.5. Set it in"):
        trainer.evaluate(make_dataset())
    trainer = make_trainer(tmp_path, **STEPS)
    for name in ("args", "model", "train_dataset", "processing_class", "optimizer", "lr_scheduler", "engine"):
        with pytest.raises(AttributeError, match=f"Another {name} comes too late.* Make a new trainer"):
            setattr(trainer, name, getattr(trainer, name))
    trainer.args.learning_rate = trainer.args.learning_rate
    assert trainer.train().global_step == 2


class Freezing(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.model.norm.requires_grad_(False)


@pytest.mark.parametrize("change", ["freeze", "unfreeze", "replace"])
def test_parameters_that_change_too_late_are_refused(tmp_path, change):
    model = bf16_model()
    model.model.norm.requires_grad_(change != "unfreeze")
    trainer = make_trainer(tmp_path, model=model, **STEPS)
    if change == "replace":
        model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())
    model.model.norm.requires_grad_(change != "freeze")
    with pytest.raises(
        ValueError, match=r"1 were frozen, unfrozen or replaced since, model\.norm\.weight for one"
    ):
        trainer.train()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_parameters_that_a_callback_freezes_are_refused(tmp_path):
    """An optimizer's momentum would go on to move them."""
    trainer = make_trainer(tmp_path, model=bf16_model(), callbacks=[Freezing], **STEPS)
    with pytest.raises(
        ValueError, match=r"1 were frozen, unfrozen or replaced since, model\.norm\.weight for one"
    ):
        trainer.train()
    assert len(read_metrics(tmp_path)) == 1


@pytest.mark.usefixtures("all_garbage_is_found")
def test_what_a_trainer_held_is_freed_with_it(tmp_path):
    trainer = make_trainer(tmp_path, model=bf16_model(), **STEPS)
    trainer.train()
    masters = trainer.policy.optimizer.leaves
    held = [
        weakref.ref(x)
        for x in (trainer, trainer.policy, trainer.model, *trainer.model.parameters(), *masters)
    ]
    del trainer, masters
    gc.collect()
    assert [x() for x in held if x() is not None] == []
