"""The trainer: builds the parts, then the loop. Read `train` first.

The loop is the only place that changes phase: rollout (the engine is awake and owns the time-shared memory)
and training (the engine sleeps and its memory is the trainer's). Everything it calls is ignorant of the rest.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy, TrainOutput, speed_metrics

from colocate import assembly
from colocate.algorithms.advantages import AdvantageOptions
from colocate.algorithms.objective import Objective
from colocate.algorithms.objective_params import ObjectiveParams
from colocate.checkpoints import changes, hub, sealed, snapshot
from colocate.checkpoints.best import BestCheckpoint
from colocate.checkpoints.finite import check_finite_weights
from colocate.checkpoints.interruption import StopRequest
from colocate.checkpoints.lock import holding_run_lock
from colocate.config import GRPOConfig
from colocate.data.sampler import PromptBatch
from colocate.experience.agreement import Agreement
from colocate.experience.rollout import RequestBuilder, Rollout, Scorer
from colocate.experience.slices import SliceRows
from colocate.experience.weighting import shuffled_slices, weighted_for_evaluation, with_entropy_threshold
from colocate.experience.window import TrainingWindow
from colocate.memory.handover import Handover
from colocate.memory.recovery import Recovery
from colocate.memory.timeline import Timeline
from colocate.nested_options import arguments_of_model_generate
from colocate.planning.run_options import planner_for
from colocate.policy.loading import stop_token_ids
from colocate.policy.policy import OUT_OF_MEMORY_ADVICE, UpdateResult
from colocate.reporting.journal import Journal
from colocate.reporting.metrics import Metrics
from colocate.run_header import header_rows
from colocate.run_identity import RunIdentity
from colocate.trainer_arguments import check_arguments, check_reward_columns, config_or_default
from colocate.trl_names import TRLNames
from colocate.types import Sample
from colocate.weights.layouts import causal_lm

logger = logging.getLogger(__name__)


class GRPOTrainer(TRLNames):
    """Trains a language model with GRPO and its variants (DeepSeekMath, arXiv 2402.03300).

    The arguments are TRL's. `tools`, `rollout_func` and `environment_factory` are not supported yet and
    refused by name.

    Args:
        model: name or path of a causal language model, a loaded one, or a PEFT model.
        reward_funcs: a function, an async function, a sequence classifier or its name; or a list of these.
        args: the configuration.
        train_dataset: rows with a `prompt` (text or messages); other columns are passed to reward functions.
        eval_dataset: likewise, or a dict of named ones.
        processing_class: the tokenizer; the model's own if not given.
        reward_processing_classes: tokenizers of reward models.
        callbacks: transformers' trainer callbacks.
        optimizers: an optimizer over the model's parameters and a scheduler, in place of `args`' own.
        quantization_config: passed to `from_pretrained` when `model` is a name.
        peft_config: train an adapter instead of the whole model.

    Raises:
        TypeError: an argument is nothing that it takes.
        ValueError: an argument, the dataset or the batch cannot be trained on; the message says what to set.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: assembly.TrainDataset | None = None,
        eval_dataset: assembly.EvalDataset | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        assembly.check_reward_source(reward_funcs)
        assembly.refuse_unsupported(
            tools=tools, rollout_func=rollout_func, environment_factory=environment_factory
        )
        self.args = args = config_or_default(args, model)
        sealed.check_writable(args.run_dir)
        check_arguments(
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
        self.train_dataset, self.eval_dataset = assembly.check_datasets(train_dataset, eval_dataset, args)
        check_reward_columns(reward_funcs, self.train_dataset, self.eval_dataset, args)
        assembly.set_up_process(args)
        self.accelerator = Accelerator(cpu=args.use_cpu)
        self.batches = assembly.prompt_batches(self.train_dataset, args)
        max_steps, steps_per_epoch = assembly.num_steps(args, self.batches.num_batches_per_epoch)

        device = self.accelerator.device
        self.model, originals = assembly.prepare_model(model, args, device, quantization_config, peft_config)
        self.processing_class = assembly.load_tokenizer(self.model, processing_class, args)
        self.planner = planner_for(self.model, args)
        self.policy = assembly.build_policy(
            self.model,
            args,
            max_steps,
            originals=originals,
            has_new_adapter=peft_config is not None,
            optimizers=optimizers,
            planner=self.planner,
        )
        self.optimizer, self.lr_scheduler = self.policy.optimizer.optimizer, self.policy.optimizer.scheduler
        self.sampling = assembly.sampling_params(args, stop_token_ids(self.processing_class, self.model))
        self.engine = assembly.build_engine(self.model, args, self.accelerator, self.sampling)
        self.agreement = Agreement(
            self.sampling, is_drawn_otherwise=bool(arguments_of_model_generate(args.generation_kwargs))
        )
        self.objective = Objective(args.options_of(ObjectiveParams))
        self.entropy = assembly.entropy_controller(args)
        self.window = TrainingWindow(args.gradient_accumulation_steps, args.num_iterations, device)
        self.slice_rows = SliceRows(self.window)
        self.journal = Journal(
            args,
            self.accelerator,
            callbacks or [],
            max_steps=max_steps,
            steps_per_epoch=steps_per_epoch,
            model=self.model,
            processing_class=self.processing_class,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
        )
        self.optimizer.register_step_pre_hook(lambda *_: self.journal.event("on_pre_optimizer_step"))
        self.optimizer.register_step_post_hook(lambda *_: self.journal.event("on_optimizer_step"))
        self.best = BestCheckpoint(args)
        self.timeline = Timeline(device, on_phase=self.journal.set_phase, pooled=self.engine.pooled_bytes)
        self.timeline.watch("weights", lambda: sum(p.nbytes for p in self.model.parameters()))
        self.timeline.watch("optimizer", lambda: self.policy.optimizer.num_bytes)
        self.timeline.watch("kv_cache", lambda: self.engine.kv_cache_bytes, within_phases=True)
        self.timeline.watch("rollout_weights", lambda: self.engine.rollout_weight_bytes, within_phases=True)
        self.timeline.watch("gradients", lambda: self.policy.optimizer.gradient_bytes, within_phases=True)
        self.policy.mark = self.timeline.mark
        self.handover = Handover()
        self.policy.retry = Recovery(
            [self.give_back_kv_cache, self.policy.shrink_plan], OUT_OF_MEMORY_ADVICE
        ).run
        self.scorer = Scorer(
            assembly.build_rewards(reward_funcs, reward_processing_classes, args, device),
            self.processing_class,
            self.accelerator,
            self.journal,
            advantage_options=args.options_of(AdvantageOptions),
            mask_truncated_completions=args.mask_truncated_completions,
            stop_token_ids=self.sampling.stop_token_ids,
        )
        self.identity = RunIdentity(self, has_new_adapter=peft_config is not None)
        self.requests = RequestBuilder(self.processing_class, args, assembly.context_length(self.model, args))
        for dataset in (self.train_dataset, *assembly.evaluation_sets(self.eval_dataset).values()):
            self.requests.check_extremes(dataset)

    @holding_run_lock
    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train until `max_steps`; from a checkpoint directory, or the newest in `output_dir` with True.

        With "auto" from the newest if there is one, else from the beginning.

        Raises:
            OutputDirInUse: another run is writing into `output_dir`.
            CheckpointError: the checkpoint cannot be resumed, or none could be written.
            FloatingPointError: the weights are not finite any more, or `max_skipped_steps` were skipped.
        """
        self.begin(resume_from_checkpoint)
        with StopRequest(self.accelerator) as stop, self.journal.progress:
            while self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
                self.journal.event("on_step_begin")
                while not self.window.ready:
                    batch = next(self.batches)
                    request = self.requests.training(batch)
                    self.slice_rows.add(request)
                    with self.phase("rollout"):
                        completions = self.engine.generate(request.prompts, self.sampling)
                    with self.phase("score"):
                        rollout = self.scorer.score(request, completions)
                    with self.phase("train"):
                        self.agreement.check(rollout.samples, self.engine, self.policy)
                        self.window.add(self.slices_of(rollout, batch), self.old_logprobs)
                with self.phase("train"):
                    samples, update = self.slice_rows.take_step(self.train_slice)
                with self.phase("publish"):
                    self.publish()
                self.report(samples, update, stop)
        return self.finish()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body as a phase; the engine is awake in a "rollout" and in no other."""
        if name not in ("rollout", "evaluate/rollout"):
            with self.timeline.phase(name):
                yield
            return
        if self.policy.plan.offload_optimizer:
            with self.timeline.phase(name.replace("rollout", "offload")):
                self.policy.optimizer.offload()
        with self.timeline.phase(name):
            self.engine.wake_up()
            try:
                yield
                self.timeline.sample()  # while the KV cache is still there
            finally:
                self.engine.sleep(self.handover.keep_bytes)
        self.policy.optimizer.prefetch()  # arrives while the completions are scored and trained on

    def give_back_kv_cache(self) -> str | None:
        """Take from the sleeping engine what it was allowed to keep; None if it keeps nothing."""
        kept_bytes = self.engine.kv_cache_bytes + self.engine.rollout_weight_bytes
        if not kept_bytes:
            return None
        self.handover.keep_nothing()
        self.engine.sleep()
        return f"The engine gave back {kept_bytes / 2**30:.2f} GiB"

    # ── Training ─────────────────────────────────────────────────────────────────────────────────────────

    def slices_of(self, rollout: Rollout, batch: PromptBatch) -> list[list[Sample]]:
        """The rollout's samples, shuffled into slices, with loss weights and reference log-probs."""
        self.journal.add_rollout(rollout.metrics, rollout.table, rollout.num_tokens)
        return shuffled_slices(self.with_reference(rollout.samples), self.args, batch.number)

    def with_reference(self, samples: list[Sample]) -> list[Sample]:
        """The samples with the reference's log-probs, if the KL penalty needs them."""
        if self.policy.reference is None:
            return samples
        logprobs = self.policy.reference_logprobs(samples)
        return [replace(s, reference_logprobs=x) for s, x in zip(samples, logprobs, strict=True)]

    def old_logprobs(self, samples: list[Sample]) -> list[Tensor]:
        """Log-probs under the policy as it is, before it moves away from what generated the samples."""
        return [logprobs for logprobs, _ in self.policy.logprobs(samples)]

    def optimizer_step(self) -> tuple[list[Sample], UpdateResult]:
        """Train on what is next in the window, all slices together."""
        samples = self.next_samples()
        update = self.policy.update(samples, self.objective)
        self.window.advance(update.logprobs)
        return samples, update

    def next_samples(self) -> list[Sample]:
        """The samples of the next optimizer step."""
        slices = self.window.peek()
        if self.args.top_entropy_quantile < 1.0:
            num_slices = self.args.gradient_accumulation_steps
            slices = [with_entropy_threshold(part, self.policy, self.args, num_slices) for part in slices]
        samples = [sample for part in slices for sample in part]
        if self.planner is not None:
            longest = max(len(sample.prompt_ids) for sample in samples)
            self.policy.plan = self.planner.with_prompts(self.policy.plan, longest)
        return samples

    def publish(self) -> None:
        """Make the engine use the new weights: shared ones are in place, others are handed over."""
        weights = () if self.engine.shares_weights else self.model.named_parameters()
        self.engine.update_weights(weights, self.policy.version)

    # ── Reporting ────────────────────────────────────────────────────────────────────────────────────────

    def report(self, samples: list[Sample], update: UpdateResult, stop: StopRequest) -> None:
        """Count the step; log, evaluate and save as the callbacks ask; stop if somebody asked for it."""
        metrics = self._over_ranks(update.metrics)
        if self.objective.params.has_entropy_bonus:
            self.entropy.update(metrics["entropy_trained"])
            self.objective.entropy_coef = self.entropy.applied_coef
            metrics["entropy_coef"] = self.entropy.coef
        timeline = self.timeline.drain()
        self.handover.learn(timeline["memory"])
        if self.planner is not None:
            self.policy.plan = self.planner.refined(
                self.policy.plan, timeline["memory"], update.largest_microbatch
            )
        self.journal.end_step(metrics, timeline)
        if self.args.sync_ref_model and self.state.global_step % self.args.ref_model_sync_steps == 0:
            self.policy.sync_reference(self.args.ref_model_mixup_alpha)
        self._check_finite(samples, update)
        self.log_evaluate_save(stop)
        if self.journal.ends_epoch:
            self.journal.event("on_epoch_end")
            self.log_evaluate_save(stop)
            if not self.control.should_training_stop:
                self.journal.event("on_epoch_begin")

    def log_evaluate_save(self, stop: StopRequest) -> None:
        """Do what the callbacks asked for, in transformers' order; save and leave if asked to stop."""
        self.journal.log_if_asked()
        if self.control.should_evaluate:
            self.judge(self.evaluate())
        is_lost = self.journal.is_lost
        if is_lost:
            stop.request()
        stop_requested = stop.received()
        if self.control.should_save or stop_requested:
            with self.phase("save"):
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

    def _check_finite(self, samples: list[Sample], update: UpdateResult) -> None:
        """Keep what made a step be skipped; give up after `max_skipped_steps` in a row."""
        if not update.skipped:
            return
        check_finite_weights(self.policy, self.args, "further step")
        name = f"skipped_step_{self.state.global_step}_rank{self.accelerator.process_index}.jsonl"
        file = self.args.run_dir / name
        decode = self.processing_class.decode
        with file.open("w") as stream:
            for sample, logprobs in zip(samples, update.logprobs, strict=True):
                record = {
                    "prompt": decode(sample.prompt_ids),
                    "completion": decode(sample.completion_ids),
                    "advantage": sample.advantage,
                    "is_finite": bool(logprobs.isfinite().all()),
                }
                stream.write(json.dumps(record) + "\n")
        logger.warning(f"Step {self.state.global_step} was skipped: loss or gradient not finite. See {file}.")
        num_skipped = self.policy.num_skipped_updates
        if num_skipped >= self.args.max_skipped_steps:
            raise FloatingPointError(
                f"{num_skipped} steps in a row had a loss or gradient that is not finite and were "
                f"skipped (max_skipped_steps={self.args.max_skipped_steps}). Their prompts are in {file} and "
                "its neighbours; the weights are those of the last good step. Lower learning_rate or "
                "max_grad_norm, or look for extreme log-probs in those files."
            )

    def _over_ranks(self, metrics: Metrics) -> dict[str, float]:
        total = Metrics()
        for part in gather_object([metrics.to_host()]):
            total.merge(part)
        return total.compute()

    def evaluate(
        self,
        eval_dataset: assembly.EvalDataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Generate for every held-out prompt, and log `eval_reward`, `eval_loss` and so on.

        The metrics are over all completions; TRL's are averages over batches.

        Raises:
            ValueError: there is no dataset, or `ignore_keys` is given (nothing is predicted but rewards).
            FloatingPointError: the weights are not finite.
        """
        if ignore_keys is not None:
            raise ValueError("evaluate() predicts nothing but rewards, so there are no ignore_keys.")
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluate() needs an eval_dataset: pass one here or to the trainer.")
        if isinstance(dataset, dict):
            results = [
                self.evaluate(part, None, f"{metric_key_prefix}_{name}") for name, part in dataset.items()
            ]
            return {name: value for result in results for name, value in result.items()}
        check_finite_weights(self.policy, self.args, "evaluation")
        start_s = time.time()
        rows = list(dataset)
        with self.phase("evaluate"):
            metrics = self._evaluation_metrics(rows)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        num_steps = math.ceil(len(rows) / (self.args.eval_batch_size * self.args.world_size))
        metrics.update(speed_metrics(metric_key_prefix, start_s, num_samples=len(rows), num_steps=num_steps))
        self.journal.log_eval(metrics)
        return metrics

    def judge(self, metrics: dict[str, float]) -> None:
        """Find out whether the model just evaluated is the best so far, and has to be saved for that."""
        metrics = gather_object([metrics])[0]  # times differ between ranks, and all must come to one verdict
        if self.best.judge(self.state, metrics) and self.args.save_strategy == SaveStrategy.BEST:
            self.control.should_save = True

    def _evaluation_metrics(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        request = self.requests.evaluation(rows)
        with self.phase("evaluate/rollout"):
            completions = self.engine.generate(request.prompts, self.sampling)
        rollout = self.scorer.score(request, completions)
        samples = weighted_for_evaluation(self.with_reference(rollout.samples), self.args)
        if self.args.top_entropy_quantile < 1.0:
            samples = with_entropy_threshold(samples, self.policy, self.args, num_accumulated=1)
        objective = self._over_ranks(self.policy.evaluate(samples, self.objective))
        return {**rollout.metrics, **objective, "num_tokens": self.state.num_input_tokens_seen}

    # ── Beginning, end and checkpoints ───────────────────────────────────────────────────────────────────

    def begin(self, resume_from_checkpoint: str | bool | None) -> None:
        """Start, or continue where a checkpoint stands."""
        requested = (
            self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        )
        directory = sealed.find(requested, self.args.run_dir)
        self.introduce(resumes=directory is not None)
        if directory is not None:
            self.load_checkpoint(directory)
        elif self.state.global_step > 0:
            raise RuntimeError(
                f"This trainer has trained {self.state.global_step} steps already and its schedule is used "
                "up. To train on, make a new trainer with model=trainer.model."
            )
        self._start = (time.time(), self.state.global_step)
        self.journal.open(
            assembly.description(self.model, self.engine, self.train_dataset, self.accelerator),
            resumed_from=directory,
        )
        if self.args.eval_on_start and directory is None:
            self.evaluate()
        self.journal.event("on_epoch_begin")

    def introduce(self, *, resumes: bool) -> None:
        """Say what the run is before anything of it takes time."""
        rows = header_rows(
            self.args,
            self.accelerator,
            self.model,
            self.engine,
            self.policy.plan,
            self.train_dataset,
            self.eval_dataset,
            self.scorer.reward_functions.names,
            self.state.max_steps,
        )
        self.journal.introduce(rows, resumes=resumes)

    def finish(self) -> TrainOutput:
        """Log the run's summary, go back to the best weights if asked to, and close the record."""
        start_s, first_step = self._start
        num_steps = self.state.global_step - first_step
        num_samples = num_steps * self.args.gradient_accumulation_steps * self.args.train_batch_size
        num_samples *= self.args.world_size
        summary = speed_metrics("train", start_s, num_samples=num_samples, num_steps=num_steps)
        summary.update(train_loss=self.journal.train_loss, epoch=self.state.epoch)
        self.journal.log(summary)
        if self.best.load_at_end(self.state, self.model):
            self.policy.take_parameters()
            self.publish()
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.best.delete_others(self.state, self.args.run_dir)
        self.journal.close()
        return TrainOutput(self.state.global_step, summary["train_loss"], summary)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a plain Hugging Face (or PEFT) directory, by default the run's own.

        It holds model, tokenizer and `training_args.bin`. With `push_to_hub=True` it is uploaded too, unless
        it is an `_internal_call` (transformers' argument).

        Raises:
            CheckpointError: a file could not be written.
            FloatingPointError: the weights are not finite.
        """
        directory = Path(output_dir or self.args.run_dir)
        check_finite_weights(self.policy, self.args, "saved model")
        with sealed.saving_model(directory):
            self._write_model(directory)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub("Model save")

    def _write_model(self, directory: Path) -> None:
        if self.accelerator.is_main_process:
            self.model.save_pretrained(directory)
            self.processing_class.save_pretrained(directory)
            torch.save(self.args.without_secrets(), directory / "training_args.bin")

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
            token, revision, private: in place of `args`' own.
            card: `model_name`, `dataset_name` and `tags` of the model card.
        """
        directory = self.args.run_dir
        self._write_model(directory)
        if not self.accelerator.is_main_process:
            return None
        self.journal.handler.on_push_begin(self.args, self.state, self.control)
        hub.write_model_card(directory, base_model=causal_lm(self.model).config.name_or_path, **card)
        repository = hub.repository_of(self.args, token=token, revision=revision, private=private)
        files = hub.model_files(directory, self.model, self.processing_class)
        return repository.upload_model(directory, files, commit_message=commit_message, blocking=blocking)

    def _push_checkpoint(self, directory: Path) -> None:
        """Upload the model, and the checkpoint where `hub_strategy` says so, after each save."""
        message = f"Step {self.state.global_step}"
        self.push_to_hub(message)
        folder = hub.checkpoint_folder(self.args.hub_strategy, directory)
        if folder is not None and self.accelerator.is_main_process:
            repository = hub.repository_of(self.args)
            repository.upload_checkpoint(directory, folder=folder, commit_message=f"{message}, checkpoint")

    def save_checkpoint(self) -> Path:
        """Write `output_dir/checkpoint-<step>`, whole or not at all.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints stand.
            FloatingPointError: the weights are not finite; earlier checkpoints stand.
        """
        check_finite_weights(self.policy, self.args, "checkpoint")
        output_dir = self.args.run_dir
        directory = output_dir / f"checkpoint-{self.state.global_step}"
        is_main = self.accelerator.is_main_process
        with sealed.writing(directory, is_main=is_main, gather=gather_object) as partial:
            self._write_model(partial)
            self.best.note_saving(self.state, directory)
            self.journal.note_callbacks()
            if is_main:
                self.journal.save_state(partial)
            if not self.args.save_only_model:
                if is_main:
                    changes.save(partial, self.identity.describe())
                    snapshot.save_policy(partial, self.policy.state_dict())
                snapshot.save_rank_state(partial, self.accelerator.process_index, self._resumable_parts())
        if is_main:
            best = self.state.best_model_checkpoint
            sealed.rotate(output_dir, self.args.save_total_limit, best, written=directory)
        self.journal.event("on_save")
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            self._push_checkpoint(directory)
        return directory

    def load_checkpoint(self, directory: Path) -> None:
        """Restore everything `save_checkpoint` wrote.

        What has changed since is told, and applied where it can be.

        Raises:
            CheckpointError: the checkpoint is incomplete, corrupt, of another run or holds more than data.
            ValueError: the order of the data, or a schedule of the user's own, is another one.
        """
        sealed.verify(directory)
        policy_state = snapshot.load_policy(directory)
        changed = changes.compare(directory, self.identity.describe())
        changed.refuse()
        snapshot.load_rank_state(directory, self.accelerator.process_index, self._resumable_parts())
        self.journal.load_state(directory)
        self.journal.run_id = changed.run_id
        self.policy.load_state_dict(policy_state)
        num_dropped = self.window.clear() if changed.concern_waiting_completions else 0
        if changed.changes and self.accelerator.is_main_process:
            logger.warning(changed.told(num_dropped))
        self.objective.entropy_coef = self.entropy.applied_coef
        self.best.find_again(self.state, directory)
        self.publish()

    def _resumable_parts(self) -> dict[str, snapshot.Resumable]:
        return {
            "batches": self.batches,
            "window": self.window,
            "entropy": self.entropy,
            "journal": self.journal,
        }
