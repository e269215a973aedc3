"""Every command and every block of code in the README runs, and says of the run what the README says; figures
there and in `docs` are those of their sources.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import datasets
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from colocate.cli import main
from colocate.config.run_config import parse_run
from colocate.memory.train_plan import ACTIVATION_POLICIES
from colocate.memory.workload import Workload
from colocate.policy.footprint import kept_bytes_per_token, train_flops_per_token
from tiny import make_model, make_tokenizer, shapes_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "recipes/quickstart.yaml").read_text()
RUN_ELSEWHERE = {
    "git clone <this repository's address> colocate && cd colocate": "as tests have done",
    "make test": "what runs this test",
    "python3 -m venv .venv && source .venv/bin/activate": "as make does",
    'pip install ".[cuda,peft,math]"': "what make does to install",
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
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy2(ROOT / name, copy)
    for name in (".ci", "examples", "recipes"):
        shutil.copytree(ROOT / name, copy / name)
    (copy / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "colocate", "torchrun"):
        # Scripts, not links: a Python behind a link would look for its packages beside the link.
        script = copy / ".venv" / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{Path(sys.executable).parent / name}" "$@"\n')
        script.chmod(0o755)
    for name in ("constraints.txt", ".installed"):
        (copy / ".venv" / name).touch()
    return copy


def run(command: str, directory: Path) -> str:
    path = f"{directory / '.venv' / 'bin'}:{os.environ['PATH']}"
    # Without what a make around the tests hands down: another environment than `.venv`, say.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment = {**inherited, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module", params=[100, pytest.param(200, marks=pytest.mark.slow)])
def quickstart(checkout, request) -> Path:
    """The quickstart's run, of half as many steps; `make test-all` has the whole one, too."""
    recipe = checkout / "recipes/quickstart.yaml"
    text, num_changed = re.subn("max_steps: 200", f"max_steps: {request.param}", QUICKSTART)
    assert num_changed == 1
    recipe.write_text(text)
    shutil.rmtree(checkout / "runs", ignore_errors=True)
    run("make quickstart", checkout)
    return checkout / "runs" / "quickstart"


def test_no_command_is_forgotten():
    tested = {
        "make quickstart",
        "colocate train recipes/quickstart.yaml --learning_rate 3e-4",
        "colocate plan recipes/quickstart.yaml",
        "colocate report runs/quickstart",
        "colocate chat runs/quickstart",
        "colocate eval runs/quickstart/model runs/quickstart --num_samples 4 --reward_funcs "
        "examples/quickstart/addition.py:correct",
        "colocate train --help",
        "torchrun --nproc_per_node 2 -m colocate train recipes/quickstart.yaml",
    }
    assert set(commands()) == tested | set(RUN_ELSEWHERE)


@pytest.mark.early
@pytest.mark.xdist_group("quickstart")
def test_quickstart_learns_on_held_out_problems(quickstart):
    records = [json.loads(line) for line in (quickstart / "metrics.jsonl").read_text().splitlines()]
    held_out = [record["eval_reward"] for record in records if record.get("eval")]
    assert 0.2 <= held_out[0] <= 0.5
    assert held_out[-1] > {3: 0.7, 5: 0.85}[len(held_out)]
    page = (quickstart / "report.html").read_text()
    assert "Held-out reward" in page and f"{held_out[-1]:.3f}" in page
    AutoModelForCausalLM.from_pretrained(quickstart)


@pytest.mark.early
@pytest.mark.xdist_group("quickstart")
def test_commands_on_the_quickstart(quickstart, checkout, monkeypatch, capsys):
    monkeypatch.chdir(checkout)

    def colocate(words: str) -> str:
        """What the command prints, without another process that imports everything for it."""
        capsys.readouterr()
        assert main(shlex.split(words)) == 0
        return capsys.readouterr().out

    short = " --max_steps 2 --output_dir runs/again --eval_strategy no --eval_on_start false"
    colocate("train recipes/quickstart.yaml --learning_rate 3e-4" + short)
    assert len((checkout / "runs/again/metrics.jsonl").read_text().splitlines()) == 2
    run("torchrun --nproc_per_node 2 -m colocate train recipes/quickstart.yaml" + short, checkout)
    assert "KV cache" in colocate("plan recipes/quickstart.yaml")
    assert "report.html" in colocate("report runs/quickstart")
    assert "--num_generations (default: 8)" in run("colocate train --help", checkout)
    monkeypatch.setattr(sys, "stdin", io.StringIO("12+34=\n"))
    assert colocate("chat runs/quickstart").strip()
    measured = colocate(
        "eval runs/quickstart/model runs/quickstart --num_samples 4 --reward_funcs "
        "examples/quickstart/addition.py:correct --max_rows 32"
    )
    gained = re.search(r"Accuracy of runs/quickstart minus that of runs/quickstart/model: ([\d.]+)", measured)
    assert gained and float(gained[1]) > 0.2, measured


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


