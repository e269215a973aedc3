"""`colocate train --launcher ray` with real Ray on the CPU: the runs of torchrun, and what befalls them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import tiny
from colocate.cli import main
from colocate.clusters import ranks as ranks_module
from colocate.clusters.actor import without_launchers
from colocate.clusters.cluster import Ask
from processes import SOURCE, TORCHRUN

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.early]

REWARDS = '''
import json, os, signal
from pathlib import Path

num_calls = 0

def digits(completions, **_):
    """Rewards digits; rank 1 dies in the third step if the run's directory asks for it, once."""
    global num_calls
    num_calls += 1
    Path(f"environment{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
    if os.environ["RANK"] == "1" and num_calls == 3 and Path("die").exists():
        Path("die").unlink()
        import sys
        print("these are my last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(sum(c.isdigit() for c in text)) for text in completions]
'''
RUN = dict(
    model_name_or_path="./model", dataset_name="data.jsonl", reward_funcs=["rewards.py:digits"],
    output_dir="out", num_generations=4, per_device_train_batch_size=4, max_steps=4, max_completion_length=8,
    use_cpu=True, learning_rate=1e-2, logging_steps=1, save_steps=1, report_to="none",
)  # fmt: skip
FOREIGN = {"SLURM_PROCID": "7", "PMI_RANK": "7", "PMIX_RANK": "7", "OMPI_COMM_WORLD_RANK": "7"}


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A directory for what Ray writes; its path is short, as those of its sockets must be."""
    directory = Path(tempfile.mkdtemp(prefix="ray"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def environment(home) -> dict[str, str]:
    given = {"HOME": str(home), "RAY_TMPDIR": str(home), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    return os.environ | given | FOREIGN | {"PYTHONPATH": paths, "RAY_ADDRESS": "local"}


@pytest.fixture(scope="module")
def cluster(environment) -> Iterator[dict[str, str]]:
    """Two nodes, of two CPUs and of one, on this machine; yields the environment of their users."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ |= environment  # the nodes inherit it
    del os.environ["RAY_ADDRESS"]
    nodes = None
    try:
        nodes = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, include_dashboard=False))
        nodes.add_node(num_cpus=1)
        os.environ.clear()
        os.environ |= before
        yield environment | {"RAY_ADDRESS": nodes.address}
    finally:
        os.environ.clear()
        os.environ |= before
        if nodes is not None:
            nodes.shutdown()


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Path]:
    """Makes a directory with a model, data, a reward and a run file."""

    def make(name: str, **options: Any) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        tiny.make_model().save_pretrained(directory / "model")
        tiny.make_tokenizer().save_pretrained(directory / "model")
        tiny.sums().to_json(directory / "data.jsonl")
        (directory / "rewards.py").write_text(REWARDS)
        (directory / "run.yaml").write_text(yaml.safe_dump(RUN | options))
        return directory

    return make


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "colocate", "train", "run.yaml", "--launcher", "ray", *options]


def run_ray(directory: Path, environment: dict[str, str], *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*options), cwd=directory, env=environment, capture_output=True, text=True, timeout=280
    )


def rewards(directory: Path) -> dict[int, float]:
    """The mean reward of each step, as the run's record has it."""
    lines = (directory / "out" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["reward"] for record in records if "reward" in record}


def test_a_run_that_loses_a_rank_comes_to_the_weights_of_torchruns(make_run, cluster):
    ours, theirs = make_run("ours"), make_run("theirs")
    (ours / "die").touch()
    done = run_ray(ours, cluster, "--num_nodes", "2", "--ranks_per_node", "1")
    assert done.returncode == 0, done.stderr
    words = [sys.executable, *TORCHRUN, "-m", "colocate", "train", "run.yaml"]
    plain = without_launchers(cluster)
    subprocess.run(words, cwd=theirs, env=plain, capture_output=True, timeout=280, check=True)
    weights = [load_file(directory / "out" / "model.safetensors") for directory in (ours, theirs)]
    start = load_file(ours / "model" / "model.safetensors")
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights[0].items())
    assert rewards(ours) == rewards(theirs) and list(rewards(ours)) == [1, 2, 3, 4]

    assert not (ours / "die").exists()
    (death,) = [line for line in done.stderr.splitlines() if "was ended by SIGKILL" in line]
    assert death.startswith("rank 1 (")
    assert "Its last lines:" in death and "    these are my last words" in done.stderr
    assert done.stderr.count("The ranks are started again (1 of 3 times).") == 1
    assert "checkpoint-2" in done.stdout, "it goes on from the last checkpoint"
    for rank in range(2):
        seen = json.loads((ours / f"environment{rank}.json").read_text())
        assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_RANK"]) == (str(rank), "2", "0")
        assert not FOREIGN.keys() & seen.keys(), "libraries would believe them"


def test_a_cluster_too_small_is_refused_with_the_arithmetic(make_run, cluster):
    directory = make_run("small")
    options = ("--num_nodes", "2", "--ranks_per_node", "2", "--cluster_timeout", "1")
    done = run_ray(directory, cluster, *options)
    assert done.returncode == 1
    assert "no room within 1 s: asked 4 CPUs in 2 × 2, Ray sees 2 + 1. Ask for less" in done.stderr
    done = run_ray(directory, cluster, "--gpus_per_node", "8", "--cluster_timeout", "0")
    assert done.returncode == 1 and "asked 8 GPUs in 1 × 8, Ray sees none" in done.stderr


def test_an_error_that_would_come_again_is_not_tried_again(make_run, cluster):
    directory = make_run("wrong", num_generations=3)
    done = run_ray(directory, cluster, "--ranks_per_node", "2")
    assert done.returncode == 1 and "started again" not in done.stderr
    assert done.stderr.count("num_generations") == 1, "said by the first rank alone"
    assert "ended with exit code 1. Its last lines are above." in done.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)], ids=lambda n: n.name
)
def test_a_driver_that_is_stopped_leaves_nothing_behind(number, make_run, environment):
    """The cluster is the driver's own. Ctrl-C finishes and saves the step in hand."""
    pytest.importorskip("ray")
    directory, mark = make_run("stopped", max_steps=10_000, save_steps=5_000), uuid.uuid4().hex
    driver = subprocess.Popen(
        command("--ranks_per_node", "2"),
        cwd=directory,
        env=environment | {"COLOCATE_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None and driver.stderr is not None
    try:
        said = []
        for line in driver.stdout:
            said.append(line)
            if line.startswith("step 2/"):
                break
        assert said[-1].startswith("step 2/"), "".join(said) + driver.stderr.read()
        assert len(marked(mark)) > 4  # the driver, two ranks, Ray's own
        driver.send_signal(number)
        _, err = driver.communicate(timeout=120)
        assert driver.returncode == (130 if number == signal.SIGINT else -number), err
        end_s = time.monotonic() + 60
        while marked(mark) and time.monotonic() < end_s:
            time.sleep(0.2)
        assert marked(mark) == []
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    if number == signal.SIGINT:
        assert "the step in hand is finished and saved" in err
        assert len(list((directory / "out").glob("checkpoint-*"))) == 1


def marked(mark: str) -> list[int]:
    """The processes that have inherited a variable with this value, and are not dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_dead = (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if not is_dead and mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


# ── Without a cluster ────────────────────────────────────────────────────────────────────────────────────


def test_without_ray_the_extra_is_named(monkeypatch, capsys, make_run):
    monkeypatch.chdir(make_run("missing"))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", "run.yaml", "--launcher", "ray", "--ranks_per_node", "2"]) == 1
    assert 'pip install "colocate[ray]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_nodes", "2"], "--num_nodes is read with --launcher ray"),
        (["--launcher", "ray"], "needs --gpus_per_node, or --ranks_per_node"),
        (["--launcher", "ray", "--gpus_per_node", "2", "--ranks_per_node", "2"], "one of the two"),
    ],
)
def test_options_that_do_not_fit_together(words, message, monkeypatch, capsys, make_run):
    monkeypatch.chdir(make_run("options"))
    assert main(["train", "run.yaml", *words]) == 1
    assert message in capsys.readouterr().err


def test_arithmetic_of_nodes():
    ask = Ask(2, 8, on_gpus=True)
    assert ask.shortage([4, 0, 8]) == "asked 16 GPUs in 2 × 8, Ray sees 8 + 4"
    assert [ask.fits(nodes) for nodes in ([8, 4], [4, 4, 4, 4], [8, 8], [16], [])] == [0, 0, 1, 1, 0]
    assert ask.bundle == {"CPU": 1, "GPU": 1} and Ask(1, 2, on_gpus=False).bundle == {"CPU": 1}


def test_variables_of_other_launchers_are_taken_out():
    kept = {"PATH": "/bin", "MPLBACKEND": "agg", "NCCL_DEBUG": "INFO", "HF_TOKEN": "x"}
    foreign = FOREIGN | {"I_MPI_RANK": "1", "TORCHELASTIC_RUN_ID": "1", "SLURM_JOB_ID": "1"}
    assert without_launchers(kept | foreign) == kept


def test_ctrl_c_is_passed_on_once_and_the_second_stops_at_once(monkeypatch):
    """A Ctrl-C that arrives twice, from the terminal and from a launcher above, is one."""
    clock = iter([10.0, 10.2, 11.0, 12.0])
    monkeypatch.setattr(ranks_module.time, "monotonic", lambda: next(clock))
    received = ranks_module._Received()
    received.note(signal.SIGINT, None)
    received.note(signal.SIGINT, None)
    received.note(signal.SIGTERM, None)
    assert received.take() == [signal.SIGINT, signal.SIGTERM] and received.take() == []
    assert received.first == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        received.note(signal.SIGINT, None)
