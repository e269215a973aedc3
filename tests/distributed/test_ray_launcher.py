"""`colocate train --launcher ray` with real Ray on the CPU: the runs of torchrun, and what befalls them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from colocate.checkpoints.sealed import list_checkpoints
from colocate.cli import main
from colocate.clusters.actor import ProcessActor
from colocate.clusters.cluster import connected
from colocate.parallel.launching import free_port, without_launchers
from colocate.parallel.ray_cluster import ClusterRequest
from colocate.version import __version__
from listening import LOOPBACK, kinds_of, said_of, sockets
from processes import TORCHRUN
from ray_homes import FOREIGN, home_of_ray, marked, wait_for_end
from ray_runs import launch_here, rewards

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.early]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def another_home() -> Iterator[Path]:
    """For a cluster beside that of `cluster`: Ray notes the last one of each directory there."""
    with home_of_ray() as directory:
        yield directory


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "colocate", "train", "run.yaml", "--launcher", "ray", *options]


def run_ray(directory: Path, environment: dict[str, str], *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*options), cwd=directory, env=environment, capture_output=True, text=True, timeout=280
    )


@pytest.mark.slow
def test_a_run_that_loses_ranks_comes_to_the_weights_and_rewards_of_torchruns(make_run, cluster):
    """One is killed in the third step, and the actor of the other, as if with its node, in the fourth."""
    ours, theirs = make_run("ours"), make_run("theirs")
    (ours / "die").mkdir()
    (ours / "die" / "3-1").write_text("rank")
    (ours / "die" / "4-0").write_text("actor")
    words = [sys.executable, *TORCHRUN, "-m", "colocate", "train", "run.yaml"]
    plain, quiet = without_launchers(cluster), dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with subprocess.Popen(words, cwd=theirs, env=plain, **quiet) as torchrun:
        done = run_ray(ours, cluster, "--num_nodes", "2", "--ranks_per_node", "1")
        assert torchrun.wait(280) == 0
    assert done.returncode == 0, done.stderr
    weights = [load_file(directory / "out" / "model.safetensors") for directory in (ours, theirs)]
    start = load_file(ours / "model" / "model.safetensors")
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights[0].items())
    assert rewards(ours) == rewards(theirs) and list(rewards(ours)) == [1, 2, 3, 4]

    assert not list((ours / "die").iterdir())
    killed, again, lost, third = re.findall(
        r"^(rank \d \(.*, pid \d+\) (?:was|is) .*|The ranks are .*)$", done.stderr, re.MULTILINE
    )
    assert re.match(r"rank 1 .* was ended by SIGKILL\. Its last lines:", killed)
    assert "\n    the last words of rank\nThe ranks are started again (1 of 3 times).\n" in done.stderr
    assert lost.startswith("rank 0 ") and "is lost with its node or its actor" in lost
    assert (again, third) == tuple(f"The ranks are started again ({n} of 3 times)." for n in (1, 2))
    goes_on = [line for line in done.stdout.splitlines() if line.startswith("Continuing")]
    assert goes_on == [f"Continuing at step {n} of 4 from out/checkpoint-{n}." for n in (2, 3)]
    assert "[rank 1] the last words of rank\n" in done.stderr, "as it came, too"
    for rank in range(2):
        seen = json.loads((ours / f"environment{rank}.json").read_text())
        assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_RANK"]) == (str(rank), "2", "0")
        assert not FOREIGN.keys() & seen.keys(), "libraries would believe them"


@pytest.mark.slow
def test_a_run_whose_head_is_lost_goes_on_from_its_checkpoint_under_a_new_head(
    make_run, environment, another_home
):
    """What `ray start --head` has started is killed in the third step. To Ray a new head is a new cluster."""
    pytest.importorskip("ray")
    ours, theirs = make_run("ours"), make_run("theirs")
    (ours / "die").mkdir()
    (held := ours / "die" / "3-0").write_text("head")
    of_head = environment | {"HOME": str(another_home), "RAY_TMPDIR": str(another_home)}
    again = ("--ranks_per_node", "2", "--resume_from_checkpoint", "auto")

    address = start_head(of_head)
    # Ray waits for a head that is lost for a minute, as it may come back.
    known = environment | {"RAY_ADDRESS": address, "RAY_gcs_rpc_server_reconnect_timeout_s": "20"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command(*again), cwd=ours, env=known, **pipes) as driver:
        try:
            end_s = time.monotonic() + 200
            while held.exists() and driver.poll() is None and time.monotonic() < end_s:
                time.sleep(0.05)
            assert driver.poll() is None and not held.exists()
            for pid in heads_processes(another_home):
                os.kill(pid, signal.SIGKILL)
            words = [sys.executable, *TORCHRUN, "-m", "colocate", "train", "run.yaml"]
            plain = without_launchers(environment)
            subprocess.run(words, cwd=theirs, env=plain, check=True, capture_output=True, timeout=280)
            out, said = driver.communicate(timeout=100)
        finally:
            driver.kill()
    assert driver.returncode == 1, said
    assert "step 2/4" in out and "step 3/4" not in out, "it was in the middle"
    ((lost, how_to_go_on),) = re.findall(r"^Ray's head at (.*) is lost: (.*)$", said, re.MULTILINE)
    assert lost.rpartition(":")[2] == address.rpartition(":")[2]
    assert "start the head again (ray start --head), and the same command with --resume" in how_to_go_on
    assert wait_for_end(str(another_home)) == [], "ranks end with the cluster"
    sealed = {path.name for path in list_checkpoints(ours / "out")}
    assert sealed == {"checkpoint-1", "checkpoint-2"}

    address = start_head(of_head)
    try:
        done = run_ray(ours, environment | {"RAY_ADDRESS": address}, *again)
    finally:
        for pid in marked(str(another_home)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert done.returncode == 0, done.stderr
    assert "Continuing at step 2 of 4 from out/checkpoint-2." in done.stdout
    weights = [load_file(directory / "out" / "model.safetensors") for directory in (ours, theirs)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
    assert rewards(ours) == rewards(theirs) and list(rewards(ours)) == [1, 2, 3, 4]


def start_head(environment: dict[str, str]) -> str:
    """Start a head with `ray start`, on ports of its own; returns its address."""
    names = ("port", "ray-client-server-port", "dashboard-agent-listen-port")
    words = [
        *(f"--{name}={free_port()}" for name in names),
        "--num-cpus=2",
        "--include-dashboard=false",
    ]
    patient = environment | {"RAY_raylet_start_wait_time_s": "200"}
    del patient["RAY_ADDRESS"]
    ray = str(Path(sys.executable).with_name("ray"))
    started = subprocess.run(
        [ray, "start", "--head", *words], env=patient, capture_output=True, text=True, timeout=250
    )
    assert started.returncode == 0, started.stdout + started.stderr
    return re.findall(r"--address='(.*)'", started.stdout)[0]


def heads_processes(home: Path) -> list[int]:
    """What `ray start` has started, and not the actors above ranks, nor the ranks."""
    found = []
    for pid in marked(str(home)):
        with suppress(OSError):
            said = Path(f"/proc/{pid}/cmdline").read_text()
            if not said.startswith("ray::ProcessActor") and "colocate" not in said:
                found.append(pid)
    return found


@pytest.mark.slow
def test_an_error_that_would_come_again_is_not_tried_again(make_run, cluster):
    directory = make_run("wrong", shard=8)
    done = run_ray(directory, cluster, "--ranks_per_node", "2")
    assert done.returncode == 1 and "started again" not in done.stderr
    assert done.stderr.count("shard=8 splits the weights over 8 processes") == 1, "said by one rank alone"
    assert re.search(r"rank 0 \(.*\) ended with exit code 1\. Its last lines are above\.", done.stderr)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--num_nodes", "2", "--ranks_per_node", "2"],
            r"asked 4 CPUs in 2 × 2, Ray sees 2 \+ 1 \(free: \d\)",
        ),
        (
            ["--gpus_per_node", "8"],
            r"asked 8 GPUs in 1 × 8, Ray sees none \(free: 0\), and asked 8 CPUs in 1 × 8, Ray sees 2 \+ 1 "
            r"\(free: \d\)",
        ),
    ],
)
def test_a_cluster_too_small_is_refused_with_the_arithmetic(
    words, message, make_run, cluster, monkeypatch, capsys
):
    assert launch_here([*words, "--cluster_timeout", "0"], make_run("small"), cluster, monkeypatch) == 1
    said = capsys.readouterr().err
    assert re.search(rf"The cluster had no room within 0 s: {message}\. Ask for less, or set", said)


def test_a_cluster_of_another_version_is_told(make_run, cluster, monkeypatch, capsys):
    import ray

    true, python = ray.__version__, ".".join(map(str, sys.version_info[:3]))
    monkeypatch.setattr(ray, "__version__", "2.40.0")
    assert launch_here(["--ranks_per_node", "2"], make_run("version"), cluster, monkeypatch) == 1
    said = capsys.readouterr().err
    assert f"The Ray cluster at RAY_ADDRESS={cluster['RAY_ADDRESS']} cannot be used: Version mismatch" in said
    assert said.index(f"Ray: {true}") < said.index("Ray: 2.40.0") and said.count(f"Python: {python}") == 2


IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl-c", "kill"])
def test_a_driver_that_is_stopped_leaves_nothing_behind(how, make_run, environment):
    """The cluster is the driver's own. Ctrl-C in the panel's terminal finishes the current step."""
    pytest.importorskip("ray")
    directory, mark = make_run("stopped", max_steps=10_000, save_steps=5_000), uuid.uuid4().hex
    words, sign = command("--ranks_per_node", "2"), "step 2/10000 "
    if how == "ctrl-c":
        words, sign = [sys.executable, "-c", IN_A_TERMINAL, *words], "● rollout"
    driver = subprocess.Popen(
        words,
        cwd=directory,
        env=environment | {"COLOCATE_TEST_MARK": mark, "TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert driver.stdin is not None and driver.stdout is not None
    try:
        said = b""
        while sign.encode() not in said and (chunk := os.read(driver.stdout.fileno(), 2**16)):
            said += chunk
        assert sign.encode() in said, said.decode()
        assert len(marked(mark)) > 4  # the driver, two ranks, Ray's own
        of_ray = [pid for pid in marked(mark) if "RANK" not in psutil.Process(pid).environ()]
        found = sockets(of_ray)
        assert found and kinds_of(found) == said_of("`--launcher ray` on one machine")
        if how == "kill":
            driver.kill()
            rest, _ = driver.communicate(timeout=200)
        else:
            rest, _ = driver.communicate(b"\x03", timeout=200)
        assert driver.returncode == (-signal.SIGKILL if how == "kill" else 128 + signal.SIGINT), rest.decode()
        # Ray's agents, if the raylet above them was killed, first tell a head that is gone, too.
        assert wait_for_end(mark, 60 if how == "ctrl-c" else 240) == []
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    if how == "ctrl-c":
        text = rest.decode()
        assert "will finish this step, save and stop" in text
        assert "auto --launcher ray --ranks_per_node 2" in text, "the command to go on"
        assert len(list((directory / "out").glob("checkpoint-*"))) == 1


# ── The page ─────────────────────────────────────────────────────────────────────────────────────────────


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_quickstart_through_ray_is_torchruns(tmp_path, environment):
    pytest.importorskip("ray")
    for name in ("examples", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    short = ["--max_steps", "8", "--eval_on_start", "false", "--eval_strategy", "no"]
    warm_start, train = (shlex.split(line) for line in blocks("bash")[1].splitlines())
    alone = [sys.executable, *TORCHRUN, "-m", *train[:3], *short, "--output_dir", "runs/torchrun"]
    for words in ([sys.executable, *warm_start[1:]], [sys.executable, "-m", *train, *short], alone):
        plain = environment if words is not alone else without_launchers(environment)
        subprocess.run(words, cwd=tmp_path, env=plain, check=True, capture_output=True, timeout=280)
    runs = [tmp_path / "runs" / name for name in ("quickstart", "torchrun")]
    ours, theirs = (load_file(run / "model.safetensors") for run in runs)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert rewards(runs[0], "") == rewards(runs[1], "") and len(rewards(runs[0], "")) == 2


SRUN = """#!/bin/bash
for SLURM_NODEID in 0 1; do
    export SLURM_NODEID
    "$@" &
