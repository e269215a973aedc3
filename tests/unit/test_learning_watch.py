"""A run that learns nothing says so: once, in time, about the right thing, and not where it learns."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import TrainableTokensConfig

from colocate.reporting.completions import CompletionTable
from colocate.reporting.learning_watch import NUM_COMPLETIONS, NUM_ROLLOUTS, LearningWatch
from colocate.reporting.report import write_report
from colocate.rewards import FORMS
from tiny import count_digits, logged, make_trainer


def table(**rewards):
    number = len(next(iter(rewards.values())))
    return CompletionTable(
        prompts=["1 + 1 ="] * number,
        completions=["I think it is 2"] * number,
        rewards=rewards,
        advantages=[0.0] * number,
    )


def metrics(zero_std=0.5, clipped=0.0):
    return {"frac_reward_zero_std": zero_std, "completions/clipped_ratio": clipped}


def warnings_of(rollouts):
    watch = LearningWatch(FORMS)
    return [watch.look(*rollout) for rollout in rollouts]


MIXED = table(accuracy_reward=[0.0, 1.0] * 8)


CALLED = replace(
    MIXED,
    completions=[
        [
            {"role": "assistant", "content": "", "tool_calls": []},
            {"role": "tool", "name": "weather", "content": "{'error': 'no such city'}"},
            {"role": "assistant", "content": "I think it is 2"},
        ]
    ]
    * 16,
)


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ((metrics(1.0), table(accuracy_reward=[0.0] * 16)), r"every reward was 0 or None.*\boxed{...}"),
        ((metrics(1.0), table(accuracy_reward=[math.nan] * 16)), "every reward was 0 or None"),
        ((metrics(1.0), table(f=[0.0] * 16, g=[math.nan] * 16)), "every reward was 0 or None"),
        ((metrics(1.0), table(f=[0.25] * 16)), "the same reward, so no advantage differs from 0.*f 0.25"),
        (
            (metrics(0.96), table(f=[1.0] * 15 + [0.0])),
            "at least 90% of the prompts had.*The means are f 0.938. If they are high, end",
        ),
        (
            (metrics() | {"tools/failure_frequency": 1.0}, CALLED),
            "every call of a tool failed, .*{'error': 'no such city'}. Call the tool by hand",
        ),
        ((metrics(0.5, clipped=1.0), MIXED), "every completion was cut off at max_completion_length"),
    ],
)
def test_a_symptom_that_lasts_is_told_once_with_a_sample(rollout, words):
    told = warnings_of([rollout] * (4 * NUM_ROLLOUTS))
    assert [len(texts) for texts in told] == [0] * (NUM_ROLLOUTS - 1) + [1] + [0] * 3 * NUM_ROLLOUTS
    (text,) = told[NUM_ROLLOUTS - 1]
    assert text.startswith(f"For {NUM_ROLLOUTS} rollouts ({NUM_ROLLOUTS * 16} completions) ")
    position = 0
    for part in words.split(".*"):
        position = text.index(part, position)
    assert "prompt      … 1 + 1 =" in text and "I think it is 2\n" in text
    assert f"rewards     {next(iter(rollout[1].rewards))} " in text


def test_a_rollout_with_signal_is_not_told_of():
    assert not any(warnings_of([(metrics(0.89), MIXED)] * (4 * NUM_ROLLOUTS)))


def test_a_format_that_is_never_won_is_told_later_and_a_penalty_is_not():
    rewards = {
        "accuracy_reward": [0.0, 1.0] * 8,
        "my_format": [0.0] * 16,
        "get_repetition_penalty": [0.0] * 16,
    }
    told = warnings_of([(metrics(), table(**rewards))] * (5 * NUM_ROLLOUTS))
    (number,) = [number for number, texts in enumerate(told, start=1) if texts]
    assert number == 4 * NUM_ROLLOUTS
    assert len(told[number - 1]) == 1
    assert "the reward function my_format gave 0 or None to every completion" in told[number - 1][0]


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 20))
def test_nothing_is_told_before_it_has_lasted(pattern, size):
    """One rollout that is well begins the count anew, and small rollouts must be more."""
    bad, well = (metrics(1.0), table(f=[0.0] * size)), (metrics(0.0), table(f=[0.0, 1.0] * size))
    told = warnings_of([bad if is_bad else well for is_bad in pattern])
    needed = max(NUM_ROLLOUTS, math.ceil(NUM_COMPLETIONS / size))
    in_a_row, expected = 0, None
    for number, is_bad in enumerate(pattern):
        in_a_row = in_a_row + 1 if is_bad else 0
        if in_a_row == needed and expected is None:
            expected = number
    assert [number for number, texts in enumerate(told) if texts] == ([] if expected is None else [expected])


def never(completions, **kwargs):
    return [0.0] * len(completions)


def test_a_run_that_learns_nothing_says_so_in_its_record_and_report(tmp_path, capsys):
    options = dict(per_device_train_batch_size=8, max_steps=NUM_ROLLOUTS + 2, learning_rate=0.0)
    make_trainer(tmp_path / "bad", reward_funcs=never, **options).train()
    printed = capsys.readouterr().out
    assert printed.count("Warning: For 5 rollouts (40 completions) every reward was 0 or None") == 1
    (line,) = (tmp_path / "bad" / "warnings.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["step"] == NUM_ROLLOUTS and "never 0" in record["warning"]
    page = write_report(tmp_path / "bad").read_text()
    assert "<h2>Warnings</h2>" in page and "every reward was 0 or None" in page

    make_trainer(tmp_path / "good", reward_funcs=count_digits, **options).train()
    assert "Warning" not in capsys.readouterr().out
    assert not (tmp_path / "good" / "warnings.jsonl").exists()
    assert "<h2>Warnings</h2>" not in write_report(tmp_path / "good").read_text()


def test_a_new_run_keeps_the_warnings_of_an_earlier_one_and_a_resumed_run_drops_later_ones(tmp_path):
    options = dict(
        reward_funcs=never, per_device_train_batch_size=8, max_steps=NUM_ROLLOUTS, save_strategy="steps",
        save_steps=2, logging_steps=1,
    )  # fmt: skip
    make_trainer(tmp_path, **options).train()
    assert (tmp_path / "warnings.jsonl").exists()
    resumed = make_trainer(tmp_path, **{**options, "max_steps": 3})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (tmp_path / "warnings.jsonl").read_text() == ""
    make_trainer(tmp_path, **options).train()
    assert len((tmp_path / "warnings.jsonl").read_text().splitlines()) == 1


def test_a_resumed_run_counts_on_and_repeats_nothing(tmp_path):
    """Jobs that are cut into short parts must learn of it, too."""
    options = dict(
        reward_funcs=never, per_device_train_batch_size=8, max_steps=NUM_ROLLOUTS + 2, save_strategy="steps",
        save_steps=1, logging_steps=1,
    )  # fmt: skip
    make_trainer(tmp_path, **{**options, "max_steps": NUM_ROLLOUTS - 1}).train()
    assert not (tmp_path / "warnings.jsonl").exists()
    for max_steps in (NUM_ROLLOUTS, NUM_ROLLOUTS + 2):
        make_trainer(tmp_path, **{**options, "max_steps": max_steps}).train(resume_from_checkpoint=True)
        (line,) = (tmp_path / "warnings.jsonl").read_text().splitlines()
        assert (
            f"For {NUM_ROLLOUTS} rollouts (40 completions) every reward was 0" in json.loads(line)["warning"]
        )


@pytest.mark.parametrize(
    ("options", "correction", "cause"),
    [
        # The pad token does not occur.
        (
            {"peft_config": TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[0])},
            False,
            "no part in",
        ),
        ({}, True, "every completion the weight 0"),
        ({}, False, None),
    ],
    ids=["trained tokens that do not occur", "everything masked", "a gradient"],
)
def test_a_gradient_of_0_in_spite_of_advantages_is_said_once(tmp_path, options, correction, cause):
    trainer = make_trainer(tmp_path, max_steps=3, **options)
    if correction:  # of log-probs that are off by 2 nats per token
        generate = trainer.engine.generate
        trainer.engine.generate = lambda *request: [
            replace(c, logprobs=tuple(x - 2 for x in c.logprobs)) for c in generate(*request)
        ]
    trainer.train()
    assert (max(logged(trainer, "grad_norm")) == 0) is (cause is not None)
    if cause is None:
        assert not (tmp_path / "warnings.jsonl").exists()
    else:
        (line,) = (tmp_path / "warnings.jsonl").read_text().splitlines()
        warning = json.loads(line)["warning"]
        assert "gradient of this step is exactly 0" in warning and cause in warning
