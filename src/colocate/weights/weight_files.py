"""The safetensors files of a checkpoint, in a directory or in the Hub's cache, and their headers.

No tensor is read to list a checkpoint's tensors: a file begins with a header of names, types and shapes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate.weights.file_reading import DamagedFile, open_weights, read_object

if TYPE_CHECKING:
    import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_SAMPLED_BYTES = 4096
"""Bytes of each tensor that a fingerprint reads: 3 MB of a model of 72 billion parameters."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, as the header of its file describes it."""

    path: Path
    dtype: torch.dtype | None
    """The type in PyTorch; None: a type in which no model is trained."""
    shape: tuple[int, ...]


def check_no_gguf(name: Any) -> None:
    """Refuse the path of a GGUF file in the place of a model's name."""
    if not isinstance(name, str) or not name.lower().endswith(".gguf"):
        return
    directory, _, file = name.rpartition("/")
    raise ValueError(
        f"{name!r} is a GGUF file, and a model is called by its directory or its name on the Hub. Give "
        f"{directory or '.'!r} as the model, which must have a tokenizer, too, and "
        f"model_init_kwargs={{'gguf_file': {file!r}}}."
    )


def at(revision: str | None) -> dict[str, Any]:
    """The argument of `from_pretrained` for a revision, if there is one."""
    return {} if revision is None else {"revision": revision}


def found_file(
    name: str, file: str, revision: str | None = None, *, is_local_only: bool = False
) -> Path | None:
    """A file of a checkpoint (a directory, or a name on the Hub, from which it is downloaded unless
    `is_local_only`); None: it has no such file, or it cannot be reached."""
    if Path(name).is_dir():
        return path if (path := Path(name, file)).is_file() else None
    from transformers.utils import cached_file

    options = {**at(revision), "local_files_only": is_local_only}
    try:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **options)
    except OSError:
        return None
    return None if found is None else Path(str(found))


def weight_files(name: str, revision: str | None = None, *, is_local_only: bool = False) -> list[Path]:
    """The safetensors files of a checkpoint that are there, sorted by name; the arguments are
    `found_file`'s."""
    files = [SINGLE]
    if (index := found_file(name, INDEX, revision, is_local_only=is_local_only)) is not None:
        files = sorted(set(weight_map(index).values()))
    found = (found_file(name, file, revision, is_local_only=is_local_only) for file in files)
    return [path for path in found if path is not None]


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as a checkpoint's index says.

    Raises:
        DamagedFile: it has no such entry.
    """
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict):
        raise DamagedFile(index, "index", "it has no weight_map")
    return found


def header_of(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by their names.

    Raises:
        DamagedFile: it is no safetensors file.
    """
    import torch

    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    with open_weights(path) as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {
            key: StoredTensor(path, dtypes.get(tensor.get_dtype()), tuple(tensor.get_shape()))
            for key, tensor in slices.items()
        }


def fingerprint(files: Iterable[Path]) -> str:
    """A hash that is equal for two copies of a model's weights, however they are cut into files.

    It covers every tensor's name, type and shape, and the 4 KiB in the middle of its values, so that it takes
    milliseconds and not the minutes that reading the weights would. Training changes nearly every weight:
    another fine-tune of one model has another fingerprint.
    """
    lines = sorted(line for path in files for line in _sampled(path))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sampled(path: Path) -> list[str]:
    lines = []
    with open(path, "rb") as file:
        try:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        except (struct.error, ValueError, OverflowError, MemoryError, RecursionError) as error:
            raise DamagedFile(path, "safetensors file", error) from error
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            first, end = tensor["data_offsets"]
            size = min(_SAMPLED_BYTES, end - first)
            file.seek(8 + header_bytes + first + (end - first - size) // 2)
            digest = hashlib.sha256(file.read(size)).hexdigest()
            lines.append(json.dumps([name, tensor["dtype"], tensor["shape"], digest]))
    return lines
