"""A run as its record describes it, from which the report and the picture are drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from colocate.reporting.run_log import COMPLETIONS_FILE, METRICS_FILE, RESERVED_KEYS, RUN_FILE, WARNINGS_FILE

MAX_STEPS_DRAWN = 8
"""Steps of one rollout whose memory a chart has room for."""


@dataclass(frozen=True)
class RecordedRun:
    """The records of one run. Entries that are missing or not numbers are read as NaN."""

    directory: Path
    info: dict[str, Any]
    steps: list[dict[str, Any]]
    """One record per optimizer step, in order."""
    evals: list[dict[str, Any]]
    num_unreadable: int
    """Lines of the record that were not a JSON object with a step."""

    @property
    def name(self) -> str:
        return str(self.info.get("run_name") or self.directory.resolve().name)

    @cached_property
    def x(self) -> list[float]:
        """The numbers of the steps."""
        return [float(record["step"]) for record in self.steps]

    def metric(self, name: str) -> list[float]:
        """The value of a metric at each step.

        The record has a rollout's metrics only at the first of the steps that the rollout feeds; here they
        hold for all of these steps. A null in the record is a value that was not a number.
        """
        if name not in self._metrics:
            values: list[float] = []
            for record in self.steps:
                is_carried = name not in record and values
                values.append(values[-1] if is_carried else number(record.get(name)))
            if name.endswith("_terminated_length"):  # logged as 0, as in TRL, where no completion has ended
                cut = self.metric("completions/clipped_ratio")
                values = [math.nan if c == 1 else v for v, c in zip(values, cut, strict=True)]
            self._metrics[name] = values
        return self._metrics[name]

    @cached_property
    def _metrics(self) -> dict[str, list[float]]:
        """Columns that `metric` has read, for up to 50,000 steps: wide and narrow drawings read the same
        ones."""
        return {}

    def eval_metric(self, name: str) -> tuple[list[float], list[float]]:
        """The steps at which `name` was evaluated, and its values."""
        pairs = [(float(record["step"]), number(record.get(name))) for record in self.evals]
        pairs = [(step, value) for step, value in pairs if math.isfinite(value)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    @cached_property
    def metric_names(self) -> list[str]:
        """The names of all metrics that are a number at some step, in order of appearance."""
        names: dict[str, None] = {}
        for record in self.steps:
            for name, value in record.items():
                if name not in names and math.isfinite(number(value)):
                    names[name] = None
        return [name for name in names if name not in RESERVED_KEYS]

    @cached_property
    def wall_s(self) -> list[float]:
        """Seconds of each step, no less than the sum of its phases."""
        return [
            max(finite_or_zero(record.get("wall_s")), sum(phases.values()))
            for record, phases in zip(self.steps, self.phases, strict=True)
        ]

    @cached_property
    def phases(self) -> list[dict[str, float]]:
        """Seconds of each step by phase, without parts of phases."""
        return [{n: s for n, s in _seconds(record).items() if "/" not in n} for record in self.steps]

    @cached_property
    def phase_totals(self) -> dict[str, float]:
        """Seconds of the run by phase and part of phase; "other" is the time outside of all phases."""
        totals: dict[str, float] = {}
        for record in self.steps:
            for name, seconds in _seconds(record).items():
                totals[name] = totals.get(name, 0.0) + seconds
        outside = sum(self.wall_s) - sum(seconds for name, seconds in totals.items() if "/" not in name)
        if outside > 0.001 * sum(self.wall_s):
            totals["other"] = totals.get("other", 0.0) + outside
        return totals

    @cached_property
    def phase_names(self) -> list[str]:
        """The phases, without parts, in the order in which they first ran; "other" is last."""
        names = [name for name in self.phase_totals if "/" not in name]
        return sorted(names, key=lambda name: name == "other")

    def seconds_in(self, phase: str) -> list[float]:
        """Seconds of each step in a phase, without parts; in "other" with those outside of all phases."""
        if phase not in self._seconds_by_phase:
            seconds = [phases.get(phase, 0.0) for phases in self.phases]
            if phase == "other":
                outside = (
                    wall - sum(phases.values()) for wall, phases in zip(self.wall_s, self.phases, strict=True)
                )
                seconds = [inside + more for inside, more in zip(seconds, outside, strict=True)]
            self._seconds_by_phase[phase] = seconds
        return self._seconds_by_phase[phase]

    @cached_property
    def _seconds_by_phase(self) -> dict[str, list[float]]:
        return {}

    @cached_property
    def warnings(self) -> list[tuple[int, str]]:
        """The warnings about the run, each with the step that it was made before."""
        records = _read_objects(self.directory / WARNINGS_FILE)
        return [(r["step"], str(r["warning"])) for r in records if r is not None and "warning" in r]

    @property
    def completions_per_rollout(self) -> float:
        """Completions of a rollout over all ranks; NaN if the record does not say."""
        return number(_mapping(self.info.get("options")).get("generation_batch_size"))

    @cached_property
    def tokens_per_second(self) -> list[float]:
        """Tokens per second by step, from TRL's running count `num_tokens` and the steps' wall times.

        All steps that one rollout feeds have one speed: the rollout's tokens divided by the seconds of all of
        these steps. Otherwise the step with the rollout would have all the tokens, and the others none.
        """
        tokens = self.metric("num_tokens")
        speeds: list[float] = []
        before = 0.0 if self.x[0] == 1 else math.nan
        for now, group in groupby(range(len(tokens)), key=tokens.__getitem__):
            rows = list(group)
            wall = sum(self.wall_s[row] for row in rows)
            known = wall > 0 and now >= before
            speeds += [(now - before) / wall if known else math.nan] * len(rows)
            before = now
        return speeds

    @property
    def throughput(self) -> float:
        """Tokens per second over all steps whose speed is known, weighed by their seconds; NaN if there is
        none."""
        known = [(s, w) for s, w in zip(self.tokens_per_second, self.wall_s, strict=True) if math.isfinite(s)]
        seconds = sum(w for _, w in known)
        return sum(s * w for s, w in known) / seconds if seconds else math.nan

    @cached_property
    def spans(self) -> list[list[dict[str, Any]]]:
        """The memory spans of each step that have a phase, two times and a peak; `points` is always a
        list."""
        return [_spans(record) for record in self.steps]

    @cached_property
    def limit_bytes(self) -> float:
        """Bytes of the device's memory; NaN if the record does not have them."""
        return number(_mapping(self.steps[-1].get("memory")).get("limit_bytes"))

    def typical_step(self) -> int | None:
        """Index of the step with the median duration among the last half of the steps with memory spans.

        Only steps with a rollout are considered, if there are any: in other steps the engine sleeps
        throughout.
        """
        seen = [i for i, spans in enumerate(self.spans) if _has_rollout(spans)]
        seen = seen or [i for i, spans in enumerate(self.spans) if spans]
        seen = seen[len(seen) // 2 :]
        if not seen:
            return None
        middle = median(self.wall_s[i] for i in seen)
        return min(seen, key=lambda i: abs(self.wall_s[i] - middle))

    def typical_steps(self) -> range:
        """Indices of the typical step and of those after it that train on the same rollout, at most
        `MAX_STEPS_DRAWN`; empty without memory spans."""
        first = self.typical_step()
        if first is None:
            return range(0)
        last, end = first, min(len(self.steps), first + MAX_STEPS_DRAWN)
        if _has_rollout(self.spans[first]):
            while last + 1 < end and self.spans[last + 1] and not _has_rollout(self.spans[last + 1]):
                last += 1
        return range(first, last + 1)

    def completions(self) -> Iterator[dict[str, Any]]:
        """The completions that were sampled of each logged step, in order."""
        return (record for record in _read_objects(self.directory / COMPLETIONS_FILE) if record is not None)


def read_run(run_dir: str | Path) -> RecordedRun:
    """Read a run's directory.

    Raises:
        FileNotFoundError: there is no `metrics.jsonl`.
        ValueError: it has no record of a step.
    """
    directory = Path(run_dir)
    path = directory / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"No {METRICS_FILE} in {directory.resolve()}: that is not the output directory of a run, or the "
            "run has not begun. Pass the run's `output_dir`."
        )
    steps: dict[float, dict[str, Any]] = {}
    evals: dict[float, dict[str, Any]] = {}
    num_unreadable = 0
    for record in _read_objects(path):
        if record is None:
            num_unreadable += 1
        else:
            (evals if record.get("eval") else steps)[record["step"]] = record
    if not steps:
        raise ValueError(
            f"{path.resolve()} has no record of an optimizer step ({len(evals)} of evaluations, "
            f"{num_unreadable} unreadable lines): the run has not finished its first step."
        )
    ordered = [steps[step] for step in sorted(steps)]
    return RecordedRun(
        directory, _read_info(directory), ordered, [evals[s] for s in sorted(evals)], num_unreadable
    )


