"""The run file that a run saves: every option, as given or by default."""

from __future__ import annotations

import enum
import os
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from colocate.config.grpo_config import GRPOConfig
from colocate.config.honoured import UNNECESSARY_WITH_LAYOUT, honoured
from colocate.config.run_config import RunConfig
from colocate.options.declared import default_of
from colocate.options.redaction import redacted
from colocate.options.run_file import LAUNCH
from colocate.options.yaml_text import write_yaml
from colocate.reporting.messages import short_path

# Where a run is launched from, not what it is.
_NOT_SAVED = ("resume_from_checkpoint",)


def resolved(run: RunConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the run, as given or by default, so that new defaults cannot change the run later.

    A secret is replaced by its name, and a run started from the file asks for the secret
    (`colocate.options.redaction`). Values that `GRPOConfig` derives (batch sizes, bfloat16) are left as they
    were given, since they depend on the machine.
    """
    # A user who sets an option that the native engine does not need is told so: a default that is saved here
    # must not look as if the user had set it.
    saved = honoured(GRPOConfig) - UNNECESSARY_WITH_LAYOUT.keys()
    defaults = {f.name: default_of(f) for f in fields(GRPOConfig) if f.name in saved}
    values = {f.name: getattr(run, f.name) for f in fields(run)} | defaults | dict(options)
    return {
        name: value.value if isinstance(value, enum.Enum) else redacted(value, name)
        for name, value in values.items()
        if name not in _NOT_SAVED
    }


def save_run(path: Path, run: RunConfig, options: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write_yaml(resolved(run, options)), encoding="utf-8")


class RunFileWriter(TrainerCallback):
    """Saves the run's options after its first step: a run that could not start has overwritten nothing."""

    def __init__(self, path: Path, run: RunConfig, options: Mapping[str, Any]) -> None:
        self._saved = (path, run, dict(options))
        self._is_saved = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and not self._is_saved:
            save_run(*self._saved)
            self._is_saved = True

    @property
    def dataset_name(self) -> str | None:
        """The dataset, as the run names it."""
        return self._saved[1].dataset_name

    @property
    def resume_command(self) -> str:
        """The command that goes on with the run."""
        command = f"colocate train {shlex.quote(short_path(self._saved[0]))} --resume_from_checkpoint auto"
        if launch := os.environ.get(LAUNCH):
            return f"{command} {launch}"
        num_processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        return command if num_processes == "1" else f"torchrun --nproc_per_node {num_processes} -m {command}"
