"""Every option of a run: TRL's names and defaults, and a handful of our own.

An option declared in this file is honoured unless a table in `honoured.py` says otherwise; that file also
lists the options of transformers that are honoured. Each option is declared with its type, its default, what
its value must satisfy (`colocate.options.requirements`) and the text that `colocate train --help` prints.
"""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SaveStrategy
from transformers.utils import is_torch_bf16_gpu_available

from colocate.algorithms.advantages import AdvantageOptions
from colocate.algorithms.entropy import EntropyOptions
from colocate.algorithms.objective_params import ObjectiveParams
from colocate.config.batch_sizes import derive_batch_sizes
from colocate.config.honoured import (
    CHOICES,
    MAY_BE_INFINITE,
    RANGES,
    check_report_to,
    check_support,
    default_of,
)
from colocate.config.launchers import translate
from colocate.config.nested import check_accelerator_config, read_generation_kwargs
from colocate.config.rollout_precision import resolve_correction
from colocate.data.encoding import check_template_arguments
from colocate.engines.native.options import NativeOptions
from colocate.engines.options import EngineOptions, SamplingOptions
from colocate.engines.plugged_in import PluggedInOptions
from colocate.engines.registry import OLDER_NAMES, engine_of
from colocate.engines.vllm.options import VLLMOptions
from colocate.experience.options import CarryOptions, RefillOptions, TurnOptions
from colocate.memory.plan_options import PlanOptions
from colocate.options.distributions import how_to_install
from colocate.options.names import TWINS, override, resolve, with_present_names
from colocate.options.redaction import check_complete, redacted
from colocate.options.requirements import (
    AT_LEAST_ONE,
    BELOW_ONE,
    FEW,
    FRACTION,
    IN_COMPLETIONS,
    INTERVAL,
    NOT_NEGATIVE,
    PORT,
    SECONDS,
    TIMEOUT,
    OneOf,
    check_choice,
    check_range,
    choices_of,
    ranges_of,
)
from colocate.options.values import coerce, nearest, types_of
from colocate.parallel.meeting import meet, meeting
from colocate.parallel.watch import begin_watch
from colocate.policy.model.options import ModelOptions
from colocate.reporting.options import JournalOptions
from colocate.rollout_server.options import ServerOptions

logger = logging.getLogger(__name__)

_Record = TypeVar("_Record")


