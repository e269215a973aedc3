"""Who may use a vLLM server: strangers are refused, the key's owner does only what training needs, one run at
a time.

The gate, the worker extension and the trainer are real; vLLM behind them is not (see `fake_server`). The same
attacks on vLLM itself are in tests/integration/test_vllm_server.py.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_models import make_prompts
from fake_server import (  # noqa: F401
    KEY,
    FakeVLLM,
    engines_of_fake,
    fake_vllm,
    served_model,
)
from faulty_front import hanging_fault, send_json  # noqa: F401
from hostile_client import POISON, ask, attack_as_nobody, attacks
from safetensors.torch import save_file

from colocate.engines.vllm import arguments
from colocate.http import key as key_module
from colocate.http import lease as lease_module
from colocate.http.gate import Refused, check_token_ids
from colocate.http.key import ServerKey, key_file, key_of_new_server, key_of_server_at
from colocate.http.lease import LeaseKeeper, ServerHeld, has_ended, process_identity
from colocate.http.messages import Message, authorization
from colocate.rollout_server.trainer.client import HttpClient, WorkerError
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.rollout_server.trainer.watch import ServerPaused
from colocate.rollout_server.wire import receiver
from colocate.types import SamplingParams

SAMPLING = SamplingParams(max_tokens=6, seed=3)
BEARER = {"Authorization": f"Bearer {KEY}"}


def port_of(fake: FakeVLLM) -> int:
    return fake.http.server_port


# ── Strangers ────────────────────────────────────────────────────────────────────────────────────────────


def test_strangers_are_refused_and_logged_while_a_run_goes_on(make_engine, fake, model, caplog, capsys):
    engine = make_engine()
    expected = engine.generate(make_prompts([3, 5]), SAMPLING)
    fake.reached.clear()
    answers: dict[str, Any] = {}
    attacker = threading.Thread(target=lambda: answers.update(attack_as_nobody(port_of(fake))))
    attacker.start()
    for version in (1, 2):
        engine.update_weights(version)
        completions = engine.generate(make_prompts([3, 5]), SAMPLING)
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    attacker.join()
    assert answers.keys() == attacks().keys()
    assert {name: status for name, (status, _) in answers.items() if status not in (401, 403)} == {}
    assert not any(KEY in text or "root:" in text for _, text in answers.values())
    refusals = capsys.readouterr().err.splitlines()
    assert len(refusals) == len(attacks())
    assert all(" from 127.0.0.1:" in line and " was refused: " in line for line in refusals)
    assert KEY not in "".join(refusals) + caplog.text
    own = {"/pause", "/resume", "/reset_prefix_cache", "/collective_rpc", "/v1/completions"}
    assert set(fake.reached) <= own, "only the run's own requests came through"


def test_health_is_open_and_says_nothing(fake):
    assert ask(port_of(fake), "GET", "/health", {}, None) == (200, "")


# ── With the key ─────────────────────────────────────────────────────────────────────────────────────────

CALL = {"method": "colocate_receive", "args": []}
BY_OWNERS = {
    "a web page": (("GET", "/version", {"Origin": "http://localhost:3000"}, None), 403, "Origin"),
    "a rebound name": (("GET", "/version", {"Host": "evil.example:8000"}, None), 403, "Host"),
    "text": (("POST", "/v1/completions", {"Content-Type": "text/plain"}, {}), 415, "application/json"),
    "no object": (("POST", "/v1/completions", {}, [1]), 400, "JSON object"),
    "no JSON": (("POST", "/v1/completions", {}, "[" * 5000), 400, "JSON object"),
    "a route that training does not need": (("POST", "/update_weights", {}, {}), 403, "none of the routes"),
    "what vLLM is": (("GET", "/server_info", {}, None), 403, "none of the routes"),
    "a worker's other method": (
        ("POST", "/collective_rpc", {}, {"method": "sleep", "args": [], "timeout": 5}),
        403,
        "only colocate_receive",
    ),
    "a call without an end": (("POST", "/collective_rpc", {}, CALL), 400, "timeout"),
    "a call that ends never": (
        ("POST", "/collective_rpc", {}, {**CALL, "timeout": 1e999}),
        400,
        "positive number",
    ),
    "a call with one text": (
        ("POST", "/collective_rpc", {}, {**CALL, "args": ["a"], "timeout": 5}),
        400,
        "two texts",
    ),
    "a call with numbers": (
        ("POST", "/collective_rpc", {}, {**CALL, "args": [1, 2], "timeout": 5}),
        400,
        "two texts",
    ),
    "a name that begins like this machine's": (
        ("GET", "/version", {"Host": f"{socket.gethostname().partition('.')[0]}.evil.example"}, None),
        403,
        "Host",
    ),
    "a name that begins like an address": (
        ("GET", "/version", {"Host": "[::1].evil.example"}, None),
        403,
        "Host",
    ),
    "a pause by nobody": (("POST", "/pause?mode=keep", {}, None), 403, "run that holds"),
}


@pytest.mark.parametrize("name", BY_OWNERS)
def test_the_key_opens_only_what_training_needs(fake, name):
    (method, path, headers, body), status, message = BY_OWNERS[name]
    answer = ask(port_of(fake), method, path, {**BEARER, **headers}, body)
    assert answer[0] == status and message in answer[1]
    assert fake.reached == []


def test_what_people_ask_with_the_key(fake):
    port = port_of(fake)
    assert ask(port, "GET", "/version", BEARER, None)[0] == 200
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000", socket.gethostname(), socket.getfqdn()):
        assert ask(port, "GET", "/version", {**BEARER, "Host": host}, None)[0] == 200


def test_a_key_in_an_address_is_not_printed(fake, capsys):
    assert ask(port_of(fake), "GET", f"/version?key={KEY}", {}, None)[0] == 401
    printed = capsys.readouterr().err
    assert "'GET /version?...' from" in printed and KEY not in printed


def test_a_signature_is_good_for_one_request_alone(fake, monkeypatch):
    port, key = port_of(fake), ServerKey(KEY, "a test")
    body = {**POISON, "prompt": [1], "seed": 0}
    content = json.dumps(body).encode()
    signed = {"Authorization": authorization(key, "POST", "/v1/completions", content)}
    assert ask(port, "POST", "/v1/completions", signed, body)[0] == 200
    assert ask(port, "POST", "/v1/completions", signed, {**body, "n": 2})[0] == 401
    assert ask(port, "POST", "/v1/chat/completions", signed, body)[0] == 401
    assert ask(port, "POST", "/v1/completions?x", signed, body)[0] == 401


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"prompt": [3, 97]}, "prompt has the token id 97, .* 0 to 96"),
        ({"prompt": [[3], [4, -1]]}, "token id -1"),
        ({"prompt": [1, 7.0]}, r"token id 7\.0"),
        ({"prompt": [1, "9999"]}, "token id 9999"),
        ({"allowed_token_ids": ["5"]}, "allowed_token_ids"),
        ({"stop_token_ids": [10**9], "min_tokens": 1}, "stop_token_ids"),
        ({"prompt": [0, 96]}, None),
        ({"prompt": [[0], [96]]}, None),
        ({"prompt": "text", "stop_token_ids": [10**9]}, None),
    ],
)
def test_token_ids_outside_the_vocabulary_do_not_reach_the_engine(fields, wrong):
    if wrong is None:
        check_token_ids(fields, vocab_size=97)
    else:
        with pytest.raises(Refused, match=wrong):
            check_token_ids(fields, vocab_size=97)


def test_a_worker_listens_to_signed_messages_alone(fake, caplog):
    text = json.dumps({"do": "state", "run": {"id": "x"}, "nonce": "1"})
    for signature in ("", "0" * 64, "é"):
        answer = fake.worker.colocate_receive(text, signature)
        assert answer == {"error": "the message is not signed with the server's key"}
    assert caplog.text.count("a message was refused") == 3


def test_an_answer_counts_for_its_question_alone(fake):
    key = ServerKey(KEY, "a test")
    first, second = (Message(key, {"do": "describe"}) for _ in range(2))
    answer = fake.worker.colocate_receive(*first.call(1)["args"])
    assert first.opened(answer)["rank"] == 0
    for message, changed in (
        (second, answer),
        (first, {**answer, "answer": answer["answer"].replace("0", "1")}),
        (first, {"is": "finished"}),
    ):
        with pytest.raises(ValueError, match="not signed"):
            message.opened(changed)


def test_whoever_took_the_port_cannot_answer_for_the_server(make_engine, fake):
    engine = make_engine()
    engine.generate(make_prompts([3]), SAMPLING)

    def pretend(fake: FakeVLLM, handler: Any, status: int, answer: Any) -> None:
        send_json(handler, 200, {"results": [{"start_id": "x", "version": engine._version}]})

    fake.faults["/collective_rpc state"] = [pretend]
    with pytest.raises(WorkerError, match="not signed with the server's key"):
        engine.generate(make_prompts([3]), SAMPLING)


def test_a_worker_reads_nothing_outside_the_directory_that_was_shared(fake, tmp_path):
    shared, outside = tmp_path / "shared", tmp_path / "outside"
    for directory in (shared, outside):
        directory.mkdir()
    save_file({"chunk": torch.zeros(16, dtype=torch.uint8)}, outside / "0.safetensors")
    (outside / "probe").write_text("mark")
    (shared / "linked").symlink_to(outside)
    (shared / "1.safetensors").symlink_to(outside / "0.safetensors")
    os.mkfifo(shared / "2.safetensors")
    for directory in (shared, shared / "linked", outside / "probe", "/dev"):  # no file, a link, no directory
        assert fake.message("share", directory=str(directory), mark="mark") == {"is_shared": False}
    os.mkfifo(shared / "probe")
    assert fake.message("share", directory=str(shared), mark="mark") == {"is_shared": False}
    (shared / "probe").unlink()
    (shared / "probe").write_text("mark")
    assert fake.message("share", directory=str(shared), mark="mar") == {"is_shared": False}
    assert fake.message("share", directory=str(shared), mark="mark") == {"is_shared": True}
    fake.message("begin", push="p", unless=None, replaces=None, tied_head=None, layout="")
    chunk = {"push": "p", "chunk": 0, "places": [], "size_bytes": 16, "checksum": 0}
    files = ("1.safetensors", "2.safetensors", "3.safetensors")
    for name in ("/etc/passwd", "../outside/0.safetensors", "probe", *files):
        answer = fake.message("receive_chunk", **chunk, offer={"file": name})
        assert "error" in answer, name  # nothing waits for the other end of a pipe, which would have no end


# ── The key ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("COLOCATE_SERVER_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_key_is_made_once_and_is_its_users_alone(cache):
    message = r"no key for the server at localhost:8123.*COLOCATE_SERVER_KEY"
    with pytest.raises(ValueError, match=message):
        key_of_server_at("localhost", 8123)
    made = key_of_new_server(8123)
    path = key_file(socket.gethostname(), 8123)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    text = path.read_text()
    assert len(text) >= 32 and made.is_text(text) and not made.is_text(text[:-1])
    for key in (key_of_new_server(8123), key_of_server_at("127.0.0.1", 8123)):
        assert key.is_text(text), "a server that is started again has the key that its trainer knows"
    assert not key_of_new_server(8124).is_text(text)
    assert text not in repr(made) + str(vars(made).keys())
    with pytest.raises(TypeError):
        pickle.dumps(made)


def test_the_environments_key_wins_and_leaves_no_file(cache, monkeypatch):
    monkeypatch.setenv("COLOCATE_SERVER_KEY", "k" * 20)
    assert key_of_new_server(8123).is_text("k" * 20) and key_of_server_at("node7", 8000).is_text("k" * 20)
    assert list(cache.iterdir()) == []
    for text in ("", "short", "with blanks in between it", "line\nbreak" * 3):
        monkeypatch.setenv("COLOCATE_SERVER_KEY", text)
        with pytest.raises(ValueError, match="16 to 512 printable"):
            key_of_server_at("node7", 8000)


@pytest.mark.parametrize("case", ["others can read it", "a link", "a pipe", "another user's"])
def test_a_key_that_others_may_have_written_is_refused(cache, case, monkeypatch):
    key_of_new_server(8123)
    path = key_file(socket.gethostname(), 8123)
    if case == "others can read it":
        path.chmod(0o644)
    elif case == "another user's":
        monkeypatch.setattr(key_module.os, "geteuid", lambda: path.stat().st_uid + 1)
    else:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere")) if case == "a link" else os.mkfifo(path)
    with pytest.raises(ValueError, match=r"not to be trusted|cannot be read"):
        key_of_server_at("localhost", 8123)


def test_a_trainer_with_another_key_is_told_where_it_has_it_from(fake, model, monkeypatch):
    monkeypatch.setenv("COLOCATE_SERVER_KEY", "not-the-key-of-the-fake")
    with pytest.raises(ValueError, match=r"does not know this run's key.*COLOCATE_SERVER_KEY"):
        RolloutServerEngine(model, base_url=fake.base_url, server_timeout_s=2)


def test_a_password_in_the_address_is_refused_without_being_repeated():
    with pytest.raises(ValueError, match="COLOCATE_SERVER_KEY") as caught:
        HttpClient("http://user:secret@node7:8000")
    assert "secret" not in str(caught.value)


# ── One run at a time ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def ended_process() -> str:
    """The identity of a process that is over."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = process_identity(child.pid)
        assert process and not has_ended(process)
        child.kill()
    assert has_ended(process)
    return process


