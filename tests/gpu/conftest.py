"""What the tests on a GPU share; they borrow the unit tests' tiny models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # engine_models

from colocate.engines.native.engine import NativeEngine


@pytest.fixture
def start_engine() -> Iterator[Callable[..., NativeEngine]]:
    """Makes an engine that is awake. A device has one KV cache, so each engine closes the one before it."""
    engines: list[NativeEngine] = []

    def close() -> None:
        while engines:
            engines.pop().close()

    def start(model: Any, **options: Any) -> NativeEngine:
        close()
        engine = NativeEngine(model, **{"page_size": 16, **options})
        engine.wake_up()
        engines.append(engine)
        return engine

    yield start
    close()
