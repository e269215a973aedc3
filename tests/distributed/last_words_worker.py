"""One rank of the commands in test_last_words.py: `last_words_worker.py <directory>`.

Gives `colocate train` an option that all ranks refuse, or one of them, and leaves what each has printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

from colocate.cli import main

RUN = ("--model_name_or_path", "no/model", "--dataset_name", "some/data", "--reward_funcs", "accuracy_reward")
START = ("--use_cpu", "--ddp_timeout", "120", "--report_to", "none")
WRONG, RIGHT = ("--shard", "3"), ("--shard", "1")
CASES = {
    "all": (WRONG, WRONG),
    "second": (RIGHT, WRONG),
    "different": (("--shard", "5"), WRONG),
}


def main_of_rank(directory: Path, rank: int) -> None:
    said = {}
    for number, (case, options) in enumerate(CASES.items()):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # each case has a place to meet of its own
        printed, begin_s = io.StringIO(), time.monotonic()
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            code = main(["train", *RUN, *START, "--output_dir", str(directory), *options[rank]])
        said[case] = [code, printed.getvalue(), time.monotonic() - begin_s]
    (directory / f"said{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main_of_rank(Path(sys.argv[1]), int(os.environ["RANK"]))
