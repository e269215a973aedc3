"""The rows that a run of `colocate train` held out of its training data (`test_split_size`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from colocate.checkpoints.changes import RUN_FILE
from colocate.checkpoints.saved_model import SavedModel
from colocate.checkpoints.sealed import list_checkpoints
from colocate.config.grpo_config import GRPOConfig
from colocate.config.run_config import RunConfig, parse_run
from colocate.data.fingerprint import fingerprint
from colocate.inference.measuring import Row
from colocate.reporting.run_log import RUN_FILE as RECORD_FILE
from colocate.run.data import RunData
from colocate.weights.file_reading import read_object

_OF_DATA = ("apply_chat_template", "chat_template_kwargs", "dataset_weights")
"""Options of `GRPOConfig` that decide which rows a run trains on, and how their prompts are made."""


@dataclass(frozen=True)
class HeldOut:
    """Rows that `test_split_size` held out.

    Attributes:
        dataset: the names of the datasets that the rows are from.
        rows: those on which the run evaluated, in their order, with the column `prompt`.
        words: which rows these are, as a sentence.
    """

    dataset: str
    rows: list[Row]
    words: str


def held_out_rows(
    saved: SavedModel, max_rows: int | None = None, *, trust_remote_code: bool = False
) -> HeldOut:
    """Split the training data of a run as the run itself did.

    Args:
        saved: a model whose run had `test_split_size`.
        max_rows: return the first rows only, this many at most.
        trust_remote_code: run code that comes with the tokenizer by which the run measured prompts.
    """
    read = {*RunConfig.__dataclass_fields__, *_OF_DATA, "eval_strategy", "eval_on_start"}
    run, options = parse_run({name: value for name, value in saved.options.items() if name in read})
    size = f"test_split_size={run.test_split_size:g}"
    if options.get("eval_strategy", "no") == "no" and not options.get("eval_on_start"):
        raise ValueError(
            f"{saved.name} did not evaluate (eval_strategy='no'), so {size} held nothing out: all rows were "
            "trained on. Give --dataset with other prompts."
        )
    config = GRPOConfig(
        output_dir="unused", report_to="none", gradient_checkpointing=False, bf16=False, eval_on_start=True,
        trust_remote_code=trust_remote_code,
        **{name: options[name] for name in _OF_DATA if name in options},
    )  # fmt: skip
    data = RunData(run, config)
    trained_on, held_out = data.load()
    assert isinstance(held_out, datasets.Dataset) and isinstance(trained_on, datasets.Dataset)
    _check_same(saved, trained_on)
    rows = [dict(row) for row in held_out]
    words = f"Rows that {saved.name} was not trained on: {size} held out {len(rows):,}"
    words += f" of {len(trained_on) + len(rows):,}"
    if max_rows is not None and max_rows < len(rows):
        words += f", and these are the first {max_rows:,} of them"
    return HeldOut(", ".join(data.names), rows[:max_rows], f"{words}.")


def _check_same(saved: SavedModel, trained_on: datasets.Dataset) -> None:
    """Refuse training rows that differ from the newest checkpoint's, since the split would differ as well."""
    was, now = _training_data_of(Path(saved.trained)), fingerprint(trained_on)
    if was and was["columns"] == now["columns"] and was != now:
        raise ValueError(
            f"The data have changed since {saved.name} was trained: {was['rows']:,} rows were left to train "
            f"on then (digest {was['digest']}), and {now['rows']:,} are now ({now['digest']}), so that rows "
            "held out now may have been trained on. Give --dataset with prompts that were not."
        )


def _training_data_of(place: Path) -> dict[str, Any]:
    """The fingerprint of the training data in a checkpoint or a run's newest one; empty if there is none."""
    checkpoint = next(iter(list_checkpoints(place)[-1:]), place)
    description = _read(checkpoint / RUN_FILE)
    # An earlier run's checkpoints stay in a directory that a run without checkpoints has been given.
    if checkpoint != place and _read(place / RECORD_FILE).get("run_id") != description.get("run_id"):
        return {}
    return dict(description.get("others", {}).get("dataset") or {})


def _read(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}
