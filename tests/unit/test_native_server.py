"""The native engine as a rollout server, asked by a plain HTTP client and by a trainer's engine."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
import shlex
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import greedy_completions, greedy_references, make_gpt2, make_model, make_prompts
from engine_pressure import Pressure
from native_server_case import NativeServer, config_only

from colocate.cli import main
from colocate.clusters.actor import ProcessActor
from colocate.config.run_config import parse_run
from colocate.http import gate
from colocate.http.lease import ServerHeld
from colocate.http.messages import Message
from colocate.options.run_file import read_overrides
from colocate.rollout_server.native import serve as serve_module
from colocate.rollout_server.options import server_urls
from colocate.rollout_server.trainer import transports
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.rollout_server.trainer.pool import EnginePool
from colocate.rollout_server.trainer.watch import Timeouts, timeouts_among
from colocate.rollout_server.wire import receiver
from colocate.rollout_server.wire.receiver import other_weights
from colocate.serving import engine_thread
from colocate.serving.engine_thread import NUM_FIRST_STEPS, STEP_S
from colocate.types import Prompt, SamplingParams

PROMPT = [3, 1, 4, 1, 5]
LONG = 40


@pytest.fixture(scope="module", name="model")
def served_model() -> Any:
    return make_model("qwen3")


@pytest.fixture(scope="module", name="server")
def one_server(model) -> Iterator[NativeServer]:
    server = NativeServer(model, can_sleep=True)
    yield server
    server.close()


@pytest.fixture(name="make_engine")
def engines(model) -> Iterator[Callable[..., RolloutServerEngine]]:
    made: list[RolloutServerEngine] = []

    def make(server: NativeServer, policy: Any = model, **options: Any) -> RolloutServerEngine:
        made.append(
            RolloutServerEngine(policy, base_url=server.base_url, **{"bucket_bytes": 2**15, **options})
        )
        made[-1].wake_up()
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class Client:
    """An HTTP client with the server's key, of the run that holds the server."""

    def __init__(self, server: NativeServer, run_id: str = "") -> None:
        self._server = server
        self._headers = {"Authorization": f"Bearer {server.key.reveal()}", "X-Colocate-Run": run_id}

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if content is not None else {}
        connection.request(method, path, content, self._headers | kind | headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text) if text else None

    def complete(self, **fields: Any) -> tuple[int, Any]:
        return self.ask("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, **fields})

    def tell(self, do: str, run: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        message = Message(self._server.key, {"do": do, "run": run, **arguments})
        _, answer = self.ask("POST", "/collective_rpc", message.call(20))
        return message.opened(answer["results"][0])


def published(engine: RolloutServerEngine, model: Any, version: int) -> str:
    """Send the model's weights; returns their name."""
    engine.update_weights(version)
    return engine._version


@pytest.fixture
def slow(server, monkeypatch) -> threading.Event:
    """The engine goes on step by step, slowly, until the event is set."""
    hurry, poll = threading.Event(), server.loop._engine.poll

    def poll_slowly() -> Any:
        hurry.wait(0.5)
        return poll()

    monkeypatch.setattr(server.loop._engine, "poll", poll_slowly)
    return hurry


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def begun(pool: ThreadPoolExecutor, client: Client, server: NativeServer, **fields: Any) -> Future[Any]:
    """A request that the engine has gone on with for some steps."""
    before, asked = server.loop.num_steps, pool.submit(client.complete, **fields)
    wait_until(lambda: server.loop.num_steps > before + 1)
    return asked


def test_a_pause_ends_requests_with_the_tokens_that_they_have(server, model, make_engine, slow, pool):
    engine = make_engine(server, run_id="run")
    name, client = published(engine, model, 1), Client(server, "run")
    asked = begun(pool, client, server, max_tokens=LONG, temperature=0, cache_salt=name)
    assert client.ask("POST", "/pause?mode=abort") == (200, {"status": "paused"})
    status, answer = asked.result()
    (choice,) = answer["choices"]
    assert status == 200 and choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
    slow.set()
    assert client.ask("GET", "/is_paused")[1]["is_paused"]
    client.ask("POST", "/resume")
    _, whole = client.complete(max_tokens=LONG, temperature=0, cache_salt=name)
    (expected,) = whole["choices"]
    assert expected["finish_reason"] == "length" and len(expected["token_ids"]) == LONG
    assert 0 < len(choice["token_ids"]) < LONG
    assert expected["token_ids"][: len(choice["token_ids"])] == choice["token_ids"]


def test_a_pause_that_drains_lets_what_has_begun_end_and_nothing_begin(
    server, model, make_engine, slow, pool
):
    engine = make_engine(server, run_id="run")
    name, client = published(engine, model, 2), Client(server, "run")
    first = begun(pool, client, server, max_tokens=LONG, cache_salt=name)
    draining = pool.submit(client.ask, "POST", "/pause?mode=wait")
    wait_until(lambda: server.loop._draining)
    second = pool.submit(client.complete, cache_salt=name)
    wait_until(lambda: server.loop._held)
    assert not draining.done() and not first.done()
    slow.set()
    assert draining.result() == (200, {"status": "paused"})
    assert first.result()[1]["choices"][0]["finish_reason"] == "length"
    assert not second.done() and server.loop.is_paused
    client.ask("POST", "/resume")
    assert second.result()[1]["choices"][0]["finish_reason"] == "length"
    assert client.ask("POST", "/pause?mode=hold")[0] == 400


def test_requests_for_other_weights_are_refused_by_name_also_those_that_waited(
    server, model, make_engine, pool
):
    engine = make_engine(server, run_id="run")
    old, client = published(engine, model, 3), Client(server, "run")
    assert client.complete(cache_salt=old)[0] == 200
    client.ask("POST", "/pause")
    waiting = [pool.submit(client.complete, cache_salt=name) for name in (old, "run:2")]
    wait_until(lambda: len(server.loop._held) == 2)
    new = published(engine, model, 4)  # which ends the pause
    for asked, name in zip(waiting, (old, "run:2"), strict=True):
        status, answer = asked.result()
        if name != new:
            said = f"The request is for the weights '{name}', and the server has the weights '{new}'."
            assert (status, answer["error"]["message"]) == (409, said)
    assert new != old and client.complete(cache_salt=new)[0] == 200
    # While weights are coming they have no name, and a push cannot begin beside requests.
    client.tell("begin", {"id": "run"}, push="x", unless=None, replaces=None, tied_head=None, layout="other")
    assert client.complete(cache_salt=new)[0] == 200, "another layout is refused, and the old weights stay"


def test_weights_are_those_of_the_trainer_by_messages_alone(server, model, make_engine, monkeypatch):
    monkeypatch.setattr(transports, "PIECE_BYTES", 5000)
    engine = make_engine(server, transport="http")
    prompts = make_prompts([3, 7, 12], 2)
    for seed in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(seed)))
        published(engine, model, seed)
        assert greedy_completions(engine, prompts, 9) == greedy_references(model, prompts, 9)


