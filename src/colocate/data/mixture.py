"""Several datasets in one: each with its own prompts and columns, and with its share of the prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import datasets

from colocate.data.loading import load_prompts
from colocate.data.order import SOURCE_COLUMN, check_weights
from colocate.data.prompt_format import PromptFormat
from colocate.options.declared import declared
from colocate.options.requirements import AT_LEAST_ONE
from colocate.options.values import nearest, shown

AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset

FORMAT_OPTIONS = tuple(part.name for part in fields(PromptFormat))
_TRL_NAMES = {"path": "name", "fraction": "weight", "data_files": "options: {data_files: ...}"}


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset of a run: an entry of the run file's `datasets` or `eval_datasets`.

    Raises:
        ValueError: see `PromptFormat`.
    """

    name: str
    """The source of `load_prompts`: a name on the Hub, a file, a directory or "reasoning_gym:<task>"."""
    label: str = ""
    """The name in the column `dataset` and in metrics of evaluation; "": the last part of `name`."""
    config: str | None = None
    """Configuration (subset) of the dataset on the Hub."""
    split: str = "train"
    """Split to read."""
    weight: float | None = None
    """Share of the prompts; those of all datasets sum to 1. None in all: each is visited row by row."""
    max_rows: Annotated[int | None, AT_LEAST_ONE] = None
    """Read only the first rows, this many at most."""
    prompt_column: str | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `load_prompts`."""

    def __post_init__(self) -> None:
        own = {"config", "split", "name"} & self.options.keys()
        if own:
            raise ValueError(f"options={shown(self.options)} has {shown(sorted(own))}: set it beside `name`.")
        if not self.label:
            last = self.name.rstrip("/").rpartition(":")[2]
            object.__setattr__(self, "label", Path(last).stem or self.name)
        self.format  # noqa: B018  (contradictions are found before anything is loaded)

    @property
    def format(self) -> PromptFormat:
        """The format of its prompts."""
        return PromptFormat(**{option: getattr(self, option) for option in FORMAT_OPTIONS})

    def load(self) -> AnyDataset:
        """The rows with their prompts.

        Raises:
            ValueError, FileNotFoundError, ImportError: see `load_prompts` and `PromptFormat.apply`.
        """
        dataset = load_prompts(self.name, config=self.config, split=self.split, **self.options)
        if self.max_rows is not None:
            is_stream = isinstance(dataset, datasets.IterableDataset)
            dataset = dataset.take(self.max_rows if is_stream else min(self.max_rows, len(dataset)))
        return self.format.apply(dataset, shown(self.label))


def read_entries(
    option: str, given: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[DatasetEntry]:
    """The entries of a run file's list of datasets.

    Args:
        option: the name of the list, for messages.
        defaults: the run's own `prompt_column`, `max_rows` and so on, for entries that do not set them.

    Raises:
        ValueError: an entry is no mapping, lacks its name, has a key or a value that no entry has; two
            entries have one label; or some have a weight and some have none.
    """
    entries = [_read_entry(option, entry, defaults) for entry in given]
    twice = [label for label, count in Counter(entry.label for entry in entries).items() if count > 1]
    if twice:
        raise ValueError(
            f"{option} has two entries that are called {shown(twice[0])}. Give each a name of its own with "
            f"`label: NAME`."
        )
    weighted = [entry.label for entry in entries if entry.weight is not None]
    if weighted and len(weighted) < len(entries):
        without = [entry.label for entry in entries if entry.weight is None]
        raise ValueError(
            f"{option}: {shown(weighted)} {'have' if len(weighted) > 1 else 'has'} a weight and "
            f"{shown(without)} {'have' if len(without) > 1 else 'has'} none. Give all a weight, or none."
        )
    if weighted:
        check_weights({entry.label: entry.weight for entry in entries})
    return entries


def _read_entry(option: str, given: Any, defaults: Mapping[str, Any]) -> DatasetEntry:
    if not isinstance(given, Mapping):
        raise ValueError(f"{option} has {shown(given)}, which is no mapping; write `- name: DATASET`.")
    known = declared(DatasetEntry)
    for key in given:
        if key not in known:
            instead = _TRL_NAMES.get(str(key))
            hint = (
                f"; write {instead}"
                if instead
                else nearest(str(key), known) or f"; it may have {', '.join(known)}"
            )
            raise ValueError(f"{option} has {shown(dict(given))}, where {shown(key)} is no key{hint}.")
    if not given.get("name"):
        raise ValueError(
            f"{option} has {shown(dict(given))}, which has no name: add the dataset's name or path."
        )
    own = {key: known[key].read(value, f"{option}: {key}") for key, value in given.items()}
    # An entry that says what its prompts are made of does not want the run's other way, too.
    ways = {"prompt_column", "prompt_template"}
    dropped = ways if ways & own.keys() else set()
    return DatasetEntry(**{**{k: v for k, v in defaults.items() if k not in dropped}, **own})


def mix(parts: Mapping[str, AnyDataset], *, is_weighted: bool) -> AnyDataset:
    """The datasets one after the other, with a column `dataset` that names the dataset of each row.

    Args:
        parts: the datasets by their labels; all have the column `prompt`.
        is_weighted: whether the rows will be drawn by weights, so that they must be known.

    Raises:
        ValueError: the datasets have different columns or types of columns, or a column `dataset`; or one is
            a stream, and there are weights or datasets without streams.
    """
    streams = [label for label, part in parts.items() if isinstance(part, datasets.IterableDataset)]
    if streams and (is_weighted or len(streams) < len(parts)):
        raise ValueError(
            f"The datasets {shown(streams)} are streams, whose rows are not known: they can neither be given "
            "weights nor be mixed with datasets that are loaded. Load them without streaming."
        )
    _check_columns(parts)
    return datasets.concatenate_datasets([_with_name(part, label) for label, part in parts.items()])


def _with_name(part: Any, label: str) -> Any:
    if isinstance(part, datasets.IterableDataset):
        return part.map(lambda row: {SOURCE_COLUMN: label})
    return part.add_column(SOURCE_COLUMN, [label] * len(part))


def _check_columns(parts: Mapping[str, AnyDataset]) -> None:
    columns = {label: list(part.column_names or ()) for label, part in parts.items()}
    for label, names in columns.items():
        if SOURCE_COLUMN in names:
            raise ValueError(
                f"{shown(label)} has the column {SOURCE_COLUMN!r}, which in a mixture names the dataset of a "
                f"row. Rename it with columns: {{{SOURCE_COLUMN}: NAME}}, or leave it out with columns: "
                f"{{{SOURCE_COLUMN}: null}}."
            )
    _check_names(columns)
    for name in next(iter(columns.values())):
        kinds = {label: _kind(part, name) for label, part in parts.items()}
        if len(set(kinds.values())) > 1:
            remedy = f"Write it as one type in all files, or leave it out with columns: {{{name}: null}}."
            if name == "prompt":
                remedy = "Set system_prompt or apply_chat_template to make messages of all that are text."
            listed = ", ".join(f"{kind} in {shown(label)}" for label, kind in kinds.items())
            raise ValueError(f"The column {name!r} is not of one type in all datasets: {listed}. {remedy}")


def _check_names(columns: Mapping[str, list[str]]) -> None:
    """Raises ValueError unless the datasets have the same columns."""
    first = next(iter(columns.values()))
    common = [name for name in first if all(name in names for names in columns.values())]
    extra = [
        f"{shown(label)} also {', '.join(repr(name) for name in names if name not in common)}"
        for label, names in columns.items()
        if len(names) > len(common)
    ]
    if extra:
        raise ValueError(
            f"The datasets have different columns. All have {', '.join(map(repr, common)) or 'none'}; "
            f"{'; '.join(extra)}. Give what is the same thing one name with columns: {{old: new}}, and leave "
            "the rest out with columns: {old: null}."
        )


def _kind(part: AnyDataset, column: str) -> str:
    feature = (part.features or {}).get(column)
    if isinstance(feature, datasets.Value):
        return str(feature.dtype).replace("large_string", "string")
    return "messages" if column == "prompt" else str(feature)
