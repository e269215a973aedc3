"""Scripts of TRL's run with nothing changed but the import.

Those in `tests/trl_scripts/` are from TRL's repository at f2cd57710 (`examples/scripts/`), unchanged.
"""

import re
import sys
from pathlib import Path

import datasets
import pytest
import trl
from datasets import Dataset
from safetensors.torch import load_file

from tests import tiny


def run_script(path, arguments, monkeypatch):
    """Run a script of TRL's as `python SCRIPT ARGUMENTS...` does, with colocate in TRL's place."""
    text = re.sub(r"^(\s*from )trl\b", r"\1colocate", path.read_text(encoding="utf-8"), flags=re.M)
    assert not re.search(r"^\s*(import|from) trl\b", text, flags=re.M)
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    module = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(text, str(path), "exec"), module)
    return module


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """A model's directory and a dataset's, in the working directory."""
    monkeypatch.chdir(tmp_path)
    tiny.make_model().save_pretrained("model")
    tiny.make_tokenizer().save_pretrained("model")
    rows = Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(8)])
    rows.to_json("prompts.jsonl")
    Path("digit_rewards.py").write_text("from tests.tiny import count_digits\n", encoding="utf-8")
    return rows


OPTIONS = (
    *("--output_dir", "out", "--use_cpu", "--report_to", "none", "--disable_tqdm", "--bf16", "False"),
    *("--max_steps", "2", "--per_device_train_batch_size", "4", "--num_generations", "4"),
    *("--max_completion_length", "6", "--learning_rate", "0.01", "--logging_steps", "1"),
    *("--save_strategy", "no", "--shuffle_dataset", "False"),
)


@pytest.mark.parametrize("use_peft", [False, True])
def test_trls_grpo_script_trains_as_the_trainer_does(use_peft, inputs, monkeypatch):
    """`trl/scripts/grpo.py`, as the wheel brings it: arguments from the command line and from a file, the
    data from a mixture."""
    Path("script.yaml").write_text(
        "model_name_or_path: model\nreward_funcs: [digit_rewards.count_digits]\n"
        "datasets:\n  - path: json\n    data_files: prompts.jsonl\n    columns: [prompt]\n"
        f"use_peft: {use_peft}\nlora_r: 4\n",
        encoding="utf-8",
    )
    script = Path(trl.__file__).parent / "scripts" / "grpo.py"
    run_script(script, ["--config", "script.yaml", *OPTIONS], monkeypatch)

    from peft import LoraConfig

    adapters = LoraConfig(r=4, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM") if use_peft else None
    trainer = tiny.make_trainer(
        "direct", model="model", train_dataset=inputs, peft_config=adapters, shuffle_dataset=False
    )
    trainer.train()
    trainer.save_model("direct")
    file = "adapter_model.safetensors" if use_peft else "model.safetensors"
    expected, saved = load_file(f"direct/{file}"), load_file(f"out/{file}")
    assert expected.keys() == saved.keys()
    for name, weight in expected.items():
        assert weight.equal(saved[name]), name
    start = {} if use_peft else load_file("model/model.safetensors")
    trained = [name for name in saved if "lora_B" in name or not use_peft]
    assert any(not saved[name].equal(start.get(name, saved[name] * 0)) for name in trained)


PROBLEMS = {
    "AI-MO/NuminaMath-TIR": {"problem": "1+1?", "solution": "2", "messages": []},
    "openai/gsm8k": {"question": "1+1?", "answer": "one and one #### 2"},
}
"""A row of each dataset that the scripts load."""


@pytest.mark.parametrize("name", ["gspo", "grpo_continuous_batching"])
def test_examples_of_trl_run(name, inputs, monkeypatch):
    def load_dataset(path, *_, split):
        loaded = Dataset.from_list([PROBLEMS[path]] * 8)
        return loaded if isinstance(split, str) else [loaded for _ in split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    script = Path(__file__).parents[1] / "trl_scripts" / f"{name}.py"
    options = ["--model_name_or_path", "model", "--dtype", "float32", "--use_peft", "--lora_r", "4"]
    modules = ["--lora_target_modules", "q_proj,", "v_proj"]  # as the script's own docstring has it
    ran = run_script(script, [*options, *modules, *OPTIONS], monkeypatch)
    assert ran["trainer"].state.global_step == 2
    names = {key.rsplit(".lora_")[0].rsplit(".")[-1] for key in load_file("out/adapter_model.safetensors")}
    assert names == {"q_proj", "v_proj"}
