"""The run's own record: `metrics.jsonl`, `completions.jsonl` and `run.json` in the output directory.

`metrics.jsonl` has one strict JSON object per line, in ASCII: no NaN, no Infinity (they become null).

One line per optimizer step, metrics under TRL's names beside these reserved keys:

    step        int    optimizer steps taken, from 1
    epoch       float  passes over the data
    time        float  Unix time at the end of the step, seconds
    wall_s      float  seconds since the end of the step before, all of it
    phases      dict   seconds by phase; "train/forward" is part of "train"
    memory      dict   {"device", "limit_bytes", "spans": [...]}, see `colocate.memory.timeline`

    {"step": 12, "epoch": 0.31, "time": 1790000000.1, "wall_s": 7.3, "phases": {"rollout": 4.1, "train": 3.0},
     "memory": {...}, "loss": 0.01, "reward": 0.41, "reward_std": 0.2, "completions/mean_length": 212.4, ...}

One line per evaluation, metrics under TRL's `eval_` names:

    {"eval": true, "step": 50, "epoch": 1.0, "time": 1790000300.2, "eval_reward": 0.44, ...}

`completions.jsonl` has one line per sampled completion; prompt and completion are strings or lists of
messages:

    {"step": 12, "prompt": "2 + 2 =", "completion": " 4", "rewards": {"accuracy_reward": 1.0},
     "advantage": 0.7}

`run.json` is one object that describes the run. The report shows `run_name`, `model`, `dataset`, `device`,
`versions` (a dict), `command`, `commit` and `options` (a dict of those that were set); all are optional.
`run_id` is the same for a run and those that resume it.

Only the main process writes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from colocate.reporting.completions import CompletionTable

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
RUN_FILE = "run.json"

RESERVED_KEYS = frozenset({"step", "epoch", "time", "wall_s", "phases", "memory", "eval"})


class RunLog:
    """Appends to the run's record, one flushed line at a time: what was logged survives a crash."""

    def __init__(
        self, output_dir: str | Path, resume_step: int | None = None, run_id: str | None = None
    ) -> None:
        """Open the record of a run.

        Args:
            resume_step: the step the run continues from: lines of later steps, which will be taken again, are
                dropped. None begins a new run: the files of an earlier one in the same directory are kept as
                `metrics.1.jsonl` and so on.
            run_id: whose record is continued. One of another run, as `run.json` says, is kept under such a
                name, too: the checkpoint resumed from need not be this directory's.
        """
        self._dir = Path(output_dir)
        self._dir.mkdir(parents=True, exist_ok=True)
        is_same = resume_step is not None and (run_id is None or run_id == _run_id(self._dir / RUN_FILE))
        for name in (METRICS_FILE, COMPLETIONS_FILE):
            if not is_same:
                _set_aside(self._dir / name)
            else:
                assert resume_step is not None
                _drop_after(self._dir / name, resume_step)
        self._last_step = resume_step or 0
        self._metrics = open(self._dir / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115
        self._completions = open(self._dir / COMPLETIONS_FILE, "a", encoding="utf-8")  # noqa: SIM115

    def describe(self, info: Mapping[str, Any]) -> None:
        """Write `run.json`."""
        text = json.dumps(strict_json(info), indent=2, allow_nan=False)
        (self._dir / RUN_FILE).write_text(text + "\n", encoding="utf-8")

    def log_step(
        self, step: int, metrics: Mapping[str, Any], *, epoch: float, timeline: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Append the record of one optimizer step and return it, as written.

        Args:
            timeline: what `Timeline.drain` returned: `wall_s`, `phases`, `memory`.

        Raises:
            ValueError: the step does not follow the last one, or a metric has a reserved name.
        """
        if step <= self._last_step:
            raise ValueError(
                f"Step {step} is already in {self._dir / METRICS_FILE} (last: {self._last_step}). "
                f"To continue from a checkpoint, open the RunLog with resume_step={step - 1}."
            )
        record = {"step": step, "epoch": epoch, "time": time.time(), **timeline}
        record = _write_line(self._metrics, _with_metrics(record, metrics))
        self._last_step = step
        return record

    def log_eval(self, step: int, metrics: Mapping[str, Any], *, epoch: float) -> dict[str, Any]:
        """Append the record of an evaluation done after `step` steps and return it, as written."""
        record = {"eval": True, "step": step, "epoch": epoch, "time": time.time()}
        return _write_line(self._metrics, _with_metrics(record, metrics))

    def log_completions(self, step: int, table: CompletionTable, num_samples: int = 4) -> None:
        """Append a few completions, drawn at random: picking the best would flatter the policy."""
        sample = table.sample(num_samples, seed=step)
        for i in range(len(sample.prompts)):
            row = {
                "step": step,
                "prompt": sample.prompts[i],
                "completion": sample.completions[i],
                "rewards": {name: values[i] for name, values in sample.rewards.items()},
                "advantage": sample.advantages[i],
            }
            _write_line(self._completions, row)

    @property
    def is_lost(self) -> bool:
        """Whether the file is no longer where it was opened: the directory was deleted or moved away."""
        return not os.path.exists(self._metrics.name)

    def close(self) -> None:
        self._metrics.close()
        self._completions.close()


def strict_json(value: Any) -> Any:
    """`value` with every NaN and infinity replaced by None and every scalar tensor by its number."""
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _with_metrics(record: dict[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    # Trainers hand over log records that repeat the step and the epoch.
    metrics = {name: value for name, value in metrics.items() if name not in ("step", "epoch")}
    reserved = RESERVED_KEYS & metrics.keys()
    if reserved:
        raise ValueError(f"Metrics named {sorted(reserved)} clash with the record's own keys: rename them.")
    return {**record, **metrics}


def _write_line(file: TextIO, record: Mapping[str, Any]) -> dict[str, Any]:
    strict = strict_json(record)
    try:
        file.write(json.dumps(strict, allow_nan=False) + "\n")
        file.flush()
    except OSError as error:
        error.filename = file.name  # "No space left on device", but on which?
        raise
    return strict


def _run_id(path: Path) -> str | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _set_aside(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


def _drop_after(path: Path, step: int) -> None:
    """Keep only the whole lines of steps up to `step`; a line cut short by a crash goes too."""
    if not path.exists():
        return
    shortened = path.with_suffix(".tmp")
    with open(path, encoding="utf-8") as old, open(shortened, "w", encoding="utf-8") as new:
        new.writelines(line for line in old if _step_of(line) <= step)
    os.replace(shortened, path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
