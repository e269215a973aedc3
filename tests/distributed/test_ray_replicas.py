"""Rollout servers beside a run's ranks with real Ray: where they are, and what is done when they are lost.

They are native servers, or in place of vLLM a program that serves nothing; vLLM itself is in
`tests/integration/test_vllm_replicas.py`.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colocate.cli import main
from colocate.clusters import replica as replica_module
from colocate.clusters.cluster import connected, places
from colocate.clusters.process import Ending, present
from colocate.clusters.replica import Replica
from colocate.clusters.start import Start
from colocate.parallel.ray_cluster import ClusterRequest
from processes import SOURCE
from ray_runs import launch_here, rewards

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.early]

VLLM = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

sys.stdout.write(f"is asked to serve {sys.argv[2]}\\n")  # in one piece, as what follows goes to the same file
sys.stdout.flush()
if "--fail" in sys.argv:
    sys.exit("out of memory, say")
host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port"))
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch) -> None:
    """A program in place of vLLM that serves nothing, for replicas that a test starts."""
    package = tmp_path / "packages" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    (package / "main.py").write_text(VLLM)
    information = tmp_path / "packages" / "vllm-0.32.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    run, paths = Replica.run, f"{tmp_path / 'packages'}{os.pathsep}{SOURCE}"
    with_path = lambda self, arguments, variables: run(  # noqa: E731
        self, arguments, {**variables, "PYTHONPATH": paths}
    )
    monkeypatch.setattr(Replica, "run", with_path)


@contextmanager
def replicas_of(
    ask: ClusterRequest, directory: Path, cluster: dict[str, str], monkeypatch: Any, *vllm_options: str
) -> Iterator[Start]:
    """The processes of a run with replicas and a rank on each of two nodes, of which none runs."""
    monkeypatch.chdir(directory)
    for name in ("HOME", "RAY_TMPDIR", "RAY_ADDRESS"):
        monkeypatch.setenv(name, cluster[name])
    ask = replace(ask, vllm_options=vllm_options, max_restarts=2, timeout_s=60.0)
    values = dict(model_name_or_path="./model", output_dir="out")
    with connected("test"), places(ask, "test", is_embedded=False) as groups:
        start = Start(ask, values, *groups)
        with present([*start.ranks, *start.replicas]):
            yield start


def watched(start: Start, *states: Callable[[], bool]) -> Ending | None:
    """Keep the replicas until each of the states has come, one after the other.

    Each state is a question, and may do something where its answer is yes. Returns how a replica has ended
    that never was ready, if one has.
    """

    async def watch() -> Ending | None:
        tasks, end_s = start.keep_replicas(), time.monotonic() + 300
        for is_there in states:
            while not is_there():
                assert time.monotonic() < end_s
                for task in tasks:
                    if task.done():
                        return task.result()
                await asyncio.sleep(0.05)
        return None

    return asyncio.run(watch())


def test_a_replica_that_is_lost_is_started_again_in_its_place(make_run, cluster, vllm, monkeypatch, capsys):
    """One with its server, one with its actor; both listen where they did."""
    import ray

    ask = ClusterRequest(2, 1, on_gpus=False, num_replicas=2)
    with replicas_of(ask, make_run("replaced"), cluster, monkeypatch) as start:
        first, second = start.replicas
        before, urls = [], []

        def are_killed() -> bool:
            if first.is_ready and second.is_ready:
                before.extend((first.pid, second.pid))
                urls.extend(start.variables(0)["COLOCATE_REPLICAS"].split(","))
                os.killpg(first.pid, signal.SIGKILL)
                ray.kill(second.actor)
            return bool(before)

        def are_back() -> bool:
            return not {first.pid, second.pid} & {*before} and first.is_ready and second.is_ready

        assert watched(start, are_killed, are_back) is None
        assert [each.url for each in start.replicas] == urls and len(set(urls)) == 2
        for url in urls:
            assert urllib.request.urlopen(f"{url}/health").status == 200
    said = capsys.readouterr().err
    assert re.search(
        r"replica 0 \(.*\) was ended by SIGKILL\. Its last lines, of out/replica-0\.log:\n    ", said
    )
    assert re.search(r"replica 1 \(.*\) is lost with its node or its actor: ", said)
    assert said.count("It is started again in its place (1 of 2 times).") == 2
    assert "is asked to serve ./model" in Path("out/replica-1.log").read_text()
    assert [pid for pid in (first.pid, second.pid) if Path(f"/proc/{pid}/cmdline").exists()] == []


@pytest.mark.slow
def test_a_replica_that_hangs_is_killed_and_started_again_in_its_place(
    make_run, cluster, vllm, monkeypatch, capsys
):
    """Its whole process group is stopped: its port takes connections, and nobody answers."""
    monkeypatch.setattr(replica_module, "ANSWER_S", 3.0)
    monkeypatch.setattr(replica_module, "PATIENCE", 2)
    ask = ClusterRequest(2, 1, on_gpus=False, num_replicas=1)
    with replicas_of(ask, make_run("hanging"), cluster, monkeypatch) as start:
        (replica,) = start.replicas
        before, urls = [], []

        def is_stopped() -> bool:
            if replica.is_ready:
                before.append(replica.pid)
                urls.append(replica.url)
                os.killpg(replica.pid, signal.SIGSTOP)
                with socket.create_connection(("127.0.0.1", replica.place.free_port), timeout=60):
                    pass
            return bool(before)

        def is_back() -> bool:
            return replica.pid not in before and replica.is_ready

        assert watched(start, is_stopped, is_back) is None
        assert [replica.url] == urls and urllib.request.urlopen(f"{replica.url}/health").status == 200
        (line,) = (Path(f"/proc/{pid}/cmdline") for pid in before)
        assert not line.exists() or not line.read_bytes()
    said = capsys.readouterr().err
    assert re.search(
        r"replica 0 \(.*\) did not answer any more, though it ran, and was killed\. Its last lines, of "
        r"out/replica-0\.log:\n    .*\n(    .*\n)*It is started again in its place \(1 of 2 times\)\.",
        said,
    )


def test_a_replica_that_never_starts_ends_the_run_with_its_last_words(make_run, cluster, vllm, monkeypatch):
    ask = ClusterRequest(2, 1, on_gpus=False, num_replicas=1, is_colocated=False)
    with replicas_of(ask, make_run("failing"), cluster, monkeypatch, "--fail") as start:
        ending = watched(start, lambda: False)
        assert ending is not None and not ending.was_lost and ending.code == 1
        assert re.match(
            r"replica 0 \(.*\) ended with exit code 1\. Its last lines, of out/replica-0", ending.text
        )
        assert "\n    out of memory, say" in ending.text


def test_two_native_servers_draw_what_the_engine_in_the_trainer_draws(make_run, cluster, monkeypatch):
    """Two ranks with a server beside each, and one process with both ranks' batch that draws itself."""
    directory = make_run("native", save_strategy="no", reward_funcs=["plain.py:digits"])
    (directory / "plain.py").write_text(
        "def digits(completions, **_):\n    return [sum(map(str.isdigit, x)) for x in completions]\n"
    )
    words = ["--num_nodes", "2", "--ranks_per_node", "1", "--num_replicas", "2", "--replica_engine", "native"]
    assert launch_here(words, directory, cluster, monkeypatch) == 0
    alone = ["--engine", "native", "--per_device_train_batch_size", "8", "--output_dir", "alone"]
    assert main(["train", "run.yaml", *alone]) == 0
    found = rewards(directory)
    assert found == rewards(directory, "alone") and list(found) == [1, 2, 3, 4]
    for number in range(2):
        assert "is ready at" in (directory / "out" / f"replica-{number}.log").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replica_engine", "native"], "is read with --num_replicas"),
        (
            ["--num_replicas", "2", "--replica_engine", "native", "--replica_gpus", "2"],
            "a native server has its whole model on one GPU",
        ),
        (
            ["--num_replicas", "2", "--replica_engine", "native", "--", "--max-model-len", "9"],
            "`-- --max-model-len` is for vLLM",
        ),
    ],
)
def test_what_native_servers_do_not_take_is_refused(make_run, cluster, monkeypatch, capsys, words, said):
    directory = make_run("refused")
    assert launch_here(["--ranks_per_node", "1", *words], directory, cluster, monkeypatch) == 1
    assert said in capsys.readouterr().err


