"""vLLM servers that a run on Ray starts for itself: real Ray, real vLLM on a CPU, one of two lost.

With vLLM and Ray installed: `pytest -m vllm tests/integration/test_vllm_replicas.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import tiny
from processes import TORCHRUN
from ray_homes import environment_of_ray, home_of_ray, wait_for_end

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from vllm_server_case import TINY, TINY_VARIABLES, make_server_model, shared_server

from colocate.cli import _split_at_dashes
from colocate.parallel.launching import without_launchers
from colocate.parallel.ray_cluster import ClusterRequest
from colocate.rollout_server.command_line import serve_command

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm_server")]

REWARDS = '''
import json, os, signal, time
from contextlib import suppress
from pathlib import Path
import psutil

def digits(completions, trainer_state, **_):
    """Rewards digits. The file die/STEP makes rank 1 kill the second server in that step, or stop its engine,
    as the file says; the file back/STEP makes it wait in that step until it was started again."""
    step, is_second = trainer_state.global_step + 1, os.environ["RANK"] == "1"
    if is_second and (death := Path(f"die/{step}")).exists():
        port = os.environ["COLOCATE_REPLICAS"].rpartition(":")[2]
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if {"colocate", "rollout-serve", port} <= {*words}:
                with suppress(ProcessLookupError):  # the guard of the server's group is no group of its own
                    if death.read_text() == "kill":
                        os.killpg(process.pid, signal.SIGKILL)  # vLLM, too
                        continue
                    # Its HTTP server goes on, and answers /health.
                    for each in psutil.process_iter(["name", "cmdline"]):
                        names = [each.info["name"], *(each.info["cmdline"] or [])]
                        if "EngineCore" in " ".join(names) and os.getpgid(each.pid) == process.pid:
                            os.kill(each.pid, signal.SIGSTOP)
    if is_second and Path(f"back/{step}").exists():
        until_s = time.monotonic() + 200
        while Path("out/replica-1.log").read_text().count("is ready at") < 2 and time.monotonic() < until_s:
            time.sleep(0.1)
        time.sleep(3.5)  # the ranks ask it every 2 s, give or take a half
    return [float(sum(c.isdigit() for c in text)) for text in completions]
'''
RUN = dict(
    model_name_or_path="./model", dataset_name="data.jsonl", reward_funcs=["rewards.py:digits"],
    output_dir="out", num_generations=4, per_device_train_batch_size=8, max_steps=5, max_completion_length=8,
    use_cpu=True, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none",
    engine="vllm_server",
)  # fmt: skip


def make_run(directory: Path) -> Path:
    """A directory with the shared servers' model, data, a reward and a run file."""
    directory.mkdir()
    make_server_model().save_pretrained(directory / "model")
    tiny.make_tokenizer().save_pretrained(directory / "model")
    tiny.sums().to_json(directory / "data.jsonl")
    (directory / "rewards.py").write_text(REWARDS)
    (directory / "run.yaml").write_text(yaml.safe_dump(RUN))
    return directory


@pytest.fixture
def home() -> Iterator[Path]:
    with home_of_ray() as directory:
        yield directory


def test_vllm_takes_what_replicas_are_started_with():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    own = ("--max-model-len", "4096")
    ask = ClusterRequest(1, 8, on_gpus=True, num_replicas=4, replica_size=2, vllm_options=own)
    values = {"model_name_or_path": "some/model", "model_revision": "main", "trust_remote_code": "true"}
    _, options = _split_at_dashes(serve_command(ask, values, "127.0.0.1", 8000))
    read = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    assert (read.enable_sleep_mode, read.gpu_memory_utilization, read.load_format) == (True, 0.4, "dummy")
    assert (read.dtype, read.revision, read.trust_remote_code, read.max_model_len) == (
        *("bfloat16", "main", True, 4096),
    )


def rewards(directory: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["reward"]) for record in records if "reward" in record]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("kill", "was ended by SIGKILL"),
        ("stop", "did not answer any more, though it ran, and was killed"),
    ],
)
@pytest.mark.slow  # five starts of vLLM; `tests/distributed/test_ray_replicas.py` loses others at each change
def test_a_run_with_two_replicas_of_which_one_is_lost_is_that_of_servers_started_by_hand(
    how, told, tmp_path, home
):
    pytest.importorskip("ray")
    ours, theirs = make_run(tmp_path / "ours"), make_run(tmp_path / "theirs")
    for name, step in (("die", 2), ("back", 4)):
        (ours / name).mkdir()
        (ours / name / str(step)).write_text(how)
    environment = environment_of_ray(home) | TINY_VARIABLES
    train = [*("-m", "colocate", "train", "run.yaml")]
    words = [sys.executable, *train, "--launcher", "ray", "--ranks_per_node", "2", "--num_replicas", "2"]
    done = subprocess.run(
        [*words, "--", *TINY, "--max-model-len", "128"],
        cwd=ours,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    assert "It is started again in its place (1 of 3 times)." in done.stderr
    assert re.search(rf"replica 1 \(.*, pid \d+, http://127.0.0.1:\d+\) {told}\. Its last", done.stderr)
    assert re.search(r"http://127.0.0.1:\d+ is lost: ", done.stderr)
    assert re.search(r"http://127.0.0.1:\d+ is back, with the weights of now\.", done.stderr)
    assert wait_for_end(str(home)) == [], "no server is left"

    urls = ",".join(shared_server(number).base_url for number in range(2))
    by_hand = [sys.executable, *TORCHRUN, *train, "--vllm_server_base_url", urls]
    # The servers' keys are there.
    at_home = without_launchers(environment) | {"HOME": os.path.expanduser("~")}
    subprocess.run(by_hand, cwd=theirs, env=at_home, check=True, timeout=700)
    assert rewards(ours) == rewards(theirs) and [step for step, _ in rewards(ours)] == [1, 2, 3, 4, 5]
    weights = [load_file(directory / "out" / "model.safetensors") for directory in (ours, theirs)]
    start = load_file(ours / "model" / "model.safetensors")
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], atol=1e-6, rtol=1e-5)
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights[0].items())
