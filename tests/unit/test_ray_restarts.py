"""When a run on Ray is started again, with which options, and when it is not: without Ray."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from colocate.checkpoints.sealed import MANIFEST
from colocate.clusters import launch as launch_module
from colocate.clusters.launch import launch
from colocate.clusters.process import Ending
from colocate.parallel.rank_failure import VARIABLE, read_failure, record_failure
from colocate.parallel.ray_cluster import ClusterRequest

LOST, FAILED, STOPPED = (
    Ending(137, "rank 1 was ended by SIGKILL", was_lost=True),
    Ending(1, "rank 1 ended with exit code 1"),
    Ending(130, was_stopped=True),
)
LOST_LATE = Ending(137, "rank 1 was ended by SIGKILL", was_lost=True, was_stopped=True)
AUTO = ["--resume_from_checkpoint", "auto"]


def test_the_rank_that_failed_by_itself_is_shown():
    """Others end because of it, and their last line may be a warning about a socket."""
    because = Ending(1, "rank 0: [W] socket closed")
    silent = Ending(1, "rank 1: what all ranks find wrong", has_words=False, failed_at_s=4.0)
    first, later = (Ending(1, f"rank {n}", failed_at_s=float(n)) for n in (5, 6))
    lost = Ending(137, "rank 2 was killed", was_lost=True)
    endings = [because, silent, later, first, lost]
    assert sorted(endings, key=lambda ending: ending.order) == [lost, first, later, silent, because]


def test_a_rank_writes_once_why_it_fails_and_only_where_a_launcher_asks(monkeypatch, tmp_path):
    file = tmp_path / "error.json"
    monkeypatch.delenv(VARIABLE, raising=False)
    record_failure(ValueError("nobody asks"))
    monkeypatch.setenv(VARIABLE, str(file))
    assert read_failure(file) is None
    before_s = int(time.time())
    record_failure(ValueError("first"), "the reward is wrong")
    record_failure(RuntimeError("then everything else"))
    found = read_failure(file)
    assert found is not None and found.text == "the reward is wrong" and found.at_s >= before_s
    shown = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(file))
    assert shown.message["message"] == "ValueError: first" and shown.timestamp == found.at_s


def seal(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST).write_text("{}")


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Plays starts, each an ending and the steps whose checkpoints it writes; returns their arguments.

    There is a checkpoint of step 9 of an earlier run.
    """

    def play(*starts: tuple[Ending, list[int]], max_restarts: int = 3) -> tuple[list[list[str]], int | str]:
        output_dir = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        for name in ("checkpoint-9", "partial-checkpoint-8", "checkpoint-last"):
            seal(output_dir / name)
        seen, ended = [], []
        script = iter(starts)

        @contextmanager
        def connected(run_id: str):
            yield True

        @contextmanager
        def places(ask: ClusterRequest, name: str, **_: Any):
            yield "of ranks", "of servers"
            ended.append(name)

        @contextmanager
        def present(processes: list[str]):
            assert processes == ["a rank", "a server"]
            yield

        class Start:
            ranks, replicas = ("a rank",), ("a server",)

            def __init__(self, asked: ClusterRequest, values: Any, *groups: str) -> None:
                assert asked == ask and groups == ("of ranks", "of servers")

            async def run(self, arguments: list[str]) -> Ending:
                seen.append(arguments)
                ending, steps = next(script)
                for step in steps:
                    written = output_dir / f"checkpoint-{step}"
                    seal(written)
                    os.utime(written, ns=(2, 2 + len(seen)))
                return ending

        stand_ins = dict(connected=connected, places=places, present=present, Start=Start)
        stand_ins["run_directory"] = lambda: "here"
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(launch_module, name, stand_in)
        ask = ClusterRequest(1, 2, on_gpus=False, max_restarts=max_restarts)
        try:
            outcome: int | str = launch(["train"], {"output_dir": str(output_dir)}, ask)
        except RuntimeError as error:
            outcome = str(error)
        assert len(set(ended)) == len(seen), "each start is ended, and has a name of its own"
        assert next(script, None) is None, "each was played"
        return seen, outcome

    return play


DONE = (Ending(0), [9])


def test_a_run_that_ends_is_started_once(play):
    assert play(DONE) == ([["train"]], 0)


def test_a_loss_goes_on_from_this_runs_checkpoint_and_not_from_an_earlier_runs(play):
    seen, code = play((LOST, []), (LOST, [1, 2]), DONE)
    assert (seen, code) == ([["train"], ["train"], ["train", *AUTO]], 0)


def test_a_checkpoint_that_is_written_anew_is_this_runs(play):
    seen, _ = play((LOST, [9]), DONE)
    assert seen[1] == ["train", *AUTO]


def test_losses_are_endured_so_often_and_no_oftener(play):
    seen, text = play(*[(LOST, [1])] * 3, max_restarts=2)
    assert len(seen) == 3 and text.startswith("rank 1 was ended by SIGKILL\n") and "again 2 times" in text
    seen, text = play((LOST, [1]), max_restarts=0)
    assert len(seen) == 1 and "again" not in text


def test_an_error_is_tried_again_only_after_progress(play):
    seen, text = play((FAILED, [1]), (FAILED, []))
    assert seen == [["train"], ["train", *AUTO]] and text.startswith("rank 1 ended with exit code 1\n")
    seen, _ = play((FAILED, []))
    assert len(seen) == 1


def test_a_run_that_was_asked_to_stop_is_not_started_again(play):
    assert play((STOPPED, [1])) == ([["train"]], 130)
    seen, text = play((LOST_LATE, [1]))
    assert len(seen) == 1 and text.startswith("rank 1 was ended by SIGKILL\n"), "it is told all the same"
