"""docs/security.md, held to the sockets that are open in each mode.

Rows of Ray and of vLLM are compared where these are started anyhow: in distributed/test_ray_launcher.py, in
test_vllm_server.py and in test_vllm_in_process.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from chat_templates import make_tokenizer as make_chat_tokenizer
from colocate.cli import main
from colocate.reporting.live import ReportServer
from colocate.rollout_server.native import serve as rollout_serve
from listening import EVERY, kinds_of, rows, said_of, sockets
from processes import TORCHRUN, run_python
from tiny import make_model, make_tokenizer, make_trainer
from tool_chat import user

ONE_PROCESS, RANKS = "`colocate train` with one process", "several ranks"
VLLMS = "vLLM's workers"
RAYS = ("`--launcher ray` on one machine", "a Ray cluster that you start")
RANK = """
import json, os, sys, torch
from pathlib import Path
from accelerate import PartialState
from listening import sockets
state = PartialState(cpu=True)
torch.distributed.all_reduce(torch.ones(1))
found = sockets([os.getpid(), os.getppid()])
Path(sys.argv[0]).with_name(f"{state.process_index}.json").write_text(json.dumps(sorted(found)))
torch.distributed.barrier()
state.destroy_process_group()
"""

Look = Callable[[], None]


def serve(directory: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocate.commands.serve._await_signal", look)
    assert main(["serve", "model", "--use_cpu", "--port", "0"]) == 0


def serve_rollouts(directory: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def looking() -> Iterator[Any]:
        yield SimpleNamespace(wait=lambda _: look() or True)

    monkeypatch.setattr(rollout_serve, "stop_event", looking)
    assert main(["rollout-serve", "model", "--engine", "native", "--use_cpu", "--port", "0"]) == 0


def watch_report(directory: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "run").mkdir()
    monkeypatch.setattr(ReportServer, "serve_forever", lambda server: look())
    assert main(["report", "run", "--watch", "--port", "0"]) == 0


def play_agents(directory: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_chat_tokenizer("qwen2_5")
    noted: list[None] = []

    def agent(row: dict[str, Any], endpoint: Any) -> None:
        noted.append(look())
        raise RuntimeError("seen")

    trainer = make_trainer(
        directory / "agents", agent=agent, processing_class=tokenizer, max_completion_length=8,
        model=make_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id),
        train_dataset=Dataset.from_list([{"prompt": user("hi")}] * 4),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="without a call"):
        trainer.train()
    assert noted


def chat(directory: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> Iterator[str]:
        yield "a\n"
        look()

    monkeypatch.setattr("colocate.commands.chat._piped", lines)
    assert main(["chat", "model", "--use_cpu", "--max_tokens", "2"]) == 0


MODES: dict[str, Callable[[Path, Look, pytest.MonkeyPatch], None]] = {
    ONE_PROCESS: chat,
    "`colocate report --watch`": watch_report,
    "`colocate serve`": serve,
    "`colocate rollout-serve`": serve_rollouts,
    "an agent's endpoint": play_agents,
}


def test_every_row_of_the_page_is_compared():
    names = [row[0] for row in rows()]
    assert len(names) == len(MODES) + 2 + len(RAYS)
    for mode in (*MODES, RANKS, VLLMS, *RAYS):
        assert sum(name.startswith(mode) for name in names) == 1, mode


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_listens_where_the_page_says(mode, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLOCATE_SERVER_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    before, found = sockets([os.getpid()]), []
    MODES[mode](tmp_path, lambda: found.append(sockets([os.getpid()]) - before), monkeypatch)
    assert found, "nobody looked"
    assert kinds_of(set().union(*found)) == said_of(mode)
    assert sockets([os.getpid()]) <= before, "it is over"


def test_ranks_listen_where_the_page_says(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    paths = str(Path(__file__).parents[1])
    run_python(*TORCHRUN, tmp_path / "rank.py", timeout_s=300, PYTHONPATH=paths)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(found) == 2
    kinds = kinds_of({tuple(one) for addresses in found for one in addresses})
    assert EVERY in kinds and kinds <= said_of(RANKS), kinds  # where gloo listens depends on the host's name
