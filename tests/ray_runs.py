"""A tiny run for the launcher on Ray: its model, data, reward and run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from colocate.cli import main

REWARDS = '''
import json, os, signal, sys, time
from pathlib import Path

def digits(completions, trainer_state, **_):
    """Rewards digits. The file die/STEP-RANK kills that rank, or the actor above it, in that step, once. Or
    the rank waits there for somebody to kill Ray's head."""
    rank = os.environ["RANK"]
    Path(f"environment{rank}.json").write_text(json.dumps(dict(os.environ)))
    if (death := Path(f"die/{trainer_state.global_step + 1}-{rank}")).exists():
        who = death.read_text()
        death.unlink()
        print(f"the last words of {who}", file=sys.stderr, flush=True)
        if who != "head":
            os.kill(os.getpid() if who == "rank" else os.getppid(), signal.SIGKILL)
        time.sleep(100)
    return [float(sum(c.isdigit() for c in text)) for text in completions]
'''
RUN = dict(
    model_name_or_path="./model", dataset_name="data.jsonl", reward_funcs=["rewards.py:digits"],
    output_dir="out", num_generations=4, per_device_train_batch_size=4, max_steps=4, max_completion_length=8,
    use_cpu=True, learning_rate=1e-2, logging_steps=1, save_steps=1, report_to="none",
)  # fmt: skip


def write_run(directory: Path, **options: Any) -> Path:
    """Makes a directory with a model, data, a reward and a run file."""
    directory.mkdir()
    tiny.make_model().save_pretrained(directory / "model")
    tiny.make_tokenizer().save_pretrained(directory / "model")
    tiny.sums().to_json(directory / "data.jsonl")
    (directory / "rewards.py").write_text(REWARDS)
    (directory / "run.yaml").write_text(yaml.safe_dump(RUN | options))
    return directory


def rewards(directory: Path, output_dir: str = "out") -> dict[int, float]:
    """The mean reward of each step, as the run's record has it."""
    lines = (directory / output_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["reward"] for record in records if "reward" in record}


def launch_here(
    words: list[str], directory: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> int:
    """The exit code of the launcher as a driver in this process."""
    monkeypatch.chdir(directory)
    for name in ("HOME", "RAY_TMPDIR", "RAY_ADDRESS"):
        monkeypatch.setenv(name, environment[name])
    return main(["train", "run.yaml", "--launcher", "ray", *words])
