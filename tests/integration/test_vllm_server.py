"""The server engine against vLLM's real server, on the CPU: numbers, publishing, and being killed.

With vLLM installed: `pytest -m vllm tests/integration/test_vllm_server.py`.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from engine_models import (
    assert_logprobs_are_the_models,
    greedy_completions,
    greedy_references,
    make_model,
    make_prompts,
)
from hostile_client import ask, attack_as_nobody, attacks
from vllm_server_case import ServerProcess, as_vllm, make_server_engine, make_server_model, shared_server

from colocate.http import lease
from colocate.http.key import key_file
from colocate.http.lease import ServerHeld
from colocate.rollout_server.trainer.client import HttpClient, ServerUnreachable
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.types import SamplingParams
from listening import kinds_of, said_of, sockets
from serving_case import MODEL, serving

# One shared server for these and the contract suite's tests.
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm_server")]

GREEDY = SamplingParams(max_tokens=9, temperature=0)


@pytest.fixture
def model():
    return make_server_model()


@pytest.fixture
def engine(model) -> Iterator[RolloutServerEngine]:
    engine = make_server_engine(model)
    engine.wake_up()
    yield engine
    engine.close()


@pytest.fixture
def tied_model():
    return make_model("qwen3-tied", hidden_size=64, head_dim=32)


def mortal_server(model: Any, directory: Path, *options: str, **settings: Any) -> Iterator[ServerProcess]:
    model.save_pretrained(directory)
    (directory / "model.safetensors").unlink()
    server = ServerProcess(directory, options=("--load-format", "dummy", *options), **settings)
    server.wait_until_ready()
    yield server
    server.kill()
    server.stop()


@pytest.fixture
def mortal(tied_model, tmp_path) -> Iterator[ServerProcess]:
    """A server of its own for a test that kills it: a configuration is all it has."""
    yield from mortal_server(tied_model, tmp_path)


@pytest.fixture
def mortal_of_two(tied_model, tmp_path) -> Iterator[ServerProcess]:
    """Likewise, with two processes that answer, as where there are cores for them."""
    yield from mortal_server(tied_model, tmp_path, "--api-server-count", "2", environment=as_vllm(tmp_path))


def perturb(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def assert_greedy_is_the_trainers(engine: RolloutServerEngine, model: Any) -> None:
    prompts = make_prompts([1, 7, 3, 12], 2)
    assert greedy_completions(engine, prompts, 9) == greedy_references(model, prompts, 9)


def test_greedy_after_each_of_two_publishes(engine, model):
    assert_greedy_is_the_trainers(engine, model)
    for version in (1, 2):
        perturb(model, version)
        engine.update_weights(version)
        assert_greedy_is_the_trainers(engine, model)
        assert engine.policy_version == version


def test_turns_are_taken_by_vllms_own_routes(engine, model):
    """On a CPU vLLM keeps its memory all the same; what counts is the order that its routes allow."""
    engine.takes_turns = True
    for version in (1, 2):
        engine.sleep()
        assert engine._ask("/is_paused") == {"is_paused": True}
        perturb(model, version)
        engine.update_weights(version)
        engine.wake_up()
        assert engine._ask("/is_paused") == {"is_paused": False}
        assert_greedy_is_the_trainers(engine, model)


def test_logprobs_are_the_trainers(engine, model):
    prompts = make_prompts([1, 6, 11], 4)
    completions = engine.generate(prompts, SamplingParams(max_tokens=20, seed=1))
    assert_logprobs_are_the_models(model, prompts, completions, atol=1e-4, rtol=1e-4)


def test_openais_client_is_served_from_it(engine, model):
    """`colocate serve --engine vllm_server` without the command line: ids in, and the trainer's out."""
    prompts = make_prompts([1, 7, 3, 12])
    with serving(engine, stops=()) as served, served.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt=[list(prompt.token_ids) for prompt in prompts], max_tokens=9, temperature=0,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
    assert [choice.token_ids for choice in answer.choices] == greedy_references(model, prompts, 9)


def test_an_adapter_is_published_merged(model):
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    engine = make_server_engine(adapted)
    engine.wake_up()
    try:
        for version in (1, 2):
            with torch.no_grad():
                for parameter in (p for p in adapted.parameters() if p.requires_grad):
                    parameter.mul_(1.3)
            engine.update_weights(version)
            assert_greedy_is_the_trainers(engine, adapted)
    finally:
        engine.close()