def test_the_quickstarts_run_file_is_valid(capsys, monkeypatch, tmp_path):
    recipe = ROOT / "recipes" / "quickstart.yaml"
    parse_run(yaml.safe_load(recipe.read_text()))
    monkeypatch.chdir(tmp_path)
    # Everything is read and checked before the model, which is not there.
    assert main(["plan", str(recipe)]) == 1
    assert "runs/quickstart/model" in capsys.readouterr().err


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        file, _, anchor = target.partition("#")
        file = file or "README.md"
        assert target.startswith("http") or (ROOT / file).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(), re.MULTILINE)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, target


def test_figures_of_the_gpu_are_those_of_the_benchmarks():
    results = ROOT / "benchmarks/results"
    rollout = json.loads((results / "rollout-h200.json").read_text())
    handover = json.loads((results / "handover-h200.json").read_text())["claims"]
    claims, page = rollout["claims"], " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    ratios = {name: value for name, value in claims.items() if name.startswith("rollout_")}
    for name, ratio in ratios.items():
        ours, _, theirs = name.removeprefix("rollout_").partition("_vs_vllm")
        of_runs = []
        for letter, run in zip("ABCDEF", rollout["setup"]["runs"].values(), strict=False):
            rates = run["tokens_per_s"]
            if "in-process" in rates.get(ours + theirs, {}):
                native, vllm = rates[ours]["native"], rates[ours + theirs]["in-process"]
                of_runs.append(native / vllm)
                assert f"| {letter} | {native:,.0f} | {vllm:,.0f} | {of_runs[-1]:.2f} |" in page, name
        assert ratio == pytest.approx(median(of_runs))
    assert f"over the runs it is {claims['rollout_1p5b_512seq_vs_vllm']:.2f}" in page
    *_, floor = (record for record in rollout["repetitions"] if record["kind"] == "floor")
    assert (
        f"take {floor['matrix_products_s'] * 1e3:.2f} ms" in page and f"{floor['kv_s'] * 1e3:.2f} ms" in page
    )
    first, _, last, of_starts = rollout["setup"]["runs"].values()
    vllm_s = 512 * 1024 / first["tokens_per_s"]["1p5b_512seq"]["in-process"]
    native_s = 512 * 1024 / last["tokens_per_s"]["1p5b_512seq"]["native"]
    assert f"the {vllm_s:.1f} s that vLLM takes in run A, the {native_s:.1f} s of run C" in page
    assert f"would be {vllm_s / native_s:.2f}" in page
    assert not of_starts["tokens_per_s"]
    starts_of = {
        run: [
            record["seconds"]
            for record in rollout["repetitions"]
            if record["kind"] == "cold_start" and run == f"{record['commit']} on {record['machine']}"
        ]
        for run in rollout["setup"]["runs"]
    }
    in_a, _, in_c, in_d = (median(seconds) if seconds else None for seconds in starts_of.values())
    assert f"{in_a:.1f} s in run A, {in_c:.1f} s in run C and {in_d:.1f} s in run D" in page
    of_last, of_all = last["claims"]["decode_fraction_of_floor"], claims["decode_fraction_of_floor"]
    assert f"{of_last:.0%} of the measured step in run C" in page and f"{of_all:.0%} over all runs" in page
    assert f"by {claims['logprob_gap_vs_vllm']:.2f} of what vLLM's are" in page
    assert f"Sleep takes {handover['sleep_100gib_s']:.3f} s" in page
    assert f"waking up {handover['wake_100gib_s']:.3f} s" in page and handover["weight_sync_bytes"] == 0
    text = " ".join(README.split())
    compared = [ratio for name, ratio in ratios.items() if "nologprobs" not in name]
    assert f"{min(compared):.1f} to {max(compared):.1f} times as fast as vLLM's" in text
    assert max(handover["sleep_100gib_s"], handover["wake_100gib_s"]) < 0.1 and "in under 0.1 s" in text


