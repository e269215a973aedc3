"""Out of memory ends no run: memory is given back, or the plan made smaller, and the work repeated."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Remedy = Callable[[], str | None]
"""A remedy frees memory, or makes less of it needed, and says in a sentence what it did. It returns None once
it can do no more."""


class Recovery:
    """Repeats work that ran out of memory, after the first remedy that can still do something.

    Args:
        remedies: the cheapest first.
        advice: what the user can do when no remedy is left, as sentences.
    """

    def __init__(self, remedies: Sequence[Remedy], advice: str) -> None:
        self._remedies = remedies
        self._advice = advice

    def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which must leave nothing behind that changes its result when it is repeated.

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
