"""The live panel: lines at the bottom of a terminal that show a run, while all other output scrolls by
above."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.live_render import LiveRender
from rich.segment import Segment
from rich.text import Text

REFRESHES_PER_SECOND = 4


class LivePanel:
    """Draws lines anew four times a second, as wide and as many as the terminal has room for.

    Args:
        lines: returns the lines for a terminal of some width in columns and height in rows.
    """

    def __init__(self, lines: Callable[[int, int], list[Text]], console: Console) -> None:
        self._lines, self._console = lines, console
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=REFRESHES_PER_SECOND
        )
        self._live._live_render = _ReflownRender(console)
        self._bars = ExitStack()

    def start(self) -> None:
        """Draw the lines from now on, and keep other libraries' progress bars from being drawn."""
        self._bars.enter_context(without_bars())
        self._live.start()

    def refresh(self) -> None:
        """Draw the lines now."""
        self._live.refresh()

    def stop(self) -> None:
        """Draw the lines a last time, and leave them on the terminal."""
        self._live.stop()
        self._bars.close()

    def _render(self) -> Group:
        size = self._console.size
        # A line as wide as the terminal leaves the cursor where terminals disagree.
        return Group(*self._lines(size.width - 1, size.height))


class _ReflownRender(LiveRender):
    """The text that `Live` draws, which counts its rows anew when the terminal was made narrower."""

    def __init__(self, console: Console) -> None:
        super().__init__("")
        self._console = console
        self._lengths: list[int] = []
        is_cut = "TMUX" not in os.environ and (
            "XTERM_VERSION" in os.environ or os.environ.get("TERM") == "linux"
        )
        self._is_broken = not is_cut

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = super().__rich_console__(console, options)
        segments = [part for part in parts if isinstance(part, Segment)]
        self._lengths = [
            sum(cell_len(segment.text) for segment in line) for line in Segment.split_lines(segments)
        ]
        yield from segments

    def position_cursor(self):  # type: ignore[no-untyped-def]  # as in the base class
        """Control codes that erase what was drawn and leave the cursor where that began."""
        if self._shape is not None and self._is_broken:
            columns = self._console.width
            rows = sum(max(1, math.ceil(length / columns)) for length in self._lengths)
            self._shape = (self._shape[0], rows)
        return super().position_cursor()


@contextmanager
def without_bars() -> Iterator[None]:
    """A context in which datasets, if it is loaded, transformers and the Hub draw no progress bars."""
    import huggingface_hub.utils as hub
    from transformers.utils import logging as transformers_logging

    switches = [
        (
            transformers_logging.is_progress_bar_enabled(),
            transformers_logging.disable_progress_bar,
            transformers_logging.enable_progress_bar,
        ),
        # After transformers', whose switch moves this one, too.
        (not hub.are_progress_bars_disabled(), hub.disable_progress_bars, hub.enable_progress_bars),
    ]
    if (datasets := sys.modules.get("datasets")) is not None:  # a model in hand needs none
        switches.append(
            (
                not datasets.are_progress_bars_disabled(),
                datasets.disable_progress_bars,
                datasets.enable_progress_bars,
            )
        )
    for was_enabled, disable, _ in switches:
        if was_enabled:
            disable()
    try:
        yield
    finally:
        for was_enabled, _, enable in switches:
            if was_enabled:
                enable()
