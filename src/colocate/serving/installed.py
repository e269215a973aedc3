"""Whether the libraries that the service is made of are installed."""

from __future__ import annotations

import importlib.util

HOW_TO_INSTALL = "pip install 'starlette>=0.46' 'uvicorn>=0.34'"


def check_installed(asked: str) -> None:
    """Raises ImportError if Starlette or uvicorn is missing; `asked` names the feature that needs them."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{asked} needs {' and '.join(missing)}, which is not installed: {HOW_TO_INSTALL}")
