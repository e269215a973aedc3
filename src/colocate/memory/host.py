"""The part of the host's memory and cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def num_processes() -> int:
    """Processes of the run on this machine, which take from its memory and its cores at the same moment."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def limit_bytes() -> int:
    """Bytes of the machine's memory, or of the container's share of it."""
    limit = _container_limit_bytes()
    total = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def available_bytes() -> int:
    """Bytes that can still be taken without swapping, and without the container being killed.

    Cached files count as available: the kernel drops them when memory is asked for.
    """
    available = psutil.virtual_memory().available
    limit = _container_limit_bytes()
    if limit is None:
        return available
    files = [line.split() for line in _read("memory.stat").splitlines()]
    cached = sum(int(size) for name, size in files if name in ("active_file", "inactive_file"))
    return max(0, min(available, limit - int(_read("memory.current") or 0) + cached))


def _container_limit_bytes() -> int | None:
    """Bytes to which control group v2 limits the container; None: no limit (a file that says "max")."""
    limit = _read("memory.max")
    return int(limit) if limit.isdigit() else None


def _read(name: str) -> str:
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""
