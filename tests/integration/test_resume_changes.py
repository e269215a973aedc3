"""A run that is resumed under other circumstances: what changed is told, and applied or refused by name."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import (
    make_dataset,
    make_model,
    make_tokenizer,
    make_trainer,
    read_metrics,
    share_of_early_letters,
)
from test_bad_input import files_no_larger_than
from test_resume import lora, trained_adapter
from transformers import TrainerCallback, get_scheduler

from colocate.checkpoints import sealed
from colocate.checkpoints.lock import OutputDirInUse, RunLock
from colocate.checkpoints.sealed import CheckpointError, list_checkpoints
from colocate.config.grpo_config import GRPOConfig
from colocate.experience.judge import Judge
from colocate.experience.select import Selector
from colocate.options.declared import marked
from colocate.options.requirements import IN_COMPLETIONS
from colocate.run import build as builders
from colocate.run import options as run_options
from tool_chat import TEMPLATE

NUM_STEPS = 4


def build(output_dir: Path, **options: Any) -> Any:
    return make_trainer(
        output_dir, **{"save_strategy": "steps", "save_steps": 1, "max_steps": NUM_STEPS, **options}
    )


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    """A run of which two steps are done; both train on one rollout, and so will the third."""
    directory = tmp_path_factory.mktemp("two_steps")
    build(directory, num_iterations=3).train()
    for step in (3, 4):
        shutil.rmtree(directory / f"checkpoint-{step}")
    return directory


@pytest.fixture
def stopped(two_steps, tmp_path) -> Path:
    return Path(shutil.copytree(two_steps, tmp_path / "run"))


def resume(directory: Path, caplog: Any, **options: Any) -> tuple[Any, dict[str, tuple[str, str, str]]]:
    """The finished run, and by name what the table said: was, is, verdict."""
    trainer = build(directory, **{"num_iterations": 3, **options})
    with caplog.at_level(logging.WARNING, "colocate"):
        trainer.train(resume_from_checkpoint=True)
    (message,) = (r.message for r in caplog.records if "Changed since it was saved" in r.message)
    rows = [re.split(r"\s{2,}", line.strip()) for line in message.splitlines() if line.startswith("  ")]
    return trainer, {name: tuple(cells) for name, *cells in rows[1:]}


# ── Applied ──────────────────────────────────────────────────────────────────────────────────────────────


def test_hyperparameters_are_applied_from_the_next_step_on(stopped, caplog):
    changed = dict(
        learning_rate=1e-3,
        adam_beta1=0.8,
        adam_epsilon=1e-6,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        max_steps=8,
        entropy_coef=0.05,
    )
    trainer, told = resume(stopped, caplog, **changed)
    assert told["option learning_rate"] == ("0.01", "0.001", "applied")
    assert told.keys() == {f"option {name}" for name in changed}

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=8)
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step(), schedule.step()
    rates = [record["learning_rate"] for record in read_metrics(stopped)]
    assert rates[2:] == expected[2:] and rates[:2] != expected[:2]
    assert read_metrics(stopped)[2]["entropy_coef"] == 0.05
    groups = trainer.optimizer.param_groups
    assert all(g["betas"] == (0.8, 0.999) and g["eps"] == 1e-6 for g in groups)
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]


def test_nothing_changed_nothing_told(stopped, caplog):
    with caplog.at_level(logging.WARNING, "colocate"):
        build(stopped, num_iterations=3).train(resume_from_checkpoint=True)
    assert "Changed since it was saved" not in caplog.text


def test_a_penalty_begins_and_what_waits_is_generated_anew(stopped, caplog):
    trainer, told = resume(stopped, caplog, beta=0.1)
    assert told == {"option beta": ("0.0", "0.1", "applied")}
    assert "4 completions made under the former were waiting" in caplog.text
    assert trainer.policy.reference is not None
    records = read_metrics(stopped)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert "kl" not in records[1] and records[2]["kl"] > 0
    # The reference is what the run began with, so other weights cannot become it.
    (stopped / "checkpoint-3").rename(stopped / "away"), (stopped / "checkpoint-4").rename(stopped / "away-4")
    other = build(stopped, num_iterations=3, beta=0.1, model=make_model(seed=1))
    with pytest.raises(CheckpointError, match=r"checksum of the frozen weights .* reference was"):
        other.train(resume_from_checkpoint=True)
    # And the penalty may end.
    (stopped / "away").rename(stopped / "checkpoint-3")
    _, told = resume(stopped, caplog_cleared(caplog))
    assert told == {"option beta": ("0.1", "0.0", "applied")}


@pytest.mark.parametrize(
    "changed",
    [dict(generation_kwargs={"stop_token_ids": [5]}), dict(chat_template_kwargs={"style": "terse"})],
    ids=lambda changed: next(iter(changed)),
)
def test_what_was_drawn_otherwise_is_generated_anew(stopped, caplog, changed):
    _, told = resume(stopped, caplog, **changed)
    assert told.keys() == {f"option {name}" for name in changed}
    assert "4 completions made under the former were waiting" in caplog.text


NOT_SHAPING = {
    # Bound to the checkpoint, or to the sizes of batches in it.
    *("num_generations", "steps_per_generation", "gradient_accumulation_steps", "generation_batch_size"),
    "per_device_train_batch_size",
    # How long a function may take, or where it runs.
    *("reward_timeout_s", "tool_timeout_s", "tool_workers", "trust_remote_code"),
    # What is drawn stays a draw of the same distribution; how much of what is drawn is trained on.
    *("seed", "max_policy_lag", "max_refill_rounds", "top_entropy_quantile"),
    "num_generations_eval",
}
"""Options that are read where completions are made, but do not change what a completion is worth."""


def test_options_that_shape_completions_are_marked(tmp_path, monkeypatch):
    """Each option of the run that is read where completions are drawn, scored and weighed is marked, so that
    a change of it drops those that wait."""
    read: set[str] = set()
    open_calls: list[str] = []

    def noting(self: Any, name: str) -> Any:
        if open_calls:
            read.add(name)
        return object.__getattribute__(self, name)

    def watched(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            open_calls.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                open_calls.pop()

        monkeypatch.setattr(owner, name, call)

    for name in ("sampling_params", "build_requests", "build_judge", "build_rewards", "build_player"):
        watched(builders, name)
    watched(Judge, "score")
    watched(Selector, "slices")
    for record in (GRPOConfig, *filter(dataclasses.is_dataclass, vars(run_options).values())):
        monkeypatch.setattr(record, "__getattribute__", noting, raising=False)
    build(tmp_path / "plain", max_steps=1, beta=0.1).train()
    build(tmp_path / "lag", max_steps=1, max_policy_lag=1, mask_stale_tokens=True).train()
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    build(tmp_path / "turns", environment_factory=Room, processing_class=tokenizer)

    shaping = read & {field.name for field in dataclasses.fields(GRPOConfig)} - NOT_SHAPING
    marks = marked(GRPOConfig, IN_COMPLETIONS)
    assert shaping <= marks, "read where completions are made"
    # These two decide whether the policy has a reference, and how the engine multiplies.
    assert marks - shaping == {"beta", "rollout_precision"}


class Room:
    def reset(self, **row: Any) -> None:
        pass


@pytest.mark.parametrize("is_new", [True, False], ids=["new adapter", "older adapter"])
def test_a_penalty_begins_with_an_adapter(tmp_path, caplog, is_new):
    def options() -> dict[str, Any]:
        return dict(peft_config=lora()) if is_new else dict(model=trained_adapter())

    build(tmp_path, max_steps=1, **options()).train()
    trainer, told = resume(tmp_path, caplog, num_iterations=1, beta=0.1, max_steps=2, **options())
    assert told.keys() == {"option beta", "option max_steps"}
    assert trainer.policy.reference is not None and read_metrics(tmp_path)[1]["kl"] > 0
    # A reference made of the base under a new adapter is another than that of an older adapter.
    other = dict(model=trained_adapter()) if is_new else dict(peft_config=lora())
    with pytest.raises(CheckpointError, match=r"checksum of the frozen weights .* reference was"):
        build(tmp_path, beta=0.1, max_steps=3, **other).train(resume_from_checkpoint=True)


def caplog_cleared(caplog: Any) -> Any:
    caplog.clear()
    return caplog


def test_rows_rewards_and_versions_are_told(stopped, caplog, monkeypatch):
    def another_reward(completion_ids, **_: Any) -> list[float]:
        return share_of_early_letters(completion_ids)

    rows = make_dataset().to_list()
    rows[7]["prompt"] = "other"
    monkeypatch.setattr("colocate.run.identity.platform.python_version", lambda: "2.7")
    dataset = type(make_dataset()).from_list(rows)
    _, told = resume(stopped, caplog, train_dataset=dataset, reward_funcs=another_reward, temperature=0.9)
    assert told.keys() == {"dataset digest", "reward functions", "option temperature", "version of python"}
    assert told["reward functions"][:2] == ("['share_of_early_letters']", "['another_reward']")
    assert told["version of python"][1:] == ("2.7", "applied")


# ── Refused ──────────────────────────────────────────────────────────────────────────────────────────────


def test_another_optimizer_is_refused_by_name(stopped):
    trainer = build(stopped, num_iterations=3, optim="sgd", learning_rate=1.0)
    with pytest.raises(
        CheckpointError, match=r"optim \(the optimizer\) was AdamW .* and is SGD now"
    ) as error:
        trainer.train(resume_from_checkpoint=True)
    assert re.search(r"option learning_rate +0.01 +1.0 +applied", str(error.value))
    assert re.search(r"optim \(the optimizer\) +AdamW +SGD +refused", str(error.value))


def test_a_rate_that_an_own_schedule_cannot_take_is_refused(tmp_path):
    def own(learning_rate: float) -> dict[str, Any]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        return dict(model=model, optimizers=(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)))

    build(tmp_path, max_steps=1, **own(0.1)).train()
    with pytest.raises(ValueError, match=r"rate was \[0\.1\] .* is \[0\.2\] now, but StepLR derives"):
        build(tmp_path, max_steps=2, **own(0.2)).train(resume_from_checkpoint=True)
    build(tmp_path, max_steps=2, **own(0.1)).train(resume_from_checkpoint=True)


def doctor(directory: Path, name: str, mark: Path) -> None:
    class RunsCode:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    torch.save({"parts": RunsCode(), "optimizer": RunsCode()}, directory / name)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][name] = sealed._fingerprint(directory / name)
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["rank0.pt", "optimizer.pt"])
def test_a_doctored_checkpoint_runs_no_code(stopped, name):
    doctor(stopped / "checkpoint-2", name, stopped / "mark")
    with pytest.raises(CheckpointError, match=f"{name} is not read"):
        build(stopped, num_iterations=3).train(resume_from_checkpoint=True)
    assert not (stopped / "mark").exists()


def test_secrets_are_not_in_a_checkpoint(tmp_path):
    build(tmp_path, max_steps=1, hub_token="hf_secret").train()
    text = (tmp_path / "checkpoint-1" / "run.json").read_text()
    assert "hf_secret" not in text and '"option"' in text


def test_the_log_is_stored_once(two_steps):
    state = torch.load(two_steps / "checkpoint-2" / "rank0.pt", weights_only=True)
    assert "log_history" not in str(state)
    assert json.loads((two_steps / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]


# ── Begin or go on ───────────────────────────────────────────────────────────────────────────────────────


class StopAfterOne(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


def test_auto_begins_and_then_goes_on(tmp_path):
    assert build(tmp_path, callbacks=[StopAfterOne]).train(resume_from_checkpoint="auto").global_step == 1
    build(tmp_path, resume_from_checkpoint="auto").train()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_checkpoint_of_another_directory_leaves_the_record_that_is_there(stopped, tmp_path):
    build(tmp_path / "used", max_steps=3).train()
    record = (tmp_path / "used" / "metrics.jsonl").read_text()
    trainer = build(tmp_path / "used", num_iterations=3)
    trainer.train(resume_from_checkpoint=str(stopped / "checkpoint-1"))
    assert (tmp_path / "used" / "metrics.1.jsonl").read_text() == record
    assert [line["step"] for line in read_metrics(tmp_path / "used")] == [2, 3, 4]
    # From now on it is this directory's.
    build(tmp_path / "used", num_iterations=3, max_steps=5).train(resume_from_checkpoint=True)
    assert [line["step"] for line in read_metrics(tmp_path / "used")] == [2, 3, 4, 5]


# ── The directory ────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_run_is_refused_before_it_writes(stopped):
    before = {file.name: file.read_bytes() for file in stopped.iterdir() if file.is_file()}
    trainer = build(stopped)
    with (
        RunLock(stopped),
        pytest.raises(OutputDirInUse, match=f"process {os.getpid()} on .* Set another output_dir"),
    ):
        trainer.train()
    assert before == {file.name: file.read_bytes() for file in stopped.iterdir() if file.is_file()}
    trainer.train()  # when the other has ended; the trainer need not be a new one
    assert [record["step"] for record in read_metrics(stopped)] == [1, 2, 3, 4]


def test_a_reward_that_changes_the_directory_moves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sandbox").mkdir()

    def reward(completion_ids, **_: Any) -> list[float]:
        os.chdir(tmp_path / "sandbox")
        return share_of_early_letters(completion_ids)

    trainer = build(
        Path("run"), reward_funcs=reward, max_steps=2, log_completions=True, num_completions_to_print=0
    )
    trainer.train()
    trainer.save_model()
    assert not list((tmp_path / "sandbox").iterdir())
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert len(list_checkpoints(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    "vanish", [shutil.rmtree, lambda directory: directory.rename(directory.with_name("moved"))]
)
def test_a_directory_that_vanishes_is_noticed_and_the_state_saved(tmp_path, vanish):
    class Vanish(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                vanish(tmp_path / "run")

    with pytest.raises(FileNotFoundError, match=r"deleted or moved away .* after step 2 is saved"):
        build(tmp_path / "run", callbacks=[Vanish]).train()
    build(tmp_path / "run").train(resume_from_checkpoint=True)
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [3, 4]


def test_a_full_disk_in_the_last_save_names_the_file(stopped):
    trainer = build(stopped)
    with files_no_larger_than(10_000), pytest.raises(CheckpointError) as error:
        trainer.save_model()
    for text in (
        f"could not save the model in {stopped}",
        "the weights, *.safetensors",
        "checkpoint-2 has",
        "Free some space",
    ):
        assert text in str(error.value)


# ── Numbers ──────────────────────────────────────────────────────────────────────────────────────────────


class Spoil(TrainerCallback):
    """As an optimizer step with a learning rate beyond all bounds: weights that are no numbers."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            next(model.parameters()).data[0] = float("nan")