def claim_as(fake: FakeVLLM, run_id: str, **fields: Any) -> dict[str, Any]:
    run = {"output_dir": "/runs/A", "host": "node3", "pid": 12, "process": "elsewhere", **fields}
    return fake.message("claim", run={"id": run_id, **run})


def test_a_second_run_is_refused_and_the_first_goes_on(make_engine, fake, monkeypatch):
    first = make_engine(run_id="first", output_dir="/runs/A")
    expected = first.generate(make_prompts([3]), SAMPLING)
    # As from another process of this machine.
    monkeypatch.setattr("colocate.http.lease.process_identity", lambda pid: "a/b/1/2")
    message = rf"belongs to the run in /runs/A \(process {os.getpid()} on .*\), since .*--port"
    with pytest.raises(ServerHeld, match=message):
        make_engine(run_id="second", output_dir="/runs/B")
    assert ask(port_of(fake), "POST", "/pause", {**BEARER, "X-Colocate-Run": "second"}, None)[0] == 409
    assert first.generate(make_prompts([3]), SAMPLING) == expected
    first.close()
    make_engine(run_id="second", output_dir="/runs/B")


def test_what_frees_a_server(make_engine, fake, model, ended_process, monkeypatch):
    claim_as(fake, "crashed", process=ended_process)
    engine = make_engine(run_id="next")  # the holder's process is over
    assert claim_as(fake, "other")["holder"]["id"] == "next"
    engine.close()  # a clean end lets go
    assert claim_as(fake, "other") == {}
    fake.message("release", "other")
    forgotten = RolloutServerEngine(model, base_url=fake.base_url, run_id="forgotten")
    assert claim_as(fake, "other")["holder"]["id"] == "forgotten"
    del forgotten  # the end of a process that nobody closed it in
    assert claim_as(fake, "other") == {}
    monkeypatch.setattr(lease_module, "LEASE_S", 0.05)
    time.sleep(0.1)  # silence
    assert claim_as(fake, "another") == {}


