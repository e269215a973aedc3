"""Every command and every block of code in the README runs, and says of the run what the README says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocate.cli import main
from colocate.run_config import parse_run
from tiny import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RUN_ELSEWHERE = {
    "make test": "this very run",
    "pip install .": "what make does to install",
    'pip install ".[peft,math]"': "likewise",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = "\n".join(blocks("bash")).splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what the commands read, with this environment as its `.venv`."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("Makefile", "pyproject.toml", "constraints-cpu.txt"):
        shutil.copy2(ROOT / name, copy)
    for name in ("examples", "recipes"):
        shutil.copytree(ROOT / name, copy / name)
    (copy / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "colocate", "torchrun"):
        # Scripts, not links: a Python behind a link would look for its packages beside the link.
        script = copy / ".venv" / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{Path(sys.executable).parent / name}" "$@"\n')
        script.chmod(0o755)
    (copy / ".venv" / ".installed").touch()
    return copy


def run(command: str, directory: Path) -> str:
    path = f"{directory / '.venv' / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def quickstart(checkout) -> Path:
    run("make quickstart", checkout)
    return checkout / "runs" / "quickstart"


def test_no_command_is_forgotten():
    tested = {
        "make quickstart",
        "colocate train recipes/quickstart.yaml --learning_rate 3e-4",
        "colocate plan recipes/quickstart.yaml",
        "colocate report runs/quickstart",
        "torchrun --nproc_per_node 2 -m colocate train recipes/quickstart.yaml",
    }
    assert set(commands()) == tested | set(RUN_ELSEWHERE)


@pytest.mark.slow
def test_quickstart_learns_on_held_out_problems(quickstart):
    records = [json.loads(line) for line in (quickstart / "metrics.jsonl").read_text().splitlines()]
    held_out = [record["eval_reward"] for record in records if record.get("eval")]
    assert 0.2 <= held_out[0] <= 0.5
    assert held_out[-1] > 0.85
    page = (quickstart / "report.html").read_text()
    assert "Held-out reward" in page and f"{held_out[-1]:.3f}" in page
    AutoModelForCausalLM.from_pretrained(quickstart)


@pytest.mark.slow
def test_commands_on_the_quickstart(quickstart, checkout):
    short = " --max_steps 2 --output_dir runs/again --eval_strategy no --eval_on_start false"
    run("colocate train recipes/quickstart.yaml --learning_rate 3e-4" + short, checkout)
    assert len((checkout / "runs/again/metrics.jsonl").read_text().splitlines()) == 2
    run("torchrun --nproc_per_node 2 -m colocate train recipes/quickstart.yaml" + short, checkout)
    assert "KV cache" in run("colocate plan recipes/quickstart.yaml", checkout)
    assert "report.html" in run("colocate report runs/quickstart", checkout)


def _load_local(load: Callable, directory: Path, name: str, **options: object) -> object:
    return load(directory, **options)


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """The names in the README, found on the disk: no hub can be reached from a test."""
    directory = tmp_path / "model"
    make_model(max_position_embeddings=1024).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", partial(_load_local, auto.from_pretrained, directory))
    rows = datasets.Dataset.from_dict({"prompt": [f"{i} plus {i} is" for i in range(4)]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    monkeypatch.chdir(tmp_path)


def test_the_python_example(local_hub, tmp_path):
    (code,) = blocks("python")
    # Two short steps instead of a hundred long ones; all else is what the README says.
    code = code.replace("max_steps=100", "max_steps=2, max_completion_length=8, use_cpu=True")
    scope: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["trainer"].state.global_step == 2
    assert (tmp_path / "runs" / "brevity" / "metrics.jsonl").exists()


def test_the_run_file_holds_known_options():
    (text,) = blocks("yaml")
    run_options, grpo_options = parse_run(yaml.safe_load(text))
    assert run_options.dataset_name == "reasoning_gym:chain_sum"
    assert grpo_options["num_generations"] == 8


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_recipes_are_valid(recipe, capsys, monkeypatch, tmp_path):
    parse_run(yaml.safe_load(recipe.read_text()))
    monkeypatch.chdir(tmp_path)
    # Everything is read and checked before the model, which is not there.
    assert main(["plan", str(recipe)]) == 1
    assert "runs/quickstart/model" in capsys.readouterr().err


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_figures_of_the_gpu_are_those_of_the_benchmarks():
    results = ROOT / "benchmarks/results"
    rollout = json.loads((results / "rollout-h200.json").read_text())
    handover = json.loads((results / "handover-h200.json").read_text())["claims"]
    claims, page = rollout["claims"], " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    ratios = {name: value for name, value in claims.items() if name.startswith("rollout_")}
    for name, ratio in ratios.items():
        vllm = rollout["setup"]["tokens_per_s"][name.removeprefix("rollout_").replace("_vs_vllm", "")][
            "in-process"
        ]
        assert re.search(rf"\| [\d,]+ \| {vllm:,.0f} \| {ratio:.2f} \|", page), name
    assert f"first completion: {claims['start_cold_s']:.1f} s" in page
    assert f"That floor is {claims['decode_fraction_of_floor']:.0%} of the measured step" in page
    assert f"by {claims['logprob_gap_vs_vllm']:.2f} of what vLLM's are" in page
    assert f"Sleep takes {handover['sleep_100gib_s']:.3f} s" in page
    assert f"waking up {handover['wake_100gib_s']:.3f} s" in page and handover["weight_sync_bytes"] == 0
    text = " ".join(README.split())
    compared = [ratio for name, ratio in ratios.items() if "nologprobs" not in name]
    assert f"{min(compared):.1f} to {max(compared):.1f} times as fast as vLLM's" in text
    assert max(handover["sleep_100gib_s"], handover["wake_100gib_s"]) < 0.1 and "in under 0.1 s" in text


def test_figures_are_those_of_the_benchmark():
    claims = json.loads((ROOT / "benchmarks/results/step-cpu.json").read_text())["claims"]
    text = " ".join(README.split())
    assert f"takes 1/{claims['step_vs_trl']:.1f} of the time" in text
    assert f"rollout is {claims['rollout_vs_trl']:.1f} times as fast" in text
    assert f"training {claims['training_vs_trl']:.1f} times" in text