def number(value: Any) -> float:
    """`value` as a float; NaN if it is not a number that can be drawn."""
    if type(value) is float:  # nearly always, and asked millions of times of a long run
        return value if abs(value) < 1e300 else math.nan
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else math.nan


def finite_or_zero(value: Any) -> float:
    value = number(value)
    return value if math.isfinite(value) else 0.0


def _read_objects(path: Path) -> Iterator[dict[str, Any] | None]:
    """The objects of a JSON-lines file; None for a line that is not an object with a step."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # nested too deeply
                record = None
            has_step = isinstance(record, dict) and math.isfinite(number(record.get("step")))
            yield record if has_step else None


def _read_info(directory: Path) -> dict[str, Any]:
    """The description of the run in `run.json`; without that file, TRL's options in `config.yaml`."""
    try:
        return _mapping(json.loads((directory / RUN_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        pass
    try:
        config = _mapping(yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    names = {"run_name": "run_name", "model": "model_name_or_path", "dataset": "dataset_name"}
    return {ours: config[theirs] for ours, theirs in names.items() if config.get(theirs)}


def _seconds(record: dict[str, Any]) -> dict[str, float]:
    return {name: finite_or_zero(value) for name, value in _mapping(record.get("phases")).items()}


def _spans(record: dict[str, Any]) -> list[dict[str, Any]]:
    spans = _mapping(record.get("memory")).get("spans")
    spans = spans if isinstance(spans, list) else []
    return [
        {**span, "phase": str(span["phase"]), "points": _points(span)} for span in spans if _is_span(span)
    ]


def _has_rollout(spans: list[dict[str, Any]]) -> bool:
    return any(span["phase"] == "rollout" for span in spans)


def _is_span(span: Any) -> bool:
    if not isinstance(span, dict) or "phase" not in span:
        return False
    start, end, peak = (number(span.get(key)) for key in ("start_s", "end_s", "peak_bytes"))
    return start <= end and math.isfinite(peak)


def _points(span: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of a span that have two sizes and a time within the span, in the order of time."""
    points = span.get("points")
    known = [point for point in points if isinstance(point, dict)] if isinstance(points, list) else []
    start, end = number(span["start_s"]), number(span["end_s"])
    whole = [
        point
        for point in known
        if start <= number(point.get("at_s")) <= end
        and all(math.isfinite(number(point.get(key))) for key in ("in_use_bytes", "peak_bytes"))
    ]
    return sorted(whole, key=lambda point: point["at_s"])


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
