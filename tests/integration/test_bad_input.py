"""What users get wrong and what machines do to runs: each with an error that says what to do."""

from __future__ import annotations

import json
import logging
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from small_runs import (
    VOCAB_SIZE,
    make_config,
    make_dataset,
    make_model,
    make_tokenizer,
    make_trainer,
    read_metrics,
    share_of_early_letters,
)
from transformers import PreTrainedTokenizerFast, TrainingArguments

from colocate import GRPOConfig, GRPOTrainer
from colocate.checkpoints.sealed import CheckpointError, list_checkpoints, verify
from colocate.config.run_config import parse_run
from colocate.options.run_file import read_file
from colocate.users_code.errors import RewardError


@contextmanager
def refused(*parts: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """What happens within fails with an error that names these parts."""
    with pytest.raises(kind) as error:
        yield
    assert_names(error, *parts)


def assert_names(error: pytest.ExceptionInfo, *parts: str) -> None:
    missing = [part for part in parts if part not in str(error.value)]
    assert not missing, f"{error.value} lacks {missing}"


# ── Batches and options ──────────────────────────────────────────────────────────────────────────────────


def test_batch_that_holds_no_whole_groups(tmp_path):
    with refused("3 × 1 × 2", "= 6 completions", "num_generations=4", "per_device_train_batch_size to 2"):
        make_config(tmp_path, per_device_train_batch_size=3, num_generations=4)


def test_group_of_one(tmp_path):
    with refused("num_generations=1", "Set num_generations to 2 or more"):
        make_config(tmp_path, num_generations=1)


def test_dataset_smaller_than_a_batch(tmp_path):
    with refused("2 prompts", "needs 3", "generation_batch_size / num_generations"):
        make_trainer(tmp_path, train_dataset=make_dataset(2), generation_batch_size=12)


def test_modes_that_a_script_has_set(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, refused("within torch.no_grad()", "Call it outside"):
            trainer.train()
    with torch.autocast("cpu", torch.bfloat16), refused("within torch.autocast", "Call it outside"):
        trainer.train()
    with torch.inference_mode(), refused("made within torch.inference_mode()"):
        make_trainer(tmp_path)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert trainer.train().global_step == 1


def test_unknown_option(tmp_path):
    with pytest.raises(TypeError, match="learning_rat"):
        GRPOConfig(output_dir=str(tmp_path), learning_rat=1e-5)
    file = tmp_path / "run.yaml"
    file.write_text("learning_rat: 1e-5\n")
    with pytest.raises(ValueError, match="no option 'learning_rat'; did you mean 'learning_rate'"):
        parse_run(read_file(file))


def test_unknown_loss_type(tmp_path):
    with refused("loss_type='dapoo'", "dr_grpo", "vespo", "Did you mean 'dapo'?"):
        make_config(tmp_path, loss_type="dapoo")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tools", "A tool is a function or a method; got <built-in function print>"),
        ("rollout_func", r"rollout_func=\[<built-in function print>\] cannot be called"),
        (
            "environment_factory",
            r"environment_factory is \[<built-in function print>\], which cannot be called",
        ),
    ],
)
def test_what_cannot_play_is_refused_by_name(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **{name: [print]})


def test_moving_reference_under_an_adapter(tmp_path):
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with refused("sync_ref_model=True, but with an adapter", "cannot move", "without an adapter"):
        make_trainer(tmp_path, peft_config=config, beta=0.1, sync_ref_model=True)


def test_arguments_within_options_that_their_reader_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"'cosine' refuses lr_scheduler_kwargs=\{'foo': 1\}: .*'foo'"):
        make_trainer(tmp_path, lr_scheduler_kwargs={"foo": 1})
    make_model().save_pretrained(tmp_path / "model")
    config = make_config(tmp_path, model_init_kwargs={"foo": 1})
    with pytest.raises(ValueError, match=r"refuses model_init_kwargs=\{'foo': 1.*unexpected .*'foo'"):
        GRPOTrainer(str(tmp_path / "model"), share_of_early_letters, config, make_dataset())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of what was not made whole
