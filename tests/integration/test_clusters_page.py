"""Every command, file and message of docs/clusters.md is one that Ray, the command line and the code know."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import statistics
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from colocate import cli
from colocate.clusters import replica
from colocate.commands.train import _ask
from colocate.config.run_config import parse_run
from colocate.options.run_file import read_overrides
from colocate.parallel.ray_cluster import ClusterRequest
from colocate.parallel.slices import cut
from colocate.rollout_server.command_line import MEMORY_SHARE, serve_command
from colocate.rollout_server.vllm.serve import _check_options

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()
SOURCES = " ".join(
    re.sub(r'"\s*\n\s*f?"', "", path.read_text())
    for path in (
        *(ROOT / "src/colocate/clusters").glob("*.py"),
        ROOT / "src/colocate/commands/train.py",
        ROOT / "src/colocate/parallel/ray_cluster.py",
    )
)
JOB = "ray job submit --address http://10.0.0.1:8265 --working-dir . --"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


(MANIFEST,) = (yaml.safe_load(block) for block in blocks("yaml"))
SCRIPT = (ROOT / "examples/slurm/ray.sbatch").read_text()
COMMANDS = [
    line.strip() for text in blocks("bash") for line in text.replace("\\\n", " ").splitlines() if line.strip()
]


def options_of(command: str) -> tuple[ClusterRequest, list[str]]:
    """What `colocate train ...` asks of the cluster, and the run's own options."""
    program, *words = shlex.split(command)
    assert (program, words[0]) == ("colocate", "train")
    own, vllm_options = cli._split_at_dashes(words)
    known, rest = cli._build_parser().parse_known_args(own)
    known.vllm_options = vllm_options
    assert known.num_replicas or not vllm_options
    return _ask(known), rest


def check_ray(command: str) -> dict[str, Any]:
    """The options of a command of Ray, as its own parser reads them."""
    scripts = pytest.importorskip("ray.scripts.scripts")
    program, *words = shlex.split(command)
    assert program == "ray"
    group = scripts.cli
    while words and words[0] in getattr(group, "commands", {}):
        group = group.commands[words.pop(0)]
    return group.make_context("ray", words).params


def test_no_block_is_forgotten():
    languages = re.findall(r"^ *```(\w+)$", PAGE, flags=re.MULTILINE)
    assert {name: languages.count(name) for name in languages} == {"bash": 8, "yaml": 1}
    assert len(COMMANDS) == 11


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    words = shlex.split(command)
    if words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[2:] == [".[ray]"] and "ray" in extras
    elif words[0] == "sbatch":
        assert (ROOT / words[1]).read_text() == SCRIPT and words[2:] == ["run.yaml"]
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    elif words[0] == "ray":
        read = check_ray(command)
        if "entrypoint" in read:
            assert command.startswith(JOB) and read["working_dir"] == "."
            check_run(command.removeprefix(JOB), on_storage=True)
    else:
        check_run(command)


def check_run(command: str, *, on_storage: bool = False) -> ClusterRequest:
    ask, (file, *rest) = options_of(command)
    assert file.endswith("run.yaml") or (ROOT / file).is_file()
    _, options = parse_run(read_overrides(rest))
    if on_storage:
        assert options["output_dir"] == "/shared/grpo" and options["resume_from_checkpoint"] == "auto"
    return ask


