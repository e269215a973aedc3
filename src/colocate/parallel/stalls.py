"""The work of a rank's main thread, and which rank the others wait for."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

STALL_S = 60.0
"""Seconds for which one rank waits and another one does the same thing, until it is told."""

_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARIES = tuple(
    f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_MEETINGS = ("/torch/distributed/", "/colocate/parallel/meeting.py")
"""Code in which a rank waits for the others."""
_REMEDIES = {
    "rewards/": "reward_timeout_s limits the time of a reward function.",
    "episodes/": "tool_timeout_s limits the time of tools and environments.",
    "experience/agent": "agent_timeout_s limits the time of an agent.",
}
_BY_DESIGN = "roll_out"
"""Work that takes ranks unlike times by design, where no code of the user's runs: they draw unlike
lengths."""


class MainThreadWork(NamedTuple):
    """The work of a rank's main thread."""

    waits: bool
    """Whether it waits for other ranks."""
    doing: str
    """The function it is in, and its file: the user's that was called from here, if there is one; empty where
    it may rightly take as long as it takes."""
    remedy: str
    """The limit of its time, as a sentence; empty: nothing."""

    @classmethod
    def of_this_process(cls) -> MainThreadWork:
        """Look at the main thread, from any thread."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        calls: list[tuple[str, str]] = []
        while frame is not None:
            calls.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        return cls.of_calls(calls[::-1])

    @classmethod
    def of_calls(cls, calls: list[tuple[str, str]]) -> MainThreadWork:
        """Read a stack of calls, each the file and the name of a function, the outermost first."""
        waits = any(part in file for file, _ in calls for part in _MEETINGS)
        is_own = [file.startswith(_PACKAGE) for file, _ in calls]
        inner = calls[is_own.index(True) :] if any(is_own) else []
        own = [(file.removeprefix(_PACKAGE), name) for file, name in inner if file.startswith(_PACKAGE)]
        users = [
            (Path(file).name, name)
            for file, name in inner
            if not file.startswith((_PACKAGE, *_LIBRARIES, "<"))  # "<frozen ...>" is the interpreter's own
        ]
        if not own or (not users and any(name == _BY_DESIGN for _, name in own)):
            return cls(waits, "", "")
        file, name = users[0] if users else own[-1]
        remedies = [
            text for place, text in _REMEDIES.items() if any(path.startswith(place) for path, _ in own)
        ]
        return cls(waits, f"{name} ({file})", "".join(remedies[:1]))


class Seen(Protocol):
    """The state of another rank (`watch.RankState`)."""

    @property
    def rank(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def waits(self) -> bool: ...

    @property
    def doing(self) -> str: ...

    @property
    def remedy(self) -> str: ...


class Stalls:
    """Notices, as ranks are looked at again and again, that one waits and another one does not come."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._waits_since_s: float | None = None
        self._since_s: dict[tuple[int, str], float] = {}
        self._told: set[tuple[int, str]] = set()

    def look(self, waits: bool, others: Iterable[Seen]) -> list[str]:
        """The messages that are due now, from the first of the waiting ranks, once for each rank that is
        late; `others` have not finished the work in hand."""
        now_s, others = time.monotonic(), list(others)
        busy = {(each.rank, each.doing): each for each in others if not each.waits and each.doing}
        self._since_s = {key: self._since_s.get(key, now_s) for key in busy}
        self._waits_since_s = (self._waits_since_s or now_s) if waits else None
        if self._waits_since_s is None or any(each.waits and each.rank < self._rank for each in others):
            return []
        texts = []
        for key, since_s in self._since_s.items():
            stalled_s = now_s - max(since_s, self._waits_since_s)
            if stalled_s >= STALL_S and key not in self._told:
                self._told.add(key)
                each = busy[key]
                texts.append(
                    f"{each.name} has been in {each.doing} for {stalled_s:.0f} s and more, and rank "
                    f"{self._rank} waits for it. {each.remedy}".rstrip()
                )
        return texts
