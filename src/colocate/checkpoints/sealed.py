"""Checkpoints that are either whole or do not exist.

A checkpoint is a Hugging Face model directory that also holds the trainer's state. It is written under a
temporary name, listed in a manifest with sizes and checksums, flushed to disk and only then renamed. The
rename is atomic, so a directory that a killed process has half written never has a checkpoint's name.

A failure to delete an old checkpoint does not end a run: it is reported once, and the files stay.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

MANIFEST = "manifest.json"
FORMAT = 2
"""Version of the files in a checkpoint. Version 1 had Python objects, which only a full unpickler reads."""
AUTO = "auto"
"""`resume_from_checkpoint` for "go on from the newest checkpoint if there is one, else begin"."""

_NAME = re.compile(r"^checkpoint-(\d+)$")
_LEFTOVER = re.compile(r"^partial-(replaced-)?checkpoint-\d+(\.\d+)?$")
_CHUNK_BYTES = 1 << 24
_SMALLEST_INTERVAL_S = 0.001  # between two seals, whatever the clock says

_SUSPECTS = ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm")
"""Options that can make weights infinite or NaN although loss and gradient are finite."""

logger = logging.getLogger(__name__)
_told: set[Path] = set()
"""Paths that could not be deleted and were reported."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be trusted."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint differs from what was written; `reason` says how, without advice."""

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(f"{directory} is corrupt: {reason}. {_other_checkpoints(directory)}")
        self.reason = reason


def check_writable(output_dir: Path) -> None:
    """Raise before the first step, not at the first checkpoint hours later, if nothing can be saved."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir) as probe:
            probe.write(b"0")
    except OSError as error:
        raise ValueError(
            f"output_dir={str(output_dir)!r} cannot be written to ({error}), so the run could save nothing. "
            "Set output_dir to a directory of yours on a disk with free space."
        ) from error


def check_finite_weights(policy: Any, args: Any, doing: str) -> None:
    """Raise if a weight is not finite. This reads every weight once and waits for the device.

    Args:
        policy: has `find_nonfinite_weight()`.
        doing: the action that the check comes before, as a noun for the message.
    """
    name = policy.find_nonfinite_weight()
    if name is None:
        return
    checkpoints = list_checkpoints(args.run_dir)
    suspects = ", ".join(f"{option}={getattr(args, option)}" for option in _SUSPECTS)
    raise FloatingPointError(
        f"No {doing}: the weights are not finite ({name} for one). An optimizer step can make them so though "
        f"its loss and gradient are finite; this run has {suspects}. Lower learning_rate, raise adam_epsilon "
        "or set max_grad_norm to a positive number. "
        + (
            f"The last checkpoint is {checkpoints[-1]}: go on from it with resume_from_checkpoint=True."
            if checkpoints
            else f"{args.run_dir} holds no checkpoint, so the run has to begin again."
        )
    )


@contextmanager
def writing(
    final_dir: Path, *, is_main: bool = True, gather: Callable[[list], list] = lambda values: values
) -> Iterator[Path]:
    """A directory to write a checkpoint into; it is renamed to `final_dir` if the block ends without error.

    Every rank may write files of its own; the main rank seals the checkpoint.

    Args:
        gather: concatenates the lists of all ranks, and so waits for all of them.

    Raises:
        CheckpointError: on all ranks, if the disk of one rank is full or cannot be written. The partial
            checkpoint is deleted, and earlier checkpoints stay as they are.
    """
    partial_dir = final_dir.with_name(f"partial-{final_dir.name}")
    with _failing_together(final_dir, partial_dir, is_main, gather):
        if is_main:
            _remove_leftovers(final_dir.parent)
            partial_dir = _free(partial_dir)  # an old partial directory may be impossible to delete
            partial_dir.mkdir(parents=True)
    (name,) = (name for name in gather([partial_dir.name if is_main else None]) if name is not None)
    partial_dir = final_dir.with_name(name)
    with _failing_together(final_dir, partial_dir, is_main, gather):
        yield partial_dir
    with _failing_together(final_dir, partial_dir, is_main, gather):
        if is_main:
            _seal(partial_dir, final_dir)


@contextmanager
def _failing_together(
    final_dir: Path, partial_dir: Path, is_main: bool, gather: Callable[[list], list]
) -> Iterator[None]:
    """Raise a rank's error on all ranks, which would otherwise wait for that rank for ever."""
    failure = None
    try:
        yield
    # torch and safetensors raise their own types of errors for a full disk.
    except (OSError, RuntimeError, SafetensorError) as error:
        failure = error
    messages = gather([None if failure is None else str(failure) or repr(failure)])
    failed = {rank: message for rank, message in enumerate(messages) if message is not None}
    if not failed:
        return
    # One rank's figures for all: ranks whose errors differ look like one that has failed because of another.
    # None deletes files before this gather, so that all have measured them.
    free_bytes = shutil.disk_usage(_existing_parent(final_dir)).free
    written_bytes, free_bytes = gather([(_num_bytes(partial_dir), free_bytes)])[min(failed)]
    if is_main:
        shutil.rmtree(partial_dir, ignore_errors=True)
    errors = "; ".join(f"{message} (rank {rank})" for rank, message in failed.items())
    raise CheckpointError(
        f"could not write {final_dir}: {errors}. {written_bytes / 1e6:.1f} MB had been written "
        f"and are removed again; {free_bytes / 1e6:.1f} MB are free on that disk. Free some space, set "
        f"save_total_limit, or choose another output_dir. Earlier checkpoints are untouched."
    ) from failure


