"""The viewer of completions in the report: all that a run has logged, to be searched and sorted."""

from __future__ import annotations

import json
from typing import Any

from colocate.reporting.page import card
from colocate.reporting.run_log import strict_json

MAX_BYTES = 8 * 2**20
"""Text of completions in a page at most: what can be mailed, and searched at each key."""


def viewer(logged: list[dict[str, Any]]) -> str:
    """The section with the viewer of `samples.logged_completions`; empty if there are none.

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
    """The last of `records` whose text has `MAX_BYTES` at most, and whether these are all."""
    size_bytes, first = 0, len(records)
    while first and size_bytes <= MAX_BYTES:
        first -= 1
        size_bytes += len(records[first]["prompt"].encode()) + len(records[first]["completion"].encode())
    first += size_bytes > MAX_BYTES
    return records[first:], first == 0
