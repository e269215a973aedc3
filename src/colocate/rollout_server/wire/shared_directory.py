"""`SharedDirectory`: a directory in memory or on disk that does not outlive its process for long.

A process that is killed removes nothing. So its directory has a locked file (flock), whose lock the kernel
gives back with the process, and the next process to make such a directory removes those without a holder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "colocate-weights-"
_LOCK_FILE = "owner.lock"
SHARED_MEMORY = Path("/dev/shm")


class SharedDirectory:
    """A directory that is deleted with this object, when the process ends, or by the next process that makes
    one.

    Args:
        parent: where to make it; None: where temporary files are.
    """

    def __init__(self, parent: str | None) -> None:
        remove_abandoned(Path(parent or tempfile.gettempdir()))
        self._owner = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
        self.path = Path(self._owner.name)
        self._descriptor: int | None = os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # a file system without locks, where nobody removes what others have left
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            os.write(self._descriptor, b"locked")

    def close(self) -> None:
        """Delete the directory."""
        self._owner.cleanup()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def remove_abandoned(parent: Path) -> None:
    """Delete the directories here that processes of this user have left behind."""
    try:
        found = [entry for entry in parent.iterdir() if entry.name.startswith(PREFIX)]
    except OSError:
        return
    for directory in found:
        with suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(directory / _LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_size:  # else its owner is about to lock it
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)
