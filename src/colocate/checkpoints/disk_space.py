"""Whether a run's checkpoints will find room on the disk, which is known before the first step."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from colocate.checkpoints.sealed import list_checkpoints


def steps_to_save(interval: float | None, first: int, last: int) -> list[int]:
    """The steps after which a run saves.

    Args:
        interval: steps between two checkpoints, with a fraction where epochs end within steps; None: it is
            not known before, and only the last step counts.
        first: the step that the run begins or continues at.
        last: the step that it ends with, after which it saves in any case.
    """
    if last <= first:
        return []
    if interval is None or interval <= 0:
        return [last]
    # Rounding must not make 3 x (1/3) steps more than one.
    numbers = range(math.floor(first / interval + 1e-9) + 1, math.ceil(last / interval - 1e-9) + 1)
    return sorted({min(last, math.ceil(number * interval - 1e-9)) for number in numbers})


def most_at_once(output_dir: Path, steps: Sequence[int], limit: int | None) -> int:
    """The largest number of checkpoints that will exist at once in addition to those that exist now.

    Args:
        steps: those after which the run will save.
        limit: `save_total_limit`; a checkpoint is deleted when the next one is whole.
    """
    there = [checkpoint.name for checkpoint in list_checkpoints(output_dir)]
    added = [step for step in steps if f"checkpoint-{step}" not in there]
    # One that is replaced stays until the new one is whole.
    most = len(added) + (len(added) < len(steps))
    if limit is not None and limit > 0:
        most = min(most, limit + 1 - len(there))
    return max(1, most)


def check(output_dir: Path, parts: Mapping[str, int], num_at_once: int) -> str | None:
    """Compare the size of the checkpoints to come with the free space of the disk.

    Args:
        parts: the bytes of one checkpoint by purpose, as far as they are known.
        num_at_once: `most_at_once`.

    Returns:
        A warning if one checkpoint fits but not all; None if all fit, or if the file system does not tell its
        size.

    Raises:
        ValueError: not even one checkpoint fits.
    """
    usage = shutil.disk_usage(output_dir)
    needed = sum(parts.values())
    if not usage.total or usage.free >= num_at_once * needed:
        return None
    addends = " + ".join(f"{in_words(size)} of {name}" for name, size in parts.items())
    if usage.free < needed:
        less = "" if len(parts) == 1 else f", save_only_model=True ({in_words(parts['weights'])})"
        raise ValueError(
            f"output_dir={str(output_dir)!r} is on a disk with {in_words(usage.free)} free, and a checkpoint "
            f"takes {in_words(needed)} at least: {addends}. The first one could not be saved. Free some "
            f"space, or set output_dir to a disk that has it{less}, or save_strategy='no'."
        )
    fitting = usage.free // needed
    return (
        f"output_dir={str(output_dir)!r} is on a disk with {in_words(usage.free)} free, and the run is going "
        f"to have {num_at_once} more checkpoints there at once, of {in_words(needed)} at least ({addends}): "
        f"{num_at_once} × {in_words(needed)} = {in_words(num_at_once * needed)}, and {fitting} "
        f"{'fits' if fitting == 1 else 'fit'}. Free some space, set save_total_limit to fewer (while one is "
        "written, one more than that is there), save_steps to more, or output_dir to a larger disk."
    )


def in_words(num_bytes: int) -> str:
    """Bytes as text."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
