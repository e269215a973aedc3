"""Attributes and methods that scripts written for TRL's and transformers' trainers read, call and override.

This file has names only: each returns a value of another part of the run. The loop is in `loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import datasets
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, trainer_pt_utils

from colocate.algorithms.masks import entropy_threshold, off_policy_sequence_mask
from colocate.config.grpo_config import GRPOConfig
from colocate.data.splits import EvalDataset, TrainDataset, evaluation_sets
from colocate.engines.base import RolloutEngine
from colocate.experience.requests import RolloutRequest
from colocate.experience.slices import SlicedStep, SliceRows, Step
from colocate.policy.policy import Policy
from colocate.policy.reference import FrozenCopy
from colocate.reporting.journal import Journal
from colocate.run import checkpoints as run_checkpoints
from colocate.run.loaders import eval_loader, train_loader
from colocate.run.record import Run

_LOSS = "the loss is composed in colocate.algorithms.objective; a new one is an entry in algorithms/losses.py"
_ROLLOUT = "completions come from an engine: implement colocate.engines.base.RolloutEngine"
_REWARDS = "a reward function sees every column and `trainer_state`, and logs by `log_metric` and `log_extra`"
_DATA = "the order is the dataset's with shuffle_dataset=False; pass the rows in the order you want"
_PREDICTION = "evaluate(dataset) generates for held-out prompts and rewards them; nothing else is predicted"
_OPTIMIZER = "set `optim` and lr_scheduler_type, or pass `optimizers` to the trainer"
_CHECKPOINT = "use a callback's on_save, or save_checkpoint and load_checkpoint"

NOT_CALLED: dict[str, str] = {
    **dict.fromkeys(("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies"), _LOSS),
    **dict.fromkeys(
        (
            *("_prepare_inputs", "_generate_and_score_completions", "_generate", "_generate_single_turn"),
            *("vllm_generation", "llm", "vllm_client", "generation_config", "_generate_completions"),
        ),
        _ROLLOUT,
    ),
    **dict.fromkeys(("_calculate_rewards", "_metrics", "_logs"), _REWARDS),
    **dict.fromkeys(
        ("_get_train_sampler", "_get_eval_sampler", "_get_dataloader", "get_test_dataloader"), _DATA
    ),
    **dict.fromkeys(("predict", "prediction_step", "evaluation_loop"), _PREDICTION),
    **dict.fromkeys(
        (
            *("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"),
            "get_optimizer_cls_and_kwargs",
        ),
        _OPTIMIZER,
    ),
    **dict.fromkeys(
        ("_save", "_save_checkpoint", "_load_from_checkpoint", "_save_optimizer_and_scheduler"), _CHECKPOINT
    ),
    "_maybe_log_save_evaluate": "use a callback's on_step_end",
    "hyperparameter_search": "start a run for each choice, for example with `colocate train`",
    "tokenizer": "it is called processing_class",
}
"""Methods and attributes of TRL's and transformers' trainers that do not exist here, and what to use
instead."""

NOT_OVERRIDDEN: dict[str, str] = {
    **NOT_CALLED,
    **dict.fromkeys(("get_train_dataloader", "get_eval_dataloader"), _DATA),
    "log": "use a callback's on_log",
}
"""Methods that a subclass would define in vain, since they are never called."""


class ArgsOption:
    """An attribute of the trainer that returns an option of `args`, as TRL's trainers have it.

    It cannot be set: the parts of the run have read the option when they were made.
    """

    def __init__(self, option: str | None = None) -> None:
        self._option = option

    def __set_name__(self, owner: type, name: str) -> None:
        self._option = self._option or name
        self.__doc__ = f"`args.{self._option}`."

    def __get__(self, trainer: TRLNames | None, owner: type) -> Any:
        return self if trainer is None else getattr(trainer.args, str(self._option))

    def __set__(self, trainer: TRLNames, value: Any) -> None:
        raise AttributeError(
            f"{self._option}={value!r} comes too late: it was read when the trainer was built. Set it in "
            "GRPOConfig."
        )


class Part:
    """An attribute of the trainer that returns a part of its run.

    It cannot be set: the run's other parts were made with the part that there is.

    Args:
        path: its name in the run; None: as in the trainer.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._path = name, self._path or name
        self.__doc__ = f"`run.{self._path}`."

    def __get__(self, trainer: TRLNames | None, owner: type) -> Any:
        return self if trainer is None else attrgetter(str(self._path))(trainer.run)

    def __set__(self, trainer: TRLNames, value: Any) -> None:
        raise AttributeError(
            f"Another {self._name} comes too late: the run's other parts were made with the one there is. "
            "Make a new trainer, or before train() a new run: dataclasses.replace(trainer.run, ...)."
        )


