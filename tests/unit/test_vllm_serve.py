"""`colocate rollout-serve --engine vllm` without vLLM: what it refuses, starts, and passes on."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from torch.distributed.run import get_args_parser

from colocate.cli import main
from colocate.config.run_config import parse_run
from colocate.http.key import key_of_new_server, say_who_may_use_it
from colocate.options.run_file import read_overrides
from colocate.parallel.launching import free_port
from colocate.rollout_server.vllm import serve as serve_module
from processes import SOURCE
from ray_homes import wait_for_end, wait_for_number


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Path:
    """A vLLM that records how it was called, answers /health, and ends with code 7 on SIGTERM."""
    (tmp_path / "stand_in.py").write_text(
        textwrap.dedent(
            f"""
            import http.server, json, os, signal, sys, time
            arguments = sys.argv[1:]
            is_deaf = "--deaf" in arguments
            signal.signal(signal.SIGTERM, signal.SIG_IGN if is_deaf else lambda *_: os._exit(7))
            with open({str(tmp_path / "called.json")!r}, "w") as file:
                json.dump([arguments, dict(os.environ)], file)
            if "--fail" in arguments:
                sys.exit(3)
            if is_deaf:
                time.sleep(1000)
            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self):
                    self.send_response(200)
                    self.end_headers()
                def log_message(self, *_): ...
            port = int(arguments[arguments.index("--port") + 1])
            http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COLOCATE_SERVER_KEY", raising=False)
    monkeypatch.setattr(serve_module, "_entry_point", lambda model: ("stand_in", model))
    monkeypatch.setattr(serve_module, "installed_version", lambda: Version("0.30.1"))
    return tmp_path


def test_the_guides_commands_are_ones_that_are_taken(stand_in, monkeypatch):
    """Every server of vLLM that docs/vllm.md starts, up to the start of vLLM."""
    text = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    commands = [
        line
        for block in blocks
        for line in block.splitlines()
        if "--engine vllm" in line and "colocate rollout-serve" in line
    ]
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command.partition("colocate ")[2].partition(" #")[0].rstrip("& "))
        port = words[words.index("--port") + 1] if "--port" in words else None
        words = [str(free_port()) if word == port else word for word in words]
        end = words.index("--") if "--" in words else len(words)
        tail = ["--", *words[end + 1 :], "--fail"]
        assert main([*words[:end], *([] if port else ["--port", str(free_port())]), *tail]) == 3, command


