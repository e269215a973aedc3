"""The progress of a run in a notebook: a chart and one table that grows, in one output of the cell."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from colocate.reporting.live_chart import LiveChart


class NotebookTable:
    """A line that says how far the run is, the rewards as a chart, and a row for each step that is logged.

    The cell gets one output, which is replaced: a new one for each step would fill the notebook.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, str]] = []
        self._head = "starting"
        self._chart = LiveChart()
        self._handle: Any = None
        self._cell: int | None = None

    def start(self) -> None:
        """Show the table in the cell that runs, which has one of it."""
        import IPython
        from IPython.display import HTML, display

        shell = getattr(IPython, "get_ipython", lambda: None)()
        cell = getattr(shell, "execution_count", None)
        if self._handle is None or cell != self._cell:
            self._cell, self._handle = cell, display(HTML(self._html()), display_id=True)

    def update(
        self, head: str, row: Mapping[str, str] | None = None, record: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the line above the table, and add `row`, which has the key "step", if it is given.

        Args:
            record: the record of the step, whose reward the chart gets.
        """
        self._head = head
        if record is not None:
            self._chart.add_step(record)
        if row is not None:
            self._rows.append(dict(row))
        self._show()

    def add_evaluation(self, step: int, cells: Mapping[str, str], reward: float | None = None) -> None:
        """Add what an evaluation found after `step` steps to the row of that step, and its reward to the
        chart."""
        if reward is not None:
            self._chart.add_evaluation(step, reward)
        if not self._rows or self._rows[-1]["step"] != str(step):
            self._rows.append({"step": str(step)})
        self._rows[-1] |= cells
        self._show()

    def stop(self) -> None:
        """Show everything a last time; it stays in the output."""
        self._show(is_last=True)

    def _show(self, *, is_last: bool = False) -> None:
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(self._html(is_last=is_last)))

    def _html(self, *, is_last: bool = False) -> str:
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(row.get(name, ''))}</td>" for name in columns) + "</tr>"
            for row in self._rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if columns else ""
        return f"<div>{html.escape(self._head)}</div>{self._chart.image(is_last=is_last)}{table}"
