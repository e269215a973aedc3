"""The options of a run's journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from colocate.options.requirements import NOT_NEGATIVE


class _ReadByJournal:
    """The options read here that transformers' `TrainingArguments` or other parts declare."""

    if TYPE_CHECKING:
        run_name: str | None
        report_to: Any
        disable_tqdm: bool | None
        per_device_train_batch_size: int
        gradient_accumulation_steps: int
        steps_per_generation: int | None
        num_iterations: int
        save_strategy: Any
        save_only_model: bool
        restore_callback_states_from_checkpoint: bool

        @property
        def run_dir(self) -> Path: ...


@dataclass
class JournalOptions(_ReadByJournal):
    """The options that a journal reads."""

    # ── Logging ──────────────────────────────────────────────────────────────────────────────────────────

    log_completions: bool = False
    """Print and save prompts, completions and rewards every `logging_steps` steps."""
    num_completions_to_print: Annotated[int | None, NOT_NEGATIVE] = None
    """How many completions to print with log_completions=True. None: all."""
    log_unique_prompts: bool = False
    """Print and save only one completion of each prompt with log_completions=True."""
