"""Rank 1 of two ends, and rank 0 says so and ends, too: also from inside a wait that does not notice."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from torch.distributed import HashStore

import processes
from colocate.parallel.launching import free_port
from colocate.parallel.watch import LastLines, Watch
from processes import SOURCE, TORCHRUN

WORKER = Path(__file__).with_name("watch_worker.py")
TIMEOUT_S = 300
"""Rank 0 waits 60 s in vain; imports take long on a busy machine."""
PATHS = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}


def start(*words: str | Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_ranks(how: str, directory: Path) -> tuple[list[int], str]:
    """Exit codes of two ranks without a launcher, and what rank 0 wrote."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        start(WORKER, how, directory, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(2)
    ]
    (out, errors), _ = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    return [rank.returncode for rank in ranks], out + errors


def check_told(text: str, at: str, what: str) -> None:
    assert re.search(rf"rank 1 \({re.escape(socket.gethostname())}, pid \d+\) {what}", text), text
    assert at in text and "the last words of rank 1" in text and "resume_from_checkpoint" in text
    assert "nobody has noticed" not in text


def test_a_killed_rank_is_named_by_the_one_that_waits(tmp_path):
    codes, text = run_ranks("killed", tmp_path)
    assert codes == [1, -9]
    check_told(text, "after step 7", "has died")


def test_a_rank_that_raises_is_named_with_its_error(tmp_path):
    codes, text = run_ranks("raises", tmp_path)
    assert codes == [1, 1]
    assert re.search(r"rank 1 .* has failed: ValueError: rank 1 has found something after step 7", text), text
    assert "in end" in text and "nobody has noticed" not in text  # the traceback's last lines


@pytest.mark.slow
def test_a_rank_that_ends_is_named_by_the_one_that_waits(tmp_path):
    codes, text = run_ranks("ends", tmp_path)
    assert codes == [1, 0]
    check_told(
        text, "after step 6", "has ended its script, while rank 0 awaits it after step 7: all must call"
    )


@pytest.mark.slow
def test_who_saves_a_part_alone_is_told_that_all_must_save(tmp_path):
    codes, text = run_ranks("saves", tmp_path)
    assert codes == [1, 0]
    told = r"has ended its script, while rank 0 awaits it in save_model\(\): all must call the same methods"
    check_told(text, "after step 1", told)
    assert (tmp_path / "1" / "model.safetensors").exists() and not (tmp_path / "2" / "config.json").exists()


def test_a_rank_that_hangs_is_named_with_what_it_does(tmp_path):
    text = processes.run_ranks(2, WORKER, "hangs", tmp_path, timeout_s=TIMEOUT_S)
    told = r"rank 1 \(.*, pid \d+\) has been in slow \(watch_worker.py\) for 2 s and more, and rank 0 waits"
    assert len(re.findall(told, text)) == 1 and "reward_timeout_s limits the time" in text, text


@pytest.mark.slow
def test_a_trainer_whose_collective_breaks_says_why(tmp_path):
    codes, text = run_ranks("trainer", tmp_path)
    assert codes == [1, -9]
    check_told(text, "after step 1", "has died")


@pytest.mark.slow
def test_under_torchrun_it_is_told_before_the_agent_ends_all(tmp_path):
    run = start(*TORCHRUN, WORKER, "killed", tmp_path)
    out, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 1
    check_told(out + errors, "after step 7", "has died")


def test_torchrun_shows_the_rank_that_failed_first(tmp_path):
    """And not one that has ended because of it, whose last line may be a socket's."""
    run = start(*TORCHRUN, WORKER, "raises", tmp_path)
    _, errors = run.communicate(timeout=TIMEOUT_S)
    cause = errors.partition("Root Cause (first observed failure)")[2]
    assert re.search(r"rank +: 1 ", cause) and "ValueError: rank 1 has found something" in cause, errors


def test_of_a_progress_bar_the_last_state_is_kept(capsys):
    tail = LastLines(sys.stderr)
    print("first\n 1%|#\r 50%|##", end="", file=tail)
    print("\r99%|###\nlast", file=tail)
    assert tail.lines() == ["first", "99%|###", "last"]
    assert capsys.readouterr().err.startswith("first\n 1%|#\r")


def test_what_is_watched_is_not_kept_when_its_work_is_over():
    class Run:
        def progress(self) -> str:
            return "after step 3"

    run, store = Run(), HashStore()
    watch, alive = Watch(store, rank=0, num_ranks=1, silence_s=60), weakref.ref(run)
    with watch.work(run.progress):
        pass
    del run
    assert alive() is None
    with pytest.raises(ValueError), watch.work(lambda: "after step 4"):
        raise ValueError
    assert json.loads(store.get("0"))["at"] == "after step 4"
