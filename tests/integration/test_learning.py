"""Runs with defaults learn, and with filters as without: the gradient survives from engine to loss."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

from colocate.algorithms.losses import LOSSES
from tiny import PAD, make_model, make_trainer


def rewards(output_dir, **options) -> list[float]:
    """The mean reward of each step, under gradients that are used as large as they are."""
    model = make_model()
    with torch.no_grad():
        # Padding is drawn, too, and a norm of its zeros has an enormous gradient.
        model.get_input_embeddings().weight[PAD].normal_(std=0.2)
    defaults = dict(
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=24,
        max_steps=10,
        optim="sgd",
        max_grad_norm=0.0,
        learning_rate=1.0,
        lr_scheduler_type="constant",
    )
    trainer = make_trainer(output_dir, model=model, **{**defaults, **options})
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def gain(values: list[float]) -> float:
    return sum(values[-3:]) / 3 - sum(values[:2]) / 2


@functools.cache
def unfiltered_gain(output_dir) -> float:
    return gain(rewards(output_dir))


@pytest.mark.parametrize(
    "filters",
    [
        dict(top_p=0.9),
        dict(repetition_penalty=1.3),
        *(pytest.param(filters, marks=pytest.mark.slow) for filters in (dict(top_k=20), dict(min_p=0.05))),
    ],
    ids=lambda filters: "-".join(filters),
)
def test_filters_do_not_hinder_learning(tmp_path, tmp_path_factory, filters):
    expected = unfiltered_gain(tmp_path_factory.getbasetemp() / "unfiltered")
    assert expected > 10, "there is nothing to compare with"
    assert gain(rewards(tmp_path, **filters)) > 0.6 * expected


@pytest.mark.parametrize(
    "loss_type",
    [
        pytest.param(name, marks=[] if name in ("dapo", "cispo", "vespo") else pytest.mark.slow)
        for name in LOSSES
    ],
)
def test_every_loss_learns_with_all_else_at_its_default(tmp_path, loss_type):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of defaults that are TRL's, but not the paper's
        values = rewards(
            tmp_path,
            loss_type=loss_type,
            max_completion_length=8,
            max_steps=12,
            optim="adamw_torch",
            max_grad_norm=1.0,
            learning_rate=0.01,
        )
    assert gain(values) > 3
