"""Keeps a user's code from ending the run's process as if the run had succeeded."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from typing import NoReturn

EXIT_CODE = 70
"""The status of a process that a user's code has ended: an error within the program (EX_SOFTWARE)."""

_exit = os._exit
_lock = threading.Lock()
_num_users = 0
_process_id = 0


class LoudExits(contextlib.ContextDecorator):
    """Makes `os._exit` in this process name its caller, and end the process with a status that is not 0.

    Nothing runs after `os._exit`: no handler, no `finally`. With status 0 a scheduler would take the run for
    finished. Forked children end with the status that they ask for. Contexts may be nested.
    """

    def __enter__(self) -> LoudExits:
        global _num_users, _process_id
        with _lock:
            _num_users += 1
            _process_id = os.getpid()
            os._exit = _exit_loudly
        return self

    def __exit__(self, *error: object) -> None:
        global _num_users
        with _lock:
            _num_users -= 1
            if _num_users == 0:
                os._exit = _exit


def place_of_exit(error: SystemExit) -> str:
    """Return the file and the line that called `exit()`, `sys.exit()` or raised SystemExit."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename[:1] != "<"]
    while len(frames) > 1 and frames[-1].name == "exit":  # trackers put a function of theirs before sys.exit
        frames.pop()
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


def _exit_loudly(status: int) -> NoReturn:
    caller = sys._getframe(1)
    is_ours = str(caller.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]
    if os.getpid() != _process_id or is_ours:
        _exit(status)
    place = f"{caller.f_code.co_name} ({caller.f_code.co_filename}:{caller.f_lineno})"
    message = (
        f"\nos._exit({status}) was called in {place}. It ends this process at once, before the run is over: "
        "nothing more is saved, and resume_from_checkpoint goes on from the last checkpoint. The status is "
        f"{status or EXIT_CODE}. Execute code that may exit in a process of its own.\n"
    )
    os.write(2, message.encode(errors="replace"))
    _exit(status or EXIT_CODE)
