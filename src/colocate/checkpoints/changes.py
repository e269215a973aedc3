"""The description of the run that wrote a checkpoint, and its differences from the run that resumes it.

`run.json` in a checkpoint holds everything that defines the run (see `colocate.run.identity`). A run that
resumes shows the differences in one table. Forbidden differences are refused by name, the others apply from
the next step on.

    run_id      an id that a run shares with the runs that resume it
    fixed       values that must not change
    checksums   checksums of the weights with which the run began
    others      values that may change
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colocate.checkpoints.sealed import CheckpointError

RUN_FILE = "run.json"
_MAX_REASONS, _MAX_ROWS = 3, 40

PROCESSES, BATCH = "number of processes", "completions of a micro-step"

_FROZEN = "checksum of the frozen weights (an adapter's base, the reference model)"

_IN_COMPLETIONS = frozenset({"reward functions", PROCESSES})
"""Values besides options that have shaped waiting completions: their scores, and how they are divided up."""


def save(directory: Path, description: Mapping[str, Any]) -> None:
    """Write `run.json` into a checkpoint."""
    (directory / RUN_FILE).write_text(json.dumps(description, indent=1), encoding="utf-8")


@dataclass(frozen=True)
class Change:
    """A value of the run's description that has changed."""

    name: str
    was: Any
    now: Any
    refused: bool


@dataclass(frozen=True)
class Changes:
    """The differences between the run that wrote a checkpoint and the run that resumes it."""

    directory: Path
    run_id: str
    changes: tuple[Change, ...]

    def refuse(self) -> None:
        """Raises CheckpointError if a value differs that must not change."""
        refused = [change for change in self.changes if change.refused]
        if not refused:
            return
        reasons = "; ".join(
            f"{c.name} was {c.was} when it was written and is {c.now} now" for c in refused[:_MAX_REASONS]
        )
        if len(refused) > _MAX_REASONS:  # another model differs in every parameter
            reasons += f"; and {len(refused) - _MAX_REASONS} more"
        raise CheckpointError(
            f"{self.directory} cannot be resumed: {reasons}. Go back to the former, or start a new run in "
            f"another output_dir with model={str(self.directory)!r}."
            + (f"\n{self.table()}" if len(self.changes) > 1 else "")
        )

    def told(self, num_dropped: int) -> str:
        """The table of changes with a heading, as text.

        Args:
            num_dropped: completions of all ranks that waited in the checkpoint to be trained on and are
                dropped.
        """
        heading = f"Resuming {self.directory}. Changed since it was saved:"
        dropped = (
            f"\n{num_dropped} completions made under the former were waiting for later steps and are "
            "dropped: the next step generates anew."
        )
        return f"{heading}\n{self.table()}" + (dropped if num_dropped else "")

    def table(self) -> str:
        """One line for each change: name, old value, new value, "applied" or "refused"."""
        rows = [("", "was", "is", "")]
        rows += [
            (c.name, _short(c.was), _short(c.now), "refused" if c.refused else "applied")
            for c in self.changes[:_MAX_ROWS]
        ]
        if len(self.changes) > _MAX_ROWS:
            rows.append((f"... and {len(self.changes) - _MAX_ROWS} more", "", "", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  "
            + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in rows
        )

    def concern_waiting_completions(self, options: Collection[str]) -> bool:
        """Whether a changed value has shaped the completions that wait to be trained on.

        Args:
            options: the names of the options with which completions are drawn, scored and weighed.
        """
        shaping = _IN_COMPLETIONS.union(f"option {name}" for name in options)
        # A mapping's entries are told apart: the change of one has the option's name in front.
        return any(f"{change.name} ".startswith(f"{name} ") for change in self.changes for name in shaping)


def compare(directory: Path, current: Mapping[str, Any]) -> Changes:
    """Compare the run that wrote `directory` with `current`, the description of this run."""
    try:
        saved = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
        _read_as_now(saved)
        refused = [*_differences(saved["fixed"], current["fixed"]), *_frozen_differences(saved, current)]
        applied = list(_differences(saved["others"], current["others"]))
        run_id = str(saved["run_id"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{directory} cannot be resumed: {RUN_FILE} does not say what run it is of ({error!r})."
        ) from error
    changes = [Change(*d, refused=True) for d in refused] + [Change(*d, refused=False) for d in applied]
    return Changes(directory, run_id, tuple(changes))


def _read_as_now(saved: dict[str, Any]) -> None:
    """Read an earlier checkpoint's description, which named the number of processes, in today's terms."""
    fixed = saved["fixed"]
    if PROCESSES in fixed:
        saved["others"][PROCESSES] = fixed.pop(PROCESSES)
        fixed[BATCH] = saved["others"][PROCESSES] * fixed["option"].pop("per_device_train_batch_size")


def _differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*current, *saved]):
        was, now = saved.get(name), current.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _differences(was, now, f"{prefix}{name} ")
        elif was != now:
            yield f"{prefix}{name}", saved.get(name, "absent"), current.get(name, "absent")


def _frozen_differences(
    saved: Mapping[str, Any], current: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Differences of the frozen weights: a KL penalty may come and go, but its reference must not change."""
    was, now = saved["checksums"], current["checksums"]
    if was["base"] != now["base"]:
        yield (f"{_FROZEN} base", was["base"], now["base"])
    if now["reference"] is None:
        return
    reference = was["origin"] if was["reference"] is None else was["reference"]
    if reference != now["reference"]:
        yield (f"{_FROZEN} reference", reference, now["reference"])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
