"""Tensors in a checkpoint: what is read is data, whoever wrote the index."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from colocate.checkpoints import shards
from colocate.checkpoints.sealed import CheckpointError

TENSORS = {"weights/a": torch.arange(6.0).view(2, 3), "state/a/step": torch.tensor(3.0)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shards.save(tmp_path, dict(TENSORS))
    return tmp_path


def test_tensors_come_back(directory: Path) -> None:
    found = shards.shapes(directory)
    assert found == {name: (tensor.shape, tensor.dtype) for name, tensor in TENSORS.items()}
    read = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in found.items()}
    shards.load(directory, read)
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


class Runs:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def hostile(tmp_path: Path) -> dict[str, bytes]:
    touched = f"touch {tmp_path / 'touched'}"
    return {
        "a command": pickle.dumps(Runs(os.system, touched)),
        "a name behind a name": b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata.__init__\n.",
        "a layout that is none": b"\x80\x04ctorch.serialization\n_get_layout\n(X\x01\x00\x00\x00xtR.",
        "another object": pickle.dumps(Runs(torch.Size, (1,))),
        "bytes": pickle.dumps(Metadata({"weights/a": BytesStorageMetadata()})),
        "nothing": b"",
    }


@pytest.mark.parametrize("kind", hostile(Path()))
def test_an_index_that_is_none_is_refused_and_runs_nothing(
    directory: Path, tmp_path: Path, kind: str
) -> None:
    (directory / shards.FOLDER / ".metadata").write_bytes(hostile(tmp_path)[kind])
    for read in (lambda: shards.shapes(directory), lambda: shards.load(directory, dict(TENSORS))):
        with pytest.raises(CheckpointError, match=r"index|no tensor"):
            read()
    assert not (tmp_path / "touched").exists()


def test_an_index_cannot_point_out_of_its_folder(directory: Path) -> None:
    file = directory / shards.FOLDER / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../optimizer.pt"
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="no tensor in shards/"):
        shards.shapes(directory)