def test_a_run_that_crashed_on_another_machine_takes_its_server_back(make_engine, fake, monkeypatch):
    claim_as(fake, "crashed")
    with pytest.raises(ServerHeld, match="/runs/A"):
        make_engine(run_id="stranger", output_dir="/runs/B")
    monkeypatch.setattr("colocate.rollout_server.trainer.fit.LEASE_S", 4.0)
    monkeypatch.setattr(lease_module, "LEASE_S", 0.4)
    claim_as(fake, "crashed")
    make_engine(run_id="again", output_dir="/runs/A").generate(make_prompts([3]), SAMPLING)


def test_a_lease_is_renewed_while_training_takes_long(make_engine, fake, monkeypatch):
    monkeypatch.setattr(lease_module, "LEASE_S", 2.0)
    make_engine(run_id="first")
    time.sleep(3)
    assert claim_as(fake, "second")["holder"]["id"] == "first"


def test_a_release_is_the_last_that_is_heard_of_a_run():
    heard: list[str] = []
    keeper = LeaseKeeper(lambda: heard.append("renew"), lambda: heard.append("release"))
    keeper.close()
    keeper.close()
    assert heard == ["release"]


def test_a_server_that_came_back_with_another_key(make_engine, fake, model, cache, monkeypatch):
    path = key_file(socket.gethostname(), port_of(fake))
    key_of_new_server(port_of(fake))

    def restart_with(text: str) -> None:
        path.write_text(text)
        monkeypatch.setenv("COLOCATE_SERVER_KEY", text)
        fake.restart()
        monkeypatch.delenv("COLOCATE_SERVER_KEY")
        monkeypatch.setattr(receiver, "key_from_environment", lambda: fake.gate._key)

    restart_with("the-first-key-of-a-server")
    engine = make_engine(on_server_loss="wait")
    expected = engine.generate(make_prompts([3]), SAMPLING)
    restart_with("another-key-of-the-server")
    assert engine.generate(make_prompts([3]), SAMPLING) == expected


