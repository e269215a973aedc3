"""Recovery from running out of memory: memory is given back or the plan made smaller, and the work
repeated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from colocate.memory import garbage
from colocate.parallel.verdict import Peers

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Remedy = Callable[[], str | None]
"""A remedy frees memory or lowers the need for it, and returns a sentence that says what it did, or None if
it can do no more."""

ALONE = Peers(torch.device("cpu"))


class Recovery:
    """Repeats work that ran out of memory, each time after the first remedy in the list that can still help.

    Several ranks repeat it together, however many of them ran out, and fail together: none is left waiting in
    a collective that follows the work. The work itself must have no collectives, or carry them to their end
    before it raises.

    Args:
        remedies: what a rank can do by itself, the cheapest first; only ranks that ran out do it.
        advice: sentences for the error when no remedy is left: what the user can do.
        joint_remedies: what all ranks do together, if one that ran out has no remedy of its own left. Each of
            them must return None on all ranks or on none.
        peers: the ranks that do the work together.
    """

    def __init__(
        self,
        remedies: Sequence[Remedy],
        advice: str,
        *,
        joint_remedies: Sequence[Remedy] = (),
        peers: Peers = ALONE,
    ) -> None:
        self._remedies = remedies
        self._advice = advice
        self._joint_remedies = joint_remedies
        self._peers = peers

    def run(self, work: Callable[[], Result]) -> Result:
        """Run `work`, again after each remedy, and return its result. A failed attempt must not change a
        later result.

        Raises:
            torch.OutOfMemoryError: no remedy is left.
            PeerError: the work of another rank has failed with something else.
        """
        while True:
            results: list[Result] = []
            error: Exception | None = None
            try:
                results.append(work())
            except torch.OutOfMemoryError as shortage:
                error = shortage.with_traceback(None)
            except Exception as failure:
                if not self._peers.are_several:
                    raise
                error = failure
            if error is not None:
                # Outside of the handler the frames of `work` are gone, and the tensors that they held.
                free_memory()
            shortages = self._peers.short_of_memory(error)
            if not shortages:
                return results[0]
            if error is None:
                results.clear()
                free_memory()  # of an attempt that is given up for another rank's sake
            self._help(shortages, is_short=error is not None)

    def _help(self, shortages: list[str], *, is_short: bool) -> None:
        """Apply a remedy for the `shortages` of some ranks; `is_short`: this rank is one of them."""
        done = _first_of(self._remedies) if is_short else None
        if self._peers.any(is_short and done is None):
            jointly = _first_of(self._joint_remedies)
            if jointly is None:
                raise torch.OutOfMemoryError(f"{'; '.join(shortages)} Nothing is left to try. {self._advice}")
            done = jointly if done is None else f"{done}. {jointly}"
        if is_short:
            logger.warning("Out of memory: %s. %s; repeating.", "; ".join(shortages), done)


def _first_of(remedies: Sequence[Remedy]) -> str | None:
    return next((done for remedy in remedies if (done := remedy()) is not None), None)


def free_memory() -> None:
    """Give tensors that nobody refers to back to the device."""
    garbage.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
