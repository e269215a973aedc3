"""Ranks that were not started alike are told so before the first step, and missing ones are named."""

from __future__ import annotations

import json
import re
import socket
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from colocate.parallel import meeting
from colocate.parallel.launching import free_port
from colocate.parallel.meeting import Meeting, absence, in_words, meet
from colocate.run import start_checks
from processes import run_ranks
from tiny import make_model


def rank_environment(rank: int, port: int, num_ranks: int = 2, **others: str) -> dict[str, str]:
    """The environment of a rank that no torchrun has started: the first rank opens the port."""
    variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=num_ranks, LOCAL_WORLD_SIZE=num_ranks)
    variables |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    return {name: str(value) for name, value in variables.items()} | others


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> tuple[dict[str, str], dict[str, str]]:
    """What the trainers of two ranks said in each case of the worker."""
    directory = tmp_path_factory.mktemp("start")
    for rank in range(2):
        make_model(seed=rank).save_pretrained(directory / f"model{rank}")
    for rank, value in enumerate((0.5, 0.25)):  # one file on each node's own disk
        (directory / f"node{rank}").mkdir()
        source = f"def share(completions, **_):\n    return [{value}] * len(completions)\n"
        (directory / f"node{rank}" / "rewards.py").write_text(source)
    models = {f"MODEL_{rank}": str(directory / f"model{rank}") for rank in range(2)}
    run_ranks(2, Path(__file__).with_name("start_worker.py"), directory, timeout_s=240, **models)
    first, second = (json.loads((directory / f"said{rank}.json").read_text()) for rank in range(2))
    return first, second


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        (
            "option",
            ["option learning_rate: 0.01 on rank 0 (", ", 0.02 on rank 1 (", "option temperature: 1.0"],
        ),
        ("output_dir", ["option output_dir: '", "of-rank-1' on rank 1"]),
        ("dataset", ["train_dataset's rows: 12 on rank 0", "11 on rank 1", "the whole dataset, in the same"]),
        ("order", ["train_dataset's digest: "]),
        ("eval_dataset", ["eval_dataset hard's rows: 4 on rank 0", "5 on rank 1"]),
        ("weights", ["model's weights: ", "with random weights, seed"]),
        ("directory", ["model's files: "]),
        (
            "reward",
            ["source of reward_funcs[1]: share (start_worker.py, ", "other_share (start_worker.py, "],
        ),
        ("reward_file", ["source of reward_funcs: share (rewards.py, ", "each node's own disk, the same"]),
        ("tools", ["source of tools[0]: add (", "subtract ("]),
        ("environment", ["source of environment_factory['game']: Game (", "OtherGame ("]),
        ("reward_model", ["reward model 1's files: ", "the same reward models"]),
        ("version", ["version of triton: ", "3.0.0 on rank 1", "the same packages on every node"]),
        (
            "gpu",
            [
                "Ranks 0-1 on ",
                "have the same GPU (GPU-1234): 2 processes run there on 1 GPU (CUDA_VISIBLE_DEVIC",
            ],
        ),
    ],
)
def test_ranks_that_differ_are_refused_on_every_rank(said, case, messages):
    assert said[0][case] == said[1][case]
    for message in messages:
        assert message in said[0][case]
    if case != "gpu":
        num_lines = {"option": 2, "dataset": 2, "eval_dataset": 2}.get(case, 1)
        assert said[0][case].count("\n  ") == num_lines, "something else is said to differ"


def test_ranks_that_are_alike_go_on(said):
    for case in ("alike", "unsaved"):
        assert said[0][case] == said[1][case] == ""


