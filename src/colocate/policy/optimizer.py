"""The optimizer: fp32 master weights, moments and gradients over parameters that may be bf16.

bf16 has 8 bits of mantissa: next to a weight of 0.02 the neighbouring values are 1.2e-4 apart, and an Adam
step at learning rate 1e-6 moves it by 1e-6. Added to the bf16 weight it rounds to nothing, every time. So
steps are summed in an fp32 copy and the bf16 parameters are that copy, rounded.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.training_args import OptimizerNames

from colocate.memory.offload import HostStore
from colocate.option_values import shown
from colocate.policy.optimizer_names import shortcomings

SMALLEST_OFFLOADED_BYTES = 2048
"""Smaller state stays on the device: step counters, and tables that an optimizer also refers to elsewhere."""

logger = logging.getLogger(__name__)


class PolicyOptimizer:
    """Any optimizer that transformers' `optim` names, its schedule, and fp32 state beside bf16 parameters.

    Gradients of a bf16 parameter are moved into the master's fp32 `.grad` as soon as backward has made them,
    so they add up over micro-batches in fp32 and no second set in bf16 outlives a layer's backward. An fp32
    parameter is its own master.

    Between steps, masters and moments can be on the host (`offload`); the parameters, which the engine reads,
    and the gradients always stay on the device.

    Args:
        model: its trainable parameters are optimized, with transformers' weight-decay groups.
        args: read for `optim`, its `optim_args` and `optim_target_modules`, `learning_rate`, `weight_decay`,
            the Adam and `lr_scheduler_*` and warm-up options.
        num_training_steps: length of the schedule in optimizer steps.
        original_weights: by parameter name, what the weights were before a cast to bf16
            (`loading.cast_to_bf16`); they become the masters, so the cast loses nothing.
        optimizers: the user's own (optimizer, scheduler), used as they are over the model's own parameters.

    Raises:
        ImportError: the library that `optim` needs is not installed.
        ValueError: `optim` needs the model itself (LOMO, layer-wise optimizers); the schedule needs an
            evaluation metric; the user's optimizer holds none of the model's trainable parameters; nothing is
            trainable.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        num_training_steps: int,
        *,
        original_weights: Mapping[str, Tensor] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
    ) -> None:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError(
                "The model has no trainable parameter: every requires_grad is False. An adapter loads frozen "
                "unless PeftModel.from_pretrained(..., is_trainable=True)."
            )
        own_optimizer, own_scheduler = optimizers
        self._parameters = trainable
        self._host = HostStore(self._device)
        self._masters: dict[str, nn.Parameter] = {}
        if own_optimizer is None:
            self._masters = _make_masters(trainable, original_weights or {})
            self.optimizer = _build_optimizer(model, args, trainable | self._masters)
        else:
            self.optimizer = _checked(own_optimizer, trainable)
        self._hyperparameters = _hyperparameters(self.optimizer)  # before a schedule scales them
        self._hooks = [
            trainable[name].register_post_accumulate_grad_hook(_move_gradient_to(master))
            for name, master in self._masters.items()
        ]
        self.scheduler = own_scheduler or _build_scheduler(self.optimizer, args, num_training_steps)
        if "metrics" in inspect.signature(self.scheduler.step).parameters:
            raise ValueError(
                f"{type(self.scheduler).__name__} follows an evaluation metric, but the schedule here "
                "advances with every optimizer step. Choose another lr_scheduler_type."
            )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first parameter group in the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The tensors that the optimizer steps on: the masters, and the parameters that are their own
        masters."""
        return list(self._leaves_by_name().values())

    def _leaves_by_name(self) -> dict[str, nn.Parameter]:
        return self._parameters | self._masters

    @property
    def num_bytes(self) -> int:
        """Bytes of masters and moments on the device now, without parameters that are their own masters."""
        storages = (tensor.untyped_storage() for tensor in self._own_tensors())
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _own_tensors(self) -> Iterator[Tensor]:
        """The masters and the optimizer's state: the tensors that `num_bytes` counts and `offload` moves."""
        state = (x for values in self.optimizer.state.values() for x in values.values())
        for x in (*self._masters.values(), *state):
            if isinstance(x, Tensor) and x.device == self._device:
                yield x

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients accumulated so far."""
        return sum(leaf.grad.nbytes for leaf in self.leaves if leaf.grad is not None)

    def gradients(self) -> list[Tensor]:
        """The accumulated gradients, one per leaf; zeros where backward has not been.

        Zeros rather than nothing, because a rank whose samples miss a parameter must still take part in its
        reduction.
        """
        for leaf in self.leaves:
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
        return [leaf.grad for leaf in self.leaves if leaf.grad is not None]

    def offload(self) -> None:
        """Move masters and moments to the host, until `prefetch` or the next step; done when it returns.

        Only plain tensors whose memory is PyTorch's own move. Paged state, which the driver moves by itself,
        stays, and so do, on a CPU, weights mapped from their file.

        Raises:
            MemoryError: the host has not enough memory; nothing was moved.
            ValueError: the optimizer's state shares memory with a parameter; nothing was moved.
        """
        self._host.offload(
            [
                x
                for x in self._own_tensors()
                if x.nbytes >= SMALLEST_OFFLOADED_BYTES
                and type(x) in (Tensor, nn.Parameter)
                and x.untyped_storage().resizable()
            ],
            in_use=self._parameters.values(),
        )

    def prefetch(self) -> None:
        """Start to bring back what `offload` moved, if the device has room for it now. `step` waits for it,
        or, if there was no room, brings it back itself, when the activations are gone."""
        with contextlib.suppress(torch.OutOfMemoryError):
            self._host.prefetch()

    @torch.no_grad()
    def step(self) -> None:
        """Take a step of optimizer and schedule; the parameters change in place, in the storage they have.

        Raises:
            torch.OutOfMemoryError: raised before anything has changed; the same step can be done again.
            RuntimeError: memory ran out inside the optimizer, where part of the weights may have moved. Most
                of `optim` do not allocate there; some (`optimizer_names.shortcomings`) and a user's own may.
        """
        self._host.fetch()
        self._make_state()
        try:
            self.optimizer.step()
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} ran out of memory in the middle of its step: some weights "
                "may have moved and others not, so the step cannot be repeated. Go on from the last "
                "checkpoint with optim='adamw_torch_fused' or 'adamw_bnb_8bit', which need no memory to "
                "step, or with less to train (use_peft=True)."
            ) from error
        self.scheduler.step()
        self._publish()
        self.zero_grad()

    def _make_state(self) -> None:
        """Make all state that the step would make, so that memory runs out before anything has changed.

        Left to themselves optimizers make the state of one parameter, or one group, after the weights before
        it have moved, and take a half-made state for a whole one.
        """
        state = self.optimizer.state
        new = [leaf for leaf in self.leaves if leaf.grad is not None and not state.get(leaf)]
        if not new:
            return
        try:
            for index, group in enumerate(self.optimizer.param_groups):
                _initialize_group(self.optimizer, index, group)
        except torch.OutOfMemoryError:
            for leaf in new:
                state.pop(leaf, None)
            raise

    def zero_grad(self) -> None:
        """Free the gradients: the KV cache uses their memory during rollouts."""
        for leaf in self.leaves:
            leaf.grad = None

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue bit for bit: moments, schedule and weights by parameter name.

        The weights are the masters, or the parameters that are their own masters: a checkpoint's Hugging Face
        files hold masters only as rounded to bf16. Tensors that were on the host are on the device
        afterwards.
        """
        self._host.fetch()
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "hyperparameters": self._hyperparameters,
            "weights": {name: leaf.detach() for name, leaf in self._leaves_by_name().items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`, the model's parameters included.

        Hyperparameters (learning rate, betas, weight decay, ...) that this optimizer was made with are kept
        where they differ from those that the saved one was made with; a new learning rate follows its
        schedule from the step where the saved one stood.

        Raises:
            ValueError: the state is of other parameters or another precision, or the learning rate differs
                and the user's own schedule derives each from the one before.
        """
        leaves, saved = self._leaves_by_name(), state["weights"]
        differing = [
            name
            for name in sorted(saved.keys() | leaves.keys())
            if name not in saved or name not in leaves or saved[name].dtype != leaves[name].dtype
        ]
        if differing:
            raise ValueError(
                f"The saved optimizer holds weights of {len(saved)} parameters, this run of {len(leaves)}; "
                f"{len(differing)} differ, {differing[0]} for one. Resume with the `bf16`, `peft_config` and "
                "`optimizers` of the run that saved it."
            )
        changed = self._changed_hyperparameters(state["hyperparameters"])
        self._host.fetch()
        for name, leaf in leaves.items():
            leaf.copy_(saved[name])
        self.optimizer.load_state_dict(state["optimizer"])
        for group, values in zip(self.optimizer.param_groups, changed, strict=True):
            group.update(values)
        self._restore_schedule(state["scheduler"])
        self._publish()

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Make the masters what the parameters are now, after somebody else has changed them."""
        self._host.fetch()
        for name, master in self._masters.items():
            master.copy_(self._parameters[name])

    def _changed_hyperparameters(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """For each parameter group, this optimizer's hyperparameters that differ from the saved ones."""
        changed = [
            {name: value for name, value in now.items() if name in was and was[name] != value}
            for was, now in zip(saved, self._hyperparameters, strict=True)
        ]
        if any("lr" in values for values in changed) and not isinstance(self.scheduler, LambdaLR):
            raise ValueError(
                f"The learning rate was {[was['lr'] for was in saved]} when the checkpoint was written "
                f"and is {[now['lr'] for now in self._hyperparameters]} now, but "
                f"{type(self.scheduler).__name__} derives each rate from the one before. Go back to the "
                "former, or leave the scheduler in `optimizers` out and choose one by lr_scheduler_type."
            )
        return changed

    def _restore_schedule(self, saved: dict[str, Any]) -> None:
        """Take over the saved schedule's position; rates follow from it and this run's own base and
        schedule."""
        if not isinstance(self.scheduler, LambdaLR):
            self.scheduler.load_state_dict(saved)
            return
        bases = self.scheduler.base_lrs
        self.scheduler.load_state_dict(saved)
        self.scheduler.base_lrs = bases
        rates = [
            base * factor(self.scheduler.last_epoch)
            for base, factor in zip(bases, self.scheduler.lr_lambdas, strict=True)
        ]
        self.scheduler._last_lr = rates
        for group, base, rate in zip(self.optimizer.param_groups, bases, rates, strict=True):
            group["initial_lr"] = base
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _publish(self) -> None:
        if self._masters:
            # Copied into the parameter's own storage: the rollout engine reads it there.
            torch._foreach_copy_(
                [self._parameters[name] for name in self._masters], list(self._masters.values())
            )


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """For each parameter group, its hyperparameters that can be compared: numbers, switches, betas."""

    def comparable(value: Any) -> Any:
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    simple = (bool, int, float, str, tuple, type(None))
    return [
        {
            name: comparable(value)
            for name, value in group.items()
            if name != "params" and isinstance(comparable(value), simple)
        }
        for group in optimizer.param_groups
    ]


def _make_masters(
    trainable: Mapping[str, nn.Parameter], originals: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    masters = {}
    for name, parameter in trainable.items():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            weights = originals.get(name, parameter.detach()).to(parameter.device, torch.float32)
            masters[name] = nn.Parameter(weights)
    return masters


def _move_gradient_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None, "called after a gradient was accumulated"
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return move


def _build_scheduler(optimizer: Optimizer, args: TrainingArguments, num_training_steps: int) -> LRScheduler:
    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # type: ignore[arg-type]
        )
    except TypeError as error:
        raise ValueError(
            f"The schedule {shown(args.lr_scheduler_type)} refuses lr_scheduler_kwargs="
            f"{shown(args.lr_scheduler_kwargs)}: {error}"
        ) from error


def _build_optimizer(
    model: nn.Module, args: TrainingArguments, leaves: Mapping[str, nn.Parameter]
) -> Optimizer:
    name = OptimizerNames(args.optim).value
    optimizer_class, kwargs = _class_and_kwargs(name, model, args)
    is_plain = isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
    if not is_plain or {"model", "optimizer_dict"} & kwargs.keys():
        raise ValueError(
            f"optim={name!r} steps on the model's own modules, which cannot be combined with fp32 "
            "masters and gradients that are reduced before the step. Choose another, such as "
            "'adamw_torch_fused'."
        )
    if (line := shortcomings(name)) is not None and args.process_index == 0:
        logger.warning(line)
    if optimizer_class in (torch.optim.AdamW, torch.optim.SGD):
        # In place, in one kernel. The other implementations hold temporaries as large as all the weights, and
        # may run out of memory between one weight and the next.
        kwargs["fused"] = True
    elif optimizer_class in (torch.optim.Adagrad, torch.optim.RMSprop):
        kwargs["foreach"] = False  # so temporaries are as large as one weight, and not as all weights
    if "params" in kwargs:  # GaLore and APOLLO project some of the model's parameters
        return optimizer_class(_over_leaves(kwargs.pop("params"), model, leaves), **kwargs)
    # The method does not use the trainer that it belongs to. Calling it makes the groups that the installed
    # transformers would make.
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    groups = [
        {"params": [p for n, p in leaves.items() if n in decayed], "weight_decay": args.weight_decay},
        {"params": [p for n, p in leaves.items() if n not in decayed], "weight_decay": 0.0},
    ]
    return optimizer_class([group for group in groups if group["params"]], **kwargs)


def _class_and_kwargs(name: str, model: nn.Module, args: TrainingArguments) -> tuple[Any, dict[str, Any]]:
    """The optimizer class that transformers chooses for `optim`, and its keyword arguments.

    Raises:
        ImportError: the library is not installed.
    """
    try:
        optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[arg-type]
    except (ImportError, ValueError) as error:
        # If some libraries are missing, transformers raises a ValueError.
        if isinstance(error, ValueError) and not re.search("install|failed to import", str(error)):
            raise
        remedy = "pip install 'bitsandbytes>=0.46'" if "bitsandbytes" in str(error) else str(error)
        raise ImportError(f"optim={name!r} needs a library that is not installed: {remedy}") from error
    # `optim_args` reaches some optimizers as text.
    return optimizer_class, {key: _number(x) if isinstance(x, str) else x for key, x in kwargs.items()}


def _number(text: str) -> float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def _over_leaves(
    groups: list[dict[str, Any]], model: nn.Module, leaves: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """The parameter groups with masters in place of the bf16 parameters, and without frozen parameters."""
    of_parameter = {id(parameter): leaves.get(name) for name, parameter in model.named_parameters()}
    groups = [group | {"params": [of_parameter[id(p)] for p in group["params"]]} for group in groups]
    groups = [group | {"params": [leaf for leaf in group["params"] if leaf is not None]} for group in groups]
    return [group for group in groups if group["params"]]


def _initialize_group(optimizer: Any, index: int, group: dict[str, Any]) -> None:
    """Make the state of parameters that have a gradient but no state; nothing for unknown optimizers."""
    if hasattr(optimizer, "init_state"):  # bitsandbytes'
        optimizer.check_overrides()  # as bitsandbytes' own first step does before it makes state
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is not None and not optimizer.state.get(parameter):
                optimizer.init_state(group, parameter, index, position)
    elif type(optimizer).__module__.startswith("torch.optim") and hasattr(optimizer, "_init_group"):
        # The function also fills lists for the step, one for each state tensor.
        num_lists = len(inspect.signature(optimizer._init_group).parameters) - 1
        optimizer._init_group(group, *([] for _ in range(num_lists)))


def _checked(optimizer: Optimizer, trainable: Mapping[str, nn.Parameter]) -> Optimizer:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in trainable.values()):
        raise ValueError(
            f"The {type(optimizer).__name__} in `optimizers` holds none of the {len(trainable)} trainable "
            "parameters of the model. Build it over the very model object that is passed to the trainer."
        )
    low = [name for name, p in trainable.items() if p.dtype != torch.float32]
    if low:
        logger.warning(
            "Your optimizer steps on %d %s parameters themselves: at small learning rates most of its "
            "updates round to nothing. Set bf16=False, or choose the optimizer by `optim` to get fp32 "
            "masters.",
            len(low),
            trainable[low[0]].dtype,
        )
    return optimizer
