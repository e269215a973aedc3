"""What `cpu.py` starts: commands that need no model, the package, and the first work of a small model."""

from __future__ import annotations

from dataclasses import dataclass

BEFORE = "3afb56cfa264feca2f248871fabb8f76e7c2e6fa"
"""The commit that a start is compared with."""

COLOCATE = ("-m", "colocate")


@dataclass(frozen=True)
class Case:
    """One program of the interpreter, started anew for each measurement."""

    words: tuple[str, ...]
    """Arguments of the interpreter; `{directory}` is where run files, model, data and a finished run are."""
    returncode: int = 0
    typed: str = ""
    """Its standard input."""


CASES = {
    "version": Case((*COLOCATE, "--version")),
    "help": Case((*COLOCATE, "--help")),
    "wrong_option": Case((*COLOCATE, "train", "{directory}/wrong.yaml"), returncode=1),
    "wrong_model": Case((*COLOCATE, "chat", "{directory}/nowhere"), returncode=1),
    "report": Case((*COLOCATE, "report", "{directory}/run")),
    "plan": Case((*COLOCATE, "plan", "{directory}/run.yaml", "--json")),
    "import_trainer": Case(("-c", "import colocate; colocate.GRPOTrainer")),
    "first_completion": Case(
        (*COLOCATE, "chat", "{directory}/model", "--use_cpu", "--raw", "--max_tokens", "16"), typed="12+34=\n"
    ),
    "first_step": Case((*COLOCATE, "train", "{directory}/run.yaml")),
}

RUN = """\
model_name_or_path: {directory}/model
dataset_name: {directory}/data
reward_funcs: [examples/quickstart/addition.py:correct]
output_dir: {directory}/run
num_generations: 4
per_device_train_batch_size: 128
max_steps: 1
max_completion_length: 32
max_num_seqs: 512
save_strategy: "no"
use_cpu: true
"""
"""One step of `recipes/quickstart.yaml`: 32 prompts x 4 completions."""
