"""One run at a time in a directory."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import socket
import time

import pytest

from colocate.checkpoints import lock
from colocate.checkpoints.lock import OutputDirInUse, RunLock

fork = multiprocessing.get_context("fork")


def hold(directory, is_held):
    with RunLock(directory):
        is_held.set()
        time.sleep(600)


def test_a_second_run_is_refused_until_the_first_ends_or_dies(tmp_path):
    is_held = fork.Event()
    other = fork.Process(target=hold, args=(tmp_path, is_held))
    other.start()
    assert is_held.wait(200)
    expected = rf"process {other.pid} on {socket.gethostname()}, since \d{{4}}-\d\d-\d\d"
    with pytest.raises(OutputDirInUse, match=expected), RunLock(tmp_path):
        pass
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    assert list(tmp_path.iterdir())  # what it left behind locks nobody out
    with RunLock(tmp_path), pytest.raises(OutputDirInUse, match=f"process {os.getpid()} "), RunLock(tmp_path):
        pass
    with RunLock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_worker_that_outlives_the_run_holds_no_lock(tmp_path):
    with RunLock(tmp_path):
        worker = fork.Process(target=time.sleep, args=(60,))
        worker.start()
    try:
        with RunLock(tmp_path):
            assert worker.is_alive()
    finally:
        worker.kill()
        worker.join()


def test_the_lock_ends_with_an_error(tmp_path):
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    with RunLock(tmp_path):
        pass


def test_all_ranks_are_refused_together(tmp_path):
    with RunLock(tmp_path):
        refused = "process 7 on node1, since yesterday"
        with pytest.raises(OutputDirInUse, match=refused):
            RunLock(tmp_path, is_main=False, gather=lambda own: [refused, *own]).__enter__()


def test_a_file_system_without_locks_gets_one_warning(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING, "colocate"), RunLock(tmp_path):
        pass
    assert caplog.text.count("without locks") == 1