def test_a_conversation_is_read_once_and_never_with_other_weights(server, model, make_engine, monkeypatch):
    """Each turn is a request of its own. The tokens that the server's engine reads are counted there."""
    engine, pressure = make_engine(server), Pressure(monkeypatch)
    client = Client(server, engine._run_id)
    with torch.no_grad():  # other weights than those that other tests have left at the server
        model.model.norm.weight.mul_(1.1)
    published(engine, model, 1)
    context = make_prompts([40])[0].token_ids
    for turn in range(3):
        before = pressure.num_prefilled_tokens
        status, answer = client.complete(prompt=list(context), max_tokens=9, temperature=0)
        assert status == 200
        num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert num_cached == (0 if turn == 0 else (len(context) - 2 - 1) // 16 * 16), "whole pages of 16"
        assert pressure.num_prefilled_tokens - before == len(context) - num_cached
        assert answer["usage"]["prompt_tokens"] == len(context)
        context += (*answer["choices"][0]["token_ids"], 7, 7)
    assert greedy_completions(engine, [Prompt(context, 1)], 5) == greedy_references(
        model, [Prompt(context, 1)], 5
    )
    (completion,) = engine.generate([Prompt(context, 1)], SamplingParams(3))
    assert completion.num_cached_tokens == (len(context) - 1) // 16 * 16
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)
    published(engine, model, 2)
    (completion,) = engine.generate([Prompt(context, 1)], SamplingParams(3))
    assert completion.num_cached_tokens == 0


