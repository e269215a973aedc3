"""The reward of a run that goes on, as a picture for a notebook."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colocate.reporting.charts import reward_chart
from colocate.reporting.picture import standalone
from colocate.reporting.run import Run

_SIZE = (560, 240)
_REDRAW_S = 2.0
"""Seconds from one drawing to the next: a long run has many steps, and each drawing draws all of them."""


class LiveChart:
    """Gathers rewards by step, and draws the chart of them that the report has."""

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
            is_last: draw all that there is, however short ago the last drawing was.
        """
        now = time.monotonic()
        if is_last or not self._image or (self._has_news and now - self._drawn_s > _REDRAW_S):
            run = Run(Path(), {}, self._steps, self._evaluations, 0)
            if self._steps and (chart := reward_chart(run, _SIZE)):
                encoded = base64.b64encode(standalone([chart]).encode()).decode()
                self._image = f'<img alt="Reward by step" src="data:image/svg+xml;base64,{encoded}">'
                self._drawn_s, self._has_news = now, False
        return self._image