done
wait
"""


@pytest.mark.slow
def test_the_script_of_slurm_runs(make_run, environment, another_home):
    """With a stand-in of srun, which starts both nodes' tasks on this machine, and ranks on CPUs."""
    pytest.importorskip("ray")
    directory = make_run("slurm", max_steps=1)
    script = (Path(__file__).parents[2] / "examples/slurm/ray.sbatch").read_text()
    with socket.socket() as free:
        free.bind(("", 0))
        script = script.replace(":6379", f":{free.getsockname()[1]}")
    (directory / "bin").mkdir()
    (directory / "bin" / "srun").write_text(SRUN)
    (directory / "bin" / "srun").chmod(0o755)
    (directory / "bin" / "colocate").write_text(f'#!/bin/bash\nexec {sys.executable} -m colocate "$@"\n')
    (directory / "bin" / "colocate").chmod(0o755)
    path = os.pathsep.join([str(directory / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    home = str(another_home)
    variables = environment | {"HOME": home, "RAY_TMPDIR": home, "PATH": path, "SLURM_CPUS_PER_TASK": "1"}
    del variables["RAY_ADDRESS"]
    with (directory / "log").open("w") as log:
        words = ["bash", "-c", script.replace("--gpus_per_node 8", "--ranks_per_node 1"), "job", "run.yaml"]
        done = subprocess.run(words, cwd=directory, env=variables, stdout=log, stderr=log, timeout=280)
    for pid in marked(home):  # as SLURM does with a job's steps
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert done.returncode == 0, (directory / "log").read_text()
    assert "2 x CPU" in (directory / "log").read_text() and list(rewards(directory)) == [1]


def test_a_cluster_listens_where_the_page_on_security_says(cluster):
    """Which is not for colocate to say: Ray's own default."""
    port = int(cluster["RAY_ADDRESS"].rpartition(":")[2])
    heads = [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "gcs_server"]
    found = {address for address in sockets(heads) if address[1] == port}
    assert found and kinds_of(found) <= said_of("a Ray cluster that you start")
    assert LOOPBACK not in kinds_of(found)


def test_rays_handler_of_sigterm_goes_with_its_connection(cluster, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", cluster["RAY_ADDRESS"])
    before = signal.getsignal(signal.SIGTERM)
    with connected("terminated") as is_embedded:
        assert not is_embedded and ray.is_initialized()
        assert signal.getsignal(signal.SIGTERM) is not before  # else this test shows nothing
    assert not ray.is_initialized() and signal.getsignal(signal.SIGTERM) is before


# ── Without a cluster ────────────────────────────────────────────────────────────────────────────────────


def test_without_ray_the_extra_is_named(monkeypatch, capsys, make_run):
    monkeypatch.chdir(make_run("missing"))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", "run.yaml", "--launcher", "ray", "--ranks_per_node", "2"]) == 1
    assert "pip install 'ray>=2.40', or colocate's extra ray." in capsys.readouterr().err


RAY_HERE = ("--launcher", "ray", "--ranks_per_node", "2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_nodes", "2"], "--num_nodes is read with --launcher ray"),
        (["--launcher", "ray"], "needs --gpus_per_node, or --ranks_per_node"),
        (["--launcher", "ray", "--gpus_per_node", "2", "--ranks_per_node", "2"], "one of the two"),
        (["--num_replicas", "2"], "--num_replicas is read with --launcher ray"),
        ([*RAY_HERE, "--replica_gpus", "2"], "--replica_gpus is read with --num_replicas"),
        ([*RAY_HERE, "--num_replicas", "1", "--engine", "native"], "engine='native' asks none"),
        (
            [*RAY_HERE, "--num_replicas", "1", "--rollout_server_base_url", "http://a:1"],
            "rollout_server_base_url='http://a:1' names others",
        ),
        (
            [*RAY_HERE, "--num_replicas", "1", "--vllm_server_base_url", "http://a:1"],
            "vllm_server_base_url='http://a:1' names others",
        ),
    ],
)
def test_options_that_do_not_fit_together(words, message, monkeypatch, capsys, make_run):
    monkeypatch.chdir(make_run("options"))
    assert main(["train", "run.yaml", *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "node0"])
def test_an_address_where_nobody_listens_is_refused_at_once(address, monkeypatch, capsys, make_run):
    pytest.importorskip("ray")
    monkeypatch.chdir(make_run("address"))
    monkeypatch.setenv("RAY_ADDRESS", address)
    begin_s = time.monotonic()
    assert main(["train", "run.yaml", "--launcher", "ray", "--ranks_per_node", "2"]) == 1
    said = capsys.readouterr().err
    assert f"No Ray head listens at RAY_ADDRESS={address} (" in said and "`ray job submit`" in said
    assert time.monotonic() - begin_s < 100, "Ray tries for two minutes"


def test_a_ray_that_does_not_come_up_in_time_is_told(monkeypatch, capsys, make_run):
    ray = pytest.importorskip("ray")

    def late(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.chdir(make_run("late"))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(ray, "init", late)
    assert main(["train", "run.yaml", "--launcher", "ray", "--ranks_per_node", "2"]) == 1
    said = capsys.readouterr().err
    assert "on this machine cannot be used: The current node timed out" in said and "ray start --head" in said


def test_a_rank_of_another_launcher_does_not_start_ranks(monkeypatch, capsys, make_run):
    monkeypatch.chdir(make_run("rank"))
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "run.yaml", "--launcher", "ray", "--ranks_per_node", "2"]) == 1
    assert "RANK=1 says that another launcher has started this process" in capsys.readouterr().err


