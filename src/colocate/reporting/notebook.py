"""The progress of a run in a notebook: a chart and one table that grows, in one output of the cell."""

from __future__ import annotations

import base64
import html
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colocate.reporting.charts import reward_chart
from colocate.reporting.plots import standalone
from colocate.reporting.run import RecordedRun

_SIZE, _MARGIN = (560, 240), 20
_REDRAW_S = 2.0
"""Seconds from one drawing to the next: a long run has many steps, and each drawing draws all of them."""


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
        """Show the table in the running cell, which has only one."""
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
        """Add the results of an evaluation to the row of its step, and its reward to the chart."""
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


class LiveChart:
    """Gathers rewards by step, and draws the report's chart of them."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._image, self._drawn_s, self._has_news = "", 0.0, False

    def add_step(self, record: Mapping[str, Any]) -> None:
        """Note a step's reward.

        Args:
            record: the record of the step, as `RunLog.log_step` returns it.
        """
        names = ("step", "reward", "reward_std")
        self._steps.append({name: record[name] for name in names if name in record})
        self._has_news = True

    def add_evaluation(self, step: int, reward: float) -> None:
        """Note the reward of held-out prompts after a step."""
        self._evaluations.append({"step": step, "eval_reward": reward})
        self._has_news = True

    def image(self, *, is_last: bool = False) -> str:
        """The chart as an HTML image; an empty text before there is a reward.

        An image of its own keeps its style away from the notebook's.

        Args:
            is_last: draw all values, even right after the last drawing.
        """
        now = time.monotonic()
        if is_last or not self._image or (self._has_news and now - self._drawn_s > _REDRAW_S):
            run = RecordedRun(Path(), {}, self._steps, self._evaluations, 0)
            if self._steps and (chart := reward_chart(run, _SIZE)):
                whole = (side + 2 * _MARGIN for side in _SIZE)
                encoded = base64.b64encode(
                    standalone([(chart.svg(), _MARGIN, _MARGIN)], *whole).encode()
                ).decode()
                self._image = f'<img alt="Reward by step" src="data:image/svg+xml;base64,{encoded}">'
                self._drawn_s, self._has_news = now, False
        return self._image
