"""The completions that a run has logged, read for its report."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from colocate.reporting.completions import as_text
from colocate.reporting.language import language_of
from colocate.reporting.run import Run, number

_COLUMNS = {"step", "prompt", "completion", "advantage"}


def logged_completions(run: Run) -> list[dict[str, Any]]:
    """All that is known of the completions, in the order of steps.

    With `log_completions=True` these are all of each logged step, else the few that every run samples. Each
    has step, group (its number within the step), prompt and completion as text, prompt_lang and
    completion_lang (`language.language_of` them), and scores (a number or None by name).
    """
    return with_groups(_of_tables(run.directory) or list(_of_samples(run)))


def first_and_last(records: list[dict[str, Any]], most: int) -> list[list[dict[str, Any]]]:
    """`most` completions at most of the first logged step, and of the last one if that is another."""
    steps = [list(group) for _, group in groupby(records, key=lambda record: record["step"])]
    return [step[:most] for step in (steps if len(steps) < 2 else [steps[0], steps[-1]])]


def _of_samples(run: Run) -> Iterator[dict[str, Any]]:
    for record in run.completions():
        rewards = record.get("rewards")
        scores = {**(rewards if isinstance(rewards, dict) else {}), "advantage": record.get("advantage")}
        yield _record(record["step"], record.get("prompt", ""), record.get("completion", ""), scores)


def _of_tables(directory: Path) -> list[dict[str, Any]]:
    """The completions of the parquet files that `log_completions` has written."""
    records: list[dict[str, Any]] = []
    for path in sorted(directory.glob("completions/completions_*.parquet")):
        import pyarrow.parquet  # most runs have no such file

        rows = pyarrow.parquet.read_table(path).to_pylist()
        for row in rows:
            scores = {name: value for name, value in row.items() if name not in _COLUMNS}
            scores["advantage"] = row.get("advantage")
            records.append(_record(row["step"], row["prompt"], row["completion"], scores))
    return records


def with_groups(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number the groups of each step: completions of one prompt are one."""
    groups: dict[tuple[float, str], int] = {}
    last: dict[float, int] = {}
    for record in records:
        key = record["step"], record["prompt"]
        if key not in groups:
            groups[key] = last[record["step"]] = last.get(record["step"], -1) + 1
        record["group"] = groups[key]
    return records


def _record(step: float, prompt: Any, completion: Any, scores: dict[str, Any]) -> dict[str, Any]:
    # Half a character, at which a completion may end, has no form in UTF-8.
    texts = [as_text(text).encode("utf-8", "replace").decode() for text in (prompt, completion)]
    return {
        "step": number(step),
        "group": 0,
        "prompt": texts[0],
        "completion": texts[1],
        "prompt_lang": language_of(texts[0]),
        "completion_lang": language_of(texts[1]),
        "scores": {name: value for name, value in scores.items() if isinstance(value, int | float | None)},
    }
