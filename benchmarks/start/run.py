"""Starts one case once, and writes how long it took until it had ended.

    python -m benchmarks.start.run CASE --source DIRECTORY --directory DIRECTORY --out FILE

`--source` has the packages of the contestant. The interpreter is this one, in the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common.results import ROOT, origin
from benchmarks.start.cases import CASES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--source", type=Path, required=True, help="what stands first on PYTHONPATH")
    parser.add_argument("--directory", type=Path, required=True, help="where the case's files are")
    parser.add_argument("--out", type=Path, required=True, help="the record to write")
    options = parser.parse_args()
    case, record = CASES[options.case], origin()
    command = [sys.executable, *(word.format(directory=options.directory) for word in case.words)]
    environment = os.environ | {"PYTHONPATH": str(options.source)}
    load, before = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s = time.perf_counter()
    done = subprocess.run(
        command, input=case.typed, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    wall_s = time.perf_counter() - start_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != case.returncode:
        raise SystemExit(f"{options.case} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    record |= {
        "case": options.case,
        "wall_s": wall_s,
        "cpu_s": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "load_average": load,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
