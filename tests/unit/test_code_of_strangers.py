"""Commands take a model's directory from anybody: what lies with the model decides about no code.

The directory here names code in all ways there are. Each module notes that it was run.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from colocate.checkpoints import saved_model
from colocate.checkpoints.saved_model import find_model
from colocate.cli import main
from colocate.inference.loading import load
from tiny import make_model, make_tokenizer

CONVERTER = """
import sys
from pathlib import Path
from transformers import AutoConfig
AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)  # as llama.cpp's does for some architectures
Path(sys.argv[sys.argv.index("--outfile") + 1]).write_text("gguf")
"""
OPTIONS = """
trust_remote_code: true
vllm_engine_kwargs: {worker_extension_cls: traps.Worker}
reward_funcs: [gift/traps.py:reward]
dataset_name: rows.jsonl
dataset_train_split: train
max_completion_length: 2
use_cpu: true
"""
COMMANDS = {
    "chat gift --use_cpu --max_tokens 2": None,
    "eval gift --use_cpu --dataset rows.jsonl": "--reward_funcs gift/traps.py:reward",
    "serve gift --use_cpu --port 0": None,
    "export gift out": None,
    "export gift out.gguf --format gguf --converter converter.py": None,
    "merge adapter merged --base gift": None,
    "chat adapter --base gift --use_cpu --max_tokens 2": None,
    "report gift": None,
}
"""Commands, and how they are refused; None: they do what they are asked for."""


def write_traps(directory: Path, marker: Path) -> None:
    """Options of a run and a module, which notes that it was run and has all that the options name."""
    (directory / "config.yaml").write_text(OPTIONS)
    (directory / "traps.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "class Config(Qwen3Config): ...\n"
        "class Model(Qwen3ForCausalLM):\n    config_class = Config\n"
        "def reward(completions, **columns):\n    return [1.0] * len(completions)\n"
    )


def set_in_config(directory: Path, **values: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture
def marker(tmp_path, monkeypatch) -> Path:
    """What is there once a stranger's code has run; the working directory has a model that brings some."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLOCATE_SERVER_KEY", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    monkeypatch.setattr("colocate.commands.serve._await_signal", lambda: None)
    model, gift = make_model("qwen3"), tmp_path / "gift"
    model.save_pretrained(gift)
    make_tokenizer().save_pretrained(gift)
    set_in_config(gift, auto_map={"AutoConfig": "traps.Config", "AutoModelForCausalLM": "traps.Model"})
    model.name_or_path = "gift"
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    for directory in (gift, tmp_path / "adapter", tmp_path):
        write_traps(directory, tmp_path / "ran")
    (gift / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    (gift / "run.json").write_text(json.dumps({"options": {"trust_remote_code": True}}))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "converter.py").write_text(CONVERTER)
    return tmp_path / "ran"


@pytest.mark.parametrize(("command", "refusal"), COMMANDS.items())
@pytest.mark.share(2)
def test_no_command_runs_code_that_a_models_directory_names(marker, capsys, command, refusal):
    code = main(command.split())
    assert not marker.exists(), "a stranger's code was run"
    assert code == (0 if refusal is None else 1)
    assert refusal is None or refusal in capsys.readouterr().err


def test_a_model_that_needs_its_own_code_says_which_option_runs_it(marker, capsys):
    set_in_config(Path("gift"), model_type="of_a_stranger", architectures=["Strange"])
    for command in ("chat gift --use_cpu", "serve gift --use_cpu --port 0"):
        assert main(command.split()) == 1
        told = capsys.readouterr().err
        assert "give --trust_remote_code" in told and "Traceback" not in told
    assert not marker.exists()


def test_whoever_is_told_to_trust_does(marker, capsys):
    load(find_model("gift"), {"use_cpu": True})
    assert "run only with --trust_remote_code" in capsys.readouterr().err and not marker.exists()
    load(find_model("gift"), {"use_cpu": True, "trust_remote_code": True})
    assert marker.exists()
    marker.unlink()
    words = "eval gift --use_cpu --dataset rows.jsonl --reward_funcs gift/traps.py:reward"
    assert main(words.split()) == 0 and marker.exists()
    assert f"gift/traps.py:reward is run from {Path('gift/traps.py').resolve()}" in capsys.readouterr().err


def test_what_lies_above_a_model_counts_for_checkpoints_alone(marker):
    """Whoever may write to /tmp says nothing about the models that others keep there."""
    for file in ("config.yaml", "metrics.jsonl"):
        Path("gift", file).unlink()
    assert (find_model("gift").options, find_model("gift").code) == ({}, {})
    Path("gift").rename("checkpoint-8")
    assert find_model("checkpoint-8").options == {}
    Path("checkpoint-8", "manifest.json").write_text("{}")
    assert find_model("checkpoint-8").options["max_completion_length"] == 2
    os.symlink("checkpoint-8", "link")
    assert find_model("link").options == find_model("checkpoint-8").options


def test_options_that_another_user_has_put_beside_a_model_are_refused(marker, monkeypatch):
    """The file has an owner who is neither this user nor the model's."""
    real = Path.stat

    def stat(path: Path, **options: object) -> os.stat_result:
        found = real(path, **options)
        if path.name != "config.yaml":
            return found
        return os.stat_result([*found[:4], 4711, *found[5:]])

    monkeypatch.setattr(saved_model.Path, "stat", stat)
    with pytest.raises(ValueError, match=r"config.yaml is not to be trusted: .* uid 4711's"):
        find_model("gift")
