"""Makes prompts of a dataset's columns, and gives the other columns the names that rewards look for.

GSM8K has the columns `question` and `answer`, for example, and rewards look for `prompt` and `solution`.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets

from colocate.data.prompts import TrainData, is_conversational, row_name, user_message
from colocate.options.values import nearest, shown

_BRACES = r"A brace of the text itself is written twice, as in \boxed{{}}."


@dataclass(frozen=True)
class PromptFormat:
    """The format of a dataset: makes of its row a prompt and the columns that reward functions see.

    All options name columns as the dataset has them.

    Raises:
        ValueError: two options contradict each other, or one has a value that makes no sense.
    """

    prompt_column: str | None = None
    """The column with the prompts: text or lists of messages. None: `prompt`."""
    prompt_template: str | None = None
    """A text with columns in braces, such as "{question} Think first.", that makes the prompt. Two braces
    stand for one of the text itself, as in Python's `str.format`."""
    system_prompt: str | None = None
    """The text of a system message before each prompt; a prompt that is text becomes a user's message after
    it."""
    columns: Mapping[str, str | None] = field(default_factory=dict)
    """The new names of columns by their old ones; None: the column is left out."""

    def __post_init__(self) -> None:
        if self.prompt_column is not None and self.prompt_template is not None:
            raise ValueError(
                f"prompt_column={shown(self.prompt_column)} and "
                f"prompt_template={shown(self.prompt_template)} both say what the prompt is. Set one: the "
                "template may name the column in braces."
            )
        if self.prompt_template is not None:
            self._check_template(self.prompt_template)
        for old, new in self.columns.items():
            if new is not None and not (isinstance(new, str) and new):
                raise ValueError(
                    f"columns={shown(dict(self.columns))} renames {shown(old)} to {shown(new)}: write "
                    "{old: new}, with a name, or {old: null} to leave the column out."
                )

    def apply(self, dataset: TrainData, name: str) -> TrainData:
        """The dataset with a column `prompt`, and with its other columns renamed.

        The column that `prompt_column` names becomes `prompt`; those in the template stay.

        Args:
            name: what messages call the dataset.

        Raises:
            ValueError: a column is named that the dataset does not have, two columns would have one name, or
                a row has no value for the template, or a system message of its own.
        """
        columns = _columns_of(dataset)
        dataset = self._with_prompts(dataset, columns, name)
        for old in self.columns:
            _require(old, columns, name, "columns")
        renamed = {old: new for old, new in self.columns.items() if new is not None}
        dropped = [old for old, new in self.columns.items() if new is None]
        taken = set(_columns_of(dataset)).difference(self.columns)
        for new in renamed.values():
            if new in taken or list(renamed.values()).count(new) > 1:
                raise ValueError(
                    f"columns={shown(dict(self.columns))} would give two columns of {name} the name "
                    f"{shown(new)}. It has {_listed(columns)}; leave one out with columns: {{{new}: null}}."
                )
        dataset = dataset.remove_columns(dropped) if dropped else dataset
        return dataset.rename_columns(renamed) if renamed else dataset

    def _with_prompts(self, dataset: TrainData, columns: Sequence[str], name: str) -> TrainData:
        source = self.prompt_column or "prompt"
        if self.prompt_template is not None:
            for column in _fields_of(self.prompt_template):
                asked_by = f"prompt_template={shown(self.prompt_template)}"
                _require(column, columns, name, asked_by, f" {_BRACES}")
        elif self.prompt_column is not None:
            _require(source, columns, name, "prompt_column")
            if source != "prompt":
                dataset = dataset.remove_columns("prompt") if "prompt" in columns else dataset
                dataset = dataset.rename_column(source, "prompt")
        elif "prompt" not in columns:
            raise ValueError(
                f"{name} has no column 'prompt'; it has {_listed(columns)}. Set prompt_column to the one "
                "with the prompts, or prompt_template to a text with columns in braces."
            )
        if self.prompt_template is None and self.system_prompt is None:
            return dataset
        return dataset.map(self._row, with_indices=True)

    def _row(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        """The prompt of a row, in place of a column `prompt`."""
        if self.prompt_template is None:
            prompt = row["prompt"]
        else:
            for column in _fields_of(self.prompt_template):
                if row[column] is None:
                    raise ValueError(
                        f"{row_name(index)} has no value in the column {column!r}, which prompt_template="
                        f"{shown(self.prompt_template)} takes. Remove the row from the data."
                    )
            try:
                prompt = self.prompt_template.format_map(row)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{row_name(index)} does not fit prompt_template={shown(self.prompt_template)}: {error}."
                ) from error
        if self.system_prompt is None:
            return {"prompt": prompt}
        messages = prompt if is_conversational(prompt) else user_message(prompt)
        if messages[0]["role"] == "system":
            raise ValueError(
                f"{row_name(index)} begins with a system message, and "
                f"system_prompt={shown(self.system_prompt)} would be a second one. Remove one of them."
            )
        return {"prompt": [{"role": "system", "content": self.system_prompt}, *messages]}

    @staticmethod
    def _check_template(template: str) -> None:
        try:
            names = _fields_of(template)
        except ValueError as error:
            raise ValueError(
                f"prompt_template={shown(template)} is no text with columns in braces: {error}. {_BRACES}"
            ) from error
        if not names:
            raise ValueError(
                f"prompt_template={shown(template)} has no column in braces, so all prompts would be the "
                "same. Write, say, {question}."
            )
        for name in names:
            if not name or set(name) & set(".["):
                raise ValueError(
                    f"prompt_template={shown(template)} has {shown('{' + name + '}')}, which is no column's "
                    f"name. {_BRACES}"
                )


def _fields_of(template: str) -> list[str]:
    """The columns that a template names, without repetitions."""
    return list(dict.fromkeys(name for _, name, *_ in string.Formatter().parse(template) if name is not None))


def _columns_of(dataset: datasets.Dataset | datasets.IterableDataset) -> list[str]:
    """The columns of a dataset; of a stream that does not know them, those of its first row."""
    return list(dataset.column_names or next(iter(dataset), {}))


def _require(column: str, columns: Sequence[str], name: str, asked_by: str, hint: str = "") -> None:
    if column not in columns:
        raise ValueError(
            f"{asked_by} names the column {shown(column)}, which {name} does not have; it has "
            f"{_listed(columns)}{nearest(column, columns) or '.'}{hint}"
        )


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns)) or "none"
