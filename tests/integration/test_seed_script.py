"""The colocation script of TRL's announcement runs with each engine; only its import is another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocate.config.honoured import check_support
from colocate.engines.native.engine import NativeEngine
from tiny import make_model, make_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_grpo_colocate.py"

SCRIPT = """
from datasets import load_dataset
from colocate import GRPOConfig, GRPOTrainer

# Load dataset
dataset = load_dataset("trl-lib/tldr", split="train")

# Define the reward function
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

# Define training arguments
training_args = GRPOConfig(
    output_dir="Qwen2-0.5B-GRPO",
    logging_steps=1,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_tensor_parallel_size=1,
    vllm_gpu_memory_utilization=0.3,
    max_prompt_length=512,
    max_completion_length=1024,
    max_steps=2,
    num_generations=4,
    num_train_epochs=1,
    per_device_train_batch_size=4,
    push_to_hub=False,
    report_to=None
)

# Create and run the trainer
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=reward_len,
    args=training_args,
    train_dataset=dataset,
)

trainer.train()
"""


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    """The script's two names, found on the disk: a tiny model and a few rows of the data set's form."""
    model_dir = tmp_path / "hub" / "Qwen2-0.5B-Instruct"
    # Heads of a size for which vLLM has attention on a CPU.
    make_model(max_position_embeddings=2048, head_dim=32).save_pretrained(model_dir)
    make_tokenizer().save_pretrained(model_dir)
    posts = ["SUBREDDIT: r/sums\nTITLE: 3 + 4\nPOST: what is it?\nTL;DR:" * n for n in (1, 2, 30)]
    rows = Dataset.from_dict({"prompt": posts, "completion": [" seven"] * 3})

    def load_dataset(name, split):
        assert (name, split) == ("trl-lib/tldr", "train")
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for auto_class in (AutoModelForCausalLM, AutoTokenizer):
        original = auto_class.from_pretrained

        def from_pretrained(name, *args, _original=original, **kwargs):
            assert name in ("Qwen/Qwen2-0.5B-Instruct", str(model_dir))
            return _original(str(model_dir), *args, **kwargs)

        monkeypatch.setattr(auto_class, "from_pretrained", from_pretrained)
    monkeypatch.chdir(tmp_path)


def run_script(engine: str | None = None, **options: Any) -> Any:
    """The example's trainer after training, with `engine` and what this machine needs among its options."""
    code = EXAMPLE.read_text()
    if engine is not None:
        added = "".join(f"    {name}={value!r},\n" for name, value in {"engine": engine, **options}.items())
        code = code.replace("    report_to=None\n", f"{added}    report_to=None\n")
        assert repr(engine) in code.partition('"""')[2].partition('"""')[2]
    namespace: dict = {}
    exec(compile(code, "train_grpo_colocate.py", "exec"), namespace)
    return namespace["trainer"]


def test_the_example_is_the_script_of_the_announcement():
    _, docstring, code = EXAMPLE.read_text().split('"""', 2)
    assert code.strip() == SCRIPT.strip()
    assert all(f'engine="{engine}"' in docstring for engine in ("native", "vllm", "rollout_server"))


def test_script_of_the_announcement(tmp_path, no_hub):
    trainer = run_script()
    assert isinstance(trainer.engine, NativeEngine)
    assert trainer.state.global_step == 2
    run = tmp_path / "Qwen2-0.5B-GRPO"
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["step"] for entry in logs] == [1, 2]
    samples = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    for step in (1, 2):
        rewards = [-abs(20 - len(s["completion"])) for s in samples if s["step"] == step]
        assert [s["rewards"]["reward_len"] for s in samples if s["step"] == step] == rewards
        assert logs[step - 1]["reward"] == pytest.approx(sum(rewards) / 4)
    assert (run / "checkpoint-2" / "model.safetensors").is_file()  # transformers' save_strategy="steps"


def test_its_options_are_read_with_one_line(no_hub, caplog):
    namespace: dict = {}
    with caplog.at_level("WARNING", "colocate"):
        exec(SCRIPT.partition("# Create and run")[0], namespace)
    config = namespace["training_args"]
    assert config.report_to == []
    assert (config.generation_batch_size, config.steps_per_generation) == (4, 1)
    assert len(caplog.messages) == 1
    assert "the native engine generates on the trainer's GPU already" in caplog.text
    # Whether vLLM's options are needed is for the model to say.
    assert check_support(config, "vllm") == []
    (notice,) = check_support(config, "native")
    assert "vllm_gpu_memory_utilization=0.3 is not needed" in notice


def check_ran(trainer: Any) -> None:
    assert trainer.state.global_step == 2
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logs) == 2
    # Completions from weights one step old, or of another model, would be off by more.
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logs)


def test_the_script_with_the_native_engine_by_name(no_hub):
    check_ran(run_script("native"))


@pytest.mark.vllm
def test_the_script_with_vllm_in_process(no_hub):
    trainer = run_script("vllm", vllm_engine_kwargs={"enforce_eager": True})
    check_ran(trainer)
    trainer.engine.close()


@pytest.mark.vllm
@pytest.mark.slow
def test_the_script_with_a_vllm_server(no_hub, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "unit"))
    from vllm_server_case import ServerProcess

    server = ServerProcess(tmp_path / "hub/Qwen2-0.5B-Instruct", options=("--max-model-len", "2048"))
    try:
        server.wait_until_ready()
        check_ran(run_script("vllm_server", vllm_server_base_url=server.base_url))
    finally:
        server.kill()
