"""Recovery from running out of memory: memory is given back or the plan made smaller, and the work
repeated."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Remedy = Callable[[], str | None]
"""A remedy frees memory or lowers the need for it, and returns a sentence that says what it did, or None if
it can do no more."""


class Recovery:
    """Repeats work that ran out of memory, each time after the first remedy in the list that can still help.

    Args:
        remedies: what can be done about it, the cheapest first.
        advice: sentences for the error when no remedy is left: what the user can do.
    """

    def __init__(self, remedies: Sequence[Remedy], advice: str) -> None:
        self._remedies = remedies
        self._advice = advice

    def run(self, work: Callable[[], Result]) -> Result:
        """Run `work`, again after each remedy, and return its result. A failed attempt must not change a
        later result.

        Raises:
            torch.OutOfMemoryError: no remedy is left.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                shortage = error.with_traceback(None)
            # Outside of the handler the frames of `work` are gone, and the tensors that they held.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            remedy = next((done for remedy in self._remedies if (done := remedy()) is not None), None)
            if remedy is None:
                raise torch.OutOfMemoryError(f"{shortage} Nothing is left to try. {self._advice}")
            logger.warning("Out of memory: %s. %s; repeating.", str(shortage).split("\n")[0], remedy)
