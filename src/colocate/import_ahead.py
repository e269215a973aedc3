"""Packages that PyTorch and transformers import in any case, imported beside them and not after them.

Importing is mostly waiting for files, the more so where these lie on a network, and threads wait side by
side. The packages here are large and import neither PyTorch nor transformers, so no thread waits for one that
waits for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SYMBOLS = "sympy"
"""PyTorch's sharded tensors import it, and transformers imports these."""
SCORES = "sklearn.metrics"
"""transformers imports it with its models wherever scikit-learn is installed, for assisted generation."""


@contextmanager
def importing_ahead() -> Iterator[None]:
    """Within the block, which imports PyTorch and transformers, threads import what these will ask for.

    The block ends when the threads have ended, so that nobody forks a process while they hold a lock. What
    cannot be imported is left to whoever needs it, to say so. Once PyTorch is there nothing is done.
    """
    works = (
        [] if "torch" in sys.modules else [(_import, SYMBOLS), (_import, SCORES), (_fingerprint, "triton")]
    )
    threads = [threading.Thread(target=work, args=(name,), daemon=True) for work, name in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def _import(name: str) -> None:
    with suppress(Exception):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def _fingerprint(name: str) -> None:
    """Have Triton hash its own files, which it does when it first looks for a compiled kernel."""
    with suppress(Exception):
        importlib.import_module(f"{name}.runtime.cache").triton_key()