def test_figures_of_steps_are_those_of_the_benchmark():
    result = json.loads((ROOT / "benchmarks/results/step-h200.json").read_text())
    claims, setup = result["claims"], result["setup"]
    summary, page = setup["summary"], " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    for name, peer in setup["peer_settings"].items():
        ours, theirs = summary[f"colocate {name}"], summary[f"trl {name}"]
        cells = [
            f"{theirs['step_s']:.1f}",
            f"{ours['step_s']:.1f}",
            f"{claims[f'step_{name}_vs_trl']:.2f}",
            f"{ours['phases_s']['rollout']:.1f} + {ours['phases_s']['train']:.1f}",
            f"{theirs['phases_s']['generate']:.1f} + {theirs['phases_s']['train']:.1f}",
            str(peer["micro_batch"]),
        ]
        assert f" | {' | '.join(cells)} |" in page, name
        assert peer["liger"] and not peer["gradient_checkpointing"]
    around = [summary[f"trl {name}"]["phases_s"] for name in setup["peer_settings"]]
    spent = [f"{phases['_generate_and_score_completions']:.1f}" for phases in around]
    assert f"({spent[0]}, {spent[1]} and {spent[2]} s)" in page
    firsts = {
        framework: [
            record["steps"][0]["step_s"]
            for record in result["repetitions"]
            if record["kind"] == "step"
            and record["framework"] == framework
            and record["label"] in setup["peer_settings"]
        ]
        for framework in ("colocate", "trl")
    }
    ranges = [f"{min(first):.0f} to {max(first):.0f} s" for first in firsts.values()]
    assert f"the first, {ranges[0]} here and {ranges[1]} there," in page
    phases = [summary[f"colocate {name}"]["phases_s"] for name in setup["peer_settings"]]
    published = [phase["publish"] for phase in phases]
    assert {f"{phase['score']:.1f}" for phase in phases} == {"0.1"} and "here scoring takes 0.1 s" in page
    assert f"publishing {min(published):.3f} to {max(published):.3f} s" in page
    synced = [phases["sync_weights"] for phases in around]
    assert f"({min(synced):.1f} to {max(synced):.1f} s)" in page
    first, longprompt, lora = (summary[f"colocate {name}"] for name in setup["peer_settings"])
    assert f"reaches {claims['train_mfu_1p5b']:.0%} of the GPU's" in page
    assert f"{setup['peak_flop_per_s'] / 1e12:.0f} TFLOP/s, that of the long" in page
    assert f"prompts {longprompt['train_mfu']:.0%}." in page
    unshared = [row["train_mfu_as_if_unshared"] for row in (first, longprompt)]
    assert f"it would be {unshared[0]:.0%} and {unshared[1]:.0%}" in page
    assert f"lasts {claims['standby_slowdown']:.3f} times one" in page
    theirs = summary["trl 7b_lora"]
    assert claims["step_7b_lora_vs_trl"] > 2 and "less than half of it" in page
    assert f"{lora['phases_s']['rollout'] / 1024 * 1e3:.1f} ms for each of 1,024 tokens" in page
    generation = theirs["phases_s"]["generate"] / lora["phases_s"]["rollout"]
    training = theirs["phases_s"]["train"] / lora["phases_s"]["train"]
    assert f"is {generation:.1f} times as fast" in page and f"Training is {training:.1f} times" in page
    assert f"at {lora['train_utilization_4n']:.0%} of the GPU's peak" in page
    text = " ".join(README.split())
    names = ("step_1p5b_vs_trl", "step_1p5b_longprompt_vs_trl", "step_7b_lora_vs_trl")
    ratios = [f"{claims[name]:.1f}" for name in names]
    assert (
        f"step is {ratios[0]} times as fast as TRL's with vLLM in the same process, {ratios[1]} times" in text
    )
    assert f"{ratios[2]} times with LoRA on 7B" in text
    sharded = json.loads((ROOT / "benchmarks/results/sharded-h200x2.json").read_text())["claims"]
    on_two = f"{sharded['step_7b_full_2gpu_vs_trl']:.1f}"
    assert f"fine-tuning is {on_two} times as fast as TRL's with [ZeRO-3](docs/several-gpus.md)" in text