# ── Pauses ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pause_ends_when_its_run_is_silent_and_not_before(fake, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(lease_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(lease_module, "LEASE_S", 0.4)
    claim_as(fake, "first")
    assert ask(port_of(fake), "POST", "/pause", {**BEARER, "X-Colocate-Run": "first"}, None)[0] == 200
    fake.message("begin", "first", push="p", unless=None, replaces=None, tied_head=None)
    for _ in range(8):
        claim_as(fake, "first")
        now_s += 0.1
        time.sleep(0.1)  # the gate looks that often
        assert fake.is_paused
    now_s += 0.5
    deadline = time.monotonic() + 60
    while fake.is_paused and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not fake.is_paused
    assert not fake.worker._colocate_receiver._weights._is_reloading, (
        "a model in the middle of a push cannot run"
    )


def test_a_server_that_somebody_paused_is_noticed(make_engine, fake, caplog, hang):
    engine = make_engine(server_timeout_s=1.0)
    engine.generate(make_prompts([3]), SAMPLING)
    fake.faults["/v1/completions"] = [hang] * 9
    fake.is_paused = True
    started_s = time.monotonic()
    with pytest.raises(ServerPaused, match=r"paused for 1 s \(rollout_server_timeout\).*POST /resume"):
        engine.generate(make_prompts([3]), SAMPLING)
    assert time.monotonic() - started_s < 30  # who waits for an answer waits for a minute
    assert "is paused in the middle of a rollout" in caplog.text


# ── Files in the temporary directory ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", ["others may write", "a link", "another user's", "own"])
def test_a_configuration_that_somebody_else_laid_out_is_not_read(model, tmp_path, monkeypatch, caplog, case):
    monkeypatch.setattr(arguments.tempfile, "tempdir", str(tmp_path))
    honest = arguments.config_directory(model)
    root = tmp_path / f"colocate-vllm-{os.getuid()}"
    assert honest.parent == root
    (honest / "config.json").write_text("{}")
    if case == "others may write":
        root.chmod(0o777)
    elif case == "a link":
        root.rename(tmp_path / "elsewhere")
        root.symlink_to(tmp_path / "elsewhere")
    elif case == "another user's":
        monkeypatch.setattr(arguments.os, "geteuid", lambda: root.stat().st_uid + 1)
    directory = arguments.config_directory(model)
    if case == "own":
        assert directory == honest and caplog.messages == []
    else:
        assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen3"
        assert directory.parent != root and "nobody else can enter" in caplog.text
