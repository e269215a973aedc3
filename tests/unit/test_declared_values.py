"""Values are judged from the sources as the classes judge them, which is what takes seconds to import."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colocate.config.declared_values import check_batch, check_values
from colocate.config.grpo_config import GRPOConfig
from colocate.config.honoured import default_of
from colocate.config.run_config import RunConfig, parse_run
from colocate.engines.registry import OLDER_NAMES
from colocate.options.declared import declared_types

FIELDS = {f.name: f for record in (RunConfig, GRPOConfig) for f in dataclasses.fields(record)}
NOT_SET = {"output_dir", "use_cpu", "report_to"}
"""What makes a `GRPOConfig` that can be built here."""
VALUES = [
    "-1",
    "0",
    "1",
    "2.5",
    "inf",
    "none",
    "true",
    "auto",
    "grpo",
    "a word",
    "[1, 2]",
    "{a: 1}",
    "[",
    -3,
    0.5,
]


def refusal(judge, *arguments: object, **options: object) -> str | None:
    try:
        judge(*arguments, **options)
    except ValueError as error:
        return str(error)
    return None


def judged_by_the_classes(values: dict[str, object]) -> None:
    _, options = parse_run(values)
    GRPOConfig(**{"output_dir": "unused", "use_cpu": True, "report_to": "none", **options})


def test_nearly_all_types_are_known_without_an_import():
    """What is left are the options whose types are enumerations and records of transformers'."""
    assert len(FIELDS.keys() - declared_types().keys()) < 12
    assert set(FIELDS) - declared_types().keys() >= {"optim", "eval_strategy"}


def test_defaults_and_older_names_are_taken():
    check_values({name: default_of(field) for name, field in FIELDS.items()})
    for name in OLDER_NAMES:
        check_values({"engine": name})


@example(name="rollout_precision", value="-1")
@given(name=st.sampled_from(sorted(FIELDS.keys() - NOT_SET)), value=st.sampled_from(VALUES))
@settings(max_examples=150, deadline=None)
def test_what_is_refused_early_is_what_the_classes_refuse(name, value):
    early = refusal(check_values, {name: value})
    if early is not None:
        assert early.startswith(name)
        assert (refusal(judged_by_the_classes, {name: value}) or "").startswith(name)
    elif name in declared_types():  # of its type
        assert refusal(parse_run, {name: value}) is None


@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "per_device_train_batch_size": st.integers(1, 8),
            "per_device_eval_batch_size": st.integers(1, 8).map(str),
            "gradient_accumulation_steps": st.integers(1, 4),
            "generation_batch_size": st.none() | st.integers(0, 24),
            "steps_per_generation": st.none() | st.integers(1, 4),
            "num_generations": st.integers(1, 6),
            "num_generations_eval": st.none() | st.integers(1, 6),
            "eval_strategy": st.sampled_from(["no", "steps"]),
        },
    )
)
@settings(max_examples=100, deadline=None)
def test_batches_are_judged_early_as_the_class_judges_them(values):
    late = refusal(judged_by_the_classes, values)
    early = refusal(check_batch, values, 1) if refusal(check_values, values) is None else late
    assert early == late


@pytest.mark.parametrize(
    "values",
    [
        {"loss_type": "grppo"}, {"learning_rate": "-1"}, {"num_generations": "four"}, {"top_k": -2},
        {"shard": 3}, {"reward_weights": "[1, x]"}, {"lora_dropout": 1}, {"eval_strategy": "step"},
        {"engine": "vlm"}, {"scale_rewards": "grp"}, {"activation_policy": "all"}, {"save_steps": "1.5"},
    ],
)  # fmt: skip
def test_both_say_the_same(values):
    early = refusal(check_values, values)
    assert early is not None and early == refusal(judged_by_the_classes, values)
