"""Seconds of a run of one step on two CPU ranks: started by torchrun, and by `--launcher ray` with a cluster
of its own. The quickstart's model and data; nothing is evaluated."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common.results import ROOT, Record, origin
from benchmarks.curves.run import warm_start

NUM_RANKS = 2
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={NUM_RANKS}", "-m", "colocate"]
RAY = ["-m", "colocate"]
OPTIONS = ["--max_steps", "1", "--eval_on_start", "false", "--eval_strategy", "no", "--report_to", "none"]


def seconds_of(launcher: str, start: Path, directory: Path) -> float:
    """How long the whole command takes, from the start of its process to its end."""
    words = TORCHRUN if launcher == "torchrun" else RAY
    command = [sys.executable, *words, "train", str(ROOT / "recipes/quickstart.yaml"), *OPTIONS]
    command += ["--model_name_or_path", str(start / "model"), "--dataset_name", str(start / "data")]
    command += ["--output_dir", str(directory / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if launcher == "ray":
        command += ["--launcher", "ray", "--ranks_per_node", str(NUM_RANKS)]
        environment |= {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(directory), "HOME": str(directory)}
    begin_s = time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return time.perf_counter() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record: Record = {"kind": "ray_start", **origin(), "num_ranks": NUM_RANKS, "torchrun": [], "ray": []}
    with tempfile.TemporaryDirectory() as directory:
        start = warm_start(Path(directory) / "start")
        for _ in range(options.repetitions):
            for launcher in ("torchrun", "ray"):
                # A short path, as those of Ray's sockets must be.
                with tempfile.TemporaryDirectory(prefix="ray") as own:
                    record[launcher].append(seconds_of(launcher, start, Path(own)))
                print(launcher, record[launcher][-1], flush=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