def test_turns_that_are_given_up_end_there_and_later_ones_read_what_is_new(engine):
    """As vLLM counts itself: requests that it runs, tokens that it draws, tokens that it need not read."""
    port = shared_server().port
    bearer = {"Authorization": f"Bearer {key_file(socket.gethostname(), port).read_text()}"}

    def counted(name: str) -> float:
        lines = ask(port, "GET", "/metrics", bearer, None)[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    drawn, attempts = 0.0, 0
    while not 0 < drawn < 4 * 110:  # on a busy machine they may end before they are seen to run
        attempts += 1
        assert attempts < 30, "they are always drawn to their end"
        before = counted("generation_tokens_total")
        numbers = engine.submit(make_prompts([8], 4), SamplingParams(max_tokens=110))
        while not engine.poll() and counted("num_requests_running") < 4:
            pass
        engine.abort(numbers)
        while counted("num_requests_running"):
            pass
        drawn = counted("generation_tokens_total") - before

    sampling = SamplingParams(max_tokens=110)
    (prompt,) = make_prompts([50], seed=5)
    (number,) = engine.submit([dataclasses.replace(prompt, max_tokens=(30,))], sampling, keep=True)
    while engine.is_busy:
        engine.poll()
    num_found = counted("prefix_cache_hits_total")
    engine.extend(number, [1, 2, 3], 10)
    while engine.is_busy:
        engine.poll()
    assert counted("prefix_cache_hits_total") - num_found == 64, "80 tokens were read, two blocks of 32"
    engine.abort([number])


def test_another_model_is_refused():
    other = make_model("qwen3", hidden_size=64, head_dim=32, num_hidden_layers=3)
    with pytest.raises(ValueError, match="num_hidden_layers 2 instead of 3"):
        make_server_engine(other)


def test_strangers_and_second_runs_are_refused_while_a_run_goes_on(model, monkeypatch, caplog):
    server = shared_server()
    engine = RolloutServerEngine(model, base_url=server.base_url, output_dir="/runs/A")
    engine.wake_up()
    num_before = len(server.log.read_text())
    answers: dict[str, Any] = {}
    attacker = threading.Thread(target=lambda: answers.update(attack_as_nobody(server.port)))
    attacker.start()
    try:
        for version in (1, 2):
            perturb(model, version)
            engine.update_weights(version)
            assert_greedy_is_the_trainers(engine, model)
        attacker.join()
        assert {name: status for name, (status, _) in answers.items() if status not in (401, 403)} == {}
        assert len(answers) == len(attacks())

        bearer = {"Authorization": f"Bearer {key_file(socket.gethostname(), server.port).read_text()}"}
        model_name = json.loads(ask(server.port, "GET", "/v1/models", bearer, None)[1])["data"][0]["id"]
        poison = {"model": model_name, "prompt": [10**6], "max_tokens": 1}
        status, said = ask(server.port, "POST", "/v1/completions", bearer, poison)
        assert status == 400 and "the model's vocabulary is 0 to 96" in said
        second = {**bearer, "X-Colocate-Run": "second"}
        assert ask(server.port, "POST", "/pause?mode=keep", second, None)[0] == 409
        assert ask(server.port, "POST", "/sleep", bearer, {})[0] == 403
        with monkeypatch.context() as context:
            context.setattr(lease, "process_identity", lambda pid: "another/process/1/2")
            with pytest.raises(ServerHeld, match="belongs to the run in /runs/A"):
                RolloutServerEngine(model, base_url=server.base_url, output_dir="/runs/B")

        assert engine._ask("/is_paused") == {"is_paused": False}
        assert_greedy_is_the_trainers(engine, model)
        log = server.log.read_text()[num_before:]
        assert log.count("was refused: ") >= len(attacks()) + 3
        assert "from 127.0.0.1:" in log and "8.8.8.8" not in log
        assert bearer["Authorization"].split()[1] not in server.log.read_text() + caplog.text
    finally:
        engine.close()


def test_its_processes_listen_where_the_page_on_security_says():
    server = shared_server()
    processes = [psutil.Process(server.process.pid), *server.descendants()]
    found = sockets(process.pid for process in processes)
    (front,) = (address for address in found if address[1] == server.port)
    assert kinds_of([front]) == said_of("`colocate rollout-serve`")
    # Where gloo listens depends on the host's name.
    assert found - {front} and kinds_of(found - {front}) <= said_of("vLLM's workers")
    files = {unix.laddr for process in processes for unix in process.net_connections(kind="unix")}
    files = {Path(file) for file in files if file.startswith("/")}
    assert files and {file.parent for file in files} == {Path(tempfile.gettempdir())}
    assert not any(file.stat().st_mode & stat.S_IWOTH for file in files)


def test_port_taken():
    server = shared_server()
    command = [sys.executable, "-m", "colocate", "vllm-serve", "any", "--port", str(server.port)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert f"Port {server.port} of 127.0.0.1 cannot be had" in result.stderr


def ready_lines(server: ServerProcess) -> list[str]:
    """What `colocate vllm-serve` has said of being ready, for which it may take some seconds."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        lines = server.log.read_text().splitlines()
        found = [
            line for line in lines if line.startswith("colocate rollout-serve:") and "is ready at" in line
        ]
        if found:
            return found
        time.sleep(0.1)
    return []


def assert_ctrl_c_ends_everything(mortal: ServerProcess) -> None:
    descendants = mortal.descendants()
    assert descendants
    mortal.process.send_signal(signal.SIGINT)
    mortal.process.wait(200)
    _, running = psutil.wait_procs(descendants, timeout=100)
    assert not running


def make_engine(model: Any, server: ServerProcess, **options: Any) -> RolloutServerEngine:
    engine = RolloutServerEngine(model, base_url=server.base_url, **{"server_timeout_s": 300, **options})
    engine.wake_up()
    return engine


def kill_and_start_again(server: ServerProcess) -> threading.Thread:
    """Kills at once; the new one comes up on the same port in the background."""
    server.kill()

    def start() -> None:
        new = ServerProcess(server.log.parent, server.port, server.options, server.environment)
        server.process, server.log = new.process, new.log

    thread = threading.Thread(target=start)
    thread.start()
    return thread


@pytest.mark.own_vllm
def test_killed_within_a_rollout_and_within_a_publish_and_ended_by_ctrl_c(tied_model, mortal, monkeypatch):
    model = tied_model
    engine = make_engine(model, mortal, on_server_loss="wait", bucket_bytes=40_000)
    prompts = make_prompts([5, 9, 3, 7], 16)
    sampling = SamplingParams(max_tokens=100, temperature=0)
    starting = []
    try:
        expected = greedy_references(model, prompts, 100)
        engine.generate(prompts[:1], GREEDY)

        killer = threading.Timer(0.3, lambda: starting.append(kill_and_start_again(mortal)))
        killer.start()
        completions = engine.generate(prompts, sampling)
        killer.join()
        assert starting, "the rollout was over before the server was killed"
        assert [list(c.token_ids) for c in completions] == expected
        assert "restarted" not in mortal.log.read_text()

        real, num_sent = HttpClient.submit_message, []

        def start(self: HttpClient, do: str, **arguments: Any) -> Any:
            if do == "receive_chunk" and arguments["chunk"] == 2 and not num_sent:
                num_sent.append(arguments["chunk"])
                starting.append(kill_and_start_again(mortal))
            return real(self, do, **arguments)

        monkeypatch.setattr(HttpClient, "submit_message", start)
        perturb(model, 5)
        engine.update_weights(version=1)
        assert num_sent, "the push had fewer than three chunks"
        assert_greedy_is_the_trainers(engine, model)
    finally:
        for thread in starting:
            thread.join()
        engine.close()
    assert_ctrl_c_ends_everything(mortal)


@pytest.mark.own_vllm
@pytest.mark.slow
def test_ready_is_said_once_and_killed_without_waiting_is_an_error_with_a_remedy(tied_model, mortal_of_two):
    model, mortal = tied_model, mortal_of_two
    (ready,) = ready_lines(mortal)
    assert mortal.base_url in ready
    engine = make_engine(model, mortal)
    try:
        assert_greedy_is_the_trainers(engine, model)
        threading.Timer(0.3, mortal.kill).start()
        with pytest.raises(
            RuntimeError, match=r"(?s)was lost.*colocate rollout-serve.*vllm_on_server_loss='wait'"
        ):
            engine.generate(make_prompts([5] * 64, 4), SamplingParams(max_tokens=120))
        with pytest.raises(RuntimeError, match="was lost when it should take weights"):
            engine.update_weights(version=1)
    finally:
        engine.close()
    with pytest.raises(ServerUnreachable, match="colocate rollout-serve"):
        make_engine(model, mortal, server_timeout_s=0.5)
