"""The optimizer: any that transformers names, over fp32 masters, moments and gradients (`masters`)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainingArguments

from colocate.memory.offload import HostStore
from colocate.parallel.collectives import all_reduce_mean, is_distributed
from colocate.parallel.mesh import Mesh
from colocate.policy.optimizer.building import (
    build_optimizer,
    build_scheduler,
    checked_optimizer,
    initialize_group,
)
from colocate.policy.optimizer.hyperparameters import changed_since, hyperparameters, restore_schedule
from colocate.policy.optimizer.masters import Masters, MasterShards, rows_in_memory, sum_over
from colocate.policy.optimizer.state import (
    Read,
    Shapes,
    StatePlacement,
    names_by_index,
    numbers_of,
    quantization_maps,
    read_state,
    reader_of_whole,
    shapes_of,
    tensors_of,
    tensors_of_whole,
)
from colocate.weights.layouts import WHOLE
from colocate.weights.weight_parts import UNSPLIT, Split

SMALLEST_OFFLOADED_BYTES = 2048
"""Smaller state stays on the device: step counters, and tables that an optimizer also refers to elsewhere."""


class PolicyOptimizer:
    """Any optimizer that transformers' `optim` names, its schedule, and fp32 state beside bf16 parameters.

    Gradients of a bf16 parameter are moved into the master's fp32 `.grad` as soon as backward has made them
    (`collecting_gradients`), so they add up over micro-batches in fp32 and no second set in bf16 outlives a
    layer's backward. An fp32 parameter is its own master.

    With a mesh the ranks split masters, moments and reduced gradients by rows (`masters`). Gradients
    of whole parameters add up on every rank; `reduce_gradients` leaves this rank's rows of their mean.

    Between steps, masters and moments can be on the host (`offload`); the parameters, which the engine reads,
    and the gradients always stay on the device.

    Args:
        model: its trainable parameters are optimized, with transformers' weight-decay groups.
        args: read for `optim`, its `optim_args` and `optim_target_modules`, `learning_rate`, `weight_decay`,
            the Adam and `lr_scheduler_*` and warm-up options.
        num_training_steps: length of the schedule in optimizer steps.
        original_weights: by parameter name, what the weights were before a cast to bf16
            (`precision.cast_to_bf16`); they become the masters, so the cast loses nothing.
        optimizers: the user's own (optimizer, scheduler), used as they are over the model's own parameters.
        mesh: how the ranks split the state; None: every rank has all of it.
        splits: by parameter name, how the weights are split over `mesh.weight_group`; parameters without an
            entry are whole.

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
        mesh: Mesh | None = None,
        splits: Mapping[str, Split] | None = None,
    ) -> None:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            remedy = (
                "An adapter loads frozen unless PeftModel.from_pretrained(..., is_trainable=True)."
                if hasattr(model, "peft_config")
                else "Call model.requires_grad_(True), as after merge_and_unload(), or set peft_config."
            )
            raise ValueError(f"The model has no trainable parameter: every requires_grad is False. {remedy}")
        own_optimizer, own_scheduler = optimizers
        self.is_own = own_optimizer is not None
        """Whether the user has made the optimizer, so that `optim` does not say which one it is."""
        self._parameters = trainable
        self._host = HostStore(self._device)
        self._mesh = mesh
        self._splits = {name: split for name, split in (splits or {}).items() if split.part != WHOLE}
        self._shards = None if mesh is None else MasterShards(mesh)
        self._gradients: dict[str, Tensor] = {}
        """The float32 gradients, with shards, of whole parameters that have added up so far, by name."""
        self._masters = Masters(trainable, self._shards)
        if own_optimizer is None:
            self._masters.make(original_weights or {}, self._splits)
            self.optimizer = build_optimizer(model, args, self._masters.leaves)
        else:
            assert mesh is None, "a user's own optimizer steps on whole parameters"
            self.optimizer = checked_optimizer(own_optimizer, trainable)
        self._hyperparameters = hyperparameters(self.optimizer)  # before a schedule scales them
        self._names = {id(parameter): name for name, parameter in trainable.items()}
        self.scheduler = own_scheduler or build_scheduler(self.optimizer, args, num_training_steps)
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
        return list(self.named_leaves.values())

    @property
    def named_leaves(self) -> dict[str, nn.Parameter]:
        """The `leaves` by the names of the parameters; this rank's rows where ranks split them."""
        return self._masters.leaves

    @property
    def num_bytes(self) -> int:
        """Bytes of masters and moments on the device now, without parameters that are their own masters."""
        storages = [tensor.untyped_storage() for tensor in self._own_tensors()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _own_tensors(self) -> Iterator[Tensor]:
        """The masters and the optimizer's state: the tensors that `num_bytes` counts and `offload` moves."""
        state = (x for values in self.optimizer.state.values() for x in values.values())
        device = self._device
        for x in (*self._masters.of_low.values(), *state):
            if isinstance(x, Tensor) and x.device == device:
                yield x

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients accumulated so far."""
        reduced = sum(leaf.grad.nbytes for leaf in self.leaves if leaf.grad is not None)
        return reduced + sum(gradient.nbytes for gradient in self._gradients.values())

    def check_trained(self, model: nn.Module) -> None:
        """Check that the model's trainable parameters are those that are optimized."""
        trained, before = (
            {name: p for name, p in model.named_parameters() if p.requires_grad},
            self._parameters,
        )
        names = sorted(trained.keys() | before.keys())
        if changed := [name for name in names if trained.get(name) is not before.get(name)]:
            raise ValueError(
                "The model's trainable parameters are not those that the trainer was made with: "
                f"{len(changed)} were frozen, unfrozen or replaced since, {changed[0]} for one. Change the "
                "model before, or make another trainer."
            )

    @contextlib.contextmanager
    def collecting_gradients(self) -> Iterator[None]:
        """Collect gradients: within the block those that backward makes are added up in float32.

        Outside of it they are left where they are: another trainer may have the same model.
        """
        hooks = [
            self._parameters[name].register_post_accumulate_grad_hook(self._move_gradient)
            for name in self._masters.names
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _move_gradient(self, parameter: Tensor) -> None:
        """Add a gradient that backward has just made to its float32 sum."""
        if parameter.grad is None:  # of split weights, whose gradients do not come from autograd
            return
        self.add_gradient(parameter, rows_in_memory(parameter.grad, parameter))
        parameter.grad = None

    @torch.no_grad()
    def add_gradient(self, parameter: Tensor, value: Tensor) -> None:
        """Add `value`, float32 and shaped as the parameter lies in memory (`storage_of`), to its gradient; it
        may be kept and must not be changed any more."""
        name = self._names[id(parameter)]
        if self._shards is None:
            master = self._masters.of_low[name]
            if master.grad is None:
                master.grad = value.float().view_as(master)
            else:
                master.grad += value.view_as(master)
        elif name in self._gradients:
            self._gradients[name] += value
        else:
            self._gradients[name] = value.float().contiguous()

    def prepare_reduction(self) -> None:
        """Fill in gradients that backward has not made with zeros, and take the memory for the exchange.

        Every rank must do it before one of them begins `reduce_gradients`. It can be repeated.

        Raises:
            torch.OutOfMemoryError: memory has run out.
        """
        if self._shards is None:
            self.gradients()
            return
        for name, parameter in self._parameters.items():
            if name not in self._gradients:
                self._gradients[name] = torch.zeros_like(rows_in_memory(parameter), dtype=torch.float32)
        # PyTorch's allocator keeps what is freed here for the tensors of the exchange.
        num_bytes = self._shards.exchange_bytes(list(self._gradients.values()))
        torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def reduce_gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Make the leaves' gradients the means over all ranks, and return their norm over all parameters.

        A rank whose samples miss a parameter takes part in its reduction with zeros.

        Args:
            loss: this rank's, a float32 scalar.

        Returns:
            The norm, and a sum of the ranks' losses in some scale, that is finite if all are: float32 scalars
            that are equal on all ranks.
        """
        if self._shards is None:
            gradients, losses = self.gradients(), loss.clone()
            if is_distributed():
                all_reduce_mean([*gradients, losses])
            return nn.utils.get_total_norm(gradients).float(), losses
        assert self._mesh is not None, "shards are those of a mesh"
        # In the order of the parameters, which is common to all ranks.
        accumulated: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            own = self._gradients.pop(name, None)
            rows = rows_in_memory(parameter)
            accumulated[name] = torch.zeros_like(rows, dtype=torch.float32) if own is None else own
        if self._mesh.weight_group is not None:
            whole = [gradient for name, gradient in accumulated.items() if self._is_whole(name)]
            sum_over(whole, self._mesh.weight_group)
        leaves, num_ranks = self._masters.leaves, self._mesh.num_replicas * self._mesh.num_weight_parts
        for name, rows in self._shards.reduce(accumulated, num_ranks):
            leaves[name].grad = rows
        return self._norm(loss)

    def _is_whole(self, name: str) -> bool:
        """Whether every rank of a weight group has all of a parameter."""
        return self._splits.get(name, UNSPLIT).dim is None

    def _norm(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the gradient, whose rows are split over the ranks, and the sum of the ranks' losses."""
        assert self._mesh is not None, "shards are those of a mesh"
        leaves = self._masters.leaves
        gradients = [leaves[name].grad for name in self._parameters]
        norms = torch._foreach_norm([gradient for gradient in gradients if gradient is not None])
        # Whole parameters' rows are counted by every rank of a weight group.
        parts = self._mesh.num_weight_parts
        shares = [1 / parts if self._is_whole(name) else 1.0 for name in self._parameters]
        total = (torch.stack(norms).square() * torch.tensor(shares, device=self._device)).sum()
        both = torch.stack([total, loss])
        if self._mesh.device_mesh is not None:
            dist.all_reduce(both)
        return both[0].sqrt(), both[1]

    def gradients(self) -> list[Tensor]:
        """The accumulated gradients, one per leaf; zeros where backward has made none.

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
        or, if there was no room, brings it back itself, when the activations are gone.

        Where ranks split the state it stays on the host until then: it is split for want of memory.
        """
        if self.is_split:
            return
        with contextlib.suppress(torch.OutOfMemoryError):
            self._host.prefetch()

    @torch.no_grad()
    def prepare_step(self) -> None:
        """Bring the state back from the host and make missing parts of it, so that `step` needs no more
        memory. It changes no value, and can be repeated.

        Raises:
            torch.OutOfMemoryError: memory has run out.
        """
        self._host.fetch()
        self._make_state()

    @torch.no_grad()
    def step(self) -> None:
        """Take a step of optimizer and schedule; the parameters change in place, in the storage they have.

        Raises:
            torch.OutOfMemoryError: raised before anything has changed; the same step can be done again. After
                `prepare_step` it is not raised.
        """
        self.prepare_step()
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
        self._masters.publish()
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
                initialize_group(self.optimizer, index, group)
        except torch.OutOfMemoryError:
            for leaf in new:
                state.pop(leaf, None)
            raise

    def zero_grad(self) -> None:
        """Free the gradients: the KV cache uses their memory during rollouts."""
        for leaf in (*self.leaves, *self._parameters.values()):
            leaf.grad = None
        self._gradients.clear()

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
            "weights": {name: leaf.detach() for name, leaf in self._masters.leaves.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`, the model's parameters included.

        Hyperparameters (learning rate, betas, weight decay, ...) that this optimizer was made with are kept
        where they differ from those that the saved one was made with; a new learning rate follows its
        schedule from the step where the saved one stood.
        """
        leaves, saved = self._masters.leaves, state["weights"]
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
        changed = changed_since(state["hyperparameters"], self._hyperparameters, self.scheduler)
        self._host.fetch()
        for name, leaf in leaves.items():
            leaf.copy_(saved[name])
        self.optimizer.load_state_dict(state["optimizer"])
        for group, values in zip(self.optimizer.param_groups, changed, strict=True):
            group.update(values)
        restore_schedule(self.optimizer, self.scheduler, state["scheduler"])
        self._masters.publish()

    @property
    def is_split(self) -> bool:
        """Whether the ranks split the state; `tensors` and `data` have it then, not `state_dict`."""
        return self._mesh is not None

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by name, this rank's rows of each (`state`), on the device."""
        self._host.fetch()
        mesh = self._mesh or Mesh(None)
        return tensors_of(self.optimizer, self._masters.leaves, self._places(mesh), mesh)

    def data(self) -> dict[str, Any]:
        """The rest of the state, equal on all ranks."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "hyperparameters": self._hyperparameters,
            "numbers": numbers_of(self.optimizer, self._masters.leaves),
        }

    @torch.no_grad()
    def load_tensors(self, found: Shapes, read: Read, data: Mapping[str, Any]) -> None:
        """Restore `tensors` and `data`, of any number of ranks, parameters included: `found` are shapes and
        types of the saved tensors, `read` reads them by name."""
        mesh, leaves = self._mesh or Mesh(None), self._masters.leaves
        changed = changed_since(data["hyperparameters"], self._hyperparameters, self.scheduler)
        self._host.fetch()
        state = read_state(leaves, found, read, self._places(mesh), mesh)
        names = names_by_index(self.optimizer, leaves)
        states = {index: state[name] | data["numbers"].get(name, {}) for index, name in enumerate(names)}
        own = self.optimizer.state_dict()
        self.optimizer.load_state_dict(own | {"state": {i: values for i, values in states.items() if values}})
        for group, values in zip(self.optimizer.param_groups, changed, strict=True):
            group.update(values)
        restore_schedule(self.optimizer, self.scheduler, data["scheduler"])
        self._masters.publish()

    def load_whole(self, saved: Mapping[str, Any]) -> None:
        """Restore this rank's rows of the `state_dict` of an optimizer that is not split; raises as
        `load_tensors`."""
        names = names_by_index(self.optimizer, self._masters.leaves)
        tensors, numbers = tensors_of_whole(saved, names, quantization_maps(self.optimizer))
        places = self._places(self._mesh or Mesh(None))
        self.load_tensors(shapes_of(tensors), reader_of_whole(tensors, places), {**saved, "numbers": numbers})

    def _places(self, mesh: Mesh) -> dict[str, StatePlacement]:
        return {
            name: StatePlacement(mesh, parameter, self._splits.get(name, UNSPLIT))
            for name, parameter in self._parameters.items()
        }

    def has_current_masters(self) -> bool:
        """Whether nobody has changed the parameters since the last step, or since this optimizer was made."""
        self._host.fetch()
        return self._masters.are_current()

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Set the masters to the present parameters, after somebody else has changed these."""
        self._host.fetch()
        self._masters.take_parameters()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device
