"""A process that ends with the one that has started it, with all that it has started: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from colocate.parallel import process_group
from colocate.parallel.process_group import ProcessGroup
from processes import SOURCE
from ray_homes import marked, wait_for_end, wait_for_number

FAMILY = ["sh", "-c", "trap '' HUP TERM; sleep 1000 & echo begun; exec sleep 1000"]
"""A process with a child, which a hang-up does not end."""


@pytest.fixture
def mark() -> Iterator[str]:
    """A value that all processes of a test have in their environment: none may be left."""
    mark = uuid.uuid4().hex
    yield mark
    left = wait_for_end(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_processes_end_with_the_one_that_has_started_them(number, mark):
    script = f"""
import signal, time
from colocate.parallel.process_group import ProcessGroup
group = ProcessGroup({FAMILY!r})
time.sleep(1000)
"""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "MARK": mark}
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert starter.stdout is not None and starter.stdout.readline() == b"begun\n"
    assert len(wait_for_number(mark, 4)) == 4, "the starter, the command, its child, and the guard"
    starter.send_signal(number)
    assert starter.wait() == -number
    starter.stdout.close()


def test_the_command_has_its_own_words_files_and_exit_code_and_nothing_of_it_is_left(mark, tmp_path):
    words = [sys.executable, "-c", "import os, sys; print(*sys.argv, os.getcwd()); sys.exit(7)", "a b"]
    environment = os.environ | {"MARK": mark}
    group = ProcessGroup(words, stdout=subprocess.PIPE, cwd=tmp_path, env=environment)
    out, _ = group.communicate()  # the guard does not keep the pipe open
    assert (out.decode(), group.returncode) == (f"-c a b {tmp_path}\n", 7)
    assert len(wait_for_number(mark, 1)) == 1, "the guard"
    group.kill()


def test_killed_it_is_killed_with_its_children(mark):
    group = ProcessGroup(FAMILY, stdout=subprocess.PIPE, env=os.environ | {"MARK": mark})
    assert group.stdout is not None and group.stdout.readline() == b"begun\n"
    group.kill()
    assert group.wait() == -signal.SIGKILL
    group.kill()  # a second time it is nobody's
    group.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_act_on_it_also_where_its_starter_blocks_and_ignores_them(number, mark):
    script = f"""
import signal, sys, time
from colocate.parallel.process_group import ProcessGroup
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.{number.name}}})
signal.signal(signal.{number.name}, signal.SIG_IGN)
group = ProcessGroup([sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(1000)"])
assert sys.stdin.readline()
group.send_signal(signal.{number.name})
print(group.wait(), flush=True)
"""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "MARK": mark}
    starter = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert starter.stdout is not None and starter.stdin is not None
    assert starter.stdout.readline() == b"begun\n"
    out, _ = starter.communicate(b"now\n")
    assert int(out) == -number  # Python ends by SIGINT itself, after KeyboardInterrupt


@pytest.mark.parametrize("seconds", [0, 0.3])
def test_a_signal_for_the_whole_group_leaves_the_guard(seconds, mark, monkeypatch, tmp_path):
    """Also one that comes before the guard has done anything."""
    source, first = Path(process_group.__file__).read_text(), "def _guard(guarded: int) -> None:\n"
    assert first in source
    late = tmp_path / "process_group.py"
    late.write_text(source.replace(first, f"{first}    __import__('time').sleep({seconds})\n"))
    monkeypatch.setattr(process_group, "__file__", str(late))
    group = ProcessGroup(FAMILY, stdout=subprocess.PIPE, env=os.environ | {"MARK": mark})
    assert group.stdout is not None and group.stdout.readline() == b"begun\n"
    before = sorted(wait_for_number(mark, 3))
    os.killpg(group.pid, signal.SIGTERM)
    time.sleep(seconds + 0.2)  # for a guard that would end
    assert sorted(marked(mark)) == before and len(before) == 3
    group.kill()
    group.wait()
    group.stdout.close()
