"""What the suites share: measurements as processes of their own, and the records that they leave."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
"""Of the repository."""

Record = dict[str, Any]


class Runner:
    """Runs the modules of `benchmarks`.

    Args:
        records: where records and the processes' error output go.
        commit: what the records say they are of.
        extra_words: added to every command.
        peer_site: a folder with the peers' packages, on PYTHONPATH of their processes only.
        limit_s: after so many seconds `time_is_up`.
    """

    def __init__(
        self,
        records: Path,
        commit: str,
        *,
        extra_words: list[str],
        peer_site: str | None = None,
        limit_s: float = math.inf,
    ) -> None:
        self.records = records
        self.records.mkdir(parents=True, exist_ok=True)
        self.environment = os.environ | {"COLOCATE_COMMIT": commit}
        self.failures: list[str] = []
        self._extra_words = extra_words
        self._peer_site = peer_site
        self._end_s = time.perf_counter() + limit_s

    def run(
        self,
        *command: str | Path | int,
        is_peer: bool = False,
        num_processes: int = 1,
        timeout_s: float | None = None,
        **environment: str,
    ) -> str | None:
        """Standard output of `python -m benchmarks.<command>`; None if it failed, which stops nothing else.

        Args:
            num_processes: more than one are started by torchrun.
            timeout_s: a command that takes longer has failed, and ends with all that it started.
        """
        environment = self.environment | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"} | environment
        paths = [self._peer_site if is_peer else None, str(ROOT), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        words = [*map(str, command), *self._extra_words]
        log, start_s = self.records / f"{time.time_ns()}-{words[0]}.log", time.perf_counter()
        print(" ".join(words), flush=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
        with log.open("w") as stderr:
            code, output = _run(
                [
                    sys.executable,
                    *(launcher if num_processes > 1 else []),
                    "-m",
                    f"benchmarks.{words[0]}",
                    *words[1:],
                ],
                environment,
                stderr,
                timeout_s,
            )
        print(output + f"  {time.perf_counter() - start_s:.1f} s", flush=True)
        if code == 0:
            return output
        self.failures.append(" ".join(words))
        print(f"  FAILED ({code}), see {log}\n{log.read_text()[-3000:]}", flush=True)
        return None

    def out(self, name: str) -> Path:
        """Where the next record goes."""
        return self.records / f"{time.time_ns()}-{name}.json"

    def time_is_up(self) -> bool:
        """Whether nothing more should begin."""
        return time.perf_counter() > self._end_s

    @contextmanager
    def failure_noted(self, label: str) -> Iterator[None]:
        """A block whose RuntimeError is a failure as a command's is: it stops nothing else."""
        try:
            yield
        except RuntimeError as error:
            self.failures.append(f"{label}: {error}")
            print(f"  FAILED: {error}", flush=True)

    def exit_if_failed(self) -> None:
        if self.failures:
            raise SystemExit("\n".join(f"FAILED: {command}" for command in self.failures))


def _run(
    command: list[str], environment: dict[str, str], stderr: IO[str], timeout_s: float | None
) -> tuple[int, str]:
    """Exit code and standard output."""
    # In a session of its own, whose processes can be ended together.
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL, f"  ended after {timeout_s:.0f} s\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def visible_gpus(num_gpus: int) -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them; without it the first ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(num_gpus)]


def read_records(directory: Path, part: Callable[[Record], str] = lambda record: "") -> list[Record]:
    """All records, oldest first.

    Args:
        part: of the suite, as which a record's figures are compared with others'. Parts may have been run on
            different days.

    Raises:
        ValueError: as `check_same_origin`, for each part.
    """
    records = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    by_part: dict[str, list[Record]] = {}
    for record in records:
        by_part.setdefault(part(record), []).append(record)
    for of_part in by_part.values():
        check_same_origin(of_part)
    return records


def check_same_origin(records: list[Record]) -> None:
    """Raises ValueError if records are of different commits or machines: their ratios would mean nothing."""
    for name in ("commit", "machine"):
        if len(found := {record[name] for record in records}) > 1:
            raise ValueError(
                f"The records are of more than one {name}: {sorted(found)}. Remove those that do not belong, "
                "or pass another --records."
            )