def test_weights_that_are_not_finite_are_neither_saved_nor_evaluated(tmp_path):
    trainer = build(
        tmp_path, callbacks=[Spoil(2)], save_total_limit=1, eval_dataset=make_dataset(2), adam_epsilon=1e-7
    )
    with pytest.raises(FloatingPointError, match="No checkpoint: the weights are not finite") as error:
        trainer.train()
    for text in (
        "embed_tokens",
        f"{tmp_path}/checkpoint-1: go on from it",
        "learning_rate=0.01",
        "adam_epsilon=1e-07",
    ):
        assert text in str(error.value)
    assert [d.name for d in tmp_path.iterdir() if d.is_dir()] == ["checkpoint-1"]
    with pytest.raises(FloatingPointError, match="No evaluation"):
        trainer.evaluate()
    with pytest.raises(FloatingPointError, match="No saved model"):
        trainer.save_model()
    assert not (tmp_path / "model.safetensors").exists()


def test_a_step_skipped_for_its_weights_does_not_blame_the_data(tmp_path):
    trainer = build(tmp_path, callbacks=[Spoil(1)], save_strategy="no")
    with pytest.raises(FloatingPointError, match="weights are not finite") as error:
        trainer.train()
    assert trainer.state.global_step == 2 and "last good step" not in str(error.value)
    assert "holds no checkpoint" in str(error.value)