def test_a_report_whose_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_mlflow_available", lambda: False)
    with pytest.raises(ImportError, match="report_to='mlflow' needs the package mlflow: pip install mlflow"):
        make_trainer(tmp_path, report_to="mlflow")


def test_a_configuration_of_transformers_or_trl(tmp_path):
    theirs = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(
        TypeError, match=r"not transformers\..*TrainingArguments: from colocate import GRPOConfig"
    ):
        GRPOTrainer(make_model(), share_of_early_letters, theirs, make_dataset())


# ── Data, model and tokenizer ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("where", ["train_dataset", "eval_dataset"])
def test_prompt_longer_than_the_context(tmp_path, where):
    rows = datasets.Dataset.from_dict({"prompt": ["abc"] * 9 + ["a" * 60]})
    with pytest.raises(ValueError) as error:
        make_trainer(tmp_path, **{where: rows})
    assert_names(error, "60 tokens + max_completion_length=8 = 68", "context holds 64")
    assert_names(error, "max_completion_length, or max_prompt_length to at most 56")
    assert make_trainer(tmp_path, **{where: rows}, max_prompt_length=56)


def test_prompt_of_a_stream_longer_than_the_context(tmp_path):
    rows = datasets.Dataset.from_dict({"prompt": ["abc", "abd", "abe", "a" * 60]})
    options = dict(train_dataset=rows.to_iterable_dataset(), shuffle_dataset=False, save_strategy="steps")
    trainer = make_trainer(tmp_path, **options, save_steps=1)
    with pytest.raises(ValueError, match="= 68 tokens, but the context holds 64"):
        trainer.train()
    mended = make_trainer(tmp_path, **options, save_steps=1, max_prompt_length=20, max_steps=5)
    assert mended.train(resume_from_checkpoint=True).global_step == 5


def test_a_dict_of_splits_is_refused_in_trls_words_with_a_split_to_take(tmp_path):
    splits = datasets.DatasetDict({"train": make_dataset(), "test": make_dataset()})
    told = "`train_dataset` must be a `Dataset` or `IterableDataset`, got `DatasetDict`"  # TRL's words
    with pytest.raises(TypeError, match=rf"(?s){told}.*train_dataset=dataset\['train'\]"):
        make_trainer(tmp_path, train_dataset=splits)


@pytest.mark.parametrize("where", ["train_dataset", "eval_dataset"])
def test_empty_dataset(tmp_path, where):
    with pytest.raises(ValueError, match="dataset is empty"):
        make_trainer(tmp_path, **{where: datasets.Dataset.from_dict({"prompt": []})})


def test_no_column_prompt(tmp_path):
    rows = datasets.Dataset.from_dict({"question": ["a"], "answer": ["b"]})
    with refused("no column 'prompt'", "'question', 'answer'", "dataset.rename_column"):
        make_trainer(tmp_path, train_dataset=rows)


def test_tokenizer_without_pad_token_takes_eos(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    trainer = make_trainer(tmp_path, processing_class=tokenizer, max_steps=2)
    assert trainer.train().global_step == 2
    assert tokenizer.pad_token == tokenizer.eos_token
    assert trainer.model.config.pad_token_id == tokenizer.eos_token_id


def test_tokenizer_without_eos_token(tmp_path):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer().backend_tokenizer, pad_token="<pad>"
    )
    with pytest.raises(ValueError, match=r"no EOS token.*Set tokenizer\.eos_token"):
        make_trainer(tmp_path, processing_class=tokenizer)


def test_vocabularies_of_different_sizes(tmp_path):
    with pytest.raises(ValueError) as error:
        make_trainer(tmp_path, model=make_model(vocab_size=VOCAB_SIZE - 3))
    assert_names(error, f"largest token id is {VOCAB_SIZE - 1}", f"ids 0 to {VOCAB_SIZE - 4}")
    assert_names(error, f"model.resize_token_embeddings({VOCAB_SIZE})")
    rounded_up = make_trainer(tmp_path, model=make_model(vocab_size=VOCAB_SIZE + 4), max_steps=1)
    assert rounded_up.train().global_step == 1


# ── Reward functions ─────────────────────────────────────────────────────────────────────────────────────