def test_the_guides_other_commands_are_ones_that_are_taken():
    """Every command of docs/vllm.md that starts no server."""
    root = Path(__file__).parents[2]
    blocks = re.findall(r"```bash\n(.*?)```", (root / "docs" / "vllm.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if "rollout-serve" not in line]
    engines = []
    for words in (shlex.split(line, comments=True) for line in lines):
        if words[0] == "torchrun":
            started = get_args_parser().parse_args(words[1:])
            assert (started.training_script, started.module) == ("colocate", True)
            words = ["colocate", *started.training_script_args]
        if words[0] == "colocate":
            assert words[1:3] == ["train", "run.yaml"]
            engines.append(parse_run(read_overrides(words[3:]))[1]["engine"])
        elif words[:2] == ["pip", "install"]:
            project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
            assert words[2] == ".[vllm]" and "vllm" in project["optional-dependencies"]
        else:  # what is the server's alone
            assert words[0] == "curl" or words[1].startswith("COLOCATE_SERVER_KEY=")
    assert engines.count("vllm") == 2 and engines.count("rollout_server") == 2 == len(engines) - 2


@pytest.mark.parametrize(("num_cores", "num_api_servers"), [(1, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_as_many_processes_answer_as_there_are_cores_for(stand_in, monkeypatch, num_cores, num_api_servers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(num_cores))
    assert serve("--", "--fail", port=free_port()) == 3
    arguments, _ = json.loads((stand_in / "called.json").read_text())
    assert arguments[arguments.index("--api-server-count") + 1] == str(num_api_servers)


def serve(*options: str, port: int) -> int:
    return main(["vllm-serve", "some/model", "--port", str(port), *options])


def test_ready_line_and_signal(stand_in, capfd, monkeypatch):
    port = free_port()

    def say_and_signal(*about: Any) -> None:  # once the server is ready
        say_who_may_use_it(*about)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(serve_module, "say_who_may_use_it", say_and_signal)
    before = signal.getsignal(signal.SIGTERM)
    assert serve("--tensor-parallel-size", "2", "--", "--load-format", "dummy", port=port) == 7
    assert signal.getsignal(signal.SIGTERM) is before
    ready, about_the_key, about_the_tokenizer = capfd.readouterr().out.splitlines()
    assert ready == (
        f"colocate rollout-serve: some/model is ready at http://127.0.0.1:{port} "
        "(vLLM 0.30.1, tensor parallel over 2)"
    )
    assert "it has no tokenizer" in about_the_tokenizer
    (key_file,) = (stand_in / "cache").rglob(f"*-{port}.key")
    assert about_the_key == f"colocate rollout-serve: every request needs the key in {key_file}"
    arguments, environment = json.loads((stand_in / "called.json").read_text())
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["COLOCATE_SERVER_KEY"] == key_file.read_text()
    assert environment["FORWARDED_ALLOW_IPS"] == "", "or whoever asks chooses the address that is logged"
    assert key_file.read_text() not in " ".join(arguments) + ready + about_the_tokenizer
    assert arguments[0] == "some/model"
    assert arguments[-2:] == ["--load-format", "dummy"], "the user's come last and win"
    for flag in ("--disable-uvicorn-access-log", "--skip-tokenizer-init"):
        arguments.remove(flag)
    options = dict(zip(arguments[1:-2:2], arguments[2:-2:2], strict=True))
    assert options["--host"] == "127.0.0.1", "for this machine alone, unless it is said"
    assert (options["--port"], options["--tensor-parallel-size"]) == (str(port), "2")
    assert (options["--logprobs-mode"], options["--generation-config"]) == ("processed_logprobs", "vllm")
    assert options["--max-num-seqs"] == "512"
    for option in ("--worker-extension-cls", "--middleware"):
        module, _, name = options[option].rpartition(".")
        assert hasattr(__import__(module, fromlist=[name]), name)


def test_a_server_that_loses_the_signal_while_it_starts_is_not_left_behind(stand_in, monkeypatch):
    monkeypatch.setattr(serve_module, "STOP_S", 1.0)
    called = stand_in / "called.json"

    def signal_when_called():
        while not called.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=signal_when_called).start()
    assert serve("--", "--deaf", port=free_port()) == 128 + signal.SIGKILL


def test_killed_it_leaves_no_vllm_behind(stand_in):
    mark = str(stand_in)  # in the environment of all that it starts
    script = f"""
from packaging.version import Version
from torch.distributed.run import get_args_parser
from colocate.cli import main
from colocate.rollout_server.vllm import serve as serve_module
serve_module._entry_point = lambda model: ("stand_in", model)
serve_module.installed_version = lambda: Version("0.30.1")
main(["vllm-serve", "some/model", "--port", "{free_port()}"])
"""
    paths = os.pathsep.join([str(SOURCE), os.environ["PYTHONPATH"]])
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}) as server:
        assert server.stdout is not None and b"is ready at" in server.stdout.readline()
        assert len(wait_for_number(mark, 3)) == 3, "the command, vLLM, and what watches over it"
        server.kill()
    assert wait_for_end(mark) == []


def test_an_address_that_others_reach_is_said_to_be_one(stand_in, capfd, monkeypatch):
    monkeypatch.setenv("COLOCATE_SERVER_KEY", "a-key-from-the-environment")
    monkeypatch.setenv("VLLM_API_KEY", "which would lock the trainer out")
    assert serve("--host", "0.0.0.0", "--", "--fail", port=free_port()) == 3
    say_who_may_use_it(key_of_new_server(1), "0.0.0.0")
    said = capfd.readouterr().out
    assert "every request needs the key in the environment variable COLOCATE_SERVER_KEY" in said
    assert "0.0.0.0 is reached from other machines" in said and "Nothing is encrypted" in said
    assert "a-key-from-the-environment" not in said and "ready" not in said
    _, environment = json.loads((stand_in / "called.json").read_text())
    assert environment["COLOCATE_SERVER_KEY"] == "a-key-from-the-environment"
    assert "VLLM_API_KEY" not in environment
    assert not (stand_in / "cache").exists()


@pytest.mark.parametrize(
    "option", ["--host", "--host=0.0.0.0", "--hos", "--port", "--api-key=x", "--grpc_port"]
)
def test_no_option_of_vllm_goes_past_the_gate(stand_in, option, capsys):
    assert serve("--", option, "0.0.0.0", port=free_port()) == 1
    said = capsys.readouterr().err
    assert f"`{option.partition('=')[0]}` is not taken behind the --" in said and "=x" not in said
    assert not (stand_in / "called.json").exists()


def test_port_taken(stand_in, capsys):
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        assert serve(port=other.server_port) == 1
        assert f"Port {other.server_port} of 127.0.0.1 cannot be had" in (said := capsys.readouterr().err)
        assert "choose another --port and give the trainer the same one" in said
    assert not (stand_in / "called.json").exists()


@pytest.mark.parametrize(
    ("version", "message"),
    [(None, "vLLM is not installed in this environment"), (Version("0.20"), "vLLM 0.20 is too old")],
)
def test_without_a_suitable_vllm(monkeypatch, capsys, version, message):
    monkeypatch.setattr(serve_module, "installed_version", lambda: version)
    assert serve(port=free_port()) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vllm-serve", "model", "--block-size", "32"], "go after --"),
        (["vllm-serve"], "model"),
        (["report", "somewhere", "--", "--dtype"], "unrecognized arguments: --dtype"),
    ],
)
def test_wrong_command_lines(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_mentions_it():
    said = subprocess.run([sys.executable, "-m", "colocate", "--help"], capture_output=True, text=True).stdout
    assert "serve" in said
