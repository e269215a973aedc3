"""examples/loop.py composes the parts as the trainer does: the same weights, to the bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from colocate import GRPOTrainer
from tiny import changed_weights, weights_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "loop.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec: Any = importlib.util.spec_from_file_location("example_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "options",
    [{}, {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1}],
    ids=["on-policy", "reused"],
)
def test_its_steps_are_the_trainers(example, tmp_path, options):
    num_steps = 5 if options else 3
    args = example.make_config(
        str(tmp_path), max_steps=num_steps, report_to="none", save_strategy="no", disable_tqdm=True, **options
    )
    alone, trained = example.make_model(), example.make_model()
    before = weights_of(alone)
    rewards = example.train(args, alone)
    trainer = GRPOTrainer(
        trained,
        example.share_of_letter,
        args,
        example.make_dataset(),
        processing_class=example.make_tokenizer(),
    )
    trainer.train()
    assert changed_weights(alone, before)
    assert not changed_weights(alone, weights_of(trained))
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards == logged


def test_it_learns(example, tmp_path, capsys):
    args = example.make_config(str(tmp_path), max_steps=12)
    rewards = example.train(args, example.make_model())
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
