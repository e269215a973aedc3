"""The texts at a run's start and end: its facts, its directories, and the next commands to type.

This module imports nothing slow, so that `colocate train` can print before PyTorch and transformers are
loaded.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

_LABEL_WIDTH = 10
_said: set[str] = set()
"""Labels of the header's rows that the command line has printed; the trainer does not print them again."""


def short_path(path: str | Path) -> str:
    """The path as seen from the working directory if it lies in there, else the absolute one."""
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute)
    return absolute if relative.startswith(os.pardir) else relative


@contextmanager
def begun_header(title: str, rows: Mapping[str, str | None]) -> Iterator[None]:
    """Print the title and the rows that are known before anything is loaded; a trainer completes them."""
    console = Console()
    console.print(Text(title, style="bold"), soft_wrap=True)
    _print_rows(rows, console)
    _said.update(rows)
    try:
        yield
    finally:
        _said.clear()


def complete_header(rows: Mapping[str, str | None], console: Console) -> None:
    """Print the rows that `begun_header` has not printed."""
    _print_rows({label: text for label, text in rows.items() if label not in _said}, console)
    _said.clear()


def say_row(label: str, text: str) -> None:
    """Print one more row of the header; none if the text is empty."""
    _print_rows({label: text}, Console())


def _print_rows(rows: Mapping[str, str | None], console: Console) -> None:
    """Print a row for each text that is known; on a terminal a long text continues below its beginning."""
    for label, text in rows.items():
        if not text:
            continue
        # A log is read by programs: one line per row, however long.
        width = max(10, console.width - _LABEL_WIDTH - 1) if console.is_terminal else len(text) + 1
        lines = Text(text).wrap(console, width)
        # No spaces at the ends, which a terminal that is made narrower would break into lines of their own.
        words = ("\n" + " " * _LABEL_WIDTH).join(line.plain.rstrip() for line in lines)
        console.print(Text.assemble((f"{label:<{_LABEL_WIDTH}}", "dim"), words), soft_wrap=True)


def continuing(checkpoint: Path, step: int, max_steps: int) -> str:
    """The line that a resumed run prints before its next step."""
    return f"Continuing at step {step} of {max_steps} from {short_path(checkpoint)}."


def stopped(by: str, step: int, max_steps: int, checkpoint: Path, how_to_resume: str | None) -> str:
    """The text that a run prints when it was asked to stop.

    Args:
        by: who asked: "Ctrl-C" or a signal's name.
        how_to_resume: the command that resumes the run; None if `save_only_model` makes that impossible.
    """
    saved = f"Stopped by {by} after step {step} of {max_steps}; saved to {short_path(checkpoint)}."
    if how_to_resume is None:
        return f"{saved} With save_only_model=True it holds the model alone: the run cannot be resumed."
    return f"{saved}\nResume with: {how_to_resume}"


def model_saved(
    run_dir: Path,
    base: str,
    *,
    is_adapter: bool,
    held_out: bool,
    has_turns: bool,
    own_rewards: Sequence[str] = (),
    has_own_code: bool = False,
) -> str:
    """The last text of `colocate train`: where the model is, and the commands that use it.

    Args:
        base: the model that training started from, as the run names it.
        held_out: whether `colocate eval` finds held-out prompts by itself.
        has_turns: whether the run had tools or an environment, which `colocate eval` does without.
        own_rewards: the run's reward functions, if the user must name them to `colocate eval`.
        has_own_code: whether the model may need code that comes with it.
    """
    here = shlex.quote(short_path(run_dir))
    dataset = "" if held_out else " --dataset HELD_OUT"
    rewards = f" --reward_funcs {shlex.join(own_rewards)}" if own_rewards else ""
    trust = " --trust_remote_code" if has_own_code else ""
    lines = [
        f"Model: {short_path(run_dir)}" + (f", an adapter on {base}" if is_adapter else ""),
        f"Talk to it: colocate chat {here}{trust}",
    ]
    if not has_turns:
        models = f"{shlex.quote(base)} {here}"
        lines.append(f"Measure it: colocate eval {models}{dataset}{rewards} --num_samples 4{trust}")
    if is_adapter:
        lines.append(f"Merge it: colocate merge {here} {here}-merged")
    return "\n".join(lines)


def finished(step: int, max_steps: int, duration: str, run_dir: Path) -> str:
    """The text that a run prints when it has ended by itself: the last step, the checkpoint and the
    report."""
    checkpoint = run_dir / f"checkpoint-{step}"
    lines = [f"Finished: step {step} of {max_steps}, after {duration}."]
    if checkpoint.is_dir():
        lines.append(f"Checkpoint: {short_path(checkpoint)}")
    lines.append(f"Report: colocate report {short_path(run_dir)}")
    return "\n".join(lines)
