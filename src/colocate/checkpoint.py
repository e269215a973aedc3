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
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

MANIFEST = "manifest.json"
_NAME = re.compile(r"^checkpoint-(\d+)$")
_CHUNK_BYTES = 1 << 24


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be trusted."""


@contextmanager
def writing(final_dir: Path, *, is_main: bool = True, barrier=lambda: None) -> Iterator[Path]:
    """Directory to write a checkpoint into; becomes `final_dir` when the block ends without error.

    Every rank may write files of its own; the main one seals the whole.

    Raises:
        CheckpointError: the disk is full or the directory cannot be written; nothing is left behind, and
            earlier checkpoints are untouched.
    """
    partial_dir = final_dir.with_name(f"partial-{final_dir.name}")
    try:
        if is_main:
            shutil.rmtree(partial_dir, ignore_errors=True)
            partial_dir.mkdir(parents=True)
        barrier()
        yield partial_dir
        barrier()
        if is_main:
            _seal(partial_dir, final_dir)
        barrier()
    # torch and safetensors report a full disk as errors of their own.
    except (OSError, RuntimeError, SafetensorError) as error:
        free_bytes = shutil.disk_usage(_existing_parent(final_dir)).free
        written_bytes = sum(f.stat().st_size for f in partial_dir.rglob("*") if f.is_file())
        if is_main:
            shutil.rmtree(partial_dir, ignore_errors=True)
        raise CheckpointError(
            f"could not write {final_dir}: {error}. {written_bytes / 1e6:.1f} MB had been written "
            f"and are removed again; {free_bytes / 1e6:.1f} MB are free on that disk. Free some space, set "
            f"save_total_limit, or choose another output_dir. Earlier checkpoints are untouched."
        ) from error


def verify(directory: Path) -> None:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: a file is missing, was cut short or does not have the content that was written.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no {MANIFEST}: it was not written by colocate, or not to the end. "
            f"To start from its weights alone, pass the directory as the model instead."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{directory / MANIFEST} is not readable: {error}") from error
    for name, expected in manifest.items():
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
    """Sealed checkpoints in `output_dir`, oldest first. Directories without a manifest do not count."""
    if not output_dir.is_dir():
        return []
    found = [d for d in output_dir.iterdir() if _NAME.match(d.name) and (d / MANIFEST).is_file()]
    return sorted(found, key=lambda d: int(d.name.rpartition("-")[2]))


def rotate(output_dir: Path, limit: int | None, keep: str | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, but never the one named `keep` (the best so far)."""
    if limit is None or limit <= 0:
        return
    checkpoints = list_checkpoints(output_dir)
    surplus = max(0, len(checkpoints) - limit)
    # The newest is what a killed run resumes from, so it stays even where the best one fills the limit.
    deletable = [c for c in checkpoints[:-1] if keep is None or c != Path(keep)]
    for directory in deletable[:surplus]:
        shutil.rmtree(directory)


def _seal(partial_dir: Path, final_dir: Path) -> None:
    files = sorted(f for f in partial_dir.rglob("*") if f.is_file())
    manifest = {f.relative_to(partial_dir).as_posix(): _fingerprint(f) for f in files}
    (partial_dir / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for file in [*files, partial_dir / MANIFEST, partial_dir]:
        _flush(file)
    if final_dir.exists():
        shutil.rmtree(final_dir)
    partial_dir.rename(final_dir)
    _flush(final_dir.parent)


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
