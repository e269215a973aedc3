"""A suite: measurements as processes of their own, their records, and the result made of these."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, ClassVar

from benchmarks.common.results import (
    ROOT,
    Record,
    by_part,
    committed,
    published_records,
    read_records,
    write_suite_result,
)

Claims = dict[str, float | None]
"""The figures that pages may quote, by name; None where the records do not suffice."""


class Suite:
    """The base of the suites. Each says what its parts measure, and what is claimed of the records.

    Args:
        options: of the command line, as `parse` reads them.
        commit: what the records say they are of.
    """

    name: ClassVar[str]
    """The result's name, and a part of its file's."""
    parts: ClassVar[Sequence[str]]
    hardware: ClassVar[str] = "h200"
    has_all_claims: ClassVar[bool] = True
    """Whether nothing is written while a claim is missing."""
    extends_result: ClassVar[bool] = False
    """Whether the published records count, but for those of what is measured anew."""
    has_tiny: ClassVar[bool] = True
    """Whether what it runs takes `--tiny`."""

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the options that only this suite has, or its defaults of the common ones."""

    @staticmethod
    def part_of(record: Record) -> str:
        """Which records a record is compared with: they are of one commit and one machine."""
        return ""

    def measure(self, part: str) -> None:
        raise NotImplementedError

    def claims(self, records: list[Record]) -> Claims:
        raise NotImplementedError

    def setup(self, records: list[Record]) -> dict[str, Any]:
        """What the result says beside claims and repetitions."""
        return {}

    def __init__(self, options: argparse.Namespace, commit: str) -> None:
        self.options = options
        self.records: Path = options.records
        self.records.mkdir(parents=True, exist_ok=True)
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.environment = os.environ | {"COLOCATE_COMMIT": commit, "PYTHONPATH": paths}
        self.failures: list[str] = []
        self._end_s = time.perf_counter() + options.limit_s

    @classmethod
    def parse(cls, words: list[str] | None = None) -> argparse.Namespace:
        temporary = Path(tempfile.gettempdir())
        parser = argparse.ArgumentParser(description=cls.__doc__)
        parser.add_argument("--parts", nargs="+", choices=cls.parts, default=list(cls.parts))
        parser.add_argument("--records", type=Path, default=temporary / f"colocate-{cls.name}-records")
        parser.add_argument("--model-dir", type=Path, default=temporary / "colocate-models")
        parser.add_argument(
            "--peer-site", help="a folder with the peers' packages, on PYTHONPATH of theirs only"
        )
        parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing after so long")
        parser.add_argument("--merge", action="store_true", help="measure nothing")
        parser.add_argument("--hardware", default=cls.hardware, help="names the result")
        parser.set_defaults(tiny=False)
        if cls.has_tiny:
            parser.add_argument("--tiny", action="store_true", help="tiny models and cases, to try it")
        cls.add_options(parser)
        return parser.parse_args(words)

    @classmethod
    def main(cls) -> None:
        """Measure what is asked for, and write the result if its records are all there."""
        options = cls.parse()
        # An end from outside must not leave a server on the GPU.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        suite = cls(options, "" if options.merge else committed())
        if options.tiny:  # figures of a trial must not replace those of a measurement
            trial = options.records / "trial"
            trial.mkdir(exist_ok=True)
            os.environ.setdefault("OUT", str(trial))
        for part in [] if options.merge else options.parts:
            suite.measure(part)
        suite.merge()
        if suite.failures:
            raise SystemExit("\n".join(f"FAILED: {command}" for command in suite.failures))

    def merge(self) -> None:
        """Print claims and setup, and write the result."""
        records = read_records(self.records, self.part_of)
        if self.extends_result:
            parts = by_part(self.published(), self.part_of) | by_part(records, self.part_of)
            records = list(itertools.chain(*parts.values()))
        claims, setup = self.claims(records), self.setup(records)
        print(json.dumps({"setup": setup, "claims": claims}, indent=1))
        if not self.has_all_claims:
            claims = {name: value for name, value in claims.items() if value is not None}
        if records and claims:
            write_suite_result(self.name, self.options.hardware, claims, records, part=self.part_of, **setup)

    def published(self) -> list[Record]:
        """The records in the result, if there is one."""
        return [] if self.options.tiny else published_records(self.name, self.options.hardware)

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
        if is_peer and self.options.peer_site:
            environment["PYTHONPATH"] = self.options.peer_site + os.pathsep + environment["PYTHONPATH"]
        words = [*map(str, command), *(["--tiny"] if self.options.tiny else [])]
        log, start_s = self.records / f"{time.time_ns()}-{words[0]}.log", time.perf_counter()
        print(" ".join(words), flush=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
        command_line = [
            sys.executable,
            *(launcher if num_processes > 1 else []),
            "-m",
            f"benchmarks.{words[0]}",
        ]
        with log.open("w") as stderr:
            code, output = _run([*command_line, *words[1:]], environment, stderr, timeout_s)
        print(output + f"  {time.perf_counter() - start_s:.1f} s", flush=True)
        if code == 0:
            return output
        errors = log.read_text()
        self.failures.append(f"{' '.join(words)}: status {code}: {errors.strip().rpartition(chr(10))[2]}")
        print(f"  FAILED ({code}), see {log}\n{errors[-3000:]}", flush=True)
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
