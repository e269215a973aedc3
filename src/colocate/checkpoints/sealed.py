"""Checkpoints that are either whole or not there.

A checkpoint is a plain Hugging Face model directory with the trainer's state beside it. It is written under
a temporary name, listed in a manifest with sizes and checksums, flushed to disk and only then renamed: a
rename is atomic, and a directory half written by a killed process is not a checkpoint.
"""

from __future__ import annotations

import json
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
_NAME = re.compile(r"^checkpoint-(\d+)$")
_LEFTOVER = re.compile(r"^partial-(replaced-)?checkpoint-\d+$")
_CHUNK_BYTES = 1 << 24


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be trusted."""


def check_writable(output_dir: Path) -> None:
    """Find out before the first step, not at the first checkpoint hours later, that nothing can be saved.

    Raises:
        ValueError: `output_dir` cannot be made, or no file can be written there.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir) as probe:
            probe.write(b"0")
    except OSError as error:
        raise ValueError(
            f"output_dir={str(output_dir)!r} cannot be written to ({error}), so the run could save nothing. "
            "Set output_dir to a directory of yours on a disk with free space."
        ) from error


@contextmanager
def writing(
    final_dir: Path, *, is_main: bool = True, gather: Callable[[list], list] = lambda values: values
) -> Iterator[Path]:
    """Directory to write a checkpoint into; becomes `final_dir` when the block ends without error.

    Every rank may write files of its own; the main one seals the whole.

    Args:
        gather: concatenates the lists of all ranks, and so holds each until the last has come.

    Raises:
        CheckpointError: on all ranks, if the disk of one is full or cannot be written; nothing is left
            behind, and earlier checkpoints are untouched.
    """
    partial_dir = final_dir.with_name(f"partial-{final_dir.name}")
    with _failing_together(final_dir, partial_dir, is_main, gather):
        if is_main:
            _remove_leftovers(final_dir.parent)
            partial_dir.mkdir(parents=True)
    with _failing_together(final_dir, partial_dir, is_main, gather):
        yield partial_dir
    with _failing_together(final_dir, partial_dir, is_main, gather):
        if is_main:
            _seal(partial_dir, final_dir)


@contextmanager
def _failing_together(
    final_dir: Path, partial_dir: Path, is_main: bool, gather: Callable[[list], list]
) -> Iterator[None]:
    """A rank that failed alone would leave the others waiting for it."""
    failure = None
    try:
        yield
    # torch and safetensors report a full disk as errors of their own.
    except (OSError, RuntimeError, SafetensorError) as error:
        failure = error
    messages = gather([None if failure is None else str(failure) or repr(failure)])
    failed = [f"{message} (rank {rank})" for rank, message in enumerate(messages) if message is not None]
    if not failed:
        return
    free_bytes = shutil.disk_usage(_existing_parent(final_dir)).free
    written_bytes = sum(f.stat().st_size for f in partial_dir.rglob("*") if f.is_file())
    gather([None])  # nobody measures what another removes already
    if is_main:
        shutil.rmtree(partial_dir, ignore_errors=True)
    raise CheckpointError(
        f"could not write {final_dir}: {'; '.join(failed)}. {written_bytes / 1e6:.1f} MB had been written "
        f"and are removed again; {free_bytes / 1e6:.1f} MB are free on that disk. Free some space, set "
        f"save_total_limit, or choose another output_dir. Earlier checkpoints are untouched."
    ) from failure


