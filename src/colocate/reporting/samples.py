"""The completions that a run has logged: read for its report, and a viewer to search and sort them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from colocate.reporting.completions import as_text
from colocate.reporting.language import language_of
from colocate.reporting.page import card
from colocate.reporting.run import RecordedRun, number
from colocate.reporting.run_log import strict_json

MAX_BYTES = 8 * 2**20
"""The most bytes of completions in a page, which can then be mailed, and searched at each key."""
_COLUMNS = {"step", "prompt", "completion", "advantage"}


def logged_completions(run: RecordedRun) -> list[dict[str, Any]]:
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


def _of_samples(run: RecordedRun) -> Iterator[dict[str, Any]]:
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
    """Number the groups of each step: completions of one prompt form a group."""
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


def viewer(logged: list[dict[str, Any]]) -> str:
    """The section with the viewer of `logged_completions`; empty if there are none.

    Where they are too many for a page, it has those of the last steps.
    """
    records, is_whole = newest(logged)
    if not records:
        return ""
    steps = "".join(f'<option value="{s:g}">{s:g}</option>' for s in sorted({r["step"] for r in records}))
    fields = (
        _field("search", "Search", '<input id="search" name="search" type="search">'),
        _field(
            "step", "Step", f'<select id="step" name="step"><option value="">all</option>{steps}</select>'
        ),
        _field("group", "Group", '<input id="group" name="group" type="number" min="0">'),
        _field("order", "Order", f'<select id="order" name="order">{_ORDERS}</select>'),
    )
    # "</script>" in a completion must not end the element.
    data = json.dumps(strict_json(records), ensure_ascii=False).replace("<", "\\u003c")
    left_out = "" if is_whole else f"Earlier steps are left out: a page has {MAX_BYTES >> 20} MiB of text."
    return "<h2>All logged completions</h2>" + card(
        f'<form id="viewer" class="bar">{"".join(fields)}</form>'
        f'<p class="facts" id="count" role="status"></p><p class="facts">{left_out}</p>'
        '<div id="found"></div><p class="bar"><button id="more" type="button" hidden>Show more</button></p>'
        f'<script type="application/json" id="completions">{data}</script>'
    )


_ORDERS = (
    '<option value="">as logged</option><option value="best">best of its group first</option>'
    '<option value="worst">worst of its group first</option>'
)


def _field(name: str, label: str, control: str) -> str:
    return f'<div><label for="{name}">{label}</label>{control}</div>'


def newest(records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """The last records that have at most `MAX_BYTES` of text together, and whether these are all."""
    size_bytes, first = 0, len(records)
    while first and size_bytes <= MAX_BYTES:
        first -= 1
        size_bytes += len(records[first]["prompt"].encode()) + len(records[first]["completion"].encode())
    first += size_bytes > MAX_BYTES
    return records[first:], first == 0
