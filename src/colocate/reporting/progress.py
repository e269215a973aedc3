"""The progress of a run: a live panel on a terminal, a table in a notebook, and elsewhere lines.

progress = Progress(is_main_process=state.is_world_process_zero, disable_tqdm=args.disable_tqdm)
timeline = Timeline(device, on_phase=progress.set_phase)
with progress:
    for step in ...:
        record = run_log.log_step(step, metrics, epoch=epoch, timeline=timeline.drain())
        progress.update(step, max_steps, record, rollout=metrics_of_the_rollout, step_tokens=tokens)
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers.utils import is_in_notebook

from colocate.parallel.rank_failure import in_lines
from colocate.reporting.axes import compact
from colocate.reporting.notebook import NotebookTable
from colocate.reporting.panel import LivePanel
from colocate.reporting.run import number
from colocate.reporting.step_estimate import StepEstimate
from colocate.reporting.theme import category_label
from colocate.reporting.work_counts import WorkCounts

_GIB = 2**30
_SPARKS = "▁▂▃▄▅▆▇█"
_NUM_SPARKS = 32
_RATE_STEPS = 20  # speed and time left are means over this many steps
_ACCENT = "dodger_blue1"
"""A blue among the 256 colours, whose shades no terminal redefines; ANSI's own blue cannot be read on
black."""
_PHASE_STYLES = {"rollout": _ACCENT, "score": "gold3", "train": "dark_orange", "publish": "green3"}
_STEP_PHASES = ("rollout", "score", "train", "publish")
_LINE_FACTS = ("reward", "length", "speed", "step time", "memory", "ETA")
"""The facts that a plain line has; the panel has room for more."""
_BY_IMPORTANCE = (
    *("reward", "length", "step time", "speed", "eval", "zero std", "memory", "rewards", "policy"),
)
_LABEL_WIDTH = 10
_CELL_WIDTH = 115
"""Columns of text that a notebook's cell has room for."""
QUIET_S = 30.0
"""Seconds without a line after which a log gets one that says how far the phase has come."""
_REDRAW_S = 2.0
"""Seconds from one look at the counts to the next, where no panel is drawn."""
_NARROW = 60
"""The width in columns below which the panel shows only the phase that runs."""


