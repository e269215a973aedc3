"""Runs whose completions come from native rollout servers are those of the native engine in the trainer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import tiny
from colocate.cli import main
from processes import SOURCE

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from native_server_case import NativeServer

REWARDS = """
def digits(completions, **_):
    return [float(sum(c.isdigit() for c in text)) for text in completions]
"""
RUN = dict(
    model_name_or_path="./model", dataset_name="data.jsonl", reward_funcs=["rewards.py:digits"],
    num_generations=4, per_device_train_batch_size=8, max_steps=4, max_completion_length=8, use_cpu=True,
    learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none",
)  # fmt: skip


@pytest.fixture(name="run")
def run_directory(tmp_path) -> Path:
    tiny.make_model().save_pretrained(tmp_path / "model")
    tiny.make_tokenizer().save_pretrained(tmp_path / "model")
    tiny.sums().to_json(tmp_path / "data.jsonl")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return tmp_path


def rewards(directory: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["reward"]) for record in records if "reward" in record]


def assert_is_the_same_run(ours: Path, theirs: Path, start: Path) -> None:
    """Rewards are equal. Log-probs are but for roundings, as which sequences share a step depends on when
    their requests come; and so are weights, of which Adam moves each by up to the learning rate of 1e-2 in a
    step, however small its gradient is."""
    assert rewards(ours) == rewards(theirs) and [step for step, _ in rewards(ours)] == [1, 2, 3, 4]
    weights = [load_file(directory / "model.safetensors") for directory in (ours, theirs, start)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], atol=2e-4, rtol=0)
    assert any(not torch.equal(tensor, weights[2][name]) for name, tensor in weights[0].items())


def test_a_run_with_two_servers_is_that_of_the_engine_in_the_trainer(run, monkeypatch):
    monkeypatch.chdir(run)
    servers = [NativeServer(tiny.make_model(), max_num_seqs=None) for _ in range(2)]
    urls = ",".join(server.base_url for server in servers)
    words = ["train", "run.yaml", "--output_dir"]
    assert main([*words, "theirs", "--engine", "native"]) == 0
    assert main([*words, "ours", "--engine", "rollout_server", "--vllm_server_base_url", urls]) == 0
    assert all(server.loop.num_steps for server in servers), "both have drawn"
    for server in servers:
        server.close()
    assert_is_the_same_run(run / "ours", run / "theirs", run / "model")


def test_a_server_in_a_process_of_its_own_begins_and_ends_as_it_says(run):
    """Ctrl-C ends it; its key is in a file of its user's."""
    environment = os.environ | {
        "XDG_CACHE_HOME": str(run / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SOURCE),
    }
    environment.pop("COLOCATE_SERVER_KEY", None)
    words = [sys.executable, "-m", "colocate", "rollout-serve", "model", "--port", "0", "--use_cpu"]
    with subprocess.Popen(words, cwd=run, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready, about_the_key = server.stdout.readline(), server.stdout.readline()
        port = re.fullmatch(
            r"colocate rollout-serve: model is ready at http://127\.0\.0\.1:(\d+) \(native engine\)\n", ready
        )
        assert port is not None, ready
        file = Path(about_the_key.rpartition(" ")[2].strip())
        assert file.parent == run / "cache" / "colocate" / "servers" and file.name.endswith(f"-{port[1]}.key")
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0
