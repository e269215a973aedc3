"""docs/serving.md: its commands start services that answer, and its snippets run, with a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from datasets import Dataset

import colocate
from colocate.cli import main
from colocate.experience.players.agent_player import Endpoint
from colocate.serving.server import Limits
from serving_case import TOKENIZER, calling_model, random_model
from tiny import logged, make_model, make_trainer
from tool_chat import user

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
NAMED = "Qwen/Qwen2.5-0.5B-Instruct"


def test_the_conversations_figures_are_those_of_the_result():
    result = json.loads((ROOT / "benchmarks/results/conversation-cpu.json").read_text())
    claims, page = result["claims"], " ".join(PAGE.split())
    read = f"{claims['tokens_read_found']:.0f} tokens are read instead of {claims['tokens_read_anew']:,.0f}"
    assert read in page and result["setup"]["num_turns"] == 6
    found, anew = (claims[f"last_first_token_s_{name}"] for name in ("found", "anew"))
    assert f"the sixth answer begins after {found:.2f} s instead of {anew:.2f}" in page


@pytest.fixture(scope="module")
def chat_model_dir(tmp_path_factory) -> str:
    directory = str(tmp_path_factory.mktemp("model"))
    calling_model().save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


def test_no_block_is_forgotten():
    assert len(PYTHON) == 3 and len(COMMANDS) == 4 and PAGE.count("```") == 2 * (3 + 2)


def test_the_service_answers_curl_and_the_client_of_the_page_and_ends_with_ctrl_c(chat_model_dir, tmp_path):
    serve, curl, *_ = COMMANDS
    program, *words = shlex.split(serve.replace("--port 8000", "--port 0"))
    assert program == "colocate"
    words = [chat_model_dir if word == NAMED else word for word in words]
    process = subprocess.Popen(
        [sys.executable, "-m", "colocate", *words, "--served_model_name", NAMED, "--use_cpu"],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "is ready at" in line)
        (port,) = re.findall(r"http://127.0.0.1:(\d+)/v1", line)
        answer = subprocess.run(
            shlex.split(curl.replace("8000", port)), capture_output=True, text=True, check=True
        )
        assert json.loads(answer.stdout)["usage"]["completion_tokens"] <= 20
        told = subprocess.run(
            [sys.executable, "-c", PYTHON[0].replace("8000", port)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    finally:
        process.kill()
    assert list(tmp_path.iterdir()) == []


def test_the_command_for_other_machines(monkeypatch, capsys):
    """It is refused without the key of the line before, and read with it."""
    export, serve = COMMANDS[2:]
    assert export == "export COLOCATE_SERVER_KEY=$(openssl rand -hex 32)"
    words = shlex.split(serve)[1:]
    monkeypatch.delenv("COLOCATE_SERVER_KEY", raising=False)
    assert main(words) == 1
    assert "--host 0.0.0.0 is reached from other machines" in capsys.readouterr().err
    monkeypatch.setenv("COLOCATE_SERVER_KEY", os.urandom(32).hex())
    read: list[Any] = []
    monkeypatch.setattr("colocate.commands.serve._serve", lambda *arguments: read.append(arguments))
    assert main([*words, "--port", "0"]) == 0
    ((known, key, _, listening),) = read
    assert (known.max_requests, known.max_wait, known.served_model_name) == (64, 30, "qwen")
    assert key is not None and listening.fileno() == -1  # it was closed


def test_the_pages_bounds_are_the_codes():
    limits = Limits()
    assert "headers (32 KiB, 10 s) and body (8 MiB, 30 s)" in " ".join(PAGE.split())
    assert (limits.max_header_bytes, limits.header_s) == (32 * 2**10, 10)
    assert (limits.max_body_bytes, limits.body_s) == (8 * 2**20, 30)
    assert limits.max_connections == 1024 and limits.reader_s == 30


def test_the_agent_of_the_page_is_trained(tmp_path, monkeypatch):
    found: dict[str, Any] = {}

    def trainer_of(**arguments: Any) -> Any:
        arguments.pop("args")
        assert arguments.pop("model") == NAMED
        rows = [{"prompt": user("17 + 25?"), "answer": number} for number in (1, 2, 3, 4)]
        found["trainer"] = make_trainer(
            tmp_path, **{**arguments, "train_dataset": Dataset.from_list(rows)}, model=random_model(),
            processing_class=TOKENIZER, max_completion_length=120, max_steps=1, agent_timeout_s=120,
        )  # fmt: skip
        return found["trainer"]

    monkeypatch.setattr(colocate, "GRPOTrainer", trainer_of)
    exec(PYTHON[1], {})
    found["trainer"].train()
    assert 0.25 <= logged(found["trainer"], "reward")[0] <= 1


def test_the_program_of_the_page_finds_the_endpoint(tmp_path, monkeypatch):
    (tmp_path / "solve.py").write_text(
        "import os, sys, openai\n"
        "client = openai.OpenAI()\n"
        "assert str(client.base_url) == 'http://127.0.0.1:9/v1/' and client.api_key == 'a key'\n"
        "sys.exit(len(sys.argv[1]))\n"
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(PYTHON[2], names)
    assert openai.__name__ == "openai"
    endpoint = Endpoint("http://127.0.0.1:9/v1", "a key", "policy")
    assert asyncio.run(names["program"]({"task": "four"}, endpoint)) == {"exit_code": 4}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max_requests", "0"], "--max_requests=0 must be at least 1"),
        (["--max_wait", "0"], "--max_wait=0 must be more than 0"),
        (["--chat_template_kwargs", "{"], "--chat_template_kwargs is no JSON"),
        (["--chat_template_kwargs", "[1]"], "must be a JSON object"),
        (["--host", "no.such.host.invalid"], "COLOCATE_SERVER_KEY"),
        (["--engine", "transformers", "--kv_cache_tokens", "5"], "is for the native engine"),
        (["--engine", "vllm_server"], "belong together"),
        (["--vllm_server_base_url", "http://localhost:1"], "belong together"),
    ],
)
def test_options_that_cannot_be_used_are_told_before_the_model_is_loaded(options, words, monkeypatch, capsys):
    monkeypatch.delenv("COLOCATE_SERVER_KEY", raising=False)
    assert main(["serve", "no/such/model", "--port", "0", *options]) == 1
    assert words in capsys.readouterr().err


def test_the_options_of_the_trainers_server_are_pointed_to_its_command(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "some/model", "--tensor-parallel-size", "2", "--", "--max-model-len", "4096"])
    assert "a server for trainers is started by `colocate rollout-serve`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("architecture", "options", "most"),
    [
        (
            "qwen3",
            ["--max_model_len", "64", "--kv_cache_tokens", "16"],
            17,
        ),  # the cache's, and the token not fed
        ("qwen3", ["--max_model_len", "64"], 64),
        ("gpt2", [], 1024),  # no layout: by transformers
        ("qwen3", ["--engine", "transformers"], 1024),
    ],
)
def test_each_engine_serves_up_to_its_context(architecture, options, most, tmp_path, monkeypatch, capsys):
    model = make_model(architecture, vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    monkeypatch.delenv("COLOCATE_SERVER_KEY", raising=False)

    def visit() -> None:
        (base_url,) = re.findall(r"is ready at (\S+)\n", capsys.readouterr().out)
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            asked: dict[str, Any] = dict(model="it", prompt=[20] * 9)
            assert client.completions.create(**asked, max_tokens=8).usage.prompt_tokens == 9
            with pytest.raises(openai.BadRequestError, match=f"the context has {most}"):
                client.completions.create(**asked, max_tokens=most - 8)

    monkeypatch.setattr("colocate.commands.serve._await_signal", visit)
    words = [str(tmp_path), "--port", "0", "--use_cpu", "--served_model_name", "it", *options]
    assert main(["serve", *words]) == 0
