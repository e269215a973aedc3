"""A lock that allows one run at a time in an output_dir; it ends with its process, even if that is killed."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = "run.lock"
_HELD_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)

logger = logging.getLogger(__name__)
_descriptors: set[int] = set()
"""Open lock files of this process."""

Train = TypeVar("Train", bound=Callable[..., Any])


class OutputDirInUse(RuntimeError):
    """Another run is writing into the same output_dir."""


class RunLock:
    """A lock that a run holds while it writes into `output_dir`: an advisory lock (flock) on a file in it.

    The kernel releases the lock when the process ends, also when it is killed. The file names the holder. On
    a file system without locks there is one warning and no lock.

    Args:
        is_main: this process takes the lock; the other processes learn whether it succeeded.
        gather: concatenates the lists of all ranks.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        is_main: bool = True,
        gather: Callable[[list], list] = lambda values: values,
    ) -> None:
        self._path = output_dir / LOCK_FILE
        self._is_main = is_main
        self._gather = gather
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        """Raises OutputDirInUse, on all ranks, if another run holds the lock."""
        holder = self._take() if self._is_main else None
        (holder, *_) = [h for h in self._gather([holder]) if h is not None] or [None]
        if holder is not None:
            raise OutputDirInUse(
                f"Another run is writing into {self._path.parent}: {holder}. Two runs in one directory would "
                "overwrite each other's record and delete each other's checkpoints. Set another output_dir, "
                "or wait for that run or end it."
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is None or self._descriptor not in _descriptors:
            return  # not taken, or this is a forked child
        # The file is deleted while it is locked: a process that waits for it then sees that it is gone.
        with contextlib.suppress(OSError):
            if _is_file_at(self._descriptor, self._path):
                self._path.unlink()
        _descriptors.discard(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None

    def _take(self) -> str | None:
        """Take the lock. Returns a description of the holder if another run has it."""
        if fcntl is None:
            return None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _holder(descriptor)
                os.close(descriptor)
                if error.errno in _HELD_BY_ANOTHER:
                    return holder
                logger.warning(
                    f"{self._path.parent} is on a file system without locks ({error}): a second run that is "
                    "given the same output_dir is not noticed."
                )
                return None
            if _is_file_at(descriptor, self._path):
                break
            os.close(descriptor)  # its holder deleted it between the two calls
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(me).encode())
        _descriptors.add(descriptor)
        self._descriptor = descriptor
        return None


def holding_run_lock(train: Train) -> Train:
    """Decorate a method of a trainer so that it holds the lock of `args.run_dir` while it runs."""

    @functools.wraps(train)
    def locked(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        from accelerate.utils import gather_object  # loads PyTorch, which takes seconds

        is_main = trainer.accelerator.is_main_process
        with RunLock(trainer.args.run_dir, is_main=is_main, gather=gather_object):
            return train(trainer, *args, **kwargs)

    return locked  # type: ignore[return-value]


def _holder(descriptor: int) -> str:
    try:
        known = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {known['pid']} on {known['host']}, since {known['since']}"
    except (ValueError, KeyError, TypeError, OSError):
        return "a process that has not said which"


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _let_go_in_child() -> None:
    """Close the lock files in a forked child, such as a reward function's worker: it may outlive the run."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