class FailsInStepFour:
    """Right but for one call."""

    __name__ = "shaky"

    def __init__(self, fault: Any) -> None:
        self.fault = fault

    def __call__(self, completions, completion_ids, trainer_state, **_: Any) -> Any:
        rewards: list[Any] = share_of_early_letters(completion_ids)
        return self.fault(completions, rewards) if trainer_state.global_step == 3 else rewards


def looks_up(completions: list[str], rewards: list[Any]) -> list[float]:
    for completion in completions:
        if completion == completions[1]:
            return [{}[completion]]
    return rewards


FAULTS = {
    "too_few": (lambda c, r: r[1:], ["returned 3 rewards, but 4 were expected", "one reward per completion"]),
    "nan": (lambda c, r: [*r[:2], math.nan, r[3]], ["returned 'nan' (float) for completion 2 (", "finite"]),
    "text": (
        lambda c, r: [r[0], "0.5", *r[2:]],
        ["returned '0.5' (str) for completion 1 (", "finite number"],
    ),
    "one_text": (lambda c, r: "good", ["returned 'good' (str)", "a list of 4 rewards"]),
    "raising": (looks_up, ["raised KeyError", "It was working on completion", "to the prompt"]),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.share(3)
def test_a_reward_function_that_fails_costs_no_finished_work(tmp_path, name):
    fault, parts = FAULTS[name]
    options = dict(
        gradient_accumulation_steps=1, per_device_train_batch_size=4, save_strategy="steps", save_steps=2,
        max_steps=6,
    )  # fmt: skip
    with refused("The reward function 'shaky'", *parts, kind=RewardError):
        make_trainer(tmp_path, reward_funcs=FailsInStepFour(fault), **options).train()
    assert [c.name for c in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    verify(tmp_path / "checkpoint-2")

    mended = make_trainer(tmp_path, reward_funcs=FailsInStepFour(lambda c, r: r), **options)
    mended.train(resume_from_checkpoint=True)
    never_failed = make_trainer(tmp_path / "2", reward_funcs=FailsInStepFour(lambda c, r: r), **options)
    never_failed.train()
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, 7))
    for mine, theirs in zip(mended.model.parameters(), never_failed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_all_rewards_none(tmp_path, caplog):
    def undecided(completions, **_: Any) -> list[None]:
        return [None] * len(completions)

    trainer = make_trainer(tmp_path, reward_funcs=undecided, max_steps=3)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 3
    assert "one of 4 completions of 4 without a reward (from undecided): their advantages" in caplog.text
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert [record["reward"] for record in read_metrics(tmp_path)] == [None] * 3
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert {row["advantage"] for row in rows} == {0.0}


# ── Disks ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("place", ["under a file", "/proc/colocate"])
def test_output_dir_that_cannot_be_written_is_found_before_anything_else(tmp_path, place):
    (tmp_path / "file").write_text("")
    output_dir = str(tmp_path / "file" / "run") if place == "under a file" else place
    built = []

    class Model:  # looked at only after the directory
        def __getattr__(self, name: str) -> Any:
            built.append(name)
            raise AttributeError(name)

    with refused(f"output_dir='{output_dir}' cannot be written to", "Set output_dir to"):
        make_trainer(output_dir, model=Model())
    assert not built


@contextmanager
def files_no_larger_than(num_bytes: int):
    """As on a full disk, a write fails half-way; only the number of the error is another."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("num_bytes", [50_000, 150_000], ids=["safetensors", "torch"])
@pytest.mark.share(2)
def test_disk_full_while_saving(tmp_path, num_bytes):
    options = dict(save_strategy="steps", save_steps=2, max_steps=4)
    make_trainer(tmp_path, **options, model=make_model()).train()
    (tmp_path / "checkpoint-4").rename(tmp_path / "away")
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "away").iterdir()}
    assert (
        sizes["model.safetensors"] > 50_000 and sizes["optimizer.pt"] > 150_000 > sizes["model.safetensors"]
    )

    trainer = make_trainer(tmp_path, **options)
    with files_no_larger_than(num_bytes), pytest.raises(CheckpointError) as error:
        trainer.train(resume_from_checkpoint=True)
    assert_names(error, f"could not write {tmp_path / 'checkpoint-4'}", "MB are free on that disk")
    assert_names(error, "Free some space, set save_total_limit, or choose another output_dir")
    assert_names(error, "Earlier checkpoints are untouched")
    assert [d.name for d in sorted(tmp_path.iterdir()) if d.is_dir()] == ["away", "checkpoint-2"]
    verify(tmp_path / "checkpoint-2")

    again = make_trainer(tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    expected = (tmp_path / "away" / "model.safetensors").read_bytes()
    assert (tmp_path / "checkpoint-4" / "model.safetensors").read_bytes() == expected


def test_disk_full_while_logging(tmp_path):
    options = dict(save_strategy="steps", save_steps=1)
    make_trainer(tmp_path, **options, max_steps=1).train()
    room = (tmp_path / "metrics.jsonl").stat().st_size + 40
    trainer = make_trainer(tmp_path, **options, max_steps=3)
    with files_no_larger_than(room), pytest.raises(OSError, match=r"metrics\.jsonl"):
        trainer.train(resume_from_checkpoint=True)
    # The line cut short goes when the run goes on.
    make_trainer(tmp_path, **options, max_steps=3).train(resume_from_checkpoint=True)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]


# ── Numbers ──────────────────────────────────────────────────────────────────────────────────────────────


class Explodes:
    """Rewards that no gradient can hold, in the given steps."""

    __name__ = "explodes"

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def __call__(self, completion_ids, trainer_state, **_: Any) -> list[float]:
        scale = 1e38 if trainer_state.global_step + 1 in self.steps else 1.0
        return [scale * reward for reward in share_of_early_letters(completion_ids)]


def exploding_trainer(output_dir: Path, *steps: int, **options: Any) -> Any:
    options = {"scale_rewards": "none", "save_strategy": "steps", "save_steps": 1, "max_steps": 8, **options}
    return make_trainer(output_dir, reward_funcs=Explodes(*steps), **options)


def weights_of(checkpoint: Path) -> dict[str, Any]:
    state = torch.load(checkpoint / "optimizer.pt")
    return {"weights": state["optimizer"]["weights"], "scheduler": state["optimizer"]["scheduler"]}


def test_a_step_that_is_not_finite_is_skipped(tmp_path):
    trainer = exploding_trainer(tmp_path, 3, max_steps=4)
    assert trainer.train().global_step == 4
    records = read_metrics(tmp_path)
    assert [record["skipped_updates"] for record in records] == [0, 0, 1, 0]
    assert records[2]["grad_norm"] is None and records[2]["learning_rate"] == records[3]["learning_rate"]
    before, skipped, after = (weights_of(tmp_path / f"checkpoint-{step}") for step in (2, 3, 4))
    assert before["scheduler"] == skipped["scheduler"]
    for name, weight in before["weights"].items():
        assert torch.equal(skipped["weights"][name], weight)
    assert any(not torch.equal(after["weights"][name], w) for name, w in before["weights"].items())
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_too_many_steps_that_are_not_finite(tmp_path):
    trainer = exploding_trainer(tmp_path, 2, 4, 5, 6, 7, max_skipped_steps=3)
    with pytest.raises(FloatingPointError) as error:
        trainer.train()
    file = tmp_path / "skipped_step_6_rank0.jsonl"
    assert_names(error, "3 steps in a row", "max_skipped_steps=3", str(file), "Lower learning_rate")
    assert trainer.state.global_step == 6
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 4 and all(abs(row["advantage"]) > 1e30 or row["advantage"] == 0 for row in rows)
    prompts = {prompt for prompt in make_dataset()["prompt"]}
    assert {row["prompt"] for row in rows} <= prompts
    assert [c.name for c in list_checkpoints(tmp_path)][-1] == "checkpoint-5"

    # The steps already skipped are not forgotten by resuming...
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        exploding_trainer(tmp_path, 6, 7).train(resume_from_checkpoint=True)
    # ... but one that is finite ends their row.
    assert exploding_trainer(tmp_path, 7, 8).train(resume_from_checkpoint=True).global_step == 8