@dataclass(repr=False)
class GRPOConfig(  # type: ignore[misc]  # TRL's types of bf16 and others
    SamplingOptions,
    NativeOptions,
    VLLMOptions,
    ServerOptions,
    PluggedInOptions,
    ModelOptions,
    PlanOptions,
    RefillOptions,
    CarryOptions,
    TurnOptions,
    JournalOptions,
    AdvantageOptions,
    EntropyOptions,
    ObjectiveParams,
    TrainingArguments,
):
    """Options of a GRPO run: those of TRL 1.16's `GRPOConfig` and of `transformers.TrainingArguments`.

    Differences from TRL: `bf16=None` means True only where the device is a GPU that has bfloat16;
    `report_to=None` means no reporting; values are checked here rather than in the trainer; an option that
    cannot be honoured is refused by name.

    Raises:
        ValueError: an option is refused, out of its range, or the batch does not hold whole groups.
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012  (TrainingArguments keeps its own as a plain list too)
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "vllm_engine_kwargs",
    ]

    # ── Defaults that differ from TrainingArguments ──────────────────────────────────────────────────────

    learning_rate: Annotated[float, NOT_NEGATIVE] = 1e-6
    logging_steps: Annotated[float, INTERVAL] = 10
    remove_unused_columns: bool | None = False  # type: ignore[assignment]  # TRL's type
    """Keep only the dataset's column `prompt`, so that reward functions see no other."""
    resume_from_checkpoint: str | bool | None = None  # type: ignore[assignment]
    """The checkpoint that `colocate train` continues from. True: the newest one in `output_dir`. "auto": the
    newest one that is not corrupt; if there is none at all, the run begins at step 0."""

    # ── Batches. All batch sizes count completions, not prompts ──────────────────────────────────────────

    generation_batch_size: Annotated[int | None, AT_LEAST_ONE] = None
    """Completions per rollout, over all ranks. None: per_device_train_batch_size × ranks ×
    steps_per_generation."""
    num_iterations: Annotated[int, FEW] = 1
    """How many times each rollout is trained on (μ)."""
    shuffle_dataset: bool = True
    """Visit the prompts in random order (seeded by `data_seed`, or by `seed` where that is not set)."""
    dataset_weights: dict[str, Any] | None = None
    """Shares of the prompts by the value of the dataset's column `dataset`, such as {gsm8k: 0.7, math: 0.3};
    they sum to 1. None: every row is visited equally often. A run file's `datasets` set it."""
    share_prompts: bool = True
    """Compute a group's prompt once for all of its completions in a micro-batch of training. False: once for
    each completion, as TRL does."""
    offload_scorers: bool = False
    """Keep the weights of reward models, and of the reference in full fine-tuning, in pinned host memory
    except while rollouts are scored: neither the KV cache nor training shares the device with them then."""
    max_skipped_steps: Annotated[int, AT_LEAST_ONE] = 3
    """A step whose loss or gradient is not finite is skipped; this many of them in a row stop the run."""

    # ── Loss ─────────────────────────────────────────────────────────────────────────────────────────────

    sync_ref_model: bool = False
    """Move the reference model towards the policy every `ref_model_sync_steps` steps (TR-DPO,
    arXiv:2404.09656)."""
    ref_model_mixup_alpha: Annotated[float, FRACTION] = 0.6
    """α in: reference ← α policy + (1 − α) reference."""
    ref_model_sync_steps: Annotated[int, AT_LEAST_ONE] = 512
    """Optimizer steps between two moves of the reference model."""
    mask_truncated_completions: Annotated[bool, IN_COMPLETIONS] = False
    """Leave completions that reached `max_completion_length` out of the loss."""
    router_aux_loss_coef: Annotated[float | None, NOT_NEGATIVE] = None
    """Weight of a mixture of experts' load-balancing loss. None: the model's own weight. 0: no such loss."""

    # ── Rewards ──────────────────────────────────────────────────────────────────────────────────────────

    reward_weights: Annotated[list[float] | None, IN_COMPLETIONS] = None
    """One weight per reward function, in the order of `reward_funcs`. None: every weight is 1."""
    reward_timeout_s: Annotated[float | None, SECONDS] = 1800.0
    """Seconds that each reward function may take for the completions of a rollout. A function that takes
    longer ends the run with an error that names it; where the trainer is not in the main thread, it ends the
    process. None: no limit."""

    # ── Configurations of DeepSpeed and FSDP, whose meaning `shard` and `offload_optimizer` take over ────

    deepspeed: dict[str, Any] | str | None = None
    """A DeepSpeed configuration, as a mapping or a JSON file. It is read as `shard` (stage 0: "none"; 1 and
    2: 1; 3: "auto") and `offload_optimizer`; DeepSpeed itself is not used."""
    fsdp: bool | list[str] | str | None = None  # type: ignore[assignment]  # True is documented
    """True, or the strategies of FSDP's older form ("full_shard auto_wrap"). Read as `shard` ("auto", or 1
    where the weights are not to be split); FSDP itself is not used."""
    fsdp_config: dict[str, Any] | str | None = None
    """The settings of `fsdp`, as a mapping or a JSON file; `reshard_after_forward` decides about `shard`."""

    # ── Accepted so that existing scripts run, or refused: `honoured.py` says which and why ──────────────

    accelerator_config: AcceleratorConfig | dict[str, Any] | str | None = None  # type: ignore[assignment]
    cast_lm_head_to_fp32: bool = False
    use_vllm: bool = False
    vllm_mode: Annotated[str, OneOf(("colocate", "server"))] = "colocate"
    vllm_structured_outputs_regex: str | None = None
    ds3_gather_for_generation: bool = True
    pad_to_multiple_of: int | Literal["auto"] | None = "auto"
    cache_implementation: str | None = None
    log_multimodal: bool = True
    log_completions_hub_repo: str | None = None
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict | str | None = None
    use_transformers_paged: bool = False
    # TRL's names, which read what the ones here do, and those older than TRL 1.16: `options/names.py`
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: Annotated[int, PORT] = 8000
    vllm_server_timeout: Annotated[float, TIMEOUT] = 240.0
    vllm_importance_sampling_cap: float | None = None
    vllm_max_model_len: int | None = None
    vllm_guided_decoding_regex: str | None = None
    vllm_device: str | None = None
    vllm_dtype: str | None = None
    vllm_enable_prefix_caching: bool | None = None
    use_liger_loss: bool | None = None
    wandb_log_unique_prompts: bool | None = None
    warmup_ratio: Annotated[float | None, BELOW_ONE] = None

    def __new__(cls, *_: Any, **options: Any) -> GRPOConfig:
        for name in options.keys() - cls.__dataclass_fields__.keys():
            if hint := how_to_install(name, cls.__dataclass_fields__):
                raise TypeError(f"There is no option {name!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_complete(vars(self))
        defaults = {field.name: default_of(field) for field in fields(self)}
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        self._read_values()
        self.engine = OLDER_NAMES.get(self.engine, self.engine)
        notices = translate(self, os.environ) + resolve(self, defaults)
        if self.model_init_kwargs:
            self.model_init_kwargs = with_present_names(self.model_init_kwargs)
        if self.engine == "auto" and self.use_vllm and self.vllm_mode == "server":
            self.engine = "rollout_server"
        notices += check_support(self) + resolve_correction(self)
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        self._check_choices()
        check_accelerator_config(self.accelerator_config, self.gradient_accumulation_steps)
        self.pad_to_multiple_of = None
        self.dataloader_prefetch_factor = None  # transformers refuses it without workers
        if self.report_to is None:
            self.report_to = "none"
        if self.bf16 is None:
            self.bf16 = not self.use_cpu and is_torch_bf16_gpu_available()
        # transformers 5.2x warns about the older name even when it is only our default.
        if getattr(self, "activation_checkpointing", False) is None:
            self.activation_checkpointing = self.gradient_checkpointing
            self.activation_checkpointing_kwargs = (
                self.activation_checkpointing_kwargs or self.gradient_checkpointing_kwargs
            )

        is_metric_given = self.metric_for_best_model is not None
        # transformers connects the ranks: whoever is missing is named before.
        meet(self.ddp_timeout, use_cpu=self.use_cpu, backend=self.ddp_backend)
        if meeting() is not None:
            begin_watch(self.ddp_timeout)
        TrainingArguments.__post_init__(self)
        self._launch_dir = os.getcwd()

        if self.n_gpu > 1:
            notices.append(
                f"{self.n_gpu} GPUs are visible but one process uses one; to use them all, start with "
                f"`accelerate launch --num_processes {self.n_gpu}`."
            )
            self._n_gpu = 1  # else TrainingArguments.train_batch_size counts all of them
        self._resolve_generation_kwargs()
        notices += self._check_best(is_metric_given)
        self.validate()
        told: frozenset[str] = getattr(self, "_told", frozenset())
        notices = [line for line in (*notices, *self.unusual_pairs()) if line not in told]
        if self.process_index == 0:
            for notice in notices:
                logger.warning(notice)
        self._told = told.union(notices)
        self._given = given
        self._late: dict[str, Any] = {}  # what is set from now on

    def __setattr__(self, name: str, value: Any) -> None:
        is_new = name not in vars(self) and not hasattr(type(self), name)
        super().__setattr__(name, value)
        if name.startswith("_") or not hasattr(self, "_late"):
            return
        if name in self.__dataclass_fields__:
            self._late[name] = value
        if name in TWINS:  # scripts read by either name
            super().__setattr__(TWINS[name], value)
        if is_new and (meant := nearest(name, self.__dataclass_fields__)):
            logger.warning(f"{name} is not an option, and nothing will read it{meant}")

    def _check_best(self, is_metric_given: bool) -> list[str]:
        """Check the options that keep the best checkpoint, beyond transformers' checks; returns notices.

        Raises:
            ValueError: nothing is evaluated, or no metric says which checkpoint is the best.
        """
        asked = [
            name
            for name, is_set in (
                ("save_strategy='best'", self.save_strategy == SaveStrategy.BEST),
                ("load_best_model_at_end=True", self.load_best_model_at_end),
            )
            if is_set
        ]
        if asked and self.eval_strategy == "no":
            raise ValueError(
                f"{' and '.join(asked)}: which checkpoint is the best shows in evaluations, but "
                "eval_strategy='no'. Set eval_strategy='steps' with eval_steps, and pass an eval_dataset."
            )
        if asked and self.metric_for_best_model is None:
            raise ValueError(
                "save_strategy='best' needs a metric to compare: set metric_for_best_model='eval_reward'."
            )
        if self.load_best_model_at_end and not is_metric_given:
            return [
                "load_best_model_at_end=True compares eval_loss, as in transformers. GRPO's loss says little "
                "about how good a policy is: set metric_for_best_model='eval_reward'."
            ]
        if self.greater_is_better is not None and self.metric_for_best_model is None:
            return [f"greater_is_better={self.greater_is_better} needs metric_for_best_model to be set."]
        return []

    def _read_values(self) -> None:
        """Turn every value into its option's type and check its range, so that `learning_rate="1e-5"` means
        the same in Python as on the command line."""
        hints = types_of(type(self))  # type: ignore[arg-type]  # mypy: a dataclass is not hashable
        ranges = RANGES | ranges_of(GRPOConfig)
        for field in fields(self):
            name, value, default = field.name, getattr(self, field.name), default_of(field)
            if type(value) is not type(default) or value != default:
                value = coerce(name, value, hints[name], may_be_infinite=name in MAY_BE_INFINITE)
                setattr(self, name, value)
            if name in ranges:
                check_range(name, value, ranges[name])

    def _resolve_generation_kwargs(self) -> None:
        hints = types_of(type(self))  # type: ignore[arg-type]  # mypy: a dataclass is not hashable
        for name, value in read_generation_kwargs(self.generation_kwargs, self.engine).items():
            setattr(self, name, coerce(name, value, hints[name]))

    def _check_choices(self) -> None:
        for name, choices in (CHOICES | choices_of(GRPOConfig)).items():
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), choices)

    def take_late(self) -> None:
        """Become the configuration that would have been made with what a script has set afterwards, too.

        Options are translated, derived from one another and checked when a configuration is made.

        Raises:
            ValueError: with an option, its value and what to set.
        """
        if not self._late:
            return
        at_once = object.__new__(type(self))
        at_once._told = self._told
        at_once.__init__(**override(self._given, self._late))  # type: ignore[misc]
        vars(self).update(vars(at_once) | {"_launch_dir": self._launch_dir})

    def validate(self) -> None:
        """Derive the batch sizes, and check values and combinations.

        Raises:
            ValueError: with the option, its value and what to set.
        """
        self._check_choices()
        derive_batch_sizes(self)
        for name, requirement in (RANGES | ranges_of(GRPOConfig)).items():
            check_range(name, getattr(self, name), requirement)
        if self.num_train_epochs <= 0 and self.max_steps <= 0:
            raise ValueError(
                f"num_train_epochs={self.num_train_epochs} must be greater than 0 without max_steps."
            )
        if not str(self.output_dir).strip():
            raise ValueError(f"output_dir={self.output_dir!r} is empty: name a directory for the run.")
        check_report_to(self.report_to or ())
        self.engine_options(self.engine)
        check_template_arguments(self.chat_template_kwargs)
        if self.offload_scorers and self.sync_ref_model:
            raise ValueError(
                "offload_scorers=True keeps the reference model on the host, and sync_ref_model=True moves "
                "it towards the policy and saves it. Set one of them to False."
            )
        if self.sync_ref_model and self.beta == 0.0:
            raise ValueError(
                "sync_ref_model=True but beta=0.0, so there is no reference model to move. Set beta > 0 or "
                "sync_ref_model=False."
            )
        self.check_objective()

    @property
    def run_dir(self) -> Path:
        """`output_dir` as an absolute path: a reward function that calls `os.chdir` moves no checkpoint."""
        assert self.output_dir is not None, "TrainingArguments fills in a name where none is given"
        return Path(self._launch_dir, self.output_dir)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values without secrets, for trackers to write down."""
        # transformers puts a placeholder also where there is no token.
        return {
            name: None if getattr(self, name) is None else redacted(value, name)
            for name, value in super().to_dict().items()
        }

    def without_secrets(self) -> GRPOConfig:
        """A copy of the configuration without secrets, to be written to a file."""
        shared = copy.copy(self)
        for name, value in vars(self).items():
            if name in ("_given", "_late"):
                value = {option: redacted(one, option) for option, one in value.items()}
            vars(shared)[name] = redacted(value, name)
        return shared

    def __repr__(self) -> str:
        options = "".join(f"{name}={value},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{options})"

    __str__ = __repr__

    def options_of(self, record: type[_Record], **further: Any) -> _Record:
        """The options that one part of the run reads, with the values that they have now.

        Args:
            record: the class that declares them, such as `ObjectiveParams`; a base class of `GRPOConfig`.
            further: fields of the record that `GRPOConfig` does not have.
        """
        names = {field.name for field in fields(record)} & self.__dataclass_fields__.keys()  # type: ignore[arg-type]
        return record(**{name: getattr(self, name) for name in names}, **further)

    def engine_options(self, engine: str) -> EngineOptions:
        """The options of an engine: a value of the option `engine`."""
        return self.options_of(EngineOptions if engine == "auto" else engine_of(engine).record)
