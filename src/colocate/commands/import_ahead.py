"""Faster imports of PyTorch and transformers: some modules in parallel threads, others later.

Importing is mostly waiting for files, the more so where these lie on a network, and threads wait side by
side. SymPy is large and imports neither PyTorch nor transformers, so no thread waits for one that waits for
it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import ModuleType
from typing import Any

SYMBOLS = "sympy"
"""PyTorch's sharded tensors import it, and transformers imports these."""
SCORES, SCORE = "sklearn.metrics", "roc_curve"
"""A function that assisted generation calls. Wherever scikit-learn is installed, transformers before 5.24
imports it with its models, and with it SciPy and pandas: 1,200 modules, which nothing here needs."""


class _Late(ModuleType):
    """A stand-in for `SCORES`, which is imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _call_late if name == SCORE else getattr(_scores(), name)


def _call_late(*values: Any, **named: Any) -> Any:
    return getattr(_scores(), SCORE)(*values, **named)


def _scores() -> ModuleType:
    """The real module."""
    if isinstance(sys.modules.get(SCORES), _Late):
        del sys.modules[SCORES]
    return importlib.import_module(SCORES)


@contextmanager
def importing_ahead() -> Iterator[None]:
    """Import in threads the modules that PyTorch and transformers, imported in the block, will need.

    The block ends when the threads have ended, so that nobody forks a process while they hold a lock. A
    module that cannot be imported raises where it is needed.

    The garbage collector is off meanwhile, and never looks at the objects that are there at the end: some
    360,000 belong to modules and stay. Looking through them takes an eighth of the time, and later 0.1 to 0.3
    s each time.

    If PyTorch is imported already, this does nothing: there may be large objects whose memory is to be freed.
    """
    late = sys.modules.setdefault(SCORES, _Late(SCORES))
    try:
        with nullcontext() if "torch" in sys.modules else _side_by_side():
            yield
    finally:
        if isinstance(late, _Late) and sys.modules.get(SCORES) is late:
            del sys.modules[SCORES]


@contextmanager
def _side_by_side() -> Iterator[None]:
    works = [(_import, SYMBOLS), (_fingerprint, "triton")]
    threads = [threading.Thread(target=work, args=(name,), daemon=True) for work, name in works]
    collects = gc.isenabled()
    gc.disable()
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()
        gc.freeze()
        if collects:
            gc.enable()


def _import(name: str) -> None:
    with suppress(Exception):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def _fingerprint(name: str) -> None:
    """Have Triton hash its own files, which it does when it first looks for a compiled kernel."""
    with suppress(Exception):
        importlib.import_module(f"{name}.runtime.cache").triton_key()
