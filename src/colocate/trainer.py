"""`GRPOTrainer`: a run behind TRL's interface. `loop.py` has the loop, `run/build.py` makes the parts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput, speed_metrics

from colocate import evaluation, loop
from colocate.checkpoints import hub, sealed
from colocate.checkpoints.lock import holding_run_lock
from colocate.checkpoints.stop_signals import StopRequest
from colocate.config.grpo_config import GRPOConfig
from colocate.data.splits import EvalDataset, TrainDataset
from colocate.experience.slices import SliceRows
from colocate.parallel.watch import watched
from colocate.run import arguments, checkpoints
from colocate.run.build import build_run
from colocate.run.header import header_rows
from colocate.run.playing import playing_of
from colocate.trl.names import TRLNames


class GRPOTrainer(TRLNames):
    """Trains a language model with GRPO and its variants (DeepSeekMath, arXiv 2402.03300); TRL's arguments.

    Args:
        model: name or path of a causal language model, a loaded one, or a PEFT model.
        reward_funcs: a function, an async function, a sequence classifier or its name, or a list of such.
        args: the configuration.
        train_dataset: rows with a `prompt` (text or messages); other columns are passed to reward functions.
        eval_dataset: rows like those of `train_dataset` to evaluate on, or a dict of several such datasets.
        processing_class: the tokenizer; the model's own if not given.
        reward_processing_classes: tokenizers of reward models.
        callbacks: transformers' trainer callbacks.
        optimizers: an optimizer over the model's parameters and a scheduler, in place of `args`' own.
        quantization_config: passed to `from_pretrained` when `model` is a name.
        peft_config: train an adapter instead of the whole model.
        tools: functions that the model may call (`colocate.episodes.tools`).
        rollout_func: plays episodes by itself (`colocate.experience.players.rollout_function`).
        environment_factory: makes an environment, or a dict of such (`colocate.episodes.environments`).
        agent: plays an episode by an OpenAI client of its own (`colocate.experience.players.agent_player`).

    Raises:
        TypeError: an argument has a type that the trainer does not take.
        ValueError: an argument, the dataset or the batch cannot be trained on; the message says what to set.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: TrainDataset | None = None,
        eval_dataset: EvalDataset | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        agent: Any = None,
    ) -> None:
        arguments.check_reward_source(reward_funcs, environment_factory)
        args = arguments.config_or_default(args, model)
        sealed.check_writable(args.run_dir)
        arguments.check_arguments(
            model=model,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            report_to=args.report_to,
        )
        self.run = build_run(
            args,
            model,
            reward_funcs,
            train_dataset,
            eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks or [],
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            playing=playing_of(tools, environment_factory, rollout_func, agent, args, self),
        )
        """The parts of the run; before `train`, `dataclasses.replace` can put another part in."""
        self.eval_dataset = self.run.eval_dataset
        self._slice_rows, self._made_with = SliceRows(self.run.window), arguments.texts_of(args)

    @watched(lambda trainer: f"after step {trainer.state.global_step}")
    @holding_run_lock
    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train until `max_steps`.

        Args:
            resume_from_checkpoint: a checkpoint's directory; True: the newest one in `output_dir`; "auto":
                the newest one that is not corrupt, or the beginning if there is none; None: what `args` says.

        Raises:
            OutputDirInUse, ValueError: another run writes into `output_dir`; no checkpoint fits on its disk.
            CheckpointError: the checkpoint cannot be resumed, or none could be written.
            FloatingPointError: the weights are not finite any more, or `max_skipped_steps` were skipped.
        """
        start_s, first_step = self.begin(resume_from_checkpoint)
        loop.train(self.run, self)
        return self.finish(start_s, first_step)

    # ── Between steps ────────────────────────────────────────────────────────────────────────────────────

    def between_steps(self, stop: StopRequest) -> None:
        """Log, evaluate and save as the callbacks ask, also at an epoch's end; raise if told to stop."""
        self.log_evaluate_save(stop)
        if self.journal.ends_epoch:
            self.journal.event("on_epoch_end")
            self.log_evaluate_save(stop)
            if not self.control.should_training_stop:
                self.journal.event("on_epoch_begin")

    def log_evaluate_save(self, stop: StopRequest) -> None:
        """Log, evaluate and save as the callbacks asked, in transformers' order.

        Raises:
            KeyboardInterrupt, SystemExit: Ctrl-C or a signal asked the run to stop; it has been saved.
            FileNotFoundError: `output_dir` was deleted during the run; the state has been saved there anew.
        """
        self.journal.log_if_asked()
        if self.control.should_evaluate:
            evaluation.note_best(self.run, self.evaluate())
        is_lost = self.journal.is_lost
        if is_lost:
            stop.request()
        stop_requested = stop.received()
        if self.control.should_save or stop_requested:
            with self.run.timeline.phase("save"):
                checkpoint = self.save_checkpoint()
        if is_lost:
            raise FileNotFoundError(
                f"{self.args.run_dir} was deleted or moved away while the run was writing into it, and its "
                f"record and earlier checkpoints with it. The state after step {self.state.global_step} "
                "is saved there anew: go on from it with resume_from_checkpoint=True."
            )
        if stop_requested:
            self.journal.say_stopped(stop.name, checkpoint)
            raise stop.exception()

    def evaluate(
        self,
        eval_dataset: EvalDataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Generate for every held-out prompt; log `eval_reward` and so on over all completions, not batches.

        Raises:
            ValueError: no dataset, `ignore_keys`, or options that were set after the trainer was made.
            FloatingPointError: the weights are not finite.
        """
        arguments.check_unchanged(self.args, self._made_with, shaping_completions=True)
        if ignore_keys is not None:
            raise ValueError("evaluate() predicts nothing but rewards, so there are no ignore_keys.")
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluate() needs an eval_dataset: pass one here or to the trainer.")
        if isinstance(dataset, dict):
            results = [self.evaluate(d, None, f"{metric_key_prefix}_{name}") for name, d in dataset.items()]
            return {name: value for result in results for name, value in result.items()}
        return evaluation.evaluate(self.run, dataset, metric_key_prefix)

    # ── Beginning and end ────────────────────────────────────────────────────────────────────────────────

    def begin(self, resume_from_checkpoint: str | bool | None) -> tuple[float, int]:
        """Start the run, or restore the checkpoint that it continues from.

        Returns:
            The time now in seconds, and the optimizer steps that were taken before.
        """
        arguments.check_modes(self.args.device.type)
        arguments.check_unchanged(self.args, self._made_with)
        self.policy.optimizer.check_trained(self.model)
        own, given = self.args.resume_from_checkpoint, resume_from_checkpoint
        asked = own if given is None else given
        directory = sealed.find(asked, self.args.run_dir)
        self.journal.introduce(header_rows(self.run, resumes=directory is not None))
        if directory is not None:
            directory = self.load_checkpoint(directory, or_older=asked == sealed.AUTO)
        elif self.state.global_step > 0:
            raise RuntimeError(
                f"This trainer has trained {self.state.global_step} steps already and its schedule is used "
                "up. To train on, make a new trainer with model=trainer.model."
            )
        loop.publish_changes(self.run)
        checkpoints.check_space(self.run)
        start = time.time(), self.state.global_step
        self.journal.open(self.run.description(), resumed_from=directory)
        if self.args.eval_on_start and directory is None:
            self.evaluate()
        self.journal.event("on_epoch_begin")
        return start

    def finish(self, start_s: float, first_step: int) -> TrainOutput:
        """Log the run's summary, load the best weights if asked to, and close the record."""
        num_steps = self.state.global_step - first_step
        num_samples = num_steps * self.args.gradient_accumulation_steps * self.args.train_batch_size
        num_samples *= self.args.world_size
        summary = speed_metrics("train", start_s, num_samples=num_samples, num_steps=num_steps)
        summary.update(train_loss=self.journal.train_loss, epoch=self.state.epoch)
        self.journal.log(summary)
        if self.run.best.load_at_end(self.state, self.model):
            self.policy.take_parameters()
            loop.publish(self.run)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.run.best.delete_others(self.state, self.args.run_dir)
        self.journal.close()
        return TrainOutput(self.state.global_step, summary["train_loss"], summary)

    # ── Saving ───────────────────────────────────────────────────────────────────────────────────────────

    def save_checkpoint(self) -> Path:
        """Write `output_dir/checkpoint-<step>`, whole or not at all; upload it if `push_to_hub` asks for it.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints stand.
            FloatingPointError: the weights are not finite; earlier checkpoints stand.
        """
        directory = checkpoints.save(self.run)
        self.journal.event("on_save")
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            self._push_checkpoint(directory)
        return directory

    def load_checkpoint(self, directory: Path, *, or_older: bool = False) -> Path:
        """Restore everything that `save_checkpoint` wrote; see `checkpoints.load`."""
        directory = checkpoints.load(self.run, directory, or_older=or_older)
        loop.publish(self.run)
        return directory

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write model, tokenizer and `training_args.bin` as a plain Hugging Face (or PEFT) directory.

        Args:
            output_dir: the directory; None: that of the run. With `push_to_hub=True` it is also uploaded.

        Raises:
            CheckpointError: a file could not be written.
            FloatingPointError: the weights are not finite.
        """
        directory = Path(output_dir or self.args.run_dir)
        checkpoints.save_model(self.run, directory)
        if self.args.push_to_hub and not _internal_call:  # transformers' argument
            self.push_to_hub("Model save")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Upload the model to `hub_model_id`, by default named like `output_dir`; see `hub.MODEL_FILES`.

        Args:
            blocking: wait for the upload; otherwise a future is returned.
            token, revision, private: replace `hub_token`, `hub_revision` and `hub_private_repo` of `args`.
            card: `model_name`, `dataset_name` and `tags` of the model card.
        """
        directory = self.args.run_dir
        checkpoints.write_model(self.run, directory)
        if not self.accelerator.is_main_process:
            return None
        self.journal.handler.on_push_begin(self.args, self.state, self.control)
        checkpoints.write_card(self.run, directory, **card)
        repository = hub.repository_of(self.args, token=token, revision=revision, private=private)
        files = hub.model_files(directory, self.model, self.processing_class)
        return repository.upload_model(directory, files, commit_message=commit_message, blocking=blocking)

    def _push_checkpoint(self, directory: Path) -> None:
        """Upload the model, and the checkpoint where `hub_strategy` says so, after each save."""
        self.push_to_hub(message := f"Step {self.state.global_step}")
        folder = hub.checkpoint_folder(self.args.hub_strategy, directory)
        if folder is not None and self.accelerator.is_main_process:
            repository = hub.repository_of(self.args)
            repository.upload_checkpoint(directory, folder=folder, commit_message=f"{message}, checkpoint")