def _qwen(directory: Path, size: str) -> Path:
    """The configuration of a Qwen2.5 model, without weights."""
    shapes = {
        "1.5B": (1536, 8960, 12, 2, True),
        "7B": (3584, 18944, 28, 4, False),
    }
    hidden, mlp, heads, kv_heads, is_tied = shapes[size]
    Qwen2Config(
        hidden_size=hidden, intermediate_size=mlp, num_attention_heads=heads, num_key_value_heads=kv_heads,
        num_hidden_layers=28, vocab_size=151936, tie_word_embeddings=is_tied,
    ).save_pretrained(directory / size)  # fmt: skip
    return directory / size


def test_activation_policies_keep_what_the_table_says(tmp_path):
    page = (ROOT / "docs/training.md").read_text()
    sizes = [_qwen(tmp_path, size) for size in ("1.5B", "7B")]
    shapes = [shapes_of(AutoConfig.from_pretrained(directory)) for directory in sizes]
    workload = Workload(torch.bfloat16, prompt_tokens=256, completion_tokens=512)
    least = train_flops_per_token(shapes[0], workload, "keep")
    for policy in ACTIVATION_POLICIES:
        per_token = [kept_bytes_per_token(shape, torch.bfloat16, policy) for shape in shapes]
        gib = [size * 28 * 16384 / 2**30 for size in per_token]
        cells = [f"{size:,} B | {total:.1f} GiB" for size, total in zip(per_token, gib, strict=True)]
        if policy == "offload":
            cells = ["0 B | 0 GiB", "0 B | 0 GiB"]
        # "offload" computes what "full" does; what its copies cost is the planner's guess.
        computed = "full" if policy == "offload" else policy
        cells.append(f"{train_flops_per_token(shapes[0], workload, computed) / least:.2f}")
        row = next(line for line in page.splitlines() if line.startswith(f"| `{policy}` |"))
        assert " | ".join(cells) in row, policy
        assert policy != "offload" or per_token == [0, 0]
    assert f"are {16384 * 151936 * 4 / 2**30:.1f} GiB in float32" in page


def test_the_plan_in_the_documentation_is_what_the_command_prints(tmp_path, capsys, monkeypatch):
    page = (ROOT / "docs/training.md").read_text()
    (options,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (shown,) = re.findall(r"\$ colocate plan run.yaml (.*?)\n(.*?)```", page, flags=re.DOTALL)
    run_file = tmp_path / "run.yaml"
    run_file.write_text(options.replace("Qwen/Qwen2.5-1.5B-Instruct", str(_qwen(tmp_path, "1.5B"))))
    monkeypatch.setenv("COLUMNS", "118")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(run_file), *shown[0].split()]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown[1].splitlines() if line not in ("…", *printed)] == []
    assert "takes 37.42 GiB of the 39.40 GiB of one A100; 1.98 GiB (5.0%) stay free." in " ".join(printed)
    (advice,) = re.findall(r"```\n(Set one of these.*?)```", page, flags=re.DOTALL)
    assert main(["plan", str(run_file), "--device_name", "A10"]) == 3
    assert advice in capsys.readouterr().out


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_links_of_the_documentation_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        file, _, heading = target.partition("#")
        linked = page.parent / file if file else page
        assert target.startswith("http") or linked.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert heading in anchors, target


def test_figures_are_those_of_the_benchmark():
    claims = json.loads((ROOT / "benchmarks/results/step-cpu.json").read_text())["claims"]
    text = " ".join(README.split())
    assert f"step of a 4-layer model is {claims['step_vs_trl']:.1f} times as fast" in text
    assert f"rollout is {claims['rollout_vs_trl']:.1f} times as fast" in text
    assert f"training {claims['training_vs_trl']:.1f} times" in text
