"""A model without a layout whose weights are split over ranks by PyTorch's FSDP2 (`fully_shard`).

Nothing is known of such a model but its blocks. Rank r of t keeps the r-th chunk of every parameter's rows,
as `torch.chunk` cuts them, and a block's parameters are gathered whole while the block computes, forward and
again backward (PyTorch FSDP, Zhao et al. 2023, arXiv:2304.11277). Parameters outside of the blocks
(embeddings, the last norm, the head) are gathered for a whole pass. LoRA adapters stay whole on every rank,
and so do the few parameters that are float32 in a model of bfloat16 (`float32_parameters`): FSDP2 takes one
type.

All ranks that share the weights make the same forward and backward passes. One that fails in a pass leaves
the others waiting, so that its error must end the run.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from colocate.weights.adapters import base_linear, unsupported_adapters
from colocate.weights.float32_parameters import kept_in_float32
from colocate.weights.layouts import WeightPart, causal_lm
from colocate.weights.weight_parts import local_part, refuse_saving

Result = TypeVar("Result")


def why_not_fully_sharded(model: nn.Module) -> str | None:
    """The reason that keeps a model without a layout from being split by FSDP2; None: nothing does."""
    lm = causal_lm(model)
    if (reason := unsupported_adapters(lm)) is not None:
        return reason
    if not _blocks(lm):
        return "it does not say what its blocks are (`_no_split_modules` names none that it has)"
    whole = _kept_whole(lm)
    parameters = {name: p for name, p in lm.named_parameters() if p not in whole}
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            return f"{name} is quantised ({parameter.dtype})"
        if parameter.ndim == 0:
            return f"{name} is a single number, which has no rows"
    if len(dtypes := {str(p.dtype).removeprefix("torch.") for p in parameters.values()}) > 1:
        return f"its parameters have several types: {', '.join(sorted(dtypes))}"
    of_block: dict[int, str] = {}
    for number, block in enumerate(_blocks(lm)):
        for parameter in set(block.parameters()) - whole:
            if of_block.setdefault(id(parameter), str(number)) != str(number):
                return f"blocks {of_block[id(parameter)]} and {number} share a parameter"
    return None


def shard_fully(model: nn.Module, part: WeightPart, mesh: DeviceMesh, device: torch.device) -> None:
    """Keep one part of the weights of a model without a layout, on `device`, in place.

    Its parameters become `DTensor`s, and its class a subclass that PyTorch makes.

    Args:
        part: which of the parts this rank keeps.
        mesh: of the ranks that share one copy of the weights, in the order of the parts.
    """
    lm = causal_lm(model)
    if (reason := why_not_fully_sharded(model)) is not None:
        raise ValueError(
            f"shard={part.count} splits the weights of {type(lm).__name__}, a model without a layout, over "
            f"{part.count} processes by FSDP2, but {reason}. Set shard=1, which splits the optimizer alone."
        )
    origin = _Origin(_without_weights(lm), part, mesh, device)
    _wrap(lm, part, mesh)
    nn.Module.to(lm, device)
    _origins[lm] = origin


@torch.no_grad()
def copy_sharded(model: nn.Module) -> Any:
    """A second model with the weights that `model` has now, split as they are; without gradients."""
    lm = causal_lm(model)
    origin = _origins[lm]
    copied: Any = copy.deepcopy(origin.blank)
    _wrap(copied, origin.part, origin.mesh)
    copied._apply(lambda x: (torch.empty_like if x.is_meta else torch.Tensor.to)(x, device=origin.device))
    for mine, theirs in zip(copied.parameters(), lm.parameters(), strict=True):
        local_part(mine).copy_(local_part(theirs))
    return copied


@dataclass(frozen=True)
class _Origin:
    """The way in which a model was split."""

    blank: nn.Module
    """The model as it was before, without weights: its parameters are on the meta device, its buffers are
    whole."""
    part: WeightPart
    mesh: DeviceMesh
    device: torch.device


_origins: weakref.WeakKeyDictionary[nn.Module, _Origin] = weakref.WeakKeyDictionary()
"""Models on the meta device by causal language model; a model that FSDP2 has split cannot be copied
itself."""


def _without_weights(lm: Any) -> Any:
    known: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in lm.parameters()
    }
    return copy.deepcopy(lm, known)


def _wrap(lm: Any, part: WeightPart, mesh: DeviceMesh) -> None:
    """Have FSDP2 split the model's parameters, wherever they are."""
    # Gradients are summed in float32, and stored in the parameters' type, in which they were made.
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    kept: dict[str, Any] = dict(mesh=mesh, mp_policy=precision, ignored_params=_kept_whole(lm))
    for parameter in lm.parameters():
        parameter.data = parameter.data.contiguous()
    for block in _blocks(lm):
        fully_shard(block, **kept)
    name = type(lm).__name__
    fully_shard(lm, **kept, reshard_after_forward=False)
    type(lm).__name__ = name  # messages and checkpoints name the architecture, not PyTorch's subclass of it
    for module in _sharded_modules(lm):
        # Sums, of which the optimizer makes the mean over all ranks. A mean of PyTorch's own or a scaled sum
        # is made by NCCL alone.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # PyTorch 2.13: experts that one rank misses
            module.set_reduce_scatter_unused_params(True)
    lm.weight_part = part
    lm.save_pretrained = partial(refuse_saving, part)
    lm.run_gathered = MethodType(_run, lm)
    register_fsdp_forward_method(lm, "run_gathered")


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `shard_fully` has split the model's weights."""
    return isinstance(causal_lm(model), FSDPModule)


