"""Tensors of which every rank has rows, written by all ranks and read back by any number of them.

The files are those of `torch.distributed.checkpoint`, in the folder `shards` of a checkpoint. Its index is a
pickle, which could run code: it is read with an unpickler that knows the index's own types only.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from colocate.checkpoints.sealed import CheckpointError

FOLDER = "shards"
_INDEX = ".metadata"

_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        *("ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata", "Metadata"),
        *("MetadataIndex", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "strided", *(str(x).removeprefix("torch.") for x in vars(torch).values()
                                   if isinstance(x, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""Types that the index may consist of, by module. Making one of them does nothing else."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _TYPES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an index")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """PyTorch's reader, with the index read as data."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        file = self._directory / _INDEX
        try:
            with file.open("rb") as stream:
                metadata = _IndexUnpickler(stream).load()
        except (
            pickle.UnpicklingError,
            OSError,
            EOFError,
            LookupError,
            AttributeError,
            ValueError,
            TypeError,
        ) as error:
            raise CheckpointError(
                f"{file} is not read: it is not the index of a checkpoint's tensors, and reading anything "
                f"else could run code ({error}). Take a checkpoint from a source that you trust."
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{file} holds a {type(metadata).__name__}, not an index of tensors.")
        others = [
            n for n, x in metadata.state_dict_metadata.items() if not isinstance(x, TensorStorageMetadata)
        ]
        paths = [info.relative_path for info in (metadata.storage_data or {}).values()]
        outside = [path for path in paths if Path(path).name != path or path == ".."]
        if others or outside:
            raise CheckpointError(
                f"{file} names {(others + outside)[0]!r}, which is no tensor in {self._directory.name}/. "
                "Take a checkpoint from a source that you trust."
            )
        return metadata


def is_in(directory: Path) -> bool:
    """Whether a checkpoint has tensors that were written by all ranks."""
    return (directory / FOLDER / _INDEX).is_file()


def save(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors by name into a checkpoint; all ranks must call it together.

    A `DTensor` is written by the ranks that hold its rows, a plain tensor by one rank of those that have its
    name.

    Raises:
        OSError: a rank could not write; it is raised on all ranks.
    """
    try:
        dcp.save(dict(tensors), storage_writer=FileSystemWriter(directory / FOLDER, overwrite=True))
    except CheckpointException as error:  # which is no Exception
        raise OSError(_reasons(error)) from error


def shapes(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Whole shape and type of every tensor in a checkpoint, by name."""
    metadata = _Reader(directory / FOLDER).read_metadata()
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors with a checkpoint's tensors of the same names; all ranks must call it together."""
    try:
        dcp.load(dict(tensors), storage_reader=_Reader(directory / FOLDER))
    except CheckpointException as error:
        raise CheckpointError(f"{directory / FOLDER} cannot be read: {_reasons(error)}") from error


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"{failure} (rank {rank})" for rank, (failure, _) in sorted(error.failures.items()))
