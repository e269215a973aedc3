"""The files of a saved model or adapter, checked when they are loaded: an error names the damaged one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colocate.weights.adapter_files import CONFIG as ADAPTER_CONFIG
from colocate.weights.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from colocate.weights.adapter_files import read_adapter
from colocate.weights.file_reading import DamagedFile, open_weights, read_object
from colocate.weights.weight_files import INDEX, found_file, header_of, weight_files, weight_map

_OBJECTS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", ADAPTER_CONFIG),
)
_LFS = b"version https://git-lfs"


def check_files(name: str, revision: str | None = None) -> None:
    """Read the JSON files of a model or adapter, and the headers of its weights. The Hub is not asked.

    Args:
        name: its directory, or its name on the Hub.

    Raises:
        DamagedFile: one cannot be read.
    """
    for file in _OBJECTS:
        if (path := found_file(name, file, revision, is_local_only=True)) is not None:
            read_object(path)
    paths = weight_files(name, revision, is_local_only=True)
    if (index := found_file(name, INDEX, revision, is_local_only=True)) is not None:
        named = set(weight_map(index).values())
        if missing := sorted(named - {path.name for path in paths}):
            raise ValueError(
                f"{name!r} lacks {len(missing)} of the {len(named)} files that its {INDEX} names, such as "
                f"{missing[0]!r}. Was a download or a copy cut short? Get the model again."
            )
    adapter = found_file(name, ADAPTER_WEIGHTS, revision, is_local_only=True)
    for path in (*paths, *([] if adapter is None else [adapter])):
        _check_weights(path)


def check_adapter(name: str) -> None:
    """Refuse an adapter whose tensors are not those that its configuration speaks of, or are no numbers.

    Args:
        name: its directory, or its name on the Hub.

    Raises:
        DamagedFile: a LoRA adapter is not whole; other kinds are left to PEFT.
    """
    path = found_file(name, ADAPTER_WEIGHTS)
    try:
        read_adapter(name)
    except DamagedFile:
        raise
    except (ValueError, FileNotFoundError):
        if path is None:
            return
    assert path is not None, "read_adapter would have missed it"
    with open_weights(path) as file:
        for key in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(key)
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise DamagedFile(path, "adapter", f"{key!r} has values that are no finite numbers")


@contextmanager
def naming_damage(name: str, revision: str | None = None) -> Iterator[None]:
    """Name the damaged file if the block fails because of one.

    Raises:
        DamagedFile: a file is damaged.
    """
    try:
        yield
    except (DamagedFile, FileNotFoundError):
        raise
    except Exception as error:
        check_files(name, revision)
        if name in str(error) or isinstance(error, (ImportError, MemoryError)) or _is_clear(error):
            raise
        raise ValueError(
            f"{name} could not be loaded: {type(error).__name__}: {str(error)[:1000] or 'without a word'}"
        ) from error


@contextmanager
def adapters_are_whole(name: str) -> Iterator[None]:
    """Refuse an adapter that is loaded in the block and is not whole: PEFT would only warn, and put its
    starting values in place of missing ones.

    Raises:
        DamagedFile: see `check_adapter`.
    """
    if found_file(name, ADAPTER_CONFIG) is not None:
        check_adapter(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        yield


def check_complete(name: str, report: dict[str, Any]) -> None:
    """Refuse a model that lacks weights, by the loading information of `from_pretrained`, which would draw
    them at random."""
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{name} lacks {len(missing)} of its model's weights, such as {missing[0]!r}; in their place "
            "would be random numbers. Was it saved without its head, or a file of it lost? Get the model "
            "again."
        )


def _check_weights(path: Path) -> None:
    with open(path, "rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise DamagedFile(path, "safetensors file", "it is a pointer of Git LFS: run `git lfs pull`")
    header_of(path)


def _is_clear(error: Exception) -> bool:
    """Whether this package has raised an error, whose messages say what to do."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__", "")).startswith("colocate.")
