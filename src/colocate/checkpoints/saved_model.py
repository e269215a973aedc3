"""Finds the model that a name means: a run's directory, a checkpoint, a model's or an adapter's directory,
or a name on the Hub."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colocate.checkpoints import sealed
from colocate.options.run_file import read_file
from colocate.reporting.run_log import METRICS_FILE
from colocate.reporting.run_log import RUN_FILE as RECORD_FILE
from colocate.weights.adapter_files import CONFIG as ADAPTER_CONFIG
from colocate.weights.file_reading import read_object
from colocate.weights.weight_files import found_file

RUN_FILE = "config.yaml"
"""The options of a run of `colocate train`, which it writes into its directory."""
_OF_CODE = (
    *("trust_remote_code", "model_init_kwargs", "reward_funcs", "tools", "environment_factory"),
    "vllm_engine_kwargs",
)
"""Options that decide which code is run. Whoever wrote a model's directory wrote its options, too."""


@dataclass(frozen=True)
class SavedModel:
    """A model that can be loaded.

    Attributes:
        name: the name that the user gave.
        base: directory or Hub name of the whole weights.
        adapter: directory or Hub name of the adapter on them; None: there is none.
        revision: branch, tag or commit of the base on the Hub.
        options: the options of the run that trained it, without those in `code`; empty if they are not known.
        code: the options of that run that name code to run. A command may print them; only its user may apply
            them.
    """

    name: str
    base: str
    adapter: str | None = None
    revision: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    code: dict[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> str:
        """Directory or Hub name of the trained part: the adapter, or else the whole model."""
        return self.base if self.adapter is None else self.adapter


def find_model(name: str, base: str | None = None) -> SavedModel:
    """The model that `name` means. A run whose model is not saved yet means its newest checkpoint.

    Args:
        base: the model below an adapter; None: the one that the adapter's configuration names.
    """
    directory = _directory_of(name)
    place = name if directory is None else str(directory)
    if (config_file := found_file(place, ADAPTER_CONFIG)) is None:
        if base is not None:
            raise ValueError(
                f"{name} is a whole model and no adapter: there is nothing to put onto {base!r}."
            )
        if found_file(place, "config.json") is None:
            raise ValueError(
                f"There is no directory {name!r}, and no model of this name on the Hub or in its cache here."
            )
        options, code = _options_of(directory)
        return SavedModel(name, place, options=options, code=code)
    config = read_object(config_file)
    found = base or config.get("base_model_name_or_path")
    if not found or not isinstance(found, str):
        raise ValueError(
            f"{name} is an adapter that does not say which model it is for: name it with --base."
        )
    revision = None if base is not None else config.get("revision")
    is_here = Path(found).is_dir()
    # What a path within the run's working directory is called, the Hub may have, too.
    if not is_here and (_is_path(found) or found_file(found, "config.json", revision) is None):
        raise ValueError(
            f"{name} is an adapter on the model {found!r}, and there is no such directory here"
            + ("" if _is_path(found) else ", and no model of this name on the Hub or in its cache here")
            + ". Name the model with --base, or start the command where the run was started."
        )
    return SavedModel(name, found, place, revision, *_options_of(directory))


def _is_path(name: str) -> bool:
    """Whether a name cannot be one on the Hub, which has at most one slash."""
    return name.count("/") > 1 or name.startswith((".", "/", "~"))


def _directory_of(name: str) -> Path | None:
    """The directory that holds the model; None: the name is one on the Hub."""
    path = Path(name).expanduser()
    if not path.is_dir():
        if path.exists():
            raise ValueError(f"{name} is a file; name the directory of a run, a checkpoint or a model.")
        if (
            _is_path(name)
            or path.suffix in (".yaml", ".yml")
            or (path.parent != Path() and path.parent.is_dir())
        ):
            raise ValueError(f"There is no directory {name!r}: name a run, a checkpoint or a model.")
        return None
    if (path / "config.json").is_file() or (path / ADAPTER_CONFIG).is_file():
        return path
    if checkpoints := sealed.list_checkpoints(path):
        return checkpoints[-1]
    entries = sorted(entry.name for entry in path.iterdir())
    shown = ", ".join(entries[:8]) + (f" and {len(entries) - 8} more" if len(entries) > 8 else "")
    raise ValueError(
        f"{name} has no model: neither config.json nor {ADAPTER_CONFIG} nor a checkpoint-<step> in it. It "
        f"has {shown or 'no files'}. A run saves its model at its end, and checkpoints every save_steps."
    )


def _options_of(directory: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """`options` and `code` of a `SavedModel`; those of a run from Python are read from its record."""
    options: dict[str, Any] = {}
    for place in _run_directories(directory):
        if (place / RUN_FILE).is_file():
            _check_owner(place / RUN_FILE, directory)
            options = read_file(place / RUN_FILE)
            break
        if (place / METRICS_FILE).is_file() and (place / RECORD_FILE).is_file():
            _check_owner(place / RECORD_FILE, directory)
            options = read_object(place / RECORD_FILE).get("options") or {}
            break
    code = {name: value for name, value in options.items() if name in _OF_CODE and value}
    return {name: value for name, value in options.items() if name not in _OF_CODE}, code


def _run_directories(directory: Path | None) -> list[Path]:
    """Directories whose options hold for a model; its parent counts only if the model is a checkpoint."""
    if directory is None:
        return []
    whole = directory.resolve()
    return [directory, *([whole.parent] if whole in sealed.list_checkpoints(whole.parent) else [])]


def _check_owner(file: Path, directory: Path | None) -> None:
    """Raises ValueError if a file belongs neither to this user nor to the owner of the model that it
    describes."""
    assert directory is not None
    described = (directory / name for name in ("config.json", ADAPTER_CONFIG))
    trusted = {os.geteuid(), 0, *(path.stat().st_uid for path in described if path.is_file())}
    if (owner := file.stat().st_uid) not in trusted:
        raise ValueError(
            f"{file} is not to be trusted: it says how the model in {directory} was trained, and it is uid "
            f"{owner}'s, who is neither this user (uid {os.geteuid()}) nor the model's owner. Delete it, or "
            "move the model to a directory of yours."
        )