def run_gathered(model: nn.Module, work: Callable[[], Result]) -> Result:
    """Do `work`, which may call any of the model's modules and read the weights outside of its blocks; all
    ranks that share the weights must do it together.

    A backward pass may start from its result, once. If FSDP2 has not sharded the model, `work` is just
    called.
    """
    if not is_fully_sharded(model):
        return work()
    lm = causal_lm(model)
    result: Result = lm.run_gathered(work)
    if not torch.is_grad_enabled():  # no backward pass follows, which would let go of the gathered weights
        lm.reshard()
    return result


def _run(lm: nn.Module, work: Callable[[], Result]) -> Result:
    return work()


def gather_whole(model: nn.Module) -> None:
    """Make all of a model's weights whole on this rank until `let_go`, so that ranks can run it each by
    itself; all ranks that share the weights must call it together."""
    for module in _sharded_modules(causal_lm(model)):
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()


def let_go(model: nn.Module) -> None:
    """Keep this rank's part only."""
    lm = causal_lm(model)
    for module in _sharded_modules(lm):
        module.reshard()
        module.set_reshard_after_forward(module is not lm, recurse=False)


def whole_bytes(model: nn.Module) -> int:
    """Bytes of the whole weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in causal_lm(model).parameters())


def _blocks(lm: Any) -> list[nn.Module]:
    """The modules that transformers would not put on two devices, none inside another."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in lm.modules():
        if type(module).__name__.removeprefix("FSDP") in names and id(module) not in inside:
            blocks.append(module)
            inside |= {id(child) for child in module.modules()}
    return [block for block in blocks if any(True for _ in block.parameters())]


def _adapters(lm: nn.Module) -> set[nn.Parameter]:
    """The parameters of LoRA adapters on linear layers."""
    adapted = [module for module in lm.modules() if hasattr(module, "get_base_layer")]
    return {p for module in adapted for p in set(module.parameters()) - set(base_linear(module).parameters())}


def _kept_whole(lm: Any) -> set[nn.Parameter]:
    """The parameters that every rank has all of: adapters, and float32 ones in a model of another type."""
    if lm.get_input_embeddings().weight.dtype == torch.float32:
        return _adapters(lm)
    return _adapters(lm) | {p for p in kept_in_float32(lm) if p.dtype == torch.float32}


def _sharded_modules(lm: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in lm.modules() if isinstance(module, FSDPModule))
