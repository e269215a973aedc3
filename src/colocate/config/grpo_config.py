"""Every option of a run: TRL's names and defaults, and a handful of our own (`grpo_options.py`)."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy
from transformers.utils import is_torch_bf16_gpu_available

from colocate.config.batch_sizes import derive_batch_sizes
from colocate.config.grpo_options import GRPOOptions
from colocate.config.honoured import check_report_to, check_support
from colocate.config.launchers import translate
from colocate.config.nested import check_accelerator_config, read_generation_kwargs
from colocate.config.rollout_precision import resolve_correction
from colocate.config.transformers_options import transformers_options
from colocate.data.encoding import check_template_arguments
from colocate.engines.options import EngineOptions
from colocate.engines.registry import engine_of
from colocate.options.declared import Option, declared, default_of
from colocate.options.distributions import how_to_install
from colocate.options.names import TWINS, override, resolve, with_present_names
from colocate.options.redaction import check_complete, redacted
from colocate.options.values import nearest
from colocate.parallel.meeting import meet, meeting
from colocate.parallel.watch import begin_watch

logger = logging.getLogger(__name__)

_Record = TypeVar("_Record")


@dataclass(repr=False)
class GRPOConfig(GRPOOptions, TrainingArguments):  # type: ignore[misc]  # TRL's types of bf16 and others
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

    def __new__(cls, *_: Any, **options: Any) -> GRPOConfig:
        for name in options.keys() - cls.__dataclass_fields__.keys():
            if hint := how_to_install(name, cls.__dataclass_fields__):
                raise TypeError(f"There is no option {name!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        defaults = {field.name: default_of(field) for field in fields(self)}
        if not vars(self).pop("_is_read", False):
            self._read_values()
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        notices = translate(self, os.environ) + resolve(self, defaults)
        if self.model_init_kwargs:
            self.model_init_kwargs = with_present_names(self.model_init_kwargs)
        if self.engine == "auto" and self.use_vllm and self.vllm_mode == "server":
            self.engine = "rollout_server"
        notices += check_support(self) + resolve_correction(self)
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
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

    @classmethod
    def _options(cls) -> Mapping[str, Option]:
        return _options_of(cls)  # type: ignore[arg-type]  # mypy: a dataclass is not hashable

    def _read_values(self) -> None:
        check_complete(vars(self))
        for name, option in self._options().items():
            if not option.is_default(value := getattr(self, name)):
                setattr(self, name, option.read(value))

    @classmethod
    def from_read(cls, values: Mapping[str, Any], *, told: frozenset[str] = frozenset()) -> GRPOConfig:
        """Make the configuration of values that `Option.read` has returned (`run_config.parse_run`).

        Args:
            told: notices that are not logged again.
        """
        config = object.__new__(cls)
        config._is_read, config._told = True, told
        config.__init__(**values)  # type: ignore[misc]
        return config

    def _resolve_generation_kwargs(self) -> None:
        for name, value in read_generation_kwargs(self.generation_kwargs, self.engine).items():
            setattr(self, name, self._options()[name].read(value))

    def take_late(self) -> None:
        """Become the configuration that would have been made with what a script has set afterwards, too.

        Options are translated, derived from one another and checked when a configuration is made.

        Raises:
            ValueError: with an option, its value and what to set.
        """
        if not self._late:
            return
        check_complete(self._late)
        late = {name: self._options()[name].read(value) for name, value in self._late.items()}
        at_once = type(self).from_read(override(self._given, late), told=self._told)
        vars(self).update(vars(at_once) | {"_launch_dir": self._launch_dir})

    def validate(self) -> None:
        """Derive the batch sizes, and check combinations of values.

        Raises:
            ValueError: with the option, its value and what to set.
        """
        derive_batch_sizes(self)
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


@functools.cache
def _options_of(config_class: type) -> Mapping[str, Option]:
    """The options of a class that can be given; what it inherits has the defaults and conditions of here."""
    known = {**transformers_options(), **declared(GRPOOptions)}
    given = {field.name for field in fields(config_class) if field.init}
    return {
        name: known.get(name, option)._replace(hint=option.hint)
        for name, option in declared(config_class).items()
        if name in given
    }
