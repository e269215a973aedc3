"""Values of a run file are read as `GRPOConfig` reads Python's, without what takes seconds to import."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Literal, get_origin

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import TrainingArguments

from colocate.config.grpo_config import GRPOConfig
from colocate.config.run_config import RunConfig, check_batch, parse_run, read_options
from colocate.config.transformers_options import transformers_options
from colocate.engines.registry import OLDER_NAMES
from colocate.options import declared as declared_module
from colocate.options.declared import declared, default_of
from colocate.options.values import members

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
    own = {name: value for name, value in values.items() if name in RunConfig.__dataclass_fields__}
    options = {name: value for name, value in values.items() if name not in own}
    parse_run(own)
    GRPOConfig(**{"output_dir": "unused", "use_cpu": True, "report_to": "none", **options})


def test_the_options_of_transformers_are_known_without_an_import():
    """Their enumerations are text; where there is no text, their classes are anything."""
    known, classes = transformers_options(), declared(TrainingArguments)
    assert known.keys() == {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    for name, option in known.items():
        assert (option.default, type(option.default)) == (classes[name].default, type(classes[name].default))
        hint = str if get_origin(option.hint) is Literal else option.hint  # one of our choices
        kinds = {
            str if kind.__module__.startswith("transformers") else kind
            for kind in members(classes[name].hint)
        }
        if name not in {"debug", "parallelism_config"}:  # which may not be set
            assert set(members(hint)) == kinds, name


def test_every_option_is_known_without_pytorch():
    code = (
        "import sys\nfrom colocate.config.help import option_sections\n"
        "from colocate.config.run_config import run_options\noption_sections()\n"
        "print(*run_options(), *({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {name for name in FIELDS if not name.startswith("_")}


@pytest.mark.parametrize("door", ["run file", "python", "later"])
def test_a_value_is_read_once(door, monkeypatch, tmp_path):
    calls = []
    coerce = declared_module.coerce
    monkeypatch.setattr(
        declared_module, "coerce", lambda name, *a, **kw: calls.append(name) or coerce(name, *a, **kw)
    )
    values = {"learning_rate": "1e-5", "engine": "vllm_server", "optim": "sgd", "max_steps": "3"}
    given = {"output_dir": str(tmp_path), "use_cpu": "true", "report_to": "none"} | values
    if door == "run file":
        config = GRPOConfig.from_read(read_options(given))
    elif door == "python":
        config = GRPOConfig(**given)
    else:
        config = GRPOConfig(**{name: given[name] for name in given.keys() - values.keys()})
        for name, value in values.items():
            setattr(config, name, value)
        config.take_late()
    assert (config.learning_rate, config.engine, config.max_steps) == (1e-5, "rollout_server", 3)
    assert {name: calls.count(name) for name in values} == dict.fromkeys(values, 1)
    assert all(calls.count(name) <= 1 for name in calls)


def test_defaults_and_older_names_are_taken():
    read_options({name: default_of(field) for name, field in FIELDS.items()})
    for name in OLDER_NAMES:
        read_options({"engine": name})


@example(name="rollout_precision", value="-1")
@given(name=st.sampled_from(sorted(FIELDS.keys() - NOT_SET)), value=st.sampled_from(VALUES))
@settings(max_examples=150, deadline=None)
def test_what_is_refused_early_is_what_the_classes_refuse(name, value):
    early = refusal(read_options, {name: value})
    if early is not None:
        assert early.startswith(name)
        assert (refusal(judged_by_the_classes, {name: value}) or "").startswith(name)
    else:  # not for its type, range or choices
        late = refusal(judged_by_the_classes, {name: value}) or ""
        of_one_value = (
            r"unknown|too large|not (finite|text|true|one of|a (list|mapping|number|whole number( or|\.)))"
        )
        assert not re.match(rf"{name}=.* is ({of_one_value})", late)


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
    early = late if refusal(read_options, values) else refusal(check_batch, read_options(values), 1)
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
    early = refusal(read_options, values)
    assert early is not None and early == refusal(judged_by_the_classes, values)