def test_asleep_the_weights_have_no_memory_and_awake_they_are_the_trainers(server, model, make_engine):
    engine = make_engine(server)
    prompts = make_prompts([3, 7], 2)
    published(engine, model, 5)
    assert engine.takes_turns
    expected = greedy_references(model, prompts, 9)
    assert greedy_completions(engine, prompts, 9) == expected
    served = server.loop._weights._parameters.values()
    for version in (6, 7):
        engine.sleep()
        assert sum(parameter.untyped_storage().nbytes() for parameter in served) == 0
        published(engine, model, version)  # nothing is sent yet
        assert sum(parameter.untyped_storage().nbytes() for parameter in served) == 0
        engine.wake_up()
        assert greedy_completions(engine, prompts, 9) == expected


def test_a_server_that_was_put_to_sleep_unasked_is_sent_its_weights_again(
    server, model, make_engine, monkeypatch
):
    """A request to sleep may be repeated, and reach a server that knows nothing of it."""
    monkeypatch.setattr(
        receiver, "_PUSH_LEASE_S", 2.0
    )  # for which the push that is given up here is waited for
    engine, prompts = make_engine(server, run_id="run"), make_prompts([3, 7], 2)
    name, client, run = published(engine, model, 8), Client(server, "run"), {"id": "run"}
    push = dict(push="x", unless=None, replaces=None, tied_head=None)
    client.tell("begin", run, **push, layout=server.loop.receiver._layout[1])
    assert client.ask("POST", "/sleep?level=2")[0] == 200
    state = client.tell("state", run)
    assert state["is_asleep"] and state["version"] is None
    chunk = dict(chunk=0, places=[], size_bytes=0, checksum=0, offer={})
    assert client.tell("receive_chunk", run, push="x", **chunk)["is"] == "unknown"
    push["push"] = "y"
    refused = client.tell("begin", run, **push, layout=server.loop.receiver._layout[1])
    assert "POST /wake_up?tags=weights first" in refused["error"]
    with pytest.raises(RuntimeError, match="no memory for them"):
        server.loop._weights.load([])
    assert greedy_completions(engine, prompts, 9) == greedy_references(model, prompts, 9)
    assert client.tell("state", run)["version"] == name


# ── An engine that is of no use ──────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def hanging(server: NativeServer) -> Iterator[None]:
    """The thread of the engine hangs in a step, as one that has made its first steps; the HTTP server of the
    process does not."""
    stepper, release, has_begun = server.loop._stepper, threading.Event(), threading.Event()

    def hang() -> dict[int, Any]:
        has_begun.set()
        release.wait()
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepper, "num_steps", NUM_FIRST_STEPS)
        patch.setattr(stepper, "_step_s", 0.5)
        patch.setattr(server.loop._engine, "poll", hang)
        yield
        assert has_begun.is_set()
        release.set()
        server.loop.do(lambda: None).result(60)


def end_thread(server: NativeServer) -> None:
    server.end_thread()
    server.loop._thread.join(60)
    assert not server.loop._thread.is_alive()


