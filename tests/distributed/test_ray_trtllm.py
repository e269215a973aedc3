"""A run whose ranks have one TensorRT-LLM together, with real Ray; the package is the stand-in.

The server is an actor that two ranks' processes call, and which has two workers' copies of the weights. They
come by handles of memory that each rank shares with the worker on its GPU, here on the host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_ray_launcher import FOREIGN, home_of_ray

import tiny
from processes import SOURCE, TRTLLM_SOURCE

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.early]

UNIT = Path(__file__).parents[1] / "unit"
LOG = "COLOCATE_TEST_TRTLLM_LOG"
PACKAGE = "import trtllm_stand_in\n\ntrtllm_stand_in.install()\n"
REWARDS = """
import os
import signal
from pathlib import Path

from colocate_trtllm import shared_memory
from trtllm_case import HostMemory

shared_memory.CudaMemory = HostMemory  # there is no GPU

def digits(completions, trainer_state, **_):
    # Rewards digits. The file `die` kills the server after the second rollout, once.
    die = Path("die")
    if trainer_state.global_step == 1 and os.environ["RANK"] == "0" and die.exists():
        die.unlink()
        os.kill(int(Path("events").read_text().split(" ", 1)[0]), signal.SIGKILL)
    return [float(sum(c.isdigit() for c in text)) for text in completions]
"""
RUN = dict(
    model_name_or_path="./model", dataset_name="data.jsonl", reward_funcs="rewards.py:digits",
    output_dir="out", num_generations=4, per_device_train_batch_size=4, max_steps=3, max_completion_length=8,
    use_cpu=True, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", seed=3,
)  # fmt: skip


LOGGED = "sampling/sampling_logp_difference/max"


@pytest.fixture
def directory(tmp_path) -> Path:
    """A run's directory, with the package beside it."""
    tiny.make_model().save_pretrained(tmp_path / "model")
    tiny.make_tokenizer().save_pretrained(tmp_path / "model")
    tiny.sums().to_json(tmp_path / "data.jsonl")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "packages" / "tensorrt_llm").mkdir(parents=True)
    (tmp_path / "packages" / "tensorrt_llm" / "__init__.py").write_text(PACKAGE)
    return tmp_path


def train(directory: Path, size: int, *options: str) -> subprocess.CompletedProcess:
    """The command of the quick start, which takes this engine because its package is there."""
    pytest.importorskip("ray")
    paths = [SOURCE, TRTLLM_SOURCE, directory / "packages", UNIT, UNIT.parent]
    words = ["bash", str(UNIT.parents[1] / "examples" / "math_ray.sh"), str(size), "--ranks_per_node", "2"]
    for name, value in RUN.items():
        words += [f"--{name}", str(value)]
    with home_of_ray() as home:
        given = {"HOME": str(home), "RAY_TMPDIR": str(home), "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
        given |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
        given[LOG] = str(directory / "events")
        given["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return subprocess.run(
            [*words, *options],
            cwd=directory,
            env=os.environ | FOREIGN | given,
            capture_output=True,
            text=True,
            timeout=280,
        )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 1])
def test_two_ranks_train_with_tensorrt_llm_beside_them(directory, size):
    done = train(directory, size)
    assert done.returncode == 0, done.stderr
    assert "engine    TensorRT-LLM beside the ranks; engine='trtllm'" in done.stdout
    steps = logged(directory)
    assert [record["step"] for record in steps] == [1, 2, 3]
    # The policy has moved in between: it is its weights of each step that drew the completions.
    assert all(record[LOGGED] < 1e-4 for record in steps)
    assert len({record["reward"] for record in steps}) > 1
    check_events((directory / "events").read_text().splitlines(), size)


@pytest.mark.slow
def test_a_server_that_dies_is_told_and_the_run_goes_on_from_its_checkpoint(directory):
    (directory / "die").touch()
    done = train(directory, 2, "--save_strategy", "steps", "--save_steps", "1")
    assert done.returncode == 0, done.stderr
    assert "EngineLost: TensorRT-LLM's server is gone" in done.stderr
    assert "The ranks are started again (1 of 3 times)." in done.stderr
    assert [record["step"] for record in logged(directory)] == [1, 2, 3]
    servers = {line.split(" ", 1)[0] for line in (directory / "events").read_text().splitlines()}
    assert len(servers) == 2


def logged(directory: Path) -> list[dict]:
    records = [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if LOGGED in record]


def check_events(lines: list[str], size: int) -> None:
    """Each server's: four phases, a sleep after its start and one after each rollout."""
    servers = {line.split(" ", 1)[0] for line in lines}
    assert len(servers) == 2 // size
    for server in servers:
        own = [event for pid, event in (line.split(" ", 1) for line in lines) if pid == server]
        assert own.pop(0) == f"started on {size} GPUs without variables of launchers"
        phase = [*["resume weights"] * size, *["begin"] * size]
        phase += [*["finalize", "reset_prefix_cache"] * size, *["resume kv"] * size]
        asleep = ["pause", *["reset_prefix_cache"] * size, *["release kv"] * size]
        assert own == asleep + 3 * (phase + asleep)
    if size == 1:
        # One engine takes no memory for its KV cache while the other's rank still publishes.
        order = [event for _, event in (line.split(" ", 1) for line in lines)]
        for number in range(1, 4):
            published = [index for index, event in enumerate(order) if event == "finalize"][: 2 * number]
            taken = [index for index, event in enumerate(order) if event == "resume kv"][2 * number - 2]
            assert max(published) < taken
