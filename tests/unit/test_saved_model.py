"""Which model a name means, and how it is loaded to generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model

from colocate.checkpoints.saved_model import find_model
from colocate.inference.loading import load
from colocate.types import Prompt, SamplingParams
from tiny import make_model, make_tokenizer


def save_model(directory: Path) -> Path:
    make_model("qwen3").save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def save_adapter(base: Path, directory: Path) -> Path:
    model = make_model("qwen3")
    model.name_or_path = str(base)
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(directory)
    return directory


def seal(checkpoint: Path) -> Path:
    """Make a directory a checkpoint that was written to its end."""
    (checkpoint / "manifest.json").write_text("{}")
    return checkpoint


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_means_its_model_and_before_it_has_one_its_newest_checkpoint(home):
    run = home / "runs" / "first"
    for step in (8, 16):
        seal(save_model(run / f"checkpoint-{step}"))
    (run / "config.yaml").write_text("chat_template_kwargs: {enable_thinking: false}\n")
    found = find_model("runs/first")
    assert (found.base, found.adapter) == (str(Path("runs/first/checkpoint-16")), None)
    assert found.options == {"chat_template_kwargs": {"enable_thinking": False}}
    save_model(run)
    assert find_model("runs/first").base == "runs/first"
    assert find_model("runs/first/checkpoint-8").options == found.options


def test_an_adapter_has_the_base_that_it_names_or_that_is_named(home):
    base, other = save_model(home / "base"), save_model(home / "other")
    save_adapter(base, home / "adapter")
    assert (find_model("adapter").base, find_model("adapter").adapter) == (str(base), "adapter")
    assert find_model("adapter", str(other)).base == str(other)
    with pytest.raises(ValueError, match="whole model and no adapter"):
        find_model("base", str(other))
    config = home / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="does not say which model it is for"):
        find_model("adapter")


def test_a_run_from_python_has_the_options_of_its_record(home):
    run = save_model(home / "run")
    (run / "metrics.jsonl").write_text("")
    (run / "run.json").write_text(json.dumps({"options": {"max_completion_length": 7}}))
    assert find_model("run").options == {"max_completion_length": 7}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs/third", r"There is no directory 'runs/third'"),
        ("./nothing", r"There is no directory './nothing'"),
        (
            "someone/such-a-model",
            r"no directory 'someone/such-a-model', and no model of this name on the Hub",
        ),
        ("runs", r"runs has no model: .* It has notes.txt"),
        ("runs/notes.txt", r"is a file; name the directory"),
    ],
)
def test_a_name_that_means_no_model_says_what_is_there(home, name, message):
    (home / "runs").mkdir()
    (home / "runs" / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=message):
        find_model(name)


def drawn(loaded: Any) -> tuple[int, ...]:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=loaded.stop_token_ids)
    engine = loaded.make_engine(sampling)
    (completion,) = engine.generate([Prompt((9, 10, 11), 0)], sampling)
    engine.close()
    return completion.token_ids


def test_a_run_of_4_bits_is_loaded_in_4_bits_as_it_was_trained(home):
    base = save_model(home / "base")
    adapter = save_adapter(base, home / "run")
    (adapter / "config.yaml").write_text("load_in_4bit: true\nbnb_4bit_quant_type: fp4\nuse_cpu: true\n")
    loaded = load(find_model("run"), {"engine": "auto", "seed": 1})
    layers = [module for module in loaded.model.modules() if isinstance(module, Linear4bit)]
    assert layers and {layer.weight.quant_type for layer in layers} == {"fp4"}
    assert len(drawn(loaded)) == 8
    whole = load(find_model("base"), {"engine": "transformers", "use_cpu": True})
    assert not any(isinstance(module, Linear4bit) for module in whole.model.modules())


def test_a_loaded_model_keeps_nothing_of_training(home):
    save_adapter(save_model(home / "base"), home / "run")
    loaded = load(find_model("run"), {"use_cpu": True})
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not any(module.training for module in loaded.model.modules())
    before = torch.random.get_rng_state()
    assert drawn(loaded) == drawn(loaded) and torch.equal(before, torch.random.get_rng_state())
    assert not (home / "unused").exists()