class TRLNames:
    """The attributes and methods of `GRPOTrainer` that scripts written for TRL use."""

    eval_dataset: EvalDataset | None
    run: Run
    args: GRPOConfig = Part()  # type: ignore[assignment]
    model: Any = Part()
    processing_class: Any = Part("tokenizer")
    train_dataset: TrainDataset = Part()  # type: ignore[assignment]
    optimizer: Optimizer = Part("policy.optimizer.optimizer")  # type: ignore[assignment]
    lr_scheduler: LRScheduler = Part("policy.optimizer.scheduler")  # type: ignore[assignment]
    engine: RolloutEngine = Part()  # type: ignore[assignment]
    policy: Policy = Part()  # type: ignore[assignment]
    journal: Journal = Part()  # type: ignore[assignment]
    _slice_rows: SliceRows
    _step: SlicedStep | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, advice in NOT_OVERRIDDEN.items():
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__} overrides {name}, which colocate's trainer never calls: {advice}."
                )

    def __getattr__(self, name: str) -> Any:
        advice = f": {NOT_CALLED[name]}" if name in NOT_CALLED else ""
        raise AttributeError(
            f"{type(self).__name__!r} has no attribute {name!r}{advice}", name=name, obj=self
        )

    # ── Options ──────────────────────────────────────────────────────────────────────────────────────────

    num_generations = ArgsOption()
    num_iterations = ArgsOption()
    max_completion_length = ArgsOption()
    chat_template_kwargs = ArgsOption()
    temperature = ArgsOption()
    top_p = ArgsOption()
    top_k = ArgsOption()
    min_p = ArgsOption()
    repetition_penalty = ArgsOption()
    use_vllm = ArgsOption()
    use_transformers_continuous_batching = ArgsOption()
    vllm_mode = ArgsOption()
    beta = ArgsOption()
    loss_type = ArgsOption()
    epsilon_low = ArgsOption("epsilon")
    scale_rewards = ArgsOption()
    importance_sampling_level = ArgsOption()
    multi_objective_aggregation = ArgsOption()
    off_policy_mask_threshold = ArgsOption()
    mask_truncated_completions = ArgsOption()
    top_entropy_quantile = ArgsOption()
    use_adaptive_entropy = ArgsOption()
    shuffle_dataset = ArgsOption()
    log_completions = ArgsOption()

    @property
    def num_generations_eval(self) -> int:
        """Completions of each held-out prompt."""
        return self.args.num_generations_eval or self.num_generations

    @property
    def epsilon_high(self) -> float:
        """The upper clipping bound, which defaults to the lower one."""
        return self.args.upper_epsilon

    @property
    def entropy_coef(self) -> float:
        """The entropy bonus's coefficient as it is now: adaptive control moves it."""
        return self.run.entropy.coef

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the auxiliary loss of a mixture of experts' routers is part of the loss."""
        return bool(self.policy.router_loss_coef)

    # ── Parts ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def model_wrapped(self) -> Any:
        """The model itself, since no wrapper (such as DistributedDataParallel) is put around it."""
        return self.model

    @property
    def ref_model(self) -> nn.Module | None:
        """The reference model. None: there is no KL penalty, or the reference is the policy's model with its
        adapters off."""
        reference = self.policy.reference
        if not isinstance(reference, FrozenCopy):
            return None
        self.run.scorers.wake()  # until the next rollout, with `offload_scorers`
        with reference.model() as model:
            return model

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """The functions and methods that the model may call, those of all environments among them."""
        boxes = self.run.playing.toolboxes()
        return list(dict.fromkeys(function for box in boxes for function in box.functions))

    @property
    def environments(self) -> list[Any] | None:
        """The environments of the episodes that were begun last, one for each; None: there are none yet."""
        pool = self.run.playing.environments
        return None if pool is None else pool.shown

    @property
    def rollout_func(self) -> Callable[[list[Any], Any], dict[str, Any]] | None:
        """The function that plays the episodes, as it was given."""
        return self.run.playing.given.get("rollout_func")

    @property
    def reward_funcs(self) -> list[Any]:
        """[F] functions and models, in the order given."""
        return self.run.judge.reward_functions.functions

    @property
    def reward_func_names(self) -> list[str]:
        """[F] names under which rewards are logged."""
        return self.run.judge.reward_functions.names

    @property
    def accelerator(self) -> Accelerator:
        return self.run.accelerator

    @property
    def reward_weights(self) -> Tensor:
        """[F] float32."""
        return self.run.judge.reward_functions.weights

    @property
    def reward_processing_classes(self) -> list[Any]:
        """[F] tokenizers of the reward models; None for a function."""
        return self.run.judge.reward_functions.tokenizers

    @property
    def callback_handler(self) -> Any:
        """The handler of transformers that holds the callbacks."""
        return self.journal.handler

    @property
    def state(self) -> TrainerState:
        """The `TrainerState` of the run. It may be replaced; but the values that this run itself sets (its
        length, the intervals of logs, evaluations and checkpoints, the rank) stay as they are."""
        return self.journal.state

    @state.setter
    def state(self, state: TrainerState) -> None:
        self.journal.replace_state(state)

    @property
    def control(self) -> TrainerControl:
        """The `TrainerControl`, in which callbacks ask for logs, evaluations, checkpoints or the end."""
        return self.journal.control

    # ── Data ─────────────────────────────────────────────────────────────────────────────────────────────

    def get_train_dataloader(self) -> DataLoader:
        """Load this rank's rows of each slice of an epoch, one per completion. The loop does not read it."""
        return train_loader(self.train_dataset, self.args)

    def get_eval_dataloader(
        self, eval_dataset: str | datasets.Dataset | datasets.IterableDataset | None = None
    ) -> DataLoader:
        """Held-out rows, one per completion. `evaluate` does not read it.

        Args:
            eval_dataset: one, or the name of one of several; the trainer's own if None.

        Raises:
            ValueError: there is no such dataset.
        """
        sets = evaluation_sets(self.eval_dataset)
        if isinstance(eval_dataset, str):
            if eval_dataset not in sets:
                raise ValueError(f"There is no eval_dataset {eval_dataset!r}, but {sorted(sets)}.")
            return eval_loader(sets[eval_dataset], self.args)
        if eval_dataset is None:
            if "" not in sets:
                raise ValueError(
                    "There is no eval_dataset: pass one here or to the trainer."
                    if not sets
                    else f"There are several evaluation sets: name one of {sorted(sets)}."
                )
            eval_dataset = sets[""]
        return eval_loader(eval_dataset, self.args)

    # ── One step ─────────────────────────────────────────────────────────────────────────────────────────

    def note_request(self, request: RolloutRequest) -> None:
        """Remember which generation batch the next slices are from."""
        self._slice_rows.add(request)

    def around_step(self, take: Callable[[], Step]) -> Step:
        """Call `training_step` for each slice of an optimizer step; the last call takes the step."""
        rows = self._slice_rows.of_next_step()
        self._step = SlicedStep(take, len(rows))
        try:
            for inputs in rows:
                self.training_step(self.model, inputs)
            return self._step.result()
        finally:
            self._step = None

    def training_step(
        self, model: Any, inputs: list[dict[str, Any]], num_items_in_batch: Any = None
    ) -> Tensor:
        """Train on one slice of an optimizer step (`per_device_train_batch_size` completions).

        The loop calls it `gradient_accumulation_steps` times per optimizer step, as TRL's does, so that a
        subclass can do something around it. Micro-batches are packed over the whole step, so the last of
        these calls does the work for all slices of the step.

        Args:
            model: the trainer's model.
            inputs: this rank's rows of the generation batch that the slice is from, one per completion; empty
                for completions that were generated before the run was resumed, and for a slice whose
                completions are all on other ranks.
            num_items_in_batch: not read; loss weights are worked out over the whole step.

        Returns:
            This rank's loss of the step from the last call, 0 from the others.

        Raises:
            RuntimeError: there are no completions to train on, since `train()` has not generated any.
        """
        if self._step is None:
            raise RuntimeError("There are no completions to train on: train() generates them, so call that.")
        return self._step.visit()

    # ── What transformers' trainers offer besides ────────────────────────────────────────────────────────

    log_metrics = trainer_pt_utils.log_metrics
    save_metrics = trainer_pt_utils.save_metrics
    save_state = trainer_pt_utils.save_state

    def is_world_process_zero(self) -> bool:
        return self.state.is_world_process_zero

    def is_local_process_zero(self) -> bool:
        return self.state.is_local_process_zero

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add numbers to `state.log_history` and to every tracker, with the averages since the last log."""
        self.journal.log(dict(logs))

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None
    ) -> None:
        """Write `README.md` into `output_dir`."""
        if self.accelerator.is_main_process:
            run_checkpoints.write_card(
                self.run, self.args.run_dir, model_name=model_name, dataset_name=dataset_name, tags=tags
            )

    def end(self) -> None:
        """Finish the trackers and leave the group of processes: the last call of a script."""
        self.accelerator.end_training()

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.journal.handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove a callback (or the first callback of a class) and return it; None if there is no such
        callback."""
        return self.journal.handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.journal.handler.remove_callback(callback)

    # ── TRL's functions of tensors ───────────────────────────────────────────────────────────────────────

    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        """`algorithms.masks.off_policy_sequence_mask` with TRL's order of arguments; [B, 1]."""
        return off_policy_sequence_mask(
            per_token_logps, sampling_per_token_logps, advantages, mask, threshold=off_policy_threshold
        )

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """[B, T] bool, True for tokens whose entropy is at or above the `threshold`-quantile over all
        ranks."""
        local = entropies[mask.bool()].float()
        # Ranks differ in tokens; entropies are never negative.
        padded = self.accelerator.pad_across_processes(local, dim=0, pad_index=-1)
        gathered = self.accelerator.gather(padded)
        bound = entropy_threshold(gathered[gathered >= 0], 1 - threshold)
        return (entropies >= bound) & mask.bool()