def verify(directory: Path) -> None:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: a file is missing, was cut short or does not have the content that was written.
    """
    if not directory.is_dir():
        raise CheckpointError(f"There is no checkpoint {directory}. {_other_checkpoints(directory)}")
    if not (directory / MANIFEST).is_file():
        raise CheckpointError(
            f"{directory} has no {MANIFEST}: it was not written by colocate, or not to the end. "
            f"To start from its weights alone, pass the directory as the model instead."
        )
    for name, expected in _read_manifest(directory)["files"].items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(
                f"{directory} is corrupt: {name} is missing. {_other_checkpoints(directory)}"
            )
        actual = _fingerprint(file)
        if actual != expected:
            raise CheckpointError(
                f"{directory} is corrupt: {name} has {actual['bytes']} bytes and checksum {actual['crc32']}, "
                f"but {expected['bytes']} bytes with checksum {expected['crc32']} were written. "
                f"{_other_checkpoints(directory)}"
            )


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Sealed checkpoints in `output_dir` in the order in which they were written.

    That is not always the order of their steps: a new run in an old run's directory, or one that went back
    to an older checkpoint, writes small numbers beside larger ones that it has nothing to do with.
    """
    if not output_dir.is_dir():
        return []
    found = [d for d in output_dir.iterdir() if _NAME.match(d.name) and (d / MANIFEST).is_file()]
    return sorted(found, key=_written_at)


def find(resume_from_checkpoint: str | bool | None, output_dir: Path) -> Path | None:
    """The checkpoint that the option asks for: a path, the newest for True, none for None or False.

    Raises:
        CheckpointError: True, but there is none.
    """
    if not resume_from_checkpoint:
        return None
    if resume_from_checkpoint is not True:
        return Path(resume_from_checkpoint)
    found = list_checkpoints(output_dir)
    if not found:
        raise CheckpointError(
            f"resume_from_checkpoint=True, but {output_dir} holds no complete checkpoint. To begin the run, "
            "leave resume_from_checkpoint out."
        )
    return found[-1]


def rotate(output_dir: Path, limit: int | None, keep: str | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, but never the one named `keep` (the best so far)."""
    if limit is None or limit <= 0:
        return
    checkpoints = list_checkpoints(output_dir)
    surplus = max(0, len(checkpoints) - limit)
    # The newest is what a killed run resumes from, so it stays even where the best one fills the limit.
    deletable = [c for c in checkpoints[:-1] if keep is None or c.resolve() != Path(keep).resolve()]
    for directory in deletable[:surplus]:
        # Under this name it is no checkpoint any more, should the process be killed half-way.
        shutil.rmtree(directory.rename(directory.with_name(f"partial-{directory.name}")))


def _remove_leftovers(output_dir: Path) -> None:
    """What killed processes had not finished writing, or not finished deleting."""
    if not output_dir.is_dir():
        return
    for directory in output_dir.iterdir():
        if _LEFTOVER.match(directory.name):
            shutil.rmtree(directory)


def _seal(partial_dir: Path, final_dir: Path) -> None:
    files = sorted(f for f in partial_dir.rglob("*") if f.is_file())
    manifest = {
        "written_at": time.time(),
        "files": {f.relative_to(partial_dir).as_posix(): _fingerprint(f) for f in files},
    }
    (partial_dir / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for file in [*files, partial_dir / MANIFEST, partial_dir]:
        _flush(file)
    replaced = final_dir.with_name(f"partial-replaced-{final_dir.name}")
    if final_dir.exists():
        final_dir.rename(replaced)
    partial_dir.rename(final_dir)
    _flush(final_dir.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if not isinstance(manifest, dict) or not {"written_at", "files"} <= manifest.keys():
            raise ValueError("not a list of files")
    except ValueError as error:  # a flipped bit may also spoil the encoding
        raise CheckpointError(
            f"{directory} is corrupt: {MANIFEST} is not readable ({error}). {_other_checkpoints(directory)}"
        ) from error
    return manifest


def _written_at(directory: Path) -> float:
    try:
        return float(json.loads((directory / MANIFEST).read_text())["written_at"])
    except (ValueError, KeyError, TypeError):
        # Corrupt, which `verify` reports; when it was written decides whether anybody asks.
        return (directory / MANIFEST).stat().st_mtime


def _fingerprint(file: Path) -> dict[str, int]:
    # CRC-32 finds what disks and kills do to files, at memory speed; nobody forges a checkpoint.
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
