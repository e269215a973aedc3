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

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, set_seed
from transformers.trainer_utils import TrainOutput, speed_metrics

from colocate import assembly, checkpoint, snapshot
from colocate.algorithms.objective import Objective
from colocate.config import GRPOConfig
from colocate.data.prompts import check_context_length, tokenize_prompts
from colocate.data.sampler import PromptBatch, PromptBatches, rank_slice
from colocate.interruption import StopRequest
from colocate.memory.timeline import Timeline
from colocate.policy.forward import causal_lm
from colocate.policy.loading import stop_token_ids
from colocate.policy.policy import UpdateResult
from colocate.reporting.journal import Journal
from colocate.reporting.metrics import Metrics
from colocate.rollout import Rollout, RolloutRequest, Scorer
from colocate.types import Prompt, Sample
from colocate.weighting import shuffled_slices, with_entropy_threshold
from colocate.window import TrainingWindow

logger = logging.getLogger(__name__)


class GRPOTrainer:
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
        ValueError: an argument, the dataset or the batch cannot be trained on; the message says what to set.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
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
        assembly.refuse_unsupported(
            tools=tools, rollout_func=rollout_func, environment_factory=environment_factory
        )
        self.args = args = args or assembly.default_config(model)
        checkpoint.check_writable(Path(args.output_dir))
        self.train_dataset, self.eval_dataset = assembly.check_datasets(train_dataset, eval_dataset, args)
        set_seed(args.seed)
        self.accelerator = Accelerator(cpu=args.use_cpu)
        self.batches = PromptBatches(
            self.train_dataset,
            args.generation_batch_size // args.num_generations,
            shuffle=args.shuffle_dataset,
            seed=args.seed if args.data_seed is None else args.data_seed,
        )
        max_steps, steps_per_epoch = assembly.num_steps(args, self.batches.num_batches_per_epoch)

        device = self.accelerator.device
        self.model, originals = assembly.prepare_model(model, args, device, quantization_config, peft_config)
        self.processing_class = assembly.load_tokenizer(self.model, processing_class, args)
        self.policy = assembly.build_policy(
            self.model,
            args,
            max_steps,
            originals=originals,
            has_new_adapter=peft_config is not None,
            optimizers=optimizers,
        )
        self.engine = assembly.build_engine(self.model, args, self.accelerator)
        self.sampling = assembly.sampling_params(args, stop_token_ids(self.processing_class, self.model))
        self.objective = Objective(args.objective_params())
        self.entropy = assembly.entropy_controller(args)
        self.window = TrainingWindow(args.gradient_accumulation_steps, args.num_iterations, device)
        self.journal = Journal(
            args,
            self.accelerator,
            callbacks or [],
            max_steps=max_steps,
            steps_per_epoch=steps_per_epoch,
            model=self.model,
            processing_class=self.processing_class,
            optimizer=self.policy.optimizer.optimizer,
            lr_scheduler=self.policy.optimizer.scheduler,
        )
        self.timeline = Timeline(device, on_phase=self.journal.set_phase)
        self.scorer = Scorer(
            assembly.build_rewards(reward_funcs, reward_processing_classes, args, device),
            self.processing_class,
            self.accelerator,
            self.journal,
            scale_rewards=args.scale_rewards,
            multi_objective_aggregation=args.multi_objective_aggregation,
            mask_truncated_completions=args.mask_truncated_completions,
            stop_token_ids=self.sampling.stop_token_ids,
        )
        # Taken now, because `sync_ref_model` will change the reference.
        self._frozen_checksum = snapshot.checksum(self.policy.frozen_weights())
        self.context_length = assembly.context_length(self.model, args)
        self.check_longest_prompts()

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train until `max_steps`; from a checkpoint directory, or the newest in `output_dir` with True."""
        self.begin(resume_from_checkpoint)
        with StopRequest(self.accelerator) as stop, self.journal.progress:
            while self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
                while not self.window.ready:
                    batch = next(self.batches)
                    request = self.training_request(batch)
                    with self.phase("rollout"):
                        completions = self.engine.generate(request.prompts, self.sampling)
                    with self.phase("score"):
                        rollout = self.scorer.score(request, completions)
                    with self.phase("train"):
                        self.window.add(self.slices_of(rollout, batch), self.old_logprobs)
                with self.phase("train"):
                    samples = self.next_samples()
                    update = self.policy.update(samples, self.objective)
                    self.window.advance(update.logprobs)
                with self.phase("publish"):
                    self.publish()
                self.report(samples, update, stop)
        return self.finish()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body as a phase; the engine is awake in "rollout" and in no other."""
        with self.timeline.phase(name):
            if name != "rollout":
                yield
                return
            self.engine.wake_up()
            try:
                yield
            finally:
                self.engine.sleep()

    # ── Rollout ──────────────────────────────────────────────────────────────────────────────────────────

    def training_request(self, batch: PromptBatch) -> RolloutRequest:
        """This rank's equal share of the batch's completions; a group may span ranks."""
        num_generations = self.args.num_generations
        share = rank_slice(
            len(batch.rows),
            num_generations,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        rows = [batch.rows[index] for index, _ in share]
        keys = [batch.keys[index] for index, _ in share]
        return self._request(rows, keys, [members for _, members in share], num_generations)

    def _request(
        self, rows: list[dict[str, Any]], keys: list[int], members: list[range], num_generations: int
    ) -> RolloutRequest:
        prompts = [
            Prompt(token_ids, key, samples)
            for token_ids, key, samples in zip(self._tokenize(rows), keys, members, strict=True)
        ]
        for prompt in prompts:
            check_context_length(len(prompt.token_ids), self.sampling.max_tokens, self.context_length)
        return RolloutRequest(rows, prompts, num_generations)

    def _tokenize(self, rows: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
        return tokenize_prompts(
            rows,
            self.processing_class,
            chat_template_kwargs=self.args.chat_template_kwargs,
            max_prompt_length=self.args.max_prompt_length,
        )

    def check_longest_prompts(self) -> None:
        """Find prompts too long for the context before anything is generated.

        Tokenizing a large dataset takes minutes. Its longest prompts by characters take milliseconds, and
        hold the longest by tokens in all but odd cases, which are found when their batch comes.

        Raises:
            ValueError: prompt and completion do not fit the context together.
        """
        for dataset in (self.train_dataset, *assembly.evaluation_sets(self.eval_dataset).values()):
            if isinstance(dataset, datasets.IterableDataset):
                continue
            lengths = [len(str(prompt)) for prompt in dataset["prompt"]]
            longest = sorted(range(len(lengths)), key=lengths.__getitem__)[-16:]
            num_tokens = max(len(ids) for ids in self._tokenize([dataset[i] for i in longest]))
            check_context_length(num_tokens, self.sampling.max_tokens, self.context_length)

    # ── Training ─────────────────────────────────────────────────────────────────────────────────────────

    def slices_of(self, rollout: Rollout, batch: PromptBatch) -> list[list[Sample]]:
        """The rollout's samples, shuffled into slices, with loss weights and reference log-probs."""
        samples = rollout.samples
        if self.policy.reference is not None:
            reference = self.policy.reference_logprobs(samples)
            samples = [
                replace(sample, reference_logprobs=logprobs)
                for sample, logprobs in zip(samples, reference, strict=True)
            ]
        self.journal.add_rollout(rollout.metrics, rollout.table, rollout.num_tokens)
        return shuffled_slices(samples, self.args, batch.number)

    def old_logprobs(self, samples: list[Sample]) -> list[Tensor]:
        """Log-probs under the policy as it is, before it moves away from what generated the samples."""
        return [logprobs for logprobs, _ in self.policy.logprobs(samples)]

    def next_samples(self) -> list[Sample]:
        """The samples of the next optimizer step."""
        slices = self.window.peek()
        if self.args.top_entropy_quantile < 1.0:
            slices = [with_entropy_threshold(samples, self.policy, self.args) for samples in slices]
        return [sample for samples in slices for sample in samples]

    def publish(self) -> None:
        """Make the engine use the new weights: shared ones are in place, others are handed over."""
        weights = () if self.engine.shares_weights else self.model.named_parameters()
        self.engine.update_weights(weights, self.policy.version)

    # ── Reporting ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> TrainerState:
        return self.journal.state

    @property
    def control(self) -> TrainerControl:
        return self.journal.control

    def report(self, samples: list[Sample], update: UpdateResult, stop: StopRequest) -> None:
        """Count the step; log, evaluate and save as the callbacks ask; stop if somebody asked for it."""
        metrics = self._over_ranks(update.metrics)
        if self.objective.params.has_entropy_bonus:
            self.entropy.update(metrics["entropy_trained"])
            self.objective.entropy_coef = self.entropy.applied_coef
            metrics["entropy_coef"] = self.entropy.coef
        self.journal.end_step(metrics, self.timeline.drain())
        if self.args.sync_ref_model and self.state.global_step % self.args.ref_model_sync_steps == 0:
            self.policy.reference.sync(self.model, self.args.ref_model_mixup_alpha)
        self._check_finite(samples, update)
        if self.control.should_evaluate:
            self.evaluate()
        stop_requested = stop.received()
        if self.control.should_save or stop_requested:
            self.save_checkpoint()
        if stop_requested:
            raise SystemExit(143)  # 128 + SIGTERM, what a shell expects of a process that obeyed it

    def _check_finite(self, samples: list[Sample], update: UpdateResult) -> None:
        """Keep what made a step be skipped; give up after `max_skipped_steps` in a row."""
        if not update.skipped:
            return
        name = f"skipped_step_{self.state.global_step}_rank{self.accelerator.process_index}.jsonl"
        file = Path(self.args.output_dir) / name
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
        """Generate for every held-out prompt; rewards are logged as `eval_reward` and so on.

        Raises:
            ValueError: there is no dataset, or `ignore_keys` is given (nothing is predicted but rewards).
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
        start_s = time.time()
        request = self._evaluation_request(dataset)
        with self.phase("rollout"):
            completions = self.engine.generate(request.prompts, self.sampling)
        with self.phase("score"):
            rollout = self.scorer.score(request, completions)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in rollout.metrics.items()}
        metrics.update(speed_metrics(metric_key_prefix, start_s, num_samples=len(rollout.table.prompts)))
        self.journal.log_eval(metrics)
        return metrics

    def _evaluation_request(self, dataset: assembly.TrainDataset) -> RolloutRequest:
        rows = list(dataset)
        num_generations = self.args.num_generations_eval or self.args.num_generations
        per_rank = math.ceil(len(rows) / self.accelerator.num_processes)
        share = range(len(rows))[self.accelerator.process_index * per_rank :][:per_rank]
        # Negative keys: a held-out prompt never shares its random numbers with a training prompt.
        keys = [-1 - index for index in share]
        members = [range(num_generations)] * len(share)
        return self._request([rows[index] for index in share], keys, members, num_generations)

    # ── Beginning, end and checkpoints ───────────────────────────────────────────────────────────────────

    def begin(self, resume_from_checkpoint: str | bool | None) -> None:
        """Start, or continue where a checkpoint stands."""
        requested = (
            self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        )
        directory = checkpoint.find(requested, Path(self.args.output_dir))
        if directory is not None:
            self.load_checkpoint(directory)
        self._start = (time.time(), self.state.global_step)
        self.journal.open(self._description(), resumed=directory is not None)
        if self.args.eval_on_start and directory is None:
            self.evaluate()

    def finish(self) -> TrainOutput:
        """Log the run's summary and close its record."""
        start_s, first_step = self._start
        num_steps = self.state.global_step - first_step
        summary = speed_metrics(
            "train", start_s, num_samples=num_steps * self._completions_per_step, num_steps=num_steps
        )
        losses = [entry["loss"] for entry in self.state.log_history if entry.get("loss") is not None]
        summary["train_loss"] = sum(losses) / len(losses) if losses else math.nan
        self.journal.log(summary)
        self.journal.close()
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(self.state.global_step, summary["train_loss"], summary)

    def _description(self) -> dict[str, Any]:
        lm = causal_lm(self.model)
        num_parameters = sum(p.numel() for p in self.model.parameters())
        return {
            "model": lm.config.name_or_path or type(lm).__name__,
            "num_parameters": num_parameters,
            "engine": type(self.engine).__name__,
            "dataset": getattr(self.train_dataset.info, "dataset_name", None),
            "device": f"{self.accelerator.num_processes} x {self.accelerator.device.type}",
        }

    @property
    def _completions_per_step(self) -> int:
        args = self.args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size

    def save_model(self, output_dir: str | None = None) -> None:
        """Write a plain Hugging Face (or PEFT) directory with the tokenizer; by default the run's own."""
        if self.accelerator.is_main_process:
            directory = output_dir or self.args.output_dir
            self.model.save_pretrained(directory)
            self.processing_class.save_pretrained(directory)

    def push_to_hub(self, commit_message: str | None = "End of training", **kwargs: Any) -> None:
        """Upload model and tokenizer to `hub_model_id` (by default the name of `output_dir`)."""
        if not self.accelerator.is_main_process:
            return
        name = self.args.hub_model_id or Path(self.args.output_dir).name
        options = {
            "commit_message": commit_message,
            "token": self.args.hub_token,
            "private": self.args.hub_private_repo,
            "revision": self.args.hub_revision,
            **kwargs,
        }
        self.model.push_to_hub(name, **options)
        self.processing_class.push_to_hub(name, **options)

    def save_checkpoint(self) -> Path:
        """Write `output_dir/checkpoint-<step>`, whole or not at all.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints stand.
        """
        output_dir = Path(self.args.output_dir)
        directory = output_dir / f"checkpoint-{self.state.global_step}"
        is_main = self.accelerator.is_main_process
        with checkpoint.writing(directory, is_main=is_main, gather=gather_object) as partial:
            self.save_model(str(partial))
            if is_main:
                self.state.save_to_json(str(partial / "trainer_state.json"))
                torch.save(self.args, partial / "training_args.bin")
            if not self.args.save_only_model:
                if is_main:
                    torch.save(self.policy.state_dict(), partial / "optimizer.pt")
                rank = self.accelerator.process_index
                snapshot.save_rank_state(partial, rank, self._resumable_parts(), self._identity())
        if is_main:
            checkpoint.rotate(output_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
        self.journal.event("on_save")
        if self.args.push_to_hub and self.args.hub_strategy == "every_save":
            self.push_to_hub(f"Step {self.state.global_step}")
        return directory

    def load_checkpoint(self, directory: Path) -> None:
        """Restore everything `save_checkpoint` wrote.

        Raises:
            CheckpointError: the checkpoint is incomplete, corrupt or of another run.
        """
        checkpoint.verify(directory)
        if not (directory / "optimizer.pt").is_file():
            raise checkpoint.CheckpointError(
                f"{directory} was written with save_only_model=True: there is no optimizer state to resume. "
                f"Start a new run with model={str(directory)!r}."
            )
        rank = self.accelerator.process_index
        snapshot.load_rank_state(directory, rank, self._resumable_parts(), self._identity())
        self.policy.load_state_dict(torch.load(directory / "optimizer.pt", map_location="cpu"))
        self.objective.entropy_coef = self.entropy.applied_coef
        self.publish()

    def _resumable_parts(self) -> dict[str, snapshot.Resumable]:
        return {
            "batches": self.batches,
            "window": self.window,
            "entropy": self.entropy,
            "journal": self.journal,
        }

    def _identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that resumes it."""
        options = ("num_generations", "num_iterations", "steps_per_generation", "gradient_accumulation_steps")
        return {
            "number of processes": self.accelerator.num_processes,
            "parameter": {name: tuple(p.shape) for name, p in self.model.named_parameters()},
            "option": {name: getattr(self.args, name) for name in (*options, "per_device_train_batch_size")},
            "checksum of the frozen weights (an adapter's base, the reference model)": self._frozen_checksum,
        }