def verify(directory: Path) -> None:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CorruptCheckpoint: a file is missing, cannot be read, is cut short, or different from what was
            written.
        CheckpointError: there is no such checkpoint, or another version of colocate wrote it.
    """
    if not directory.is_dir():
        raise CheckpointError(f"There is no checkpoint {directory}. {_other_checkpoints(directory)}")
    if not (directory / MANIFEST).is_file():
        raise CheckpointError(
            f"{directory} has no {MANIFEST}: it was not written by colocate, or not to the end. "
            f"To start from its weights alone, pass the directory as the model instead."
        )
    manifest = _read_manifest(directory)
    if manifest.get("format", 1) != FORMAT:
        raise CheckpointError(
            f"{directory} has format {manifest.get('format', 1)}, and this version of colocate reads format "
            f"{FORMAT}. Resume it with the version that wrote it, or start a new run in another output_dir "
            f"with model={str(directory)!r}."
        )
    for name, expected in manifest["files"].items():
        file = directory / name
        if not file.is_file():
            raise CorruptCheckpoint(directory, f"{name} is missing")
        try:
            actual = _fingerprint(file)
        except OSError as error:
            raise CorruptCheckpoint(directory, f"{name} cannot be read ({error})") from error
        if actual != expected:
            raise CorruptCheckpoint(
                directory,
                f"{name} has {actual['bytes']} bytes and checksum {actual['crc32']}, but "
                f"{expected['bytes']} bytes with checksum {expected['crc32']} were written",
            )


@contextmanager
def saving_model(directory: Path) -> Iterator[None]:
    """Turn a failure to save a model into an error that names the file and what fills the disk."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        name = getattr(error, "filename", None) or _last_written(directory)
        if isinstance(error, SafetensorError):  # safetensors deletes a file that it could not finish
            name = "the weights, *.safetensors"
        free_bytes = shutil.disk_usage(_existing_parent(directory)).free
        sizes = {c: _num_bytes(c) for c in list_checkpoints(directory)}
        taken = "; ".join(f"{c.name} has {size / 1e6:.1f} MB" for c, size in sizes.items())
        raise CheckpointError(
            f"could not save the model in {directory}: {error} ({name}). "
            f"{free_bytes / 1e6:.1f} MB are free on that disk. Free some space"
            + (f" ({taken})" if taken else "")
            + (
                f" and go on from {list(sizes)[-1]} with resume_from_checkpoint=True."
                if sizes
                else ", and set save_strategy='steps', so that a run's work is on the disk before its end."
            )
        ) from error


@contextmanager
def writing_directory(target: Path) -> Iterator[Path]:
    """Yield a directory to write into. When the block ends without an error it is renamed to `target`, or to
    the target of that link."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists already: name a directory that does not, or an empty one.")
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if target.exists():
        target.rmdir()
    partial.rename(target)


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Sealed checkpoints in `output_dir` in the order in which they were written.

    Their steps need not be in order: a new run in an old run's directory, or a run that went back to an older
    checkpoint, writes smaller numbers than are there. The order does not depend on the clock either, because
    every seal gets a later time than the seals that it finds (`_seal`).
    """
    if not output_dir.is_dir():
        return []
    found = [d for d in output_dir.iterdir() if _NAME.match(d.name) and _is_sealed(d)]
    return sorted(found, key=_written_at)