def test_a_server_whose_engine_hangs_says_so(server, model, make_engine, pool):
    engine = make_engine(server, run_id="run")
    published(engine, model, 9)
    client = Client(server, "run")
    with hanging(server):
        asked = pool.submit(client.complete)
        wait_until(lambda: client.ask("GET", "/health")[0] == 503)
        for path in ("/health", "/is_paused"):
            status, answer = client.ask("GET", path)
            assert status == 503 and "The engine hangs" in answer["error"]["message"]
    assert asked.result()[0] == 200, "it was only slow"
    assert client.ask("GET", "/health")[0] == client.ask("GET", "/is_paused")[0] == 200


def test_a_step_that_takes_long_is_no_hang(server, model, make_engine, pool, monkeypatch):
    """The engine is in one of its first steps, which may compile kernels, for ten minutes by its clock."""
    published(make_engine(server, run_id="run"), model, 10)
    client, now_s, release = Client(server, "run"), [0.0], threading.Event()
    stepper, poll = server.loop._stepper, server.loop._engine.poll
    monkeypatch.setattr(stepper, "_step_s", STEP_S)
    monkeypatch.setattr(stepper, "num_steps", 0)
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + now_s[0])
    monkeypatch.setattr(engine_thread, "time", clock)
    monkeypatch.setattr(server.loop._engine, "poll", lambda: release.wait(60) and poll())
    asked = pool.submit(client.complete)
    wait_until(lambda: stepper.num_steps)
    now_s[0] = 600.0
    assert client.ask("GET", "/health")[0] == client.ask("GET", "/is_paused")[0] == 200
    release.set()
    assert asked.result()[0] == 200


def test_a_server_whose_engines_thread_has_ended_says_so_and_keeps_nobody_waiting(model, make_engine, pool):
    server = NativeServer(model)
    engine = make_engine(server, run_id="run")
    name, client = published(engine, model, 1), Client(server, "run")
    client.ask("POST", "/pause")
    waiting = pool.submit(client.complete, cache_salt=name)
    wait_until(lambda: server.loop._held)
    end_thread(server)
    reason = "The engine has ended by an error (SystemExit)"
    status, answer = waiting.result()
    assert status == 503 and reason in answer["error"]["message"]
    message = Message(server.key, {"do": "state"}).call(60)
    for method, path, body in (
        *(("GET", path, None) for path in ("/health", "/is_paused")),
        ("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 2}),
        ("POST", "/collective_rpc", message),
    ):
        status, answer = client.ask(method, path, body)
        assert status == 503 and reason in answer["error"]["message"], path
    server.close()


@pytest.mark.parametrize("fault", ["hangs", "ends"])
def test_the_pool_gives_an_engine_up_that_is_of_no_use(model, make_engine, fault):
    servers = [NativeServer(model) for _ in range(2)]
    quick = Timeouts(**{**vars(timeouts_among(2)), "silence_s": 0.05, "answer_s": 30.0})
    engines = [make_engine(server, run_id="run", timeouts=quick) for server in servers]
    pool, prompts = EnginePool(engines), make_prompts([3, 5, 7, 4])
    pool.wake_up()
    expected = [c.token_ids for c in pool.generate(prompts, SamplingParams(6, seed=3))]
    # Its state is asked for before a rollout, and would tell at once.
    pusher = engines[0]._pusher
    pusher.state = lambda: (pusher.start_id, engines[0]._version)
    with hanging(servers[0]) if fault == "hangs" else contextlib.nullcontext():
        if fault == "ends":
            end_thread(servers[0])
        drawn = [c.token_ids for c in pool.generate(prompts, SamplingParams(6, seed=3))]
        loss = pool._members[0].loss
        assert drawn == expected and loss is not None
        assert f"The engine {'hangs' if fault == 'hangs' else 'has ended'}" in loss.reason
        assert not engines[0].is_back()
    pool.close()
    for server in servers:
        server.close()


@pytest.mark.parametrize("fault", ["hangs", "ends"])
def test_on_ray_a_server_whose_engine_is_of_no_use_answers_no_more(server, model, make_engine, pool, fault):
    """The question of the actor that watches it; `test_cluster_replica.py` has what follows."""
    watched = server if fault == "hangs" else NativeServer(model)
    published(make_engine(watched, run_id="run"), model, 11)
    actor, question = ProcessActor(), (f"{watched.base_url}/is_paused", watched.key.reveal(), 60.0)
    assert actor.answers(*question)
    with hanging(watched) if fault == "hangs" else contextlib.nullcontext():
        asked = pool.submit(Client(watched, "run").complete)
        if fault == "ends":
            end_thread(watched)
        wait_until(lambda: not actor.answers(*question))
    asked.result(60)
    if fault == "ends":
        watched.close()


def test_a_body_is_parsed_once(server, model, make_engine, monkeypatch):
    published(make_engine(server, run_id="run"), model, 12)
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(text) or loads(text, **options))
    completion = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
    message = json.dumps(Message(server.key, {"do": "state"}).call(60)).encode()
    for path, body in (("/v1/completions", completion), ("/collective_rpc", message)):
        assert Client(server, "run").ask("POST", path, body)[0] == 200
        assert parsed.count(body) == 1, path


