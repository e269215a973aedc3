"""Loads prompts from the Hub, from files, from `save_to_disk` directories or from a generated task."""

from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path
from typing import Any

import datasets

from colocate.data.faults import find_fault, find_wrong_encoding
from colocate.data.reasoning_gym import encode_entry, import_reasoning_gym
from colocate.options.values import shown

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
OTHER_FILES = (".txt", ".tsv", ".arrow", ".yaml", ".yml", ".gz", ".zip", ".xlsx")
"""Endings of names that are meant as files and not as datasets on the Hub, though they cannot be read."""
TASK_PREFIX = "reasoning_gym:"
# reasoning_gym draws a random seed when none is given; every rank would then train on prompts of its own.
TASK_SEED = 42


def load_prompts(
    name: str, *, config: str | None = None, split: str = "train", **options: Any
) -> datasets.Dataset | datasets.IterableDataset:
    """Load a dataset of prompts.

    Args:
        name: One of
            - a Hub dataset, `"trl-lib/DeepMath-103K"`;
            - a `.jsonl`, `.json`, `.parquet` or `.csv` file, a directory of files of one of these kinds
              (a split is recognised by the file name, as on the Hub) or one written by `save_to_disk`;
            - `"reasoning_gym:<task>"`: problems that `reasoning_gym` generates, with the columns `prompt` and
              `entry`; score them with `colocate.rewards.reasoning_gym.reasoning_gym_reward`.
        config: The Hub dataset's configuration.
        split: Which split to load. A single file is the split `"train"`.
        options: Passed to `datasets.load_dataset` (such as `streaming=True`), or the task's `size`, `seed`
            (42 unless given) and parameters.

    Raises:
        FileNotFoundError: there is no such file or directory; the message has the nearest names.
        ImportError: `reasoning_gym` is not installed.
        ValueError: a task, parameter, option, split or file type is unknown, or a file is empty or damaged;
            the message has the line.
    """
    if name.startswith(TASK_PREFIX):
        if config is not None or split != "train":
            raise ValueError(
                f"{name!r} is generated, so it has neither configurations nor splits (got config={config!r}, "
                f"split={split!r}). For evaluation load it with another seed, such as seed={TASK_SEED + 1}."
            )
        return _generate_task(name.removeprefix(TASK_PREFIX), **options)
    path = Path(name).expanduser()
    if path.is_dir():
        return _load_directory(path, config, split, options)
    if path.is_file():
        return _load([path], _reader(path), None, split, {"data_files": str(path)}, options)
    if path.suffix in (*READERS, *OTHER_FILES) or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"No file or directory {name!r}.{_nearest_paths(path)}")
    return _load([], name, config, split, {}, options)


def _load(
    files: list[Path],
    reader: str,
    config: str | None,
    split: str,
    own: dict[str, Any],
    options: dict[str, Any],
) -> datasets.Dataset | datasets.IterableDataset:
    """Call `datasets.load_dataset`, and add file and line to its errors, which have neither.

    The arguments in `own` follow from the dataset's name, so the user's `options` must not set them.
    """
    name = str(files[0]) if len(files) == 1 else reader
    if taken := sorted(options.keys() & {"path", *own}):
        raise ValueError(
            f"The options of {name!r} have {', '.join(map(repr, taken))}, which its name decides."
        )
    if "encoding" not in options:
        fault = find_fault(files, max_lines=100) if options.get("streaming") else find_wrong_encoding(files)
        if fault is not None:
            raise ValueError(fault)
    try:
        dataset = datasets.load_dataset(reader, config, split=split, **own, **options)
    except (TypeError, ValueError, StopIteration, datasets.exceptions.DatasetBuildError) as error:
        reason = error.__cause__ or error
        with_options = f" with {shown(options)}" if options else ""
        raise ValueError(
            find_fault(files) or f"Cannot load {name!r}, split {split!r}{with_options}: {reason}"
        ) from error
    if isinstance(dataset, datasets.Dataset) and len(dataset) == 0:
        raise ValueError(find_fault(files) or f"{name!r}, split {split!r}, holds no rows.")
    return dataset


def _reader(path: Path) -> str:
    if path.suffix not in READERS:
        raise ValueError(f"Cannot read {str(path)!r}: prompts are read from {', '.join(READERS)} files.")
    return READERS[path.suffix]


def _nearest_paths(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f" The directory {str(parent)!r} does not exist either."
    nearest = difflib.get_close_matches(path.name, os.listdir(parent), n=3)
    return f" Did you mean {', '.join(repr(str(parent / n)) for n in nearest)}?" if nearest else ""


def _load_directory(
    path: Path, config: str | None, split: str, options: dict[str, Any]
) -> datasets.Dataset | datasets.IterableDataset:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        # What `save_to_disk` wrote takes no reader options: passing them on would fail far from here.
        if config is not None or options:
            given = [*options, *(["config"] if config is not None else [])]
            raise ValueError(
                f"{str(path)!r} was written by `save_to_disk`, which takes no {', '.join(given)}."
            )
        saved = datasets.load_from_disk(str(path))
        splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        if split not in splits:
            raise ValueError(f"{str(path)!r} has no split {split!r}; it has {', '.join(map(repr, splits))}.")
        return splits[split]
    kinds = {file.suffix for file in path.rglob("*") if file.suffix in READERS}
    if len({READERS[kind] for kind in kinds}) != 1:
        found = f"has {', '.join(sorted(kinds))} files mixed" if kinds else "holds none"
        raise ValueError(
            f"A directory of prompts holds files of one kind out of {', '.join(READERS)}; "
            f"{str(path)!r} {found}. Name one file, or separate the kinds."
        )
    files = sorted(file for file in path.rglob("*") if file.suffix in READERS)
    return _load(files, str(path), config, split, {}, options)


def _generate_task(task: str, *, seed: int = TASK_SEED, **parameters: Any) -> datasets.Dataset:
    """Generate the problems of a task: the column `prompt` has the question, `entry` all that its verifier
    needs."""
    factory = import_reasoning_gym().factory
    if task not in factory.DATASETS:
        nearest = difflib.get_close_matches(task, factory.DATASETS, n=3)
        hint = (
            f"Did you mean {', '.join(map(repr, nearest))}?" if nearest else "See its gallery for the names."
        )
        raise ValueError(f"reasoning_gym has no task {task!r}. {hint}")
    _require_shared_hash_seed(task)
    parameters["seed"] = seed
    known = {field.name for field in dataclasses.fields(factory.DATASETS[task][1])}
    if unknown := sorted(set(parameters) - known):
        raise ValueError(
            f"The task {task!r} has no parameter {', '.join(map(repr, unknown))}; "
            f"it has {', '.join(sorted(known))}."
        )
    try:
        problems = factory.create_dataset(task, **parameters)
    except (AssertionError, TypeError) as error:  # how reasoning_gym's configurations refuse a value
        raise ValueError(f"The task {task!r} refuses its parameters {shown(parameters)}: {error}") from error
    entries = [problems[index] for index in range(len(problems))]
    return datasets.Dataset.from_dict(
        {
            "prompt": [entry["question"] for entry in entries],
            "entry": [encode_entry(task, parameters, entry) for entry in entries],
        }
    )


def _require_shared_hash_seed(task: str) -> None:
    # Some generators (word_ladder, ransom_note, ...) draw from Python sets, whose order depends on the hash
    # seed of the process: ranks would disagree on the prompts, and a group would mix completions of several.
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ValueError(
            f"Each of the {world_size} processes generates the task {task!r} for itself, and the problems "
            "can depend on Python's hash seed. Launch with PYTHONHASHSEED=0 in the environment."
        )
