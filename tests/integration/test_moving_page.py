"""docs/moving-from-trl.md: its commands start runs from what TRL's own trainer has saved."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import trl
import yaml
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from colocate.cli import main
from tiny import make_model, make_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "moving-from-trl.md").read_text()
SECTION = PAGE.partition("## I have a TRL checkpoint")[2].partition("\n## ")[0]
WHOLE, ADAPTER = re.findall(r"```bash\n(.*?)```", SECTION, flags=re.DOTALL)


def trl_checkpoint(directory: str, peft_config: LoraConfig | None = None) -> None:
    """A checkpoint of TRL's trainer, with the number that the page names."""
    args = trl.GRPOConfig(
        directory,
        max_steps=1,
        save_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        "model",
        reward_funcs=lambda completions, **columns: [float(len(text)) for text in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "1 + 2 ="}] * 4),
        processing_class=make_tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    Path(directory, "checkpoint-1").rename(Path(directory, "checkpoint-100"))


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model(max_position_embeddings=1024).save_pretrained("model")
    make_tokenizer().save_pretrained("model")
    Path("rows.jsonl").write_text('{"prompt": "1 + 2 =", "solution": "3"}\n' * 4)
    run = {
        "dataset_name": "rows.jsonl", "reward_funcs": ["accuracy_reward"], "num_generations": 4,
        "per_device_train_batch_size": 4, "max_completion_length": 4, "max_steps": 1, "learning_rate": 0.0,
        "use_cpu": True, "disable_tqdm": True, "output_dir": "out", "bf16": False,
    }  # fmt: skip
    Path("run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path


def run_commands(block: str) -> None:
    for line in block.splitlines():
        assert main(shlex.split(line)[1:]) == 0, line


def weights_of(directory: str) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()


def test_a_run_starts_from_the_weights_of_a_checkpoint(directory):
    trl_checkpoint("runs/trl")
    run_commands(WHOLE)
    saved, trained = weights_of("runs/trl/checkpoint-100"), weights_of("out")
    assert saved.keys() == trained.keys()
    # At a learning rate of 0 the run ends with the weights that it began with.
    assert all(torch.equal(saved[name], trained[name]) for name in saved)


def test_a_run_starts_from_a_merged_adapter(directory):
    trl_checkpoint("runs/trl-lora", LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    run_commands(ADAPTER)
    base = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, "runs/trl-lora/checkpoint-100").merge_and_unload().state_dict()
    merged = weights_of("runs/trl-lora-merged")
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name], weight, atol=1e-6, rtol=1e-5)
    assert Path("out/adapter_config.json").is_file()


def test_a_checkpoint_is_not_resumed(directory, capsys):
    trl_checkpoint("runs/trl")
    words = ["train", "run.yaml", "--model_name_or_path", "model", "--resume_from_checkpoint"]
    assert main([*words, "runs/trl/checkpoint-100"]) == 1
    assert "pass the directory as the model" in " ".join(capsys.readouterr().err.split())