class Progress:
    """The progress of a run, from the records of its steps and the names of its phases."""

    def __init__(
        self,
        *,
        is_main_process: bool = True,
        disable_tqdm: bool = False,
        logging_steps: int = 1,
        total: int = 0,
        rollouts_per_step: float = 1.0,
        quiet_s: float = QUIET_S,
        console: Console | None = None,
    ) -> None:
        """Only the main process shows anything.

        Args:
            disable_tqdm: print plain lines on a terminal and in a notebook, too.
            logging_steps: steps from one plain line or row to the next; the last step has one in any case.
            total: steps of the run; 0: they are not known before the first one is done.
            rollouts_per_step: below 1 where a rollout feeds several steps.
            quiet_s: see `QUIET_S`.
        """
        is_in_cell = "IPython" in sys.modules and is_in_notebook()  # marimo is a notebook without it
        # A notebook would get each line that rich prints as an output of its own.
        self._console = console or Console(force_jupyter=False, width=_CELL_WIDTH if is_in_cell else None)
        self._shows = is_main_process
        self._logging_steps = logging_steps
        self._phase, self._phase_start = "", time.monotonic()
        self._step, self._total = 0, total
        self._has_stepped = False
        self.counts = WorkCounts()
        """Counts of the work done in the present phase, kept by whoever does it."""
        self._estimate = StepEstimate(rollouts_per_step)
        self._end_s = math.nan
        """The end of the run, by `time.monotonic`."""
        self._quiet_s, self._spoke_s = quiet_s, time.monotonic()
        self._depth = 0
        self._is_over = threading.Event()
        self._watcher: threading.Thread | None = None
        # What the panel shows. Replaced as a whole, because the panel is drawn by another thread.
        self._shown: dict[str, str] = {}
        self._evaluated = ""
        self._spark = ""
        self._rewards: deque[float] = deque(maxlen=_NUM_SPARKS)
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_RATE_STEPS)  # steps, seconds, tokens
        self._recent_phases: deque[Mapping[str, Any]] = deque(maxlen=_RATE_STEPS)
        self._recent_spans: deque[Mapping[str, Any]] = deque(maxlen=_RATE_STEPS)  # each step's fullest
        self._at_end: str | None = None
        self._is_running = False
        self._live: LivePanel | None = None
        self._table: NotebookTable | None = None
        if is_main_process and not disable_tqdm:
            if is_in_cell:
                self._table = NotebookTable()
            elif self._console.is_terminal:
                self._live = LivePanel(self._lines, self._console)

    def __enter__(self) -> Progress:
        self._depth += 1
        if self._depth > 1:
            return self
        self._is_running = True
        display = self._live or self._table
        if display is not None:
            display.start()
        if self._shows and self._live is None:
            self._is_over.clear()
            self._watcher = threading.Thread(target=self._watch, name="progress", daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._is_running = False
        if self._watcher is not None:
            self._is_over.set()
            self._watcher.join()
        display = self._live or self._table
        if display is not None:
            display.stop()
        if self._at_end is not None:
            self.say(self._at_end)
            self._at_end = None

    @property
    def console(self) -> Console:
        """The console to print through while the panel is shown: the output then scrolls by above it."""
        return self._console

    @property
    def has_display(self) -> bool:
        """Whether the run is shown in a panel or a notebook's table, and not as plain lines."""
        return self._live is not None or self._table is not None

    def say(self, text: str) -> None:
        """Print a text about the run, above the panel if there is one."""
        if self._shows:
            self._console.print(Text(in_lines(text, self._console.file)), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning above the panel; on a terminal its lines break between words."""
        if self._shows:
            warning = Text.assemble(("Warning: ", "bold yellow"), text)
            self._console.print(warning, soft_wrap=not self._console.is_terminal)

    def say_at_end(self, text: str) -> None:
        """Print a text at the end of the run, below everything else."""
        self._at_end = text

    def begin(self, step: int) -> None:
        """Note that the run begins after `step` steps, which an earlier run has taken."""
        self._step = step

    def set_phase(self, name: str) -> None:
        """Show that a phase has begun; an empty name: it has ended."""
        self._estimate.set_phase(name)
        self.counts.clear()
        self._phase, self._phase_start = name, time.monotonic()

    def update(
        self,
        step: int,
        total: int,
        record: Mapping[str, Any],
        *,
        rollout: Mapping[str, Any] | None = None,
        step_tokens: float = math.nan,
    ) -> None:
        """Show the state after `step` of `total` steps.

        Args:
            record: the record of the step, as `RunLog.log_step` returns it. Missing entries are not shown.
            rollout: metrics of the rollout that the step trained on, which may belong to an earlier step.
            step_tokens: the step's share of that rollout's tokens.
        """
        metrics = {**(rollout or {}), **record}
        steps = step - self._step if self._has_stepped else 1
        self._has_stepped = True
        self._estimate.end_step()
        self._recent.append((steps, number(record.get("wall_s")), steps * step_tokens))
        self._recent_phases.append(record.get("phases") or {})
        self._recent_spans.extend(_fullest_span(record))
        self._step, self._total = step, total
        # One point per rollout, however many steps train on it.
        reward = number(record.get("reward"))
        if math.isfinite(reward):
            self._rewards.append(reward)
        self._shown, self._spark = self._facts(metrics), sparkline(self._rewards)
        is_due = self._shows and (step % self._logging_steps == 0 or step == total)
        if self._table is not None:
            self._table.update(self._head(), self._row() if is_due else None, {**record, "step": step})
        elif self._live is None and is_due:
            self._print_line(self._line())

    def show_evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the result of an evaluation after `step` steps, as a line and in the panel, or in a notebook's
        table."""
        rewards = {name: number(value) for name, value in metrics.items() if name.endswith("_reward")}
        if not self._shows or not rewards:
            return
        if self._table is not None:
            cells = {name: compact(value) for name, value in rewards.items()}
            self._table.add_evaluation(step, cells, rewards.get("eval_reward"))
            return
        found = [f"{name} {compact(value)}" for name, value in rewards.items()]
        self._evaluated = f"{', '.join(found)} at step {step}"
        self.say(f"step {step} | " + " | ".join(found))

    def _seconds_per_step(self) -> float:
        timed = [(steps, seconds) for steps, seconds, _ in self._recent if seconds > 0]
        return sum(s for _, s in timed) / sum(n for n, _ in timed) if timed else math.nan

    def _shares(self) -> str:
        """Shares of the recent steps' time by phase, for phases above a fiftieth."""
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
        """Tokens that the recent steps trained on, by the seconds that they and their rollouts took."""
        counted = [(seconds, tokens) for _, seconds, tokens in self._recent if tokens > 0 and seconds > 0]
        return sum(t for _, t in counted) / sum(s for s, _ in counted) if counted else math.nan

    def _memory(self, record: Mapping[str, Any]) -> str:
        """The most memory in use in the recent steps (a rollout may need more than training); on CPUs by
        parts."""
        if not self._recent_spans:
            return ""
        fullest = max(self._recent_spans, key=_peak_bytes)
        limit = number((record.get("memory") or {}).get("limit_bytes"))
        of = f" of {limit / _GIB:.1f}" if math.isfinite(limit) else ""
        return f"{_peak_bytes(fullest) / _GIB:.1f}{of} GiB{_parts_of_host(fullest)}"

    def _facts(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        """The facts that the panel shows, by name and in order; unknown ones are left out."""
        seconds = self._seconds_per_step()
        left = seconds * (self._total - self._step)
        self._end_s = time.monotonic() + left
        facts = {
            "reward": _filled("{:.3f}", metrics.get("reward"))
            + _filled(" ± {:.3f}", metrics.get("reward_std")),
            "rewards": _by_function(metrics),
            "length": _length(metrics),
            "zero std": _filled("{:.0%} of groups, without a gradient", metrics.get("frac_reward_zero_std")),
            "policy": _policy(metrics),
            "speed": _filled("{} tokens/s", self._tokens_per_second(), compact),
            "step time": _filled("{} s", seconds, compact) + self._shares(),
            "memory": self._memory(metrics),
            "ETA": clock(left) if left > 0 else "",
        }
        return {name: text for name, text in facts.items() if text}

    def _print_line(self, line: str) -> None:
        # soft_wrap: a log is read by programs, which want one line however narrow the console.
        self._console.print(Text(line), soft_wrap=True)
        self._spoke_s = time.monotonic()

    def _watch(self) -> None:
        """Update the line above a notebook's table, or print a line into a log that had none for a while."""
        while not self._is_over.wait(min(_REDRAW_S, self._quiet_s)):
            if self._table is not None:
                self._table.update(self._head())
            elif self._phase and time.monotonic() - self._spoke_s >= self._quiet_s:
                eta = self._eta()
                facts = [
                    f"in step {self._step + 1}/{self._total or '–'}",
                    self._now(),
                    *([f"ETA {eta}"] if eta else ()),
                ]
                self._print_line(" | ".join(facts))

    def _now(self) -> str:
        """The present phase, its seconds so far, and its counts."""
        done = self.counts.words()
        return f"{self._phase} {time.monotonic() - self._phase_start:.0f} s" + (f", {done}" if done else "")

    def _eta(self) -> str:
        """The time left, by the steps so far or, during the first one, by the part of it that is done."""
        if self._has_stepped:
            left = self._end_s - time.monotonic()
            return clock(max(left, 0.0)) if math.isfinite(left) and self._step < self._total else ""
        seconds = self._estimate.seconds(share := self.counts.share()) * (self._total - self._step)
        if not seconds > self._estimate.elapsed_s:
            return ""
        if not self._estimate.knows_training:
            return f"about {clock(seconds - self._estimate.elapsed_s)} for rollouts alone"
        about = "about" if share > 0 else "at least"
        return f"{about} {clock(seconds - self._estimate.elapsed_s)}"

    def _line(self) -> str:
        facts = " | ".join(f"{name} {self._shown[name]}" for name in _LINE_FACTS if name in self._shown)
        return f"step {self._step}/{self._total} | {facts}"

    def _head(self) -> str:
        head = f"step {self._step}/{self._total}" if self._total else "starting"
        now = f", {self._now()}" if self._is_running and self._phase else ""
        return head + now + (f", ETA {eta}" if (eta := self._eta()) else "")

    def _row(self) -> dict[str, str]:
        """A row of a notebook's table."""
        return {"step": str(self._step), **{n: t for n, t in self._shown.items() if n != "ETA"}}

    # ── The panel ────────────────────────────────────────────────────────────────────────────────────────

    def _lines(self, width: int, height: int) -> list[Text]:
        """The panel's lines, at most `width` columns wide; if there are few rows, only the most important."""
        facts = {**self._shown, **({"eval": self._evaluated} if self._evaluated else {})}
        facts.pop("ETA", "")
        num_rows = max(0, height - 4)
        lines = [self._bar(width, self._eta())]
        if self._is_running:
            lines.append(_labelled("now", self._phase_strip(width), width))
            if num_rows and (done := self.counts.words()):
                lines.append(_labelled("done", Text(done), width))
                num_rows -= 1
        kept = [name for name in _BY_IMPORTANCE if name in facts][:num_rows]
        for name in (name for name in facts if name in kept):
            text = Text(facts[name])
            if name == "reward":
                room = width - _LABEL_WIDTH - len(text) - 2
                text.append(f"  {self._spark[-room:]}" if room > 0 else "", style=_ACCENT)
            lines.append(_labelled(name, text, width))
        return lines

    def _bar(self, width: int, eta: str) -> Text:
        if not self._total:
            return Text("step –  starting", style="bold")
        share = self._step / self._total
        head, end = f"step {self._step}/{self._total} ", f" {share:.1%}" + (f"  ETA {eta}" if eta else "")
        room = min(60, width - len(head) - len(end))
        done = round(share * room)
        bar = ("━" * done, _ACCENT), ("━" * (room - done), "grey50")
        return _cut(Text.assemble((head.rstrip(), "bold"), " ", *(bar if room >= 4 else ()), end), width)

    def _phase_strip(self, width: int) -> Text:
        """The phases of a step in a row; the present one is highlighted, with its seconds so far."""
        now = self._phase.partition("/")[0]
        strip = Text()
        for phase in _STEP_PHASES if now in _STEP_PHASES or not now else (*_STEP_PHASES, now):
            if phase == now:
                elapsed = time.monotonic() - self._phase_start
                style = f"bold {_PHASE_STYLES.get(now, 'orchid')}"
                strip.append(f"● {self._phase} {elapsed:.0f} s   ", style=style)
            elif width >= _NARROW - 1:
                strip.append(f"○ {phase}   ", style="dim")
        return strip


def _labelled(label: str, text: Text, width: int) -> Text:
    return _cut(Text.assemble((f"{label:<{_LABEL_WIDTH}}", "dim"), text), width)


def _cut(text: Text, width: int) -> Text:
    """The text in one line, without spaces at its end, which a broken line would put on another one."""
    text.rstrip()
    text.truncate(width, overflow="ellipsis")
    text.no_wrap = True
    return text


def _filled(template: str, value: Any, write: Any = None) -> str:
    """The template with a number filled in; the empty string if there is no number."""
    known = number(value)
    if not math.isfinite(known):
        return ""
    return template.format(known if write is None else write(known))


def _by_function(metrics: Mapping[str, Any]) -> str:
    """The mean reward of each function, if there are several; names are short, as terminals are narrow."""
    means = {
        name.removeprefix("rewards/").removesuffix("/mean").removesuffix("_reward"): number(value)
        for name, value in metrics.items()
        if name.startswith("rewards/") and name.endswith("/mean")
    }
    return "  ".join(f"{name} {compact(mean)}" for name, mean in means.items()) if len(means) > 1 else ""


def _length(metrics: Mapping[str, Any]) -> str:
    truncated = number(metrics.get("completions/clipped_ratio"))
    length = _filled("{:.0f} tokens", metrics.get("completions/mean_length"))
    return length + (f", {truncated:.0%} truncated" if length and truncated > 0 else "")


def _policy(metrics: Mapping[str, Any]) -> str:
    names = {"entropy": "entropy", "gradient norm": "grad_norm", "KL": "kl"}
    known = {name: _filled("{}", metrics.get(key), compact) for name, key in names.items()}
    return ", ".join(f"{name} {text}" for name, text in known.items() if text)


def _fullest_span(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The span of a step in which most memory was in use; none if the record does not say."""
    spans = (record.get("memory") or {}).get("spans", [])
    known = [span for span in spans if math.isfinite(_peak_bytes(span))]
    return [max(known, key=_peak_bytes)] if known else []


def _peak_bytes(span: Mapping[str, Any]) -> float:
    return number(span.get("peak_bytes"))


def _parts_of_host(span: Mapping[str, Any]) -> str:
    """Categories with a twentieth of the memory or more, in GiB, where Python shares it with the run."""
    sizes = span.get("categories") or {}
    if "libraries" not in sizes:
        return ""
    peak = _peak_bytes(span)
    parts = [*sizes.items(), ("other", peak - sum(sizes.values()))]
    shown = [f"{category_label(name)} {size / _GIB:.1f}" for name, size in parts if size >= 0.05 * peak]
    return f" ({', '.join(shown)})"


def sparkline(values: Iterable[float]) -> str:
    """The values as a row of small bars, from the lowest to the highest of them."""
    values = list(values)
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values)


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss, or as days and hours."""
    seconds = round(seconds)
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    return f"{days} d {hours} h" if days else f"{hours}:{minutes:02d}:{seconds % 60:02d}"