def test_the_table_has_the_launchers_options_and_what_they_are_without():
    rows = dict(re.findall(r"^\| `--(\w+)` \| (.*) \|$", PAGE, flags=re.MULTILINE))
    (commands,) = (a for a in cli._build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    (group,) = (g for g in commands.choices["train"]._action_groups if "Ray" in (g.title or ""))
    assert {"launcher", *rows} == {action.dest for action in group._group_actions}
    ask, _ = options_of("colocate train run.yaml --launcher ray --ranks_per_node 3")
    assert f"; {ask.num_nodes} if not given" in rows["num_nodes"]
    assert f"; {ask.max_restarts} if not given" in rows["max_restarts"]
    assert f"; {ask.timeout_s:.0f} if not given" in rows["cluster_timeout"]
    assert ask.num_replicas == 0 and "; none if not given" in rows["num_replicas"]
    ask, _ = options_of("colocate train run.yaml --launcher ray --ranks_per_node 3 --num_replicas 2")
    assert f"; {ask.replica_size} if not given" in rows["replica_gpus"]
    assert ask.is_colocated and "; colocated if not given" in rows["replica_placement"]


def test_the_job_of_kubernetes_asks_for_what_its_cluster_has():
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("ray.io/v1", "RayJob")
    spec = MANIFEST["spec"]
    ask = check_run(spec["entrypoint"], on_storage=True)
    head, (workers,) = spec["rayClusterSpec"]["headGroupSpec"], spec["rayClusterSpec"]["workerGroupSpecs"]
    assert {workers[name] for name in ("replicas", "minReplicas", "maxReplicas")} == {ask.num_nodes}
    pods = [group["template"]["spec"] for group in (head, workers)]
    (first,), (worker,) = (pod["containers"] for pod in pods)
    assert int(worker["resources"]["limits"]["nvidia.com/gpu"]) == ask.ranks_per_node == 8
    assert int(worker["resources"]["limits"]["cpu"]) >= ask.ranks_per_node
    assert first["image"] == worker["image"], "of one version"
    for pod, container in zip(pods, (first, worker), strict=True):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["shared"] == "/shared"
        assert mounts.keys() <= {volume["name"] for volume in pod["volumes"]}
    for group in (head, workers):
        check_ray("ray start " + " ".join(f"--{k}={v}" for k, v in group["rayStartParams"].items()))


def test_the_script_of_slurm_starts_what_it_asks_for():
    subprocess.run(["bash", "-n"], input=SCRIPT, text=True, check=True)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SCRIPT, flags=re.MULTILINE))
    (command,) = re.findall(r"^exec (colocate .*)$", SCRIPT, flags=re.MULTILINE)
    ask = check_run(command.replace('"$@"', "run.yaml"))
    assert (ask.num_nodes, ask.ranks_per_node) == (int(asked["nodes"]), int(asked["gpus-per-node"]))
    assert ask.on_gpus and not ask.num_replicas
    assert (asked["ntasks-per-node"], asked["signal"]) == ("1", "B:TERM@300")
    (task,) = re.findall(r"^srun bash -c '(.*?)' &$", SCRIPT, flags=re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-n"], input=task, text=True, check=True)
    filled = SCRIPT.replace("$SLURM_CPUS_PER_TASK", asked["cpus-per-task"]).replace("${HEAD##*:}", "6379")
    starts = re.findall(r"(ray (?:start|status) .*?)(?: >.*|' &)?$", filled, flags=re.MULTILINE)
    read = [check_ray(start.replace("$HEAD", "10.0.0.1:6379")) for start in starts]
    assert [params.get("head") for params in read] == [True, None, False, None]
    assert all(params["num_cpus"] == 64 and params["block"] for params in read if "head" in params)


def test_messages_are_those_of_the_code_or_rays():
    messages = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## Messages")[2], flags=re.MULTILINE)
    assert len(messages) == 16
    for message in set(messages) - {"Version mismatch"}:
        assert message in SOURCES, message


def test_the_page_says_what_the_arithmetic_says():
    said = ClusterRequest(2, 8, on_gpus=True).shortage([8, 4], "GPU")
    assert f"`{said}`" in PAGE
    own = ClusterRequest(2, 8, on_gpus=True, num_replicas=2, replica_size=2, is_colocated=False)
    assert f"`{own.shortage([8, 8], 'GPU')}`" in PAGE
    assert (replica.QUESTION_S, replica.ANSWER_S, replica.PATIENCE) == (1.0, 10.0, 6), "as the page says"
    with pytest.raises(ValueError) as raised:
        cut([["a"] * 8, ["b"] * 4], size=4, count=4)
    assert f"`{raised.value}`" in " ".join(PAGE.split())
    assert f"may take {MEMORY_SHARE} of each" in PAGE


def test_the_replicas_of_the_page_are_asked_of_vllm():
    """The command line of a server as `colocate rollout-serve` and, where it is installed, vLLM read it."""
    command, of_native = (command for command in COMMANDS if "--num_replicas" in command)
    ask, _ = options_of(command)
    assert (ask.num_replicas, ask.replica_size, ask.is_colocated, ask.on_gpus) == (4, 2, True, True)
    assert ask.num_replicas * ask.replica_size == ask.ranks_per_node
    values = {"model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "vllm_max_model_length": "1024"}
    words, vllm_options = cli._split_at_dashes(serve_command(ask, values, "127.0.0.1", 8000))
    known, rest = cli._build_parser().parse_known_args(words)
    assert (known.model, known.tensor_parallel_size, rest) == ("Qwen/Qwen2.5-7B-Instruct", 2, [])
    _check_options(vllm_options)
    read = dict(itertools.pairwise(vllm_options))
    assert read["--dtype"] == "bfloat16" and read["--gpu-memory-utilization"] == str(MEMORY_SHARE)
    assert "--enable-sleep-mode" in vllm_options and vllm_options[-2:] == ["--max-model-len", "4096"]
    assert vllm_options.index("1024") < vllm_options.index("4096"), "the user's come last"
    on_cpus = ClusterRequest(1, 4, on_gpus=False, num_replicas=2, replica_size=2)
    for each, precision, expected in (
        (on_cpus, {}, "float32"),
        (on_cpus, {"bf16": "true"}, "bfloat16"),
        (ask, {"bf16": False}, "float32"),
        (ask, {"bf16": "false", "dtype": "float16"}, "float16"),
    ):
        words = serve_command(each, values | precision, "127.0.0.1", 8000)
        assert words[words.index("--dtype") + 1] == expected, "as the policy is loaded"
        assert ("--enable-sleep-mode" in words) == each.on_gpus
    # A launch goes on with the same words.
    again, _ = options_of(f"colocate train run.yaml {ask.words}")
    assert again == ask and ask.words in command
    native, _ = options_of(of_native)
    assert (native.num_replicas, native.is_colocated, native.on_gpus) == (4, False, True)
    known, rest = cli._build_parser().parse_known_args(serve_command(native, values, "127.0.0.1", 8000))
    assert (known.engine, known.max_model_len, known.dtype, rest) == ("native", 1024, "bfloat16", [])
    assert not known.use_cpu and not known.enable_sleep_mode


def test_what_new_weights_cost_is_what_was_measured() -> None:
    h200, h100 = (
        json.loads((ROOT / f"benchmarks/results/pool-{name}x2.json").read_text()) for name in ("h200", "h100")
    )
    text = " ".join(PAGE.split())
    (vllm,) = (record for record in h200["repetitions"] if record["engine"] == "vllm")
    (native,) = h100["repetitions"]

    def of_all(record: Any, name: str) -> list[float]:
        return [value for row in record["publications"] for value in row[name].values()]

    def median_s(record: Any) -> float:
        return statistics.median(row["wall_s"] for row in record["publications"])

    for phrase in (
        f"reach a server of vLLM in {h200['claims']['publish_ipc_7b_s']:.2f} s (two H200,",
        f"one of the native engine in {h100['claims']['publish_native_ipc_7b_s']:.2f} s (two H100,",
        f"after {vllm['loss']['back_s']:.0f} s with vLLM, {native['loss']['back_s']:.0f} s with the native",
        f"vLLM's lay at most {max(of_all(vllm, 'shortfall')):.2f} logits below the largest one, the native "
        f"engine's at most {max(of_all(native, 'shortfall')):.2f};",
        f"at least {min(of_all(vllm, 'stale')):.1f} and {min(of_all(native, 'stale')):.1f} below",
        f"after the other: {median_s(vllm):.2f} s for both servers of vLLM, waking up included, and "
        f"{median_s(native):.2f} s for both native ones",
        f"limit of {h100['setup']['most_shortfall']}.",
    ):
        assert phrase in text
    assert all(len(record["publications"]) == 50 for record in (vllm, native))
    for claims, prefix in ((h200["claims"], "publish"), (h100["claims"], "publish_native")):
        assert claims[f"{prefix}_host_bytes"] == 0 and claims[f"{prefix}_matched"] == 50
        assert claims[f"{prefix}_loss_survived"] == 1
