"""The run's own record in the output directory: `metrics.jsonl`, `completions.jsonl`, `warnings.jsonl` and
`run.json`.

`metrics.jsonl` has one strict JSON object per line, in ASCII: no NaN, no Infinity (they become null).

One line per optimizer step, metrics under TRL's names besides these reserved keys:

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
messages, in UTF-8 as they are, so that one can search for them:

    {"step": 12, "prompt": "2 + 2 =", "completion": " 4", "rewards": {"accuracy_reward": 1.0},
     "advantage": 0.7}

`warnings.jsonl`, which a healthy run does not have, has one line per warning about the run:

    {"step": 5, "time": 1790000000.1, "warning": "For 5 rollouts (160 completions) every reward was 0 ..."}

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
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from colocate.reporting.completions import CompletionTable

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
WARNINGS_FILE = "warnings.jsonl"
RUN_FILE = "run.json"

RESERVED_KEYS = frozenset({"step", "epoch", "time", "wall_s", "phases", "memory", "eval"})
TRAINER_METRICS: set[str] = {*RESERVED_KEYS}
"""Names of the trainer's own metrics: a reward function's metric under such a name would replace it, or be
replaced."""


def reserve_metrics(*names: str) -> None:
    """Add names to `TRAINER_METRICS`; each file that records metrics calls it for its own."""
    TRAINER_METRICS.update(names)


class RunLog:
    """The writer of a run's record, which flushes each line: logged lines survive a crash.

    Nothing in the directory changes before the first step, so that a run which cannot start leaves the record
    of an earlier run as it is.
    """

    def __init__(
        self, output_dir: str | Path, resume_step: int | None = None, run_id: str | None = None
    ) -> None:
        """Prepare the record of a run.

        Args:
            resume_step: the step from which the run continues; lines of later steps are dropped, since these
                steps will be taken again. None: a new run begins, and files of an earlier run in the
                directory are kept as `metrics.1.jsonl` and so on.
            run_id: the run whose record is continued. If `run.json` is of another run, the record of that run
                is kept under such a name as well.
        """
        self._dir = Path(output_dir)
        self._resume_step, self._run_id = resume_step, run_id
        self._last_step = resume_step or 0
        self._description: Mapping[str, Any] | None = None
        self._evaluations: list[dict[str, Any]] = []
        self._files: tuple[TextIO, TextIO] | None = None

    def describe(self, info: Mapping[str, Any]) -> None:
        """Set the contents of `run.json`."""
        self._description = info
        if self._files is not None:
            self._write_description()

    def begin(self) -> None:
        """Open the record, and write the evaluation and completions that came before the first step."""
        if self._files is not None:
            return
        self._dir.mkdir(parents=True, exist_ok=True)
        step, run_id = self._resume_step, self._run_id
        is_same = step is not None and (run_id is None or run_id == _run_id(self._dir / RUN_FILE))
        for name in (METRICS_FILE, COMPLETIONS_FILE, WARNINGS_FILE):
            if not is_same:
                _set_aside(self._dir / name)
            else:
                assert step is not None
                _drop_after(self._dir / name, step)
        metrics = open(self._dir / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115
        # Half a character, which no file in UTF-8 can hold, becomes what JSON writes for it.
        completions = open(  # noqa: SIM115
            self._dir / COMPLETIONS_FILE, "a", encoding="utf-8", errors="backslashreplace"
        )
        self._files = metrics, completions
        self._write_description()
        for record in self._evaluations:
            _write_line(metrics, record)
        self._evaluations = []

    def _write_description(self) -> None:
        if self._description is not None:
            text = json.dumps(strict_json(self._description), indent=2, allow_nan=False)
            (self._dir / RUN_FILE).write_text(text + "\n", encoding="utf-8")

    @property
    def _metrics(self) -> TextIO:
        self.begin()
        assert self._files is not None
        return self._files[0]

    @property
    def _completions(self) -> TextIO:
        self.begin()
        assert self._files is not None
        return self._files[1]

    def log_step(
        self, step: int, metrics: Mapping[str, Any], *, epoch: float, timeline: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Append the record of one optimizer step and return it, as written.

        Args:
            timeline: what `Timeline.drain` returned: `wall_s`, `phases`, `memory`.
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
        """Append the record of an evaluation done after `step` steps and return it, as written.

        An evaluation before the first step is written with that step.
        """
        record = {"eval": True, "step": step, "epoch": epoch, "time": time.time()}
        record = _with_metrics(record, metrics)
        if self._files is None:
            self._evaluations.append(record)
            return strict_json(record)
        return _write_line(self._metrics, record)

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
            _write_line(self._completions, row, ascii_only=False)

    def log_warning(self, step: int, text: str) -> None:
        """Append a warning, which is about the rollout that `step` trains on."""
        self.begin()
        with open(self._dir / WARNINGS_FILE, "a", encoding="utf-8", errors="backslashreplace") as file:
            _write_line(file, {"step": step, "time": time.time(), "warning": text}, ascii_only=False)

    @property
    def is_lost(self) -> bool:
        """Whether the file is no longer where it was opened: the directory was deleted or moved away."""
        return self._files is not None and not os.path.exists(self._files[0].name)

    def close(self) -> None:
        self.begin()
        for file in self._files or ():
            file.close()


def earlier_record(output_dir: Path, *, has_checkpoints: bool) -> str | None:
    """A sentence that says how a new run treats an earlier record in this directory; None without one."""
    try:
        with open(output_dir / METRICS_FILE, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            steps = [_step_of(line.decode(errors="replace")) for line in file]
    except OSError:
        return None
    last = max((step for step in steps if step < math.inf), default=0)
    if not last:
        return None
    kept = _free_name(output_dir / METRICS_FILE).name
    text = f"of an earlier run, {last} steps: kept as {kept} once this run has taken a step"
    if not has_checkpoints:
        return f"{text}; that run has left no checkpoint to go on from"
    return f"{text}, its checkpoints as they are; --resume_from_checkpoint auto goes on with that run instead"


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


_LAST_BYTES = 2**16
"""Bytes at the end of a record that are read to find its last step."""

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Characters that some programs take for the end of a line, and the escapes that JSON has for them."""


def _write_line(file: TextIO, record: Mapping[str, Any], *, ascii_only: bool = True) -> dict[str, Any]:
    strict = strict_json(record)
    line = json.dumps(strict, allow_nan=False, ensure_ascii=ascii_only).translate(_LINE_ENDS)
    try:
        file.write(line + "\n")
        file.flush()
    except OSError as error:
        error.filename = file.name  # "No space left on device", but on which?
        raise
    return strict


def _run_id(path: Path) -> str | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _set_aside(path: Path) -> None:
    if path.exists() and path.stat().st_size > 0:
        path.rename(_free_name(path))


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return aside


def _drop_after(path: Path, step: int) -> None:
    """Keep only the whole lines of steps up to `step`; a line cut short by a crash is dropped, too."""
    if not path.exists():
        return
    shortened = path.with_suffix(".tmp")
    with open(path, encoding="utf-8") as old, open(shortened, "w", encoding="utf-8") as new:
        new.writelines(line for line in old if _step_of(line) <= step)
    os.replace(shortened, path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
