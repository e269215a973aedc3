"""The journal of a run: it keeps transformers' state and callbacks, the run's record and the progress
display."""

from __future__ import annotations

import math
import platform
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState
from transformers.trainer_utils import SaveStrategy

from colocate.options.redaction import redacted
from colocate.reporting import messages
from colocate.reporting.completions import CompletionTable, print_completions, write_completions_parquet
from colocate.reporting.learning_watch import LearningWatch
from colocate.reporting.metrics import MetricHistory
from colocate.reporting.options import JournalOptions
from colocate.reporting.progress import Progress, clock
from colocate.reporting.provenance import provenance
from colocate.reporting.run_log import RunLog, reserve_metrics
from colocate.version import __version__

TRAINER_STATE_FILE = "trainer_state.json"
reserve_metrics("num_tokens", "step_time")
LAST_VALUES = ("learning_rate", "grad_norm", "num_tokens")
"""Metrics of which the newest value is logged instead of the average, as in transformers."""

BETWEEN_STEPS = ("evaluate", "save")
"""Phases that come after one step and before the next."""


class _TensorBoard(TensorBoardCallback):
    """transformers' TensorBoard callback whose file stays open, for an evaluation after training."""

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.tb_writer is not None:
            self.tb_writer.flush()


def _integrations(report_to: Any) -> list[TrainerCallback]:
    own = {TensorBoardCallback: _TensorBoard}
    try:
        return [own.get(callback, callback)() for callback in get_reporting_integration_callbacks(report_to)]
    except RuntimeError as error:  # what transformers raises where the package is missing
        raise ImportError(f"report_to={report_to!r}: {error}") from error


