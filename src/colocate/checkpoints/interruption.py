"""A polite request to stop: SIGTERM, as schedulers send it some time before they kill."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from accelerate import Accelerator
from accelerate.utils import gather_object


class StopRequest:
    """Remembers a SIGTERM while the block runs, so that the step in hand can end and be saved.

    The handler only takes notes: a step that stops half-way would leave parameters and moments of different
    ages. Outside the main thread Python cannot handle signals, and SIGTERM keeps its usual meaning.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._received = False
        self._previous: signal.Handlers | object = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def received(self) -> bool:
        """Whether any rank was asked to stop; all ranks get the same answer, so all stop at the same step."""
        if self._accelerator.num_processes == 1:
            return self._received
        return any(gather_object([self._received]))
