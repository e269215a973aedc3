"""What a run leaves behind: models that `from_pretrained` loads, checkpoints, uploads."""

from __future__ import annotations

import json
from fnmatch import fnmatch

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerState

from colocate.checkpoints import hub
from tiny import make_model, make_trainer, sums, weights_of


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
    """Takes the place of `huggingface_hub.HfApi`."""

    uploads: list[dict]

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, name, *, private, exist_ok):
        assert exist_ok
        return type("Repo", (), {"repo_id": f"someone/{name}"})

    def upload_folder(self, *, folder_path, **options):
        files = {path.name for path in folder_path.iterdir()}
        self.uploads.append({**options, "files": files, "token": self.token})
        return "commit"


@pytest.fixture
def uploads(monkeypatch):
    monkeypatch.setattr(hub, "HfApi", FakeHub)
    FakeHub.uploads = []
    return FakeHub.uploads


def test_push_to_hub(tmp_path, uploads):
    trainer = make_trainer(tmp_path / "my-model", max_steps=1, hub_token="secret")
    trainer.train()
    assert uploads == []
    assert trainer.push_to_hub(dataset_name="someone/sums", tags="arithmetic") == "commit"
    (upload,) = uploads
    assert upload["repo_id"] == "someone/my-model" and upload["commit_message"] == "End of training"
    assert upload["token"] == "secret" and upload["run_as_future"] is False
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= upload["files"]
    kept_home = [name for name in upload["files"] if any(fnmatch(name, p) for p in upload["ignore_patterns"])]
    assert kept_home == ["completions.jsonl"]
    assert b"secret" not in (tmp_path / "my-model" / "training_args.bin").read_bytes()
    card = (tmp_path / "my-model" / "README.md").read_text()
    assert "someone/sums" in card and "- arithmetic" in card and "library_name: transformers" in card
    assert "secret" not in card


def test_push_at_every_save(tmp_path, uploads):
    options = dict(push_to_hub=True, hub_strategy="every_save", hub_model_id="my-model")
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1, **options)
    trainer.train()
    trainer.save_model()
    assert [upload["commit_message"] for upload in uploads] == ["Step 1", "Step 2", "Model save"]