# ── Bad input ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("begins", [False, True], ids=["before it begins", "while it is done"])
def test_who_no_longer_waits_does_not_end_the_engines_thread(server, begins):
    """A message that is answered later than its sender waits, as `asyncio.wait_for` leaves it."""
    may_end, has_begun = threading.Event(), threading.Event()

    def hold() -> None:
        has_begun.set()
        assert may_end.wait(100)

    held = server.loop.do(hold)
    assert has_begun.wait(100)
    done: list[str] = []
    given_up = held if begins else server.loop.do(lambda: done.append("done"))
    pause = server.loop.pause()
    given_up.cancel()
    pause.cancel()
    may_end.set()
    server.loop.resume().result(100)
    assert done == [] and not server.loop.is_paused
    assert server.loop.do(lambda: "goes on").result(100) == "goes on"


def test_another_model_is_refused_with_the_differences(server, make_engine):
    with pytest.raises(ValueError, match=r"another model.*num_hidden_layers 2 instead of 3.*--engine native"):
        make_engine(server, make_model("qwen3", num_hidden_layers=3))


def test_a_second_trainer_is_refused_with_the_first_ones_name(server, make_engine):
    first = {"id": "first", "output_dir": "/runs/first", "host": "node1", "pid": 4711}
    Client(server).tell("claim", first)
    with pytest.raises(ServerHeld, match=r"belongs to the run in /runs/first \(process 4711 on node1\)"):
        make_engine(server, run_id="second", output_dir="/runs/second")
    Client(server).tell("release", first)
    make_engine(server, run_id="second")


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "message"),
    [
        ("GET", "/v1/models", None, {"Authorization": ""}, 401, "The key is missing or wrong"),
        ("POST", "/v1/completions", b" " * 5001, {}, 413, "more than 5000 bytes"),
        ("POST", "/v1/completions", {"prompt": [97], "max_tokens": 2}, {}, 400, "vocabulary is 0 to 96"),
        ("POST", "/v1/completions", {"prompt": "text", "max_tokens": 2}, {}, 400, "list of whole numbers"),
        ("POST", "/v1/completions", {"prompt": [], "max_tokens": 2}, {}, 400, "at least one token id"),
        ("POST", "/v1/completions", {"prompt": [1], "max_tokens": 0}, {}, 400, "max_tokens=0 must be"),
        ("POST", "/v1/completions", {"prompt": [1], "n": 1.5}, {}, 400, "n=1.5 must be a whole number"),
        ("POST", "/v1/completions", {"prompt": [1], "top_p": 7}, {}, 400, "top_p=7.0, but it must be"),
        (
            "POST",
            "/v1/completions",
            {"prompt": [1], "max_tokens": 999},
            {},
            400,
            "the server's context is 128",
        ),
        ("POST", "/v1/completions", {"prompt": [1], "model": "x"}, {}, 404, "There is no model 'x'"),
        ("POST", "/v1/completions", b"{", {}, 400, "no JSON object"),
        ("POST", "/pause", None, {"X-Colocate-Run": ""}, 403, "Only a run that holds the server"),
        ("GET", "/docs", None, {}, 403, "none of the routes"),
    ],
)
def test_what_is_refused(
    server, model, make_engine, monkeypatch, method, path, body, headers, status, message
):
    engine = make_engine(server, run_id="run")
    published(engine, model, 8)
    monkeypatch.setattr(gate, "MAX_BODY_BYTES", 5000)
    answered, content = Client(server, "run").ask(method, path, body, **headers)
    assert answered == status and message in content["error"]["message"]
    assert Client(server, "run").complete()[0] == 200, "and the server goes on"


