"""A process that ends with the one that started it, together with its own children.

Run as a program (`python process_group.py FD COMMAND ...`) this file starts a guard and becomes the command.
Only the starter has the other end of the pipe FD, which closes however the starter ends. Then the guard, a
process of the command's group, kills the group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_OF_TERMINALS = {signal.SIGINT, signal.SIGTERM}


class ProcessGroup(subprocess.Popen[bytes]):
    """A command in a session of its own, killed with all that it has started when this process has ended.

    SIGINT and SIGTERM act on it as on a shell's command, also where this process blocks or ignores them.

    Args:
        command: the program, which may be a name on PATH, and its arguments.
        options: of `subprocess.Popen`, such as stdin, stdout, stderr, cwd and env.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        guarded, held = os.pipe()
        self._held: int | None = held
        words = [sys.executable, "-IS", __file__, str(guarded), *command]
        try:
            super().__init__(words, pass_fds=(guarded,), start_new_session=True, **options)
        finally:
            os.close(guarded)

    def kill(self) -> None:
        """Kill all processes that it has started, and itself if it still runs."""
        if self._held is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.close(self._held)
            self._held = None


def _become(guarded: int, command: list[str]) -> None:
    # A signal that comes now waits: the guard must not end by it, and the command must.
    signal.pthread_sigmask(signal.SIG_BLOCK, _OF_TERMINALS)
    if os.fork() == 0:
        _guard(guarded)
    os.close(guarded)
    # A process inherits what the one above blocks and ignores, as Ray's processes do with SIGINT.
    for number in _OF_TERMINALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_TERMINALS)
    os.execvp(command[0], command)


def _guard(guarded: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # their readers wait for the last one who could write
        os.dup2(nothing, stream)
    for number in _OF_TERMINALS:  # they end the command, which may take its time
        signal.signal(number, signal.SIG_IGN)
    while os.read(guarded, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