def test_a_node_without_the_runs_directory_says_so(tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match=rf"{socket.gethostname()} cannot enter .*none.*: No such file"):
        ProcessActor().place(str(tmp_path / "none"), __version__)


def test_a_node_with_another_version_says_so(tmp_path):
    pytest.importorskip("ray")
    told = (
        f"{socket.gethostname()} has colocate {__version__}, and the run was started with 0.0.1: install one"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        ProcessActor().place(str(tmp_path), "0.0.1")


def test_arithmetic_of_nodes():
    ask = ClusterRequest(2, 8, on_gpus=True)
    assert ask.shortage([4, 0, 8], "GPU") == "asked 16 GPUs in 2 × 8, Ray sees 8 + 4"
    assert ask.bundles == [[{"CPU": 1, "GPU": 1}] * 8] * 2
    assert ClusterRequest(1, 2, on_gpus=False).bundles == [[{"CPU": 1}] * 2]
    own = ClusterRequest(1, 8, on_gpus=True, num_replicas=3, replica_size=4, is_colocated=False)
    assert own.bundles == [[{"CPU": 1, "GPU": 1}] * 8, *[[{"CPU": 4, "GPU": 4}]] * 3]
    assert own.shortage([8, 8], "GPU") == "asked 20 GPUs in 1 × 8 + 3 × 4, Ray sees 8 + 8"
    assert ClusterRequest(1, 8, on_gpus=True, num_replicas=3, replica_size=4).sizes("GPU") == [8], (
        "they are beside ranks"
    )


def test_variables_of_other_launchers_are_taken_out():
    kept = {"PATH": "/bin", "MPLBACKEND": "agg", "NCCL_DEBUG": "INFO", "HF_TOKEN": "x"}
    foreign = FOREIGN | {"I_MPI_RANK": "1", "TORCHELASTIC_RUN_ID": "1", "SLURM_JOB_ID": "1"}
    assert without_launchers(kept | foreign) == kept
