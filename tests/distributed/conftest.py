"""What the tests of several processes share; they borrow the unit tests' tiny models."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # engine_models
