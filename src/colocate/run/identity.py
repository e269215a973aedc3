"""The identity of a run, which checkpoints keep, and which a resumed run is compared with."""

from __future__ import annotations

import enum
import importlib.metadata
import json
import platform
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from accelerate import Accelerator

from colocate.checkpoints.changes import BATCH, PROCESSES
from colocate.config.grpo_config import GRPOConfig
from colocate.config.honoured import HONOURED_BY, honoured
from colocate.data.fingerprint import fingerprint
from colocate.engines.base import RolloutEngine
from colocate.options.redaction import redacted
from colocate.policy.policy import Policy
from colocate.rewards.base import RewardFunctions
from colocate.version import __version__
from colocate.weights.layouts import causal_lm
from colocate.weights.weight_parts import splits_of

FIXED_OPTIONS = ("num_generations", "num_iterations", "steps_per_generation", "gradient_accumulation_steps")
"""Options that decide which completions a step trains on. If one changed in the middle of a rollout, it would
be unknown which completions were still to be used."""

_NOT_COMPARED = ("output_dir", "resume_from_checkpoint", "per_device_train_batch_size")
LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "numpy", "peft", "bitsandbytes", "vllm")
_ADAPTER_OPTIONS = ("peft_type", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
"""Options of PEFT that the shapes of an adapter's parameters do not show."""


class RunIdentity:
    """The description of a run (its parts are in `colocate.checkpoints.changes`), made before the first step,
    since steps change the weights, and `sync_ref_model` changes the reference."""

    def __init__(
        self,
        args: GRPOConfig,
        accelerator: Accelerator,
        policy: Policy,
        engine: RolloutEngine,
        train_dataset: Any,
        rewards: RewardFunctions,
        has_new_adapter: bool,
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._policy = policy
        self._train_dataset = train_dataset
        self._engine_name = type(engine).__name__
        self._reward_names = list(rewards.names)
        self._checksums = policy.starting_checksums(has_new_adapter=has_new_adapter)

    def describe(self, run_id: str) -> dict[str, Any]:
        """The identity as plain JSON without secrets; the first call reads the dataset (`fingerprint`)."""
        model, args = self._policy.model, self._args
        splits = splits_of(model)
        names = sorted(honoured(type(args), *HONOURED_BY).difference(_NOT_COMPARED, FIXED_OPTIONS))
        description = {
            "run_id": run_id,
            "fixed": {
                BATCH: self._accelerator.num_processes * args.per_device_train_batch_size,
                "optim (the optimizer)": type(self._policy.optimizer.optimizer).__qualname__,
                "parameter": {
                    name: tuple(splits[name].full_shape(p.shape)) for name, p in model.named_parameters()
                },
                "option": {name: getattr(args, name) for name in FIXED_OPTIONS},
            },
            "checksums": self._checksums,
            "others": {
                PROCESSES: self._accelerator.num_processes,
                "option": {n: redacted(getattr(args, n), n) for n in names if hasattr(args, n)},
                "model": redacted(causal_lm(model).config.name_or_path),
                "adapter": _adapter(model),
                "engine": self._engine_name,
                "device": self._accelerator.device.type,
                "dataset": self._dataset,
                "reward functions": self._reward_names,
                "version of": versions(),
            },
        }
        return json.loads(json.dumps(description, default=_as_json))

    @cached_property
    def _dataset(self) -> dict[str, Any]:
        return fingerprint(self._train_dataset)


def _adapter(model: Any) -> dict[str, Any]:
    if not hasattr(model, "peft_config"):
        return {}
    config = model.peft_config[model.active_adapter]
    return {name: getattr(config, name) for name in _ADAPTER_OPTIONS if hasattr(config, name)}


def versions(libraries: Iterable[str] = LIBRARIES) -> dict[str, str | None]:
    """The versions of colocate, Python and these packages; None for one that is not installed."""
    found: dict[str, str | None] = {"colocate": __version__, "python": platform.python_version()}
    for name in libraries:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _as_json(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else str(value)
