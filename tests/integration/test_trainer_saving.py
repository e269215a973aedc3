"""What a run leaves behind: models that `from_pretrained` loads, checkpoints, uploads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TrainerCallback,
    TrainerState,
)

from colocate.checkpoints import hub
from tiny import CHAT_TEMPLATE, make_model, make_trainer, sums, weights_of


def same_weights(a, b) -> bool:
    a, b = weights_of(a), weights_of(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2"])
def test_save_model_loads_with_from_pretrained(tmp_path, architecture):
    """Also with tied embeddings, and although parameters are views of fused storage."""
    trainer = make_trainer(tmp_path / "run", model=make_model(architecture))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), trainer.model)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.get_vocab() == trainer.processing_class.get_vocab()
    assert tokenizer.chat_template == trainer.processing_class.chat_template
    saved_args = torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)
    assert saved_args.learning_rate == trainer.args.learning_rate
    size = (tmp_path / "saved" / "model.safetensors").stat().st_size
    stored = {p.data_ptr(): p.nbytes for p in trainer.model.parameters()}
    assert size < sum(stored.values()) + 20_000  # each parameter once, not its fused storage per view


@pytest.mark.parametrize("when", ["before", "by a callback"])
@pytest.mark.parametrize(
    ("values", "saved"),
    [
        (dict(temperature=0.6, top_k=7), dict(do_sample=True, temperature=0.6, top_k=7)),
        (dict(num_return_sequences=3, num_beams=2, max_length=40), dict(num_beams=2, max_length=40)),
        (dict(early_stopping="sometimes", top_p=0.5, do_sample=True), dict(do_sample=True, top_p=0.5)),
    ],
    ids=str,
)
@pytest.mark.share(3)
def test_a_generation_config_that_contradicts_itself_costs_no_work(tmp_path, caplog, values, saved, when):
    """transformers refuses to write it, at the first save."""
    model = make_model()

    def change(*_args, **_kwargs):
        for name, value in values.items():
            setattr(model.generation_config, name, value)

    options: dict[str, Any] = dict(model=model, save_strategy="steps", save_steps=1)
    if when == "before":
        change()
    else:
        options["callbacks"] = [type("Change", (TrainerCallback,), {"on_step_end": change})()]
    trainer = make_trainer(tmp_path, **options)
    trainer.train()
    trainer.save_model()
    for place in (tmp_path, tmp_path / "checkpoint-2"):
        written = GenerationConfig.from_pretrained(place).to_diff_dict()
        assert saved.items() <= written.items()
        assert not (values.keys() - saved.keys()) & written.keys()
    assert "contradicts itself" in caplog.text


def test_save_model_default_directory(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.save_model()
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), trainer.model)


def test_save_adapter(tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(tmp_path / "run", peft_config=lora, max_steps=3)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(make_model(), tmp_path / "saved")
    assert same_weights(loaded, trainer.model)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(save_strategy="no"), []),
        (dict(save_strategy="steps", save_steps=2), [2, 4, 5]),
        (dict(save_strategy="steps", save_steps=2, save_total_limit=1), [5]),
        (dict(save_strategy="epoch"), [3, 5]),
    ],
    ids=str,
)
@pytest.mark.share(2)
def test_save_strategies(tmp_path, options, expected):
    trainer = make_trainer(tmp_path, max_steps=5, train_dataset=sums(3), **options)
    trainer.train()
    found = sorted(int(d.name.rpartition("-")[2]) for d in tmp_path.glob("checkpoint-*"))
    assert found == expected
    for step in found:
        directory = tmp_path / f"checkpoint-{step}"
        state = TrainerState.load_from_json(str(directory / "trainer_state.json"))
        assert state.global_step == step and state.log_history[-1]["step"] == step
        AutoModelForCausalLM.from_pretrained(directory)
    if found:
        newest = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{found[-1]}")
        assert same_weights(newest, trainer.model)


def test_save_only_model(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2, save_only_model=True)
    trainer.train()
    assert not (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2"), trainer.model)


def test_results_as_scripts_save_them(tmp_path):
    """The last lines of many training scripts."""
    trainer = make_trainer(tmp_path, eval_dataset=sums(1))
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate())
    everything = json.loads((tmp_path / "all_results.json").read_text())
    assert everything["train_loss"] == result.training_loss and "eval_reward" in everything
    assert TrainerState.load_from_json(str(tmp_path / "trainer_state.json")).global_step == 2


class FakeHub:
    """Takes the place of `huggingface_hub.HfApi`; its repository is a directory."""

    repository: Path
    uploads: list[dict]

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, name, *, private, exist_ok):
        assert exist_ok
        return type("Repo", (), {"repo_id": f"someone/{name}"})

    def upload_folder(self, *, folder_path, path_in_repo=".", allow_patterns=None, **options):
        present = [f.relative_to(folder_path).as_posix() for f in folder_path.rglob("*") if f.is_file()]
        files = set(filter_repo_objects(present, allow_patterns=allow_patterns))
        self.uploads.append({**options, "folder": path_in_repo, "files": files, "token": self.token})
        for name in files:
            target = self.repository / path_in_repo / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder_path / name, target)
        return "commit"


@pytest.fixture
def uploads(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "HfApi", FakeHub)
    FakeHub.uploads, FakeHub.repository = [], tmp_path / "repository"
    return FakeHub.uploads


MODEL = {"config.json", "generation_config.json", "model.safetensors"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
BESIDE = {"README.md", "training_args.bin"}


def test_push_to_hub(tmp_path, uploads):
    """All that a run leaves in its directory, and what a user may have put there; prompts stay at home."""
    directory = tmp_path / "my-model"
    options = dict(log_completions=True, save_strategy="steps", save_steps=1, max_steps=1)
    trainer = make_trainer(directory, hub_token="secret", **options)
    trainer.train()
    trainer.save_state()
    for name in (
        "config.yaml",
        "report.html",
        "skipped_step_3_rank0.jsonl",
        "notes.txt",
        ".env",
        "data/x.json",
    ):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("private")
    assert uploads == []
    assert trainer.push_to_hub(dataset_name="someone/sums", tags="arithmetic") == "commit"
    (upload,) = uploads
    assert upload["repo_id"] == "someone/my-model" and upload["commit_message"] == "End of training"
    assert upload["token"] == "secret" and upload["run_as_future"] is False
    assert upload["files"] == MODEL | TOKENIZER | BESIDE
    for name in BESIDE:
        assert b"secret" not in (directory / name).read_bytes()
    card = (directory / "README.md").read_text()
    assert "someone/sums" in card and "- arithmetic" in card and "library_name: transformers" in card
    assert same_weights(AutoModelForCausalLM.from_pretrained(FakeHub.repository), trainer.model)
    assert AutoTokenizer.from_pretrained(FakeHub.repository).chat_template == CHAT_TEMPLATE


def test_push_of_an_adapter_and_of_a_vocabulary_file(tmp_path, uploads):
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(tmp_path / "run", peft_config=lora)
    trainer.processing_class.vocab_files_names = {"vocab_file": "letters.model"}
    (tmp_path / "run" / "letters.model").write_text("a b c")
    trainer.push_to_hub()
    adapter = {"adapter_config.json", "adapter_model.safetensors", "letters.model"}
    assert uploads[0]["files"] == adapter | TOKENIZER | BESIDE


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("end", []),
        ("every_save", [(".", "Step 1"), (".", "Step 2")]),
        (
            "checkpoint",
            [
                *((".", "Step 1"), ("last-checkpoint", "Step 1, checkpoint")),
                *((".", "Step 2"), ("last-checkpoint", "Step 2, checkpoint")),
            ],
        ),
        (
            "all_checkpoints",
            [
                *((".", "Step 1"), ("checkpoint-1", "Step 1, checkpoint")),
                *((".", "Step 2"), ("checkpoint-2", "Step 2, checkpoint")),
            ],
        ),
    ],
)
@pytest.mark.share(2)
def test_what_is_pushed_when(tmp_path, uploads, strategy, expected):
    options = dict(push_to_hub=True, hub_strategy=strategy, hub_model_id="my-model")
    trainer = make_trainer(tmp_path / "run", save_strategy="steps", save_steps=1, **options)
    trainer.train()
    trainer.save_model()
    trainer.save_model(str(tmp_path / "elsewhere"), _internal_call=True)
    done = [(upload["folder"], upload["commit_message"]) for upload in uploads]
    assert done == [*expected, (".", "Model save")]
    if len(expected) == 4:  # what was uploaded last is a checkpoint to go on from
        again = make_trainer(tmp_path / "again", max_steps=2)
        again.train(resume_from_checkpoint=str(FakeHub.repository / expected[-1][0]))
        assert again.state.global_step == 2 and same_weights(again.model, trainer.model)
