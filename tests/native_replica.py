"""A native engine as a member of a pool, which can be lost."""

from __future__ import annotations

from colocate.engines.base import EngineLost
from colocate.engines.native.engine import NativeEngine
from colocate.types import Completion


class NativeReplica(NativeEngine):
    name = "a native engine"
    takes_turns = False
    is_lost = False

    def poll(self) -> dict[int, Completion]:
        if self.is_lost:
            raise EngineLost("It was taken away.")
        return super().poll()

    def note_update(self, version: int) -> None: ...

    def is_back(self) -> bool:
        return not self.is_lost

    def rejoin(self) -> None: ...
