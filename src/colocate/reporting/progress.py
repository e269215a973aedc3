"""What the run is doing, on the terminal: a live panel, or one line per report where there is no terminal.

progress = Progress(is_main_process=state.is_world_process_zero, disable_tqdm=args.disable_tqdm)
timeline = Timeline(device, on_phase=progress.set_phase)
with progress:
    for step in ...:
        record = run_log.log_step(step, metrics, epoch=epoch, timeline=timeline.drain())
        progress.update(step, max_steps, record)
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from colocate.reporting.plots import compact
from colocate.reporting.run import number

_GIB = 2**30
_SPARKS = "▁▂▃▄▅▆▇█"
_NUM_SPARKS = 32
_RATE_STEPS = 20  # speed and time left are means over this many steps
_PHASE_STYLES = {"rollout": "blue", "score": "yellow", "train": "dark_orange", "publish": "green"}
_STEP_PHASES = ("rollout", "score", "train", "publish")


class Progress:
    """The progress of a run, from the records of its steps and the names of its phases."""

    def __init__(
        self,
        *,
        is_main_process: bool = True,
        disable_tqdm: bool = False,
        logging_steps: int = 1,
        console: Console | None = None,
    ) -> None:
        """Only the main process shows anything.

        Args:
            disable_tqdm: plain lines on a terminal too.
            logging_steps: a plain line every so many steps, and for the last one.
        """
        self._console = console or Console()
        self._shows = is_main_process
        self._logging_steps = logging_steps
        self._phase, self._phase_start = "", time.monotonic()
        self._step = self._total = 0
        # What the panel shows. Replaced as a whole, because the panel is drawn by another thread.
        self._shown: dict[str, str] = {}
        self._spark = ""
        self._rewards: deque[float] = deque(maxlen=_NUM_SPARKS)
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_RATE_STEPS)  # steps, seconds, tokens
        self._recent_phases: deque[Mapping[str, Any]] = deque(maxlen=_RATE_STEPS)
        self._num_tokens: float | None = None
        self._live: Live | None = None
        if is_main_process and self._console.is_terminal and not disable_tqdm:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def console(self) -> Console:
        """Print through it while the panel is up: what is printed scrolls by above."""
        return self._console

    def set_phase(self, name: str) -> None:
        self._phase, self._phase_start = name, time.monotonic()

    def update(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """Show the state after `step` of `total` steps.

        Args:
            metrics: the step's record, as `RunLog.log_step` returns it. What is missing is not shown.
        """
        tokens = number(metrics.get("num_tokens"))
        before = 0.0 if step == 1 else self._num_tokens
        spent = math.nan if before is None else tokens - before
        self._num_tokens = tokens
        self._recent.append((step - self._step if self._step else 1, number(metrics.get("wall_s")), spent))
        self._recent_phases.append(metrics.get("phases") or {})
        self._step, self._total = step, total
        reward = number(metrics.get("reward"))
        if math.isfinite(reward):
            self._rewards.append(reward)
        self._shown, self._spark = self._facts(metrics), sparkline(self._rewards)
        is_due = step % self._logging_steps == 0 or step == total
        if self._shows and self._live is None and is_due:
            # soft_wrap: a log is read by programs, which want one line per step however narrow the console.
            self._console.print(Text(self._line()), soft_wrap=True)

    def show_evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Say in one line what an evaluation after `step` steps found; above the panel, if there is one."""
        rewards = {name: number(value) for name, value in metrics.items() if name.endswith("_reward")}
        if self._shows and rewards:
            found = " | ".join(f"{name} {compact(value)}" for name, value in rewards.items())
            self._console.print(Text(f"step {step} | {found}"), soft_wrap=True)

    def _seconds_per_step(self) -> float:
        timed = [(steps, seconds) for steps, seconds, _ in self._recent if seconds > 0]
        return sum(s for _, s in timed) / sum(n for n, _ in timed) if timed else math.nan

    def _shares(self) -> str:
        """The phases that take more than a fiftieth of the steps' time: not every step has a rollout."""
        wall = sum(seconds for _, seconds, _ in self._recent if seconds > 0)
        whole: dict[str, float] = {}
        for phases in self._recent_phases:
            for name, seconds in phases.items():
                if "/" not in name:
                    whole[name] = whole.get(name, 0.0) + number(seconds)
        shown = {name: seconds / wall for name, seconds in whole.items() if wall > 0}
        shares = [f"{name} {share:.0%}" for name, share in shown.items() if share > 0.02]
        return f" ({', '.join(shares)})" if shares else ""

    def _tokens_per_second(self) -> float:
        counted = [(seconds, tokens) for _, seconds, tokens in self._recent if tokens >= 0 and seconds > 0]
        return sum(t for _, t in counted) / sum(s for s, _ in counted) if counted else math.nan

    def _facts(self, record: Mapping[str, Any]) -> dict[str, str]:
        """What there is to say, by name, in order; what is unknown is left out."""
        reward, std = number(record.get("reward")), number(record.get("reward_std"))
        length = number(record.get("completions/mean_length"))
        seconds, speed = self._seconds_per_step(), self._tokens_per_second()
        left = seconds * (self._total - self._step)
        facts = {
            "reward": f"{reward:.3f}" + (f" ± {std:.3f}" if math.isfinite(std) else ""),
            "length": f"{length:.0f} tokens",
            "speed": f"{compact(speed)} tokens/s",
            "step time": f"{compact(seconds)} s" + self._shares(),
            "memory": _memory(record),
            "ETA": clock(left) if left > 0 else "",
        }
        known = {"reward": reward, "length": length, "speed": speed, "step time": seconds}
        return {name: text for name, text in facts.items() if text and math.isfinite(known.get(name, 0.0))}

    def _line(self) -> str:
        facts = " | ".join(f"{name} {text}" for name, text in self._shown.items())
        return f"step {self._step}/{self._total} | {facts}"

    def _render(self) -> RenderableType:
        facts = dict(self._shown)
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column()
        head.add_column(ratio=1)
        head.add_column(justify="right")
        share = f"{100 * self._step / self._total:.1f}%" if self._total else "starting"
        head.add_row(
            Text(f"step {self._step}/{self._total}" if self._total else "step –", style="bold"),
            ProgressBar(total=self._total or 1, completed=self._step, complete_style="blue"),
            Text(f"{share}  ETA {facts.pop('ETA')}" if "ETA" in facts else share),
        )
        body = Table.grid(padding=(0, 2))
        body.add_column(style="dim", min_width=9)
        body.add_column(no_wrap=True, overflow="ellipsis")
        body.add_row("now", self._phase_strip())
        for name, text in facts.items():
            spark = Text(f"  {self._spark}", style="blue") if name == "reward" else Text()
            body.add_row(name, Text(text) + spark)
        return Panel(Group(head, body), title="colocate", title_align="left", border_style="dim")

    def _phase_strip(self) -> Text:
        """The phases of a step, the one that runs now lit, with the seconds that it has been running."""
        now = self._phase.partition("/")[0]
        strip = Text()
        for phase in _STEP_PHASES if now in _STEP_PHASES or not now else (*_STEP_PHASES, now):
            if phase == now:
                elapsed = time.monotonic() - self._phase_start
                strip.append(
                    f"● {self._phase} {elapsed:.0f} s", style=f"bold {_PHASE_STYLES.get(now, 'magenta')}"
                )
            else:
                strip.append(f"○ {phase}", style="dim")
            strip.append("   ")
        return strip


def _memory(record: Mapping[str, Any]) -> str:
    memory = record.get("memory") or {}
    peaks = [number(span.get("peak_bytes")) for span in memory.get("spans", [])]
    if not peaks:
        return ""
    limit = number(memory.get("limit_bytes"))
    of = f" of {limit / _GIB:.1f}" if math.isfinite(limit) else ""
    return f"{max(peaks) / _GIB:.1f}{of} GiB"


def sparkline(values: Iterable[float]) -> str:
    """The values as a row of small bars, from the lowest to the highest of them."""
    values = list(values)
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values)


def clock(seconds: float) -> str:
    """h:mm:ss, or days and hours."""
    seconds = round(seconds)
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    return f"{days} d {hours} h" if days else f"{hours}:{minutes:02d}:{seconds % 60:02d}"
