"""Directories with weights in them do not stay when their processes are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from colocate.rollout_server.wire.shared_directory import PREFIX, SharedDirectory, remove_abandoned

PUSHING = """
import sys
from colocate.rollout_server.trainer.transports import FileTransport
transport = FileTransport(sys.argv[1])
flat = transport.buffer(2**16)
transport.offer(flat)
print(transport.directory, flush=True)
sys.stdin.read()
"""


def test_the_chunk_of_a_trainer_that_was_killed_in_a_push_is_removed_by_the_next(tmp_path):
    words = [sys.executable, "-c", PUSHING, str(tmp_path)]
    killed = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    left = Path(killed.stdout.readline().strip())
    chunk = left / "0.safetensors"
    live = SharedDirectory(str(tmp_path))
    (live.path / "0.safetensors").write_bytes(b"mine")
    assert chunk.stat().st_size > 2**16, "its process is at work"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert chunk.exists()
    another = SharedDirectory(str(tmp_path))
    assert not left.exists()
    assert (live.path / "0.safetensors").read_bytes() == b"mine" and another.path.is_dir()
    live.close()
    another.close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_removed(tmp_path):
    other, parent = tmp_path / "precious", tmp_path / "shm"
    for directory in (other, parent / f"{PREFIX}of-an-older-version", parent / "else"):
        directory.mkdir(parents=True)
        (directory / "file").write_text("kept")
    (other / "owner.lock").write_text("locked")
    (parent / f"{PREFIX}link").symlink_to(other)
    (parent / f"{PREFIX}new").mkdir()
    (parent / f"{PREFIX}new" / "owner.lock").touch()  # its owner is about to lock it
    before = sorted(tmp_path.rglob("*"))
    remove_abandoned(parent)
    remove_abandoned(tmp_path / "not there")
    assert sorted(tmp_path.rglob("*")) == before