def test_a_server_without_weights_draws_nothing(model):
    server = NativeServer(model)
    status, answer = Client(server).complete()
    assert status == 409 and "the server has no weights of a trainer" in answer["error"]["message"]
    server.close()


def test_answers_are_sent_at_once(server):
    """A body does not wait until the client has acknowledged its headers, which takes it 40 ms."""
    connection, times_s = http.client.HTTPConnection("127.0.0.1", server.port), []
    while len(times_s) < 10 or (min(times_s[1:]) >= 0.03 and len(times_s) < 100):  # until a quiet moment
        begin_s = time.monotonic()
        connection.request("GET", "/version", headers={"Authorization": f"Bearer {server.key.reveal()}"})
        connection.getresponse().read()
        times_s.append(time.monotonic() - begin_s)
    connection.close()
    assert min(times_s[1:]) < 0.03


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor-parallel-size", "2"], "needs --engine vllm"),
        (["--", "--block-size", "32"], "`-- --block-size` is for vLLM"),
        (["--engine", "vllm", "--dtype", "float32"], "give `-- --dtype` for vLLM"),
        (["--max_num_seqs", "0"], "max_num_seqs"),
        (["--dtype", "int8"], "--dtype='int8' must be auto, bfloat16"),
        (["--host", "203.0.113.1"], "the address is not this machine's"),
    ],
)
def test_wrong_options_are_told(model, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = config_only(model, tmp_path / "model")
    assert main(["rollout-serve", str(directory), "--port", "0", *words]) == 1
    assert message in capsys.readouterr().err


def test_a_taken_port_and_a_model_that_the_engine_does_not_know(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = config_only(make_gpt2(), tmp_path / "model")
    assert main(["rollout-serve", str(directory), "--port", str(server.port)]) == 1
    assert f"Port {server.port} of 127.0.0.1 cannot be had" in capsys.readouterr().err
    assert main(["rollout-serve", str(directory), "--port", "0"]) == 1
    assert "cannot run this model: GPT2LMHeadModel has no layout" in capsys.readouterr().err


def test_the_pages_commands_are_ones_that_are_taken(monkeypatch):
    """Every server of docs/rollout-servers.md, up to the load of its model."""
    text = (Path(__file__).parents[2] / "docs" / "rollout-servers.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [line.partition("colocate ")[2].rstrip("& ") for line in lines if "rollout-serve" in line]
    asked: list[Any] = []
    monkeypatch.setattr(serve_module, "serve", lambda model, **options: asked.append((model, options)) or 0)
    assert [main(shlex.split(command)) for command in commands] == [0] * 6
    assert {model for model, _ in asked} == {"Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"}
    assert asked[1][1]["options"].kv_cache_tokens == 262144 and asked[2][1]["options"].can_sleep
    for line in (line for line in lines if line.startswith("colocate train")):
        _, _, file, *options = shlex.split(line)
        _, values = parse_run(read_overrides(options))
        assert file == "run.yaml" and values["engine"] == "rollout_server"
        assert server_urls(values["rollout_server_base_url"])[0] == "http://localhost:8001"


def test_the_pages_refusal_is_the_servers():
    text = (Path(__file__).parents[2] / "docs" / "rollout-servers.md").read_text()
    assert f"`{other_weights('run:3', 'run:4')}`" in text


# ── Requests that no trainer sends ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fields",
    [
        {"draws": [2**64, 0, 0]}, {"draws": [0, 2**63, 0]}, {"draws": [0, 0, 2**63 - 1]},
        {"draws": [0, 0, -1]},
        {"stop_token_ids": [2**70]}, {"stop_token_ids": [-1]}, {"top_k": 2**40}, {"temperature": 10**400},
        {"temperature": 1e-40}, {"temperature": 1e999}, {"top_p": float("nan")}, {"min_p": -(10**400)},
        {"seed": 2**63}, {"max_tokens": 2**63}, {"n": 2**63}, {"repetition_penalty": 10**400},
    ],
)  # fmt: skip
def test_numbers_beyond_the_engines_are_refused_and_end_no_request_of_others(
    server, model, make_engine, pool, slow, fields
):
    name = published(make_engine(server, run_id="run"), model, 21)
    client = Client(server, "run")
    other = pool.submit(client.complete, cache_salt=name)
    wait_until(lambda: server.loop.has_requests)
    status, answer = client.complete(**fields)
    slow.set()
    assert status == 400, answer
    assert other.result()[0] == 200


def test_a_long_prompt_is_read_while_others_are_answered(server, monkeypatch):
    """By another thread than that which answers: it looks at each of its tokens."""
    threads: dict[int, set[str]] = {}
    check = gate.check_token_ids

    def noting(content: Any, vocab_size: int) -> None:
        threads.setdefault(len(content["prompt"]), set()).add(threading.current_thread().name)
        check(content, vocab_size)

    monkeypatch.setattr(gate, "check_token_ids", noting)
    client = Client(server)
    for length in (5, 100_000):
        assert client.ask("POST", "/v1/completions", {"prompt": [1] * length, "max_tokens": 2**40})[0] == 400
    assert threads[5] == {"serving-http"} and "serving-http" not in threads[100_000]
    assert client.ask("POST", "/v1/completions", b" " * (gate.MAX_PROMPT_BYTES + 1))[0] == 413


def test_a_server_that_is_paused_is_not_busy(server, model, make_engine):
    published(make_engine(server, run_id="run"), model, 22)
    client = Client(server, "run")
    assert client.ask("POST", "/pause")[0] == 200
    for _ in range(3):
        client.tell("state", {"id": "run"})
        status, answer = client.ask("GET", "/is_paused")
        assert (status, answer["is_paused"], answer["is_busy"]) == (200, True, False)
    assert client.ask("POST", "/resume")[0] == 200


def test_connections_of_strangers_take_nothing_from_a_trainer(model, monkeypatch):
    """More than there may be, on which nothing comes: the oldest are closed for those that carry requests,
    and all after the short time that strangers have."""
    limits = dataclasses.replace(serve_module.LIMITS, max_connections=8, header_s=3.0)
    monkeypatch.setattr(serve_module, "LIMITS", limits)
    server = NativeServer(model)
    client = Client(server)
    kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

    def version() -> int:
        kept.request("GET", "/version", headers=client._headers)
        answer = kept.getresponse()
        answer.read()
        return answer.status

    assert version() == 200
    own = kept.sock
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(30)]
    assert version() == 200
    assert [client.ask("GET", path)[0] for path in ("/version", "/health")] == [200, 200]
    for connection in idle:
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b"", "it is closed"
        connection.close()
    assert version() == 200 and kept.sock is own, "the trainer's connection is the same one"
    kept.close()
    server.close()
