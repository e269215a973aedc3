"""What a run says at its start, when it is stopped or goes on, and at its end; what it refuses first."""

from __future__ import annotations

import json
import os
import signal
import warnings
from typing import Any

import pytest
import torch
from small_runs import make_config, make_dataset, make_trainer, share_of_early_letters
from transformers import TrainerCallback

from colocate import GRPOTrainer
from colocate.run.header import _in_words


@pytest.fixture(autouse=True)
def in_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_introduces_itself_before_its_first_step_and_says_where_things_are(tmp_path, capsys):
    seen: list[str] = []

    class Listener(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.append(capsys.readouterr().out)

    trainer = make_trainer("run", max_steps=2, save_strategy="steps", save_steps=2, callbacks=[Listener()])
    trainer.train()
    rows = dict(line.split(maxsplit=1) for line in seen[0].splitlines())
    assert rows["model"] == "LlamaForCausalLM" and rows["output"] == "run"
    assert rows["size"] == f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters in float32"
    assert "native" in rows["engine"] and "engine='auto'" in rows["engine"]
    assert rows["prompts"] == "10 rows" and rows["rewards"] == "share_of_early_letters"
    assert rows["steps"] == "2, rollouts of 1 prompt x 4 completions"
    assert "activation_policy=" in rows["plan"] and rows["device"] == "CPU"
    assert rows["saves"] == "a checkpoint every 2 steps"
    *_, finished, checkpoint, report = capsys.readouterr().out.splitlines()
    assert finished.startswith("Finished: step 2 of 2, after 0:00:")
    assert checkpoint == f"Checkpoint: {os.path.join('run', 'checkpoint-2')}"
    assert report == "Report: colocate report run"


@pytest.mark.parametrize("save_only_model", [False, True])
def test_ctrl_c_saves_the_step_and_the_run_goes_on_as_if_nothing_had_been(capsys, save_only_model):
    def interrupting(completion_ids, trainer_state, **_: Any) -> list[float]:
        if trainer_state.global_step == 2 and is_to_stop:
            os.kill(os.getpid(), signal.SIGINT)
        return share_of_early_letters(completion_ids)

    is_to_stop = True
    options = dict(reward_funcs=interrupting, max_steps=4, save_only_model=save_only_model)
    with pytest.raises(KeyboardInterrupt, match="saved"):
        make_trainer("run", **options).train()
    said = capsys.readouterr()
    assert "Press it again to stop at once" in said.err
    stopped = f"Stopped by Ctrl-C after step 3 of 4; saved to {os.path.join('run', 'checkpoint-3')}."
    assert stopped in said.out
    if save_only_model:
        assert "cannot be resumed" in said.out and "Resume with" not in said.out
        return
    assert said.out.splitlines()[-1] == "Resume with: trainer.train(resume_from_checkpoint=True)"

    is_to_stop = False
    resumed = make_trainer("run", **options)
    resumed.train(resume_from_checkpoint=True)
    said = capsys.readouterr()
    assert f"Continuing at step 3 of 4 from {os.path.join('run', 'checkpoint-3')}." in said.out
    (line,) = [line for line in said.out.splitlines() if line.startswith("step 4/4")]
    assert "tokens/s" in line and "speed 0 " not in line
    whole = make_trainer("whole", **options)
    whole.train()
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("count", "words"),
    [(223_424, "223,424"), (494_032_768, "494 million"), (1_543_714_304, "1.54 billion")],
)
def test_numbers_of_parameters_are_said_as_people_say_them(count, words):
    assert _in_words(count) == words


def test_a_start_that_fails_moves_nothing_and_a_new_run_says_what_it_does(tmp_path, capsys):
    make_trainer("run", max_steps=2).train()
    before = (tmp_path / "run" / "metrics.jsonl").read_text()

    class Failing(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            raise RuntimeError("no connection to the tracker")

    capsys.readouterr()
    with pytest.raises(RuntimeError, match="no connection"):
        make_trainer("run", max_steps=3, callbacks=[Failing()]).train()
    said = capsys.readouterr().out
    assert "record    of an earlier run, 2 steps: kept as metrics.1.jsonl" in said
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert not (tmp_path / "run" / "metrics.1.jsonl").exists()
    make_trainer("run", max_steps=1).train()
    assert (tmp_path / "run" / "metrics.1.jsonl").read_text() == before
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["run_id"] not in before


WITH_SOLUTION = make_dataset().rename_column("wanted", "solution")


def needs_solution(completions, solution, weight=1.0, **_: Any) -> list[float]:
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'needs_solution' needs the argument 'solution', .* columns are 'prompt', 'wanted'"),
        (
            {
                "train_dataset": make_dataset().rename_column("wanted", "solution"),
                "remove_unused_columns": True,
            },
            "columns are 'prompt'. Set remove_unused_columns=False",
        ),
        (
            {"train_dataset": WITH_SOLUTION, "eval_dataset": make_dataset()},
            "columns are 'prompt', 'wanted'",
        ),
        # The dataset's own prompts and completions are not handed on.
        (
            {"reward_funcs": lambda prompt, completion, **_: []},
            "'prompt' and 'completion', but functions get 'prompts' and 'completions', a list with one value",
        ),
    ],
)
def test_a_reward_function_without_its_column_is_refused_before_the_model_is_loaded(options, message):
    arguments = {"reward_funcs": needs_solution, "train_dataset": make_dataset(), **options}
    config = make_config("run", remove_unused_columns=arguments.pop("remove_unused_columns", False))
    with pytest.raises(ValueError, match=message):
        GRPOTrainer("nowhere/such-a-model", args=config, **arguments)


def test_reward_functions_that_get_what_they_need_are_not_refused():
    from colocate.rewards.arguments import check_columns

    class Judge:
        def __call__(self, prompts, completions, answer, **_):
            return []

    funcs = [Judge(), len, torch.nn.Identity(), "some/model", lambda completion_ids, trainer_state: [], dict]
    check_columns(funcs, ["prompt", "answer"])
    check_columns(needs_solution, None)  # a stream that does not know its columns


def test_a_new_adapter_warns_of_nothing():
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        make_trainer("run", peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"]))