def test_replicas_that_do_not_fit_beside_the_ranks_are_refused(make_run, cluster, monkeypatch, capsys):
    words = ["--num_nodes", "2", "--ranks_per_node", "1", "--num_replicas", "2", "--replica_gpus", "2"]
    assert launch_here(words, make_run("beside"), cluster, monkeypatch) == 1
    said = capsys.readouterr().err
    assert "The ranks' nodes have no room for the replicas beside them: asked 2 replicas of 2 CPUs" in said
    # Ray may have put both ranks on one node.
    assert re.search(r"the nodes have (2: 1 = 1|1 \+ 1: 0 \+ 0 = 0) fit, as none crosses a node\. Ask", said)


def test_replicas_with_gpus_of_their_own_wait_for_room_with_the_ranks(make_run, cluster, monkeypatch, capsys):
    words = ["--ranks_per_node", "2", "--num_replicas", "2", "--replica_placement", "own"]
    assert launch_here([*words, "--cluster_timeout", "3"], make_run("own"), cluster, monkeypatch) == 1
    said = capsys.readouterr().err
    asked = r"asked 4 CPUs in 1 × 2 \+ 2 × 1, Ray sees 2 \+ 1 \(free: \d\)\. Ask for less, or"
    assert re.search(rf"The cluster had no room within 3 s: {asked}", said)
