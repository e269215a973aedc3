"""Python's search for garbage in cycles, and objects that it may leave out.

A process that trains or serves has half a million objects, most of them parts of modules. To look through
them takes 0.3 s, in which no kernel is launched: the device would wait.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_is_left_out = False


@contextmanager
def lasting_objects_left_out() -> Iterator[None]:
    """Collect garbage, and leave all objects that exist now out of searches within the block."""
    global _is_left_out
    gc.collect()
    gc.freeze()
    _is_left_out = True
    try:
        yield
    finally:
        _is_left_out = False
        gc.unfreeze()


def collect() -> None:
    """Free all garbage in cycles, objects that were left out of searches included."""
    if _is_left_out:
        gc.unfreeze()
    gc.collect()
    if _is_left_out:
        gc.freeze()