class Journal:
    """Keeps `TrainerState`, runs the callbacks, and writes down every step.

    Callbacks of transformers work as they are: they see `args`, `state`, `control`, and model, tokenizer,
    optimizer and scheduler as keyword arguments.
    """

    def __init__(
        self,
        args: JournalOptions,
        accelerator: Accelerator,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
        *,
        max_steps: int,
        steps_per_epoch: float,
        reward_forms: Mapping[str, str],
        **references: Any,
    ) -> None:
        """Begin a journal.

        Args:
            reward_forms: see `LearningWatch.forms`.
            references: the keyword arguments of `CallbackHandler`: model, processing_class, and so on.
        """
        self.args = args
        self.control = TrainerControl()
        integrations = _integrations(args.report_to)
        self.handler = CallbackHandler([DefaultFlowCallback, *integrations, *callbacks], **references)
        self.state = TrainerState(
            is_local_process_zero=accelerator.is_local_main_process,
            is_world_process_zero=accelerator.is_main_process,
        )
        self.note_callbacks()
        self.state.max_steps = max_steps
        self.state.num_train_epochs = math.ceil(max_steps / steps_per_epoch)
        self.state.train_batch_size = args.per_device_train_batch_size
        self.state.compute_steps(cast(TrainingArguments, args), max_steps)
        self.run_id = uuid.uuid4().hex
        """Identifies a run and all runs that resume it; only the main process's value is used."""
        self._steps_per_epoch = steps_per_epoch
        self._history = MetricHistory()
        self._since_last_step: dict[str, float] = {}
        self._rollout: dict[str, float] = {}
        self._rollout_tokens = 0
        assert args.steps_per_generation is not None, "GRPOConfig derives it"
        self._rollouts_per_step = args.gradient_accumulation_steps / (
            args.steps_per_generation * args.num_iterations
        )
        self._last: dict[str, float] = {}
        self._loss_sum, self._num_losses = 0.0, 0
        self._last_logged_step = 0
        self._table: CompletionTable | None = None
        self._learning_watch = LearningWatch(reward_forms)
        self._run_log: RunLog | None = None
        self.progress = Progress(
            is_main_process=accelerator.is_main_process,
            disable_tqdm=bool(args.disable_tqdm),
            logging_steps=self.state.logging_steps,
            total=max_steps,
            rollouts_per_step=self._rollouts_per_step,
        )
        """A context manager, because an error that ends the run must leave the terminal as it was."""
        self.event("on_init_end")

    def event(self, name: str, **kwargs: Any) -> None:
        """Run a callback event; the callbacks may change `control`."""
        self.control = getattr(self.handler, name)(self.args, self.state, self.control, **kwargs)
        if self.control.should_epoch_stop:
            raise NotImplementedError(
                f"A callback set should_epoch_stop in {name}, but an epoch cannot be cut short here: set "
                "should_training_stop, or train on fewer rows."
            )

    @property
    def has_own_callbacks(self) -> bool:
        """Whether there are callbacks of the user's, which may do anything, between steps."""
        makers = {type(callback).__module__.partition(".")[0] for callback in self.handler.callbacks}
        return bool(makers - {"transformers", "colocate"})

    def note_callbacks(self) -> None:
        """Put the state of callbacks (such as the counter of `EarlyStoppingCallback`) into the trainer's
        state."""
        parts = [
            part for part in (*self.handler.callbacks, self.control) if isinstance(part, ExportableState)
        ]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=parts).stateful_callbacks  # type: ignore[arg-type]

    def replace_state(self, state: TrainerState) -> None:
        """Continue with another `TrainerState`, except for the values that this run sets itself."""
        own = (
            *("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps"),
            *("save_steps", "is_local_process_zero", "is_world_process_zero", "stateful_callbacks"),
        )
        for name in own:
            setattr(state, name, getattr(self.state, name))
        self.state = state

    def introduce(self, rows: dict[str, str]) -> None:
        """Print the rows of the header, by label."""
        if self.state.is_world_process_zero:
            messages.complete_header(redacted(rows), self.progress.console)

    def open(self, description: dict[str, Any], *, resumed_from: Path | None) -> None:
        """Begin or continue the run's record; no file changes before the first step.

        Args:
            resumed_from: the checkpoint that has been loaded; None: the run begins anew.
        """
        if self.state.is_world_process_zero:
            step = None if resumed_from is None else self.state.global_step
            if resumed_from is not None:
                self.say(messages.continuing(resumed_from, self.state.global_step, self.state.max_steps))
            self._run_log = RunLog(self.args.run_dir, step, self.run_id)
            versions = {
                "colocate": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            }
            description = {
                "run_id": self.run_id,
                "run_name": self.args.run_name,
                **description,
                **provenance(self.args),
                "versions": versions,
            }
            self._run_log.describe(redacted(description))
        self._last_logged_step = self.state.global_step
        self.progress.begin(self.state.global_step)
        self._started_s = time.monotonic()
        for callback in self.handler.callbacks:
            if hasattr(callback, "progress"):  # one that draws, too
                callback.progress = self.progress
        self.event("on_train_begin")

    def say(self, text: str) -> None:
        """Print a text about the run, on the main process only."""
        self.progress.say(redacted(text))

    @property
    def is_lost(self) -> bool:
        """Whether the run's record was deleted or moved away while it is being written; only the main process
        can tell."""
        return self._run_log is not None and self._run_log.is_lost

    def close(self) -> None:
        """End the run and print that it has ended. The record stays open for evaluations that follow."""
        if self._run_log is not None:
            self._run_log.begin()
        self.event("on_train_end")
        duration = clock(time.monotonic() - self._started_s)
        step, max_steps = self.state.global_step, self.state.max_steps
        self.say(messages.finished(step, max_steps, duration, self.args.run_dir))

    def say_stopped(self, by: str, checkpoint: Path) -> None:
        """Print that the run was asked to stop, what it has saved, and the command that resumes it."""
        step, max_steps = self.state.global_step, self.state.max_steps
        text = messages.stopped(by, step, max_steps, checkpoint, self._how_to_resume())
        self.progress.say_at_end(redacted(text))

    def _how_to_resume(self) -> str | None:
        if self.args.save_only_model:
            return None
        # The command line's callback knows what to type.
        commands = [c.resume_command for c in self.handler.callbacks if hasattr(c, "resume_command")]
        return commands[0] if commands else "trainer.train(resume_from_checkpoint=True)"

    def set_phase(self, name: str) -> None:
        """Show that a phase has begun."""
        self.progress.set_phase(name)

    def add_rollout(self, metrics: dict[str, float], table: CompletionTable, num_tokens: int) -> None:
        """Note a rollout, whose metrics are logged with the next optimizer step."""
        self.state.num_input_tokens_seen += num_tokens
        self._since_last_step.update(metrics)
        self._rollout, self._rollout_tokens = metrics, num_tokens
        self._table = table
        for text in self._learning_watch.look(metrics, table):
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print a warning about the run, and write it into the run's record, which the report reads."""
        self.progress.warn(redacted(text))
        if self._run_log is not None:
            self._run_log.log_warning(self.state.global_step + 1, redacted(text))

    def end_step(
        self, metrics: dict[str, float], timeline: dict[str, Any], *, has_advantages: bool = False
    ) -> None:
        """Count an optimizer step and let the callbacks decide what follows it.

        Args:
            metrics: the metrics of the step, over all ranks.
            timeline: what `Timeline.drain` returned.
            has_advantages: whether this rank's part of the step had advantages other than 0.
        """
        for text in self._learning_watch.look_at_step(metrics, has_advantages=has_advantages):
            self.warn(text)
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self._steps_per_epoch
        step, phases = self.state.global_step, timeline["phases"]
        metrics = {
            **self._since_last_step,
            **metrics,
            "num_tokens": self.state.num_input_tokens_seen,
            # What was evaluated and saved after the step before was not this step's work.
            "step_time": timeline["wall_s"] - sum(phases.get(name, 0.0) for name in BETWEEN_STEPS),
        }
        self._since_last_step = {}
        self._history.add(metrics)
        self._last = {name: metrics[name] for name in LAST_VALUES}
        if math.isfinite(metrics["loss"]):
            self._loss_sum += metrics["loss"]
            self._num_losses += 1
        if self._run_log is not None:
            record = self._run_log.log_step(step, metrics, epoch=self.state.epoch, timeline=timeline)
            # A rollout that feeds several steps stays in sight until the next one.
            self.progress.update(
                step,
                self.state.max_steps,
                record,
                rollout=self._rollout,
                step_tokens=self._rollout_tokens * self._rollouts_per_step,
            )
        self.event("on_step_end")

    @property
    def ends_epoch(self) -> bool:
        """Whether the step just taken is the last of its epoch or of the run."""
        epochs_before = (self.state.global_step - 1) / self._steps_per_epoch
        # Rounding must not make 3 x (1/3) epochs less than one.
        crosses = math.floor(self.state.epoch + 1e-9) > math.floor(epochs_before + 1e-9)
        return self.control.should_training_stop or crosses

    @property
    def save_interval(self) -> float | None:
        """Optimizer steps from checkpoint to checkpoint; None where evaluations decide about them."""
        if self.args.save_strategy == SaveStrategy.EPOCH:
            return self._steps_per_epoch
        return self.state.save_steps if self.args.save_strategy == SaveStrategy.STEPS else None

    @property
    def train_loss(self) -> float:
        """Mean loss of all steps of the run, those before it was resumed included; NaN if there was no
        step."""
        return self._loss_sum / self._num_losses if self._num_losses else math.nan

    def log_if_asked(self) -> None:
        """Log the steps since the last log, if a callback asked for it."""
        if not self.control.should_log or self.state.global_step == self._last_logged_step:
            return
        self.log({})
        if self._table is not None and self._run_log is not None:
            self._run_log.log_completions(self.state.global_step, self._table)
        self._log_completions(self.state.global_step)

    def log(self, logs: dict[str, Any]) -> None:
        """Add `logs` and the averages since the last log to `state.log_history`, and tell the callbacks."""
        averages = self._history.flush()
        averages.update({name: value for name, value in self._last.items() if name in averages})
        logs = {**averages, **logs, "epoch": self.state.epoch}
        self._last_logged_step = self.state.global_step
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.event("on_log", logs=logs)

    def log_eval(self, metrics: dict[str, float]) -> None:
        """Log an evaluation, with the epoch added to `metrics`. Training metrics wait for the next training
        log."""
        metrics["epoch"] = self.state.epoch
        logs = dict(metrics)  # callbacks such as PrinterCallback take entries out
        self.state.log_history.append({**logs, "step": self.state.global_step})
        if self._run_log is not None:
            self._run_log.log_eval(self.state.global_step, metrics, epoch=self.state.epoch)
        self.progress.show_evaluation(self.state.global_step, metrics)
        self.event("on_log", logs=logs)
        self.event("on_evaluate", metrics=metrics)

    def _log_completions(self, step: int) -> None:
        if not (self.args.log_completions and self.state.is_world_process_zero and self._table is not None):
            return
        table = self._table.unique_prompts() if self.args.log_unique_prompts else self._table
        print_completions(table, step, self.args.num_completions_to_print, console=self.progress.console)
        write_completions_parquet(self.args.run_dir, step, self._table)

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self._history.state_dict(),
            "last": self._last,
            "losses": (self._loss_sum, self._num_losses),
            "rollout": (self._rollout, self._rollout_tokens),
            # Several steps train on it, and one of them may log it.
            "table": self._table.state_dict() if self._table and self.state.is_world_process_zero else None,
            "learning": self._learning_watch.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._history.load_state_dict(state["history"])
        self._last = state["last"]
        self._loss_sum, self._num_losses = state["losses"]
        self._rollout, self._rollout_tokens = state.get("rollout", ({}, 0))  # not in older checkpoints
        self._learning_watch.load_state_dict(state.get("learning", {}))  # not in older checkpoints
        self._table = None if state["table"] is None else CompletionTable(**state["table"])

    def _restore_callbacks(self, saved: dict[str, Any]) -> None:
        """Restore the state of callbacks, if `restore_callback_states_from_checkpoint` asks for it."""
        if not self.args.restore_callback_states_from_checkpoint:
            return
        for name, states in saved.items():
            # Of several callbacks of one class there is a list.
            own = [c for c in self.handler.callbacks if type(c).__name__ == name]
            for callback, state in zip(own, states if isinstance(states, list) else [states], strict=False):
                vars(callback).update(state["attributes"])

    def save_state(self, directory: Path) -> None:
        """Write `trainer_state.json`."""
        self.state.save_to_json(str(directory / TRAINER_STATE_FILE))

    def load_state(self, directory: Path) -> None:
        """Continue from the `trainer_state.json` of a checkpoint."""
        saved = TrainerState.load_from_json(str(directory / TRAINER_STATE_FILE))
        # What this run sets itself (max_steps, the log intervals) may differ from what the checkpoint's had.
        counts = ("global_step", "epoch", "num_input_tokens_seen", "log_history")
        best = ("best_metric", "best_global_step", "best_model_checkpoint")  # `checkpoints/best.py`
        for name in (*counts, *best, "stateful_callbacks"):
            setattr(self.state, name, getattr(saved, name))
        self._restore_callbacks(saved.stateful_callbacks)