def find(resume_from_checkpoint: str | bool | None, output_dir: Path) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` asks for.

    A path names the checkpoint, True and "auto" mean the newest, None and False mean none. If there is no
    checkpoint, True is an error and "auto" means none, so that one command both begins a run and continues
    it, as requeued jobs need.
    """
    if not resume_from_checkpoint:
        return None
    if resume_from_checkpoint is not True and resume_from_checkpoint != AUTO:
        return Path(resume_from_checkpoint)
    found = list_checkpoints(output_dir)
    if found:
        return found[-1]
    if resume_from_checkpoint == AUTO:
        return None
    raise CheckpointError(
        f"resume_from_checkpoint=True, but {output_dir} holds no complete checkpoint. To begin the run, "
        f"leave resume_from_checkpoint out; resume_from_checkpoint={AUTO!r} does either."
    )


def rotate(output_dir: Path, limit: int | None, keep: str | None, written: Path | None = None) -> None:
    """Delete the oldest checkpoints beyond `limit`; one that cannot be deleted stays, with a warning.

    Args:
        keep: the best checkpoint so far, which is never deleted.
        written: the checkpoint just written, which is never deleted.
    """
    if limit is None or limit <= 0:
        return
    checkpoints = list_checkpoints(output_dir)
    surplus = max(0, len(checkpoints) - limit)
    # The newest is what a killed run resumes from, so it stays even where the best one fills the limit.
    kept = {path.resolve() for path in (checkpoints[-1:] + [Path(p) for p in (keep, written) if p])}
    for directory in [c for c in checkpoints if c.resolve() not in kept][:surplus]:
        delete_checkpoint(directory)


def delete_checkpoint(directory: Path) -> None:
    """Delete a checkpoint; if it is a link or cannot be deleted, it stays, with a warning."""
    if directory.is_symlink():
        _tell(directory, f"it is a link to {directory.resolve()}, which is yours to delete")
        return
    try:
        # Renamed first, so that it is no checkpoint any more if the process is killed half-way.
        doomed = directory.rename(_free(directory.with_name(f"partial-{directory.name}")))
    except OSError as error:
        _tell(directory, str(error))
    else:
        _delete(doomed)


def _remove_leftovers(output_dir: Path) -> None:
    """Delete directories that killed processes had not finished writing or deleting."""
    if not output_dir.is_dir():
        return
    for path in output_dir.iterdir():
        if _LEFTOVER.match(path.name):
            _delete(path)


def _delete(path: Path) -> None:
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        _tell(path, str(error))


def _tell(path: Path, reason: str) -> None:
    if path not in _told:
        _told.add(path)
        logger.warning(f"{path} could not be deleted ({reason}). The run goes on; delete it yourself.")


def _free(path: Path) -> Path:
    """`path`, or the first of path.1, path.2, ... that does not exist."""
    number, free = 0, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def _seal(partial_dir: Path, final_dir: Path) -> None:
    files = sorted(f for f in partial_dir.rglob("*") if f.is_file())
    # The times must give the order of writing, even if a clock goes back or another node's is ahead.
    newest = max(map(_written_at, list_checkpoints(final_dir.parent)), default=0.0)
    manifest = {
        "format": FORMAT,
        "written_at": max(time.time(), newest + _SMALLEST_INTERVAL_S, math.nextafter(newest, math.inf)),
        "files": {f.relative_to(partial_dir).as_posix(): _fingerprint(f) for f in files},
    }
    (partial_dir / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for file in [*files, partial_dir / MANIFEST, partial_dir]:
        _flush(file)
    replaced = _make_way(final_dir)
    partial_dir.rename(final_dir)
    _flush(final_dir.parent)
    if replaced is not None:
        _delete(replaced)


def _make_way(final_dir: Path) -> Path | None:
    """Rename a directory that has the checkpoint's name; returns the path to delete after the seal."""
    if not os.path.lexists(final_dir):
        return None
    if _is_sealed(final_dir) and not final_dir.is_symlink():
        return final_dir.rename(_free(final_dir.with_name(f"partial-replaced-{final_dir.name}")))
    aside = final_dir.rename(_free(final_dir.with_name(f"{final_dir.name}.replaced")))
    logger.warning(f"{final_dir} was no checkpoint of this directory's; it is {aside.name} now.")
    return None


def _is_sealed(directory: Path) -> bool:
    try:
        return (directory / MANIFEST).is_file()
    except OSError:  # not readable, or gone in this moment
        return False


def _last_written(directory: Path) -> Path:
    files = [f for f in directory.iterdir() if f.is_file()] if directory.is_dir() else []
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=directory)


def _num_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if not isinstance(manifest, dict) or not {"written_at", "files"} <= manifest.keys():
            raise ValueError("not a list of files")
    except (ValueError, OSError, RecursionError) as error:  # a flipped bit may also spoil the encoding
        raise CorruptCheckpoint(directory, f"{MANIFEST} is not readable ({error})") from error
    return manifest


def _written_at(directory: Path) -> float:
    try:
        written_at = float(json.loads((directory / MANIFEST).read_text())["written_at"])
        if math.isfinite(written_at):
            return written_at
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    except OSError:
        return -math.inf
    # The manifest is corrupt, which `verify` reports; the time of the file still gives the order.
    return (directory / MANIFEST).stat().st_mtime


def _fingerprint(file: Path) -> dict[str, int]:
    # CRC-32 finds faults of disks and cut-off writes at memory speed; forgeries are not the concern here.
    checksum = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return {"bytes": file.stat().st_size, "crc32": checksum}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _other_checkpoints(directory: Path) -> str:
    others = [c for c in list_checkpoints(directory.parent) if c != directory]
    if not others:
        return "There is no other checkpoint beside it."
    return f"The newest other checkpoint is {others[-1]}: set resume_from_checkpoint to it."


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
