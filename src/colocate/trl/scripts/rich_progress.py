"""A callback that shows a run with Rich."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress as Bar
from rich.progress import TaskID
from rich.status import Status
from rich.table import Table
from transformers import TrainerCallback

from colocate.reporting.axes import compact
from colocate.reporting.progress import Progress


class RichProgressCallback(TrainerCallback):
    """Shows how far a run has come, and the metrics last logged in a table for each prefix of their names.

    Where the trainer shows a panel or a table of its own (on a terminal and in a notebook, unless
    `disable_tqdm` is set), the callback shows nothing: two displays of one run would overwrite each other.
    """

    progress: Progress | None = None
    """The run's own display, which prints through the same console; the journal sets it."""

    def __init__(self) -> None:
        self._live: Live | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero or (self.progress is not None and self.progress.has_display):
            return
        console = Console() if self.progress is None else self.progress.console
        self._bar = Bar(console=console)
        self._task: TaskID = self._bar.add_task(
            "[blue]Training  ", total=state.max_steps, completed=state.global_step
        )
        self._status = Status("Nothing to log yet ...", console=console)
        self._live = Live(Panel(Group(self._bar, self._status)), console=console)
        self._live.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._live is not None:
            self._bar.update(self._task, completed=state.global_step, refresh=True)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        if self._live is not None and logs:
            tables = Columns(_tables(logs), equal=False, expand=True)
            title = f"[bold green]Step {state.global_step}[/bold green]"
            self._status.update(Panel(tables, title=title, border_style="green"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _tables(logs: Mapping[str, Any]) -> list[Panel]:
    """A table of the metrics that begin with each word before a "/", and one of those without a "/"."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in logs.items():
        group, slash, rest = name.partition("/")
        groups.setdefault(group if slash else "", {})[rest if slash else name] = value
    panels = []
    for group, metrics in groups.items():
        title = f"[bold blue]{group}[/]" if group else None
        table = Table(title=title, header_style="bold magenta", box=None)
        table.add_column("Metric", justify="left", no_wrap=True)
        table.add_column("Value", justify="right")
        for name, value in metrics.items():
            table.add_row(name, compact(value) if isinstance(value, (float, int)) else str(value))
        panels.append(Panel(table, border_style="cyan", padding=(0, 1)))
    return panels
