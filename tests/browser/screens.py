"""The sizes of the screens, and the reading of charts as a browser has drawn them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def chart(page: Any, title: str) -> Any:
    """The visible chart of that title."""
    return page.locator(f'svg.plot[aria-label^="{title}"]:visible').first


def drawing(page: Any, title: str) -> ElementTree.Element:
    """The chart as it is in the page, for the readers of `test_reporting`."""
    return ElementTree.fromstring(chart(page, title).evaluate("svg => svg.outerHTML"))


def drag(page: Any, title: str, start: float, end: float) -> None:
    """Drag the mouse over the chart, from one fraction of its steps' axis to another."""
    svg = chart(page, title)
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    frame = svg.locator(".area").evaluate("area => ({...area.dataset})")
    scale = box["width"] / svg.evaluate("svg => svg.viewBox.baseVal.width")
    left, right = (box["x"] + scale * float(frame[edge]) for edge in ("left", "right"))
    y = box["y"] + box["height"] / 2
    page.mouse.move(left + start * (right - left), y)
    page.mouse.down()
    page.mouse.move(left + end * (right - left), y, steps=4)
    page.mouse.up()