# ── Ranks that do not come ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables of a rank; nothing of a meeting stays."""
    monkeypatch.setattr(meeting, "_meeting", None)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def set_all(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_a_node_that_never_joins_is_named(environment):
    environment(rank_environment(0, free_port(), LOCAL_WORLD_SIZE="1"))
    with pytest.raises(TimeoutError) as error:
        meet(1)
    here = re.escape(socket.gethostname())
    assert re.match(
        rf"1 of 2 nodes joined within 1 s: rank 1 is missing. Joined: {here} \(rank 0\)", str(error.value)
    )


def test_the_first_rank_says_whom_it_waits_for(environment, monkeypatch, caplog):
    """Half an hour without a line would look like a hang."""
    monkeypatch.setattr(meeting, "PATIENCE_S", 1.0)
    environment(rank_environment(0, free_port()))
    with pytest.raises(TimeoutError):
        meet(2)
    told = "Rank 1 of 2 has not come yet after 1 s. Rank 0 waits for 2 s (ddp_timeout)"
    assert caplog.messages[0].startswith(told)


def test_a_first_node_that_never_answers_is_named(environment):
    port = free_port()
    environment(rank_environment(1, port))
    with pytest.raises(TimeoutError, match=f"waited 1 s for the first node at 127.0.0.1:{port}, and nobody"):
        meet(1)


def test_a_port_that_is_taken_is_named(environment):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        environment(rank_environment(0, taken.getsockname()[1]))
        with pytest.raises(
            RuntimeError, match=r"cannot open port \d+.*If another run has the port.*--master_port"
        ):
            meet(1)


def test_all_that_came_hear_who_did_not():
    """Of four ranks one is missing: the others stop with its name, and the first one waits for them."""
    stores = [
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=100))
    ]
    stores += [TCPStore("127.0.0.1", stores[0].port, timeout=timedelta(seconds=100)) for _ in range(2)]
    verdicts: dict[int, str] = {}

    def decide(rank: int, store: Any) -> None:
        place = Meeting(PrefixStore("test", store), rank, 4, 2)
        verdicts[rank] = place.decide(f"node{rank // 2}", lambda hosts: absence(hosts, 2, 3.0), 3.0)

    threads = [threading.Thread(target=decide, args=pair) for pair in zip((0, 1, 3), stores, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
    assert set(verdicts) == {0, 1, 3} and len(set(verdicts.values())) == 1
    assert verdicts[3].startswith("1 of 2 nodes joined within 3 s: rank 2 is missing.")
    assert "node0 (ranks 0-1); node1 (rank 3)" in verdicts[3]


def test_a_first_rank_that_has_ended_is_named():
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", host.port, timeout=timedelta(seconds=100))
    place = Meeting(PrefixStore("test", store), 1, 2, 2)
    del host
    with pytest.raises((TimeoutError, RuntimeError)) as error:
        place.decide("report", lambda _: "", 1.0)
    assert "rank 0 has ended" in str(error.value)


def test_ranks_in_words():
    assert in_words([2]) == "rank 2"
    assert in_words([0, 1, 2, 5, 8, 9]) == "ranks 0-2, 5, 8-9"
    three_of_four = absence(["a", None, "a", "a"], 4, 600)
    assert three_of_four.startswith(
        "3 of 4 processes joined within 600 s: rank 1 is missing. Joined: a (ranks 0, 2-3)"
    )
    assert absence([*["a"] * 8, *[None] * 8], 8, 1800).startswith(
        "1 of 2 nodes joined within 1,800 s: ranks 8-15 are"
    )


def test_gpus_without_nccl_are_refused(environment, monkeypatch):
    environment(rank_environment(0, free_port()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"was built without NCCL.*ddp_backend='gloo'"):
        meet(1)
    with pytest.raises(TimeoutError):  # what comes next where NCCL is not needed
        meet(1, use_cpu=True)


def test_one_process_meets_nobody(environment, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    meet(1)
    assert meeting.meeting() is None


def test_a_rank_that_stops_on_the_way_is_named():
    assert start_checks.judge(["{}", None, None]).startswith("Ranks 1-2 of 3 began, but did not come as far")


def test_revisions_are_compared_where_they_are_known():
    def report(revision: str | None) -> str:
        known = {} if revision is None else {"model's revision": revision}
        return json.dumps(
            {"host": "a", "gpu": None, "visible": None, "compared": {"model's name": "m"} | known}
        )

    assert start_checks.judge([report("1f"), report(None)]) == ""
    assert "model's revision: 1f on ranks 0, 2 (a), 2e on rank 1 (a)" in start_checks.judge(
        [report("1f"), report("2e"), report("1f")]
    )


# ── Into how many parts ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize(
    ("shard", "num_ranks", "per_node", "message"),
    [
        (4, 8, 8, "whole: 2 key/value heads / 4 = 0.5. For this model and start, shard may be {} or 1, 2."),
        (8, 4, 4, "whole: 4 processes / 8 = 0.5; 4 processes of a node / 8 = 0.5; 4 attention heads / 8 ="),
        (2, 3, 3, "whole: 3 processes / 2 = 1.5; 3 processes of a node / 2 = 1.5. For"),
        (2, 6, 3, "whole: 3 processes of a node / 2 = 1.5. For this model and start, shard may be {} or 1."),
        (2, 4, 2, None),
        ("auto", 3, 3, None),
        (1, 3, 3, None),
    ],
)
def test_parts_that_are_not_whole(shard, num_ranks, per_node, message, is_loaded, model_dir, monkeypatch):
    args = SimpleNamespace(shard=shard, world_size=num_ranks, model_init_kwargs=None, trust_remote_code=False)
    monkeypatch.setattr(meeting, "_meeting", Meeting(None, 0, num_ranks, per_node))
    model = make_model() if is_loaded else model_dir
    if message is None:
        start_checks.check_split(args, model)
    else:
        with pytest.raises(ValueError) as error:
            start_checks.check_split(args, model)
        assert message.format("'auto', 'none'") in str(error.value)


def test_a_model_that_one_rank_has_saved_is_the_same_as_before(tmp_path):
    """Then transformers has added to its configuration there; other trainers may go on from it."""
    saved, other = make_model(), make_model()
    before, config = start_checks._model(saved), saved.config.to_dict()
    saved.save_pretrained(tmp_path)
    assert saved.config.to_dict() != config
    assert start_checks._model(saved) == before == start_checks._model(other)
    other.config.rms_norm_eps *= 2
    assert start_checks._model(other) != before
