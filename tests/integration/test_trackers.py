"""What W&B and Trackio keep of a run without a network, read from their own files, against its record."""

from __future__ import annotations

import json
import multiprocessing
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import make_dataset, make_trainer, read_metrics

NAMES = ("reward", "rewards/share_of_early_letters/mean", "completions/mean_length", "loss", "grad_norm")


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_PROJECT", "letters")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path


def train(tracker: str) -> list[dict[str, float]]:
    """Train three steps; returns what the run itself has noted of each."""
    options = dict(max_steps=3, run_name="first", hub_token="hf_secret", eval_strategy="steps", eval_steps=3)
    data = {"eval_dataset": make_dataset(2), "project": "letters"}
    make_trainer("run", report_to=[tracker], **data, **options).train()
    return [record for record in read_metrics("run") if not record.get("eval")]


def records_of_wandb(path: Path) -> Iterator[object]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, block, at, parts = path.read_bytes(), 32768, 7, b""
    assert content.startswith(b":W&B")
    while at + 7 <= len(content):
        if block - at % block < 7:  # the rest of a block is too short for a header
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def test_wandb_keeps_every_step_of_a_run_offline(home):
    import wandb

    steps = train("wandb")
    wandb.finish()
    wandb.teardown()  # its own process has written everything when it has ended
    (file,) = home.glob("wandb/offline-run-*/*.wandb")
    records = list(records_of_wandb(file))
    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("letters", "first")
    histories = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        for history in histories
    ]
    logged = [row for row in rows if "train/reward" in row]
    assert [row["train/global_step"] for row in logged] == [1, 2, 3]
    check_equal(logged, steps)
    assert any("eval/reward" in row for row in rows)
    assert b"hf_secret" not in file.read_bytes() and b"num_generations" in file.read_bytes()


@pytest.mark.slow
def test_trackio_keeps_every_step_of_a_run_in_its_database(home):
    # Trackio asks where its directory is when it is imported, which another test may have done by now.
    process = multiprocessing.get_context("spawn").Process(target=train, args=("trackio",))
    process.start()
    process.join()
    assert process.exitcode == 0
    steps = [record for record in read_metrics("run") if not record.get("eval")]
    with sqlite3.connect(home / "trackio" / "letters.db") as database:
        kept = database.execute("SELECT run_name, metrics FROM metrics ORDER BY id").fetchall()
        configs = database.execute("SELECT config FROM configs").fetchall()
    assert {name for name, _ in kept} == {"first"}
    rows = [json.loads(metrics) for _, metrics in kept]
    check_equal([row for row in rows if "train/reward" in row], steps)
    assert any("eval/reward" in row for row in rows)
    ((config,),) = configs
    assert "hf_secret" not in str(config) and "num_generations" in str(config)


def check_equal(logged: list[dict[str, float]], steps: list[dict[str, float]]) -> None:
    assert len(logged) == len(steps) == 3
    for row, step in zip(logged, steps, strict=True):
        for name in NAMES:
            assert row[f"train/{name}"] == pytest.approx(step[name], rel=1e-6), name
