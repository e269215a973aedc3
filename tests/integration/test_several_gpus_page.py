"""Every command, file and message of docs/several-gpus.md is one that launchers, options and code know."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from colocate.config import launchers
from colocate.config.grpo_config import GRPOConfig
from colocate.config.run_config import parse_run
from colocate.options.run_file import read_overrides
from launcher_configs import environment_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "several-gpus.md").read_text()
SCRIPT = (ROOT / "examples" / "slurm" / "torchrun.sbatch").read_text()
SOURCES = " ".join(
    re.sub(r'"\s*\n\s*f?"', "", (ROOT / "src" / "colocate" / name).read_text())
    for name in ("parallel/meeting.py", "run/start_checks.py", "config/launchers.py")
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def commands() -> Iterator[list[str]]:
    """Every launcher's command of the page as words, those of SLURM's script with numbers for variables."""
    for text in (*blocks("bash"), SCRIPT.replace('"$@"', "run.yaml")):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"\$SLURM_\w+", "2", line), comments=True)
            words = words[1:] if words[:1] == ["srun"] else words
            if words and words[0] in ("torchrun", "accelerate"):
                yield words


COMMANDS = list(commands())


def test_no_block_is_forgotten():
    languages = re.findall(r"^```(\w+)$", PAGE, flags=re.MULTILINE)
    assert set(languages) == {"bash", "yaml"}
    assert "sbatch examples/slurm/torchrun.sbatch run.yaml" in PAGE and SCRIPT.startswith(
        "#!/bin/bash\n#SBATCH"
    )
    assert len(COMMANDS) == 8
    for text in (*blocks("bash"), SCRIPT):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "torchrun"], ids=" ".join)
def test_commands_of_torchrun(words):
    args = get_args_parser().parse_args(words[1:])
    assert args.nproc_per_node == "8"
    check_started(args.training_script, args.training_script_args, args.module)
    if args.nnodes != "1:1":
        assert (args.nnodes, args.rdzv_backend) == ("2", "c10d") and args.rdzv_endpoint.endswith(":29500")


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "accelerate"], ids=" ".join)
def test_commands_of_accelerate(words):
    assert words[1] == "launch"
    args = launch_command_parser().parse_args(words[2:])
    check_started(args.training_script, args.training_script_args, args.module)


def check_started(script: str, arguments: list[str], is_module: bool) -> None:
    if not is_module:
        assert (script, arguments) == ("train.py", [])
        return
    assert (script, arguments[:2]) == ("colocate", ["train", "run.yaml"])
    parse_run(read_overrides(arguments[2:]))


def test_the_run_file_holds_known_options():
    _, options = parse_run(yaml.safe_load(blocks("yaml")[0]))
    assert (options["shard"], options["optim"]) == (2, "adamw_bnb_8bit")


def test_the_configuration_of_accelerate_is_taken_over(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(launchers, "_taken", {})
    text = blocks("yaml")[1]
    (tmp_path / "zero3.yaml").write_text(text)
    assert load_config_from_file(str(tmp_path / "zero3.yaml")).num_processes == 8
    asked = environment_of(yaml.safe_load(text), tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, **{k: v for k, v in asked.items() if "ACCEL" in k}})
    with caplog.at_level("WARNING", "colocate"):
        config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    assert (config.shard, config.offload_optimizer, config.bf16) == ("auto", True, True)
    assert "(zero_stage=3, offload_optimizer_device=cpu) is read as" in caplog.text


def test_what_the_table_says_of_strategies_is_what_is_read():
    rows = re.findall(r'^\| (.*) \| `shard=("?\w+"?)` \|$', PAGE, flags=re.MULTILINE)
    read = {}
    for asked, shard in rows:
        for stage in re.findall(r"\d", (re.findall(r"ZeRO stage ([\d or]+)", asked) or [""])[0]):
            read[int(stage)] = shard
        for strategy in re.findall(r"`([A-Z_\d]+)`", asked):
            read[strategy] = shard
        for reshards in re.findall(r"reshard_after_forward: (\w+)", asked):
            read[reshards] = shard
    assert len(read) == 4 + 5 + 2
    for asked, shard in read.items():
        config = GRPOConfig(output_dir="x", use_cpu=True, **request_of(asked))
        assert repr(config.shard).replace("'", '"') == shard, asked


def request_of(asked: int | str) -> dict:
    if isinstance(asked, int):
        return {"deepspeed": {"zero_optimization": {"stage": asked}}}
    if asked in ("true", "false"):
        return {"fsdp": True, "fsdp_config": {"reshard_after_forward": asked}}
    return {"fsdp": asked.lower()}


def test_messages_are_those_of_the_code():
    table = PAGE.partition("## Messages at the start")[2]
    messages = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    assert len(messages) == 9
    for message in messages:
        # Numbers, ranks and names are filled in.
        parts = re.split(r"\d[\d,]*(?:-\d+)?|node0|shard=1|nodes|ranks", message)
        for part in (part.strip(" :") for part in parts):
            assert part in SOURCES, f"{message}: {part!r}"


def test_links_lead_somewhere():
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\((\w[\w-]*\.md)[)#]", page.read_text()):
            assert (ROOT / "docs" / target).exists(), target


def test_what_splitting_costs_is_what_was_measured() -> None:
    result = json.loads((ROOT / "benchmarks/results/sharded-h200x2.json").read_text())
    claims, steps = result["claims"], result["setup"]["summary"]
    text = " ".join(PAGE.split())
    own_s = min(steps[label]["step_s"] for label in ("7b-t1", "7b-t2"))
    for phrase in (
        f"a step takes {claims['optimizer_sharding_overhead_1p5b']:.2f} times as long with `shard=1`",
        f"training takes {claims['weight_sharding_overhead_7b']:.2f} times as long with `shard=2`",
        f"decodes {claims['tp2_decode_7b_vs_two_engines']:.2f} times the tokens per second",
        f"log-probs is {claims['logprob_gap_tp2']:.2f} times that of one GPU",
        f"Two GPUs do {claims['weak_scaling_2gpu_1p5b']:.2f} times the work",
        f"time divided by {2 * claims['strong_scaling_2gpu_1p5b']:.2f}",
        f"| 7B, full fine-tuning | 74.5 GiB | {claims['full_7b_2x80gb_context']:,} |",
        f"| 14B, full fine-tuning | 139.8 GiB | {claims['full_14b_2xh200_context']:,} |",
        f"| 72B, LoRA of rank 32, bf16 | 139.8 GiB | {claims['lora_72b_2xh200_context']:,} |",
        f"takes {own_s:.1f} s, and {steps['7b-trl-zero3']['step_s']:.1f} s in TRL with DeepSpeed's ZeRO-3 on "
        f"the same machine, {claims['step_7b_full_2gpu_vs_trl']:.1f} times as long.",
        f"On another machine TRL took {steps['7b-trl']['step_s']:.1f} s with FSDP2.",
    ):
        assert phrase in text
    peers = {r["label"]: r for r in result["repetitions"] if r.get("framework") == "trl"}
    settings = {label: (r["micro_batch"], r["gradient_checkpointing"]) for label, r in peers.items()}
    assert settings == {"7b-trl": (8, True), "7b-trl-zero3": (16, False)} and all(
        r["liger"] for r in peers.values()
    )
    assert "micro-batches had 16 completions whose activations were kept, with FSDP2 8 and gradient" in text
    assert f"The older H200 file says {claims['tp2_allreduce_share']:.0%}:" in text
    assert claims["resume_other_world_size_exact"] == 1 and "were the same bits" in text
    for record in result["repetitions"]:
        if record.get("part") == "full_14b_2xh200_context" and record["passed"]:
            assert record["train_plan"]["offload_optimizer"]


def test_what_splitting_costs_on_two_h100_is_what_was_measured() -> None:
    result = json.loads((ROOT / "benchmarks/results/sharded-h100x2.json").read_text())
    claims, steps = result["claims"], result["setup"]["summary"]
    half, whole = (steps[label]["phases_s"]["rollout"] for label in ("1p5b-2gpu-half", "1p5b-1gpu"))
    text = " ".join(PAGE.split())
    for phrase in (
        f"two GPUs do {claims['weak_scaling_2gpu_1p5b']:.2f} times the work per GPU and second",
        f"time divided by {2 * claims['strong_scaling_2gpu_1p5b']:.2f}: half as many rows",
        f"take {half / whole:.2f} of a rollout's time",
        f"takes {claims['tp2_allreduce_share']:.0%} of a decode step",
    ):
        assert phrase in text


def test_what_fsdp2_costs_is_what_was_measured() -> None:
    claims = json.loads((ROOT / "benchmarks/results/sharding-probe-h200x2.json").read_text())["claims"]
    short, long = (1 + claims[f"exposed_7b_fused_{tokens}tokens"] for tokens in (4096, 16384))
    assert (
        f"four layers of 7B took {short:.2f} times as long with weights split by FSDP2 as with whole ones at "
        f"4,096 tokens, and {long:.2f} times at 16,384."
    ) in " ".join(PAGE.split())
