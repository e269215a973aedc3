"""The state of a split optimizer by name, as tensors that know which rows of the whole they are.

`torch.distributed.checkpoint` writes and reads such tensors for any number of ranks. Names are

    weights/<parameter>             the master, or a float32 parameter
    state/<parameter>/<key>         what the optimizer keeps per value (moments), or once (step)
    state/<parameter>/<key>@2of4t1  what belongs to the rows of rank 2 of 4, where weights are in 1 part, and
                                    cannot be cut again (scales of blocks)
    maps/<parameter>/<key>          what 8-bit codes mean, equal on all ranks (`quantization_maps`)

in the shapes and the orientation of the model's own whole parameters, whichever way they are split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from colocate.parallel.mesh import Mesh
from colocate.policy.optimizer.masters import Rows
from colocate.weights.weight_parts import Split

Read = Callable[[dict[str, Tensor]], None]
"""Fills tensors by name with what was saved; a `DTensor` with its own rows of it."""
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Whole shape and type of every saved tensor by name."""

_OF_RANK = re.compile(r"@(\d+)of(\d+)t(\d+)$")
_WHOLE = "0of1t1"
"""The name for the blocks of a state that was not split."""


class StatePlacement:
    """Where a rank's rows of a parameter lie in the whole parameter.

    Args:
        mesh: of the ranks that split the state.
        parameter: as the model holds it.
        split: how its weights are split.
    """

    def __init__(self, mesh: Mesh, parameter: Tensor, split: Split) -> None:
        self._mesh, self._split = mesh, split
        self.shape = split.full_shape(parameter.shape) if parameter.ndim else torch.Size([1])
        """The shape of the whole parameter."""

    def placed(self, rows: Tensor) -> Tensor:
        """This rank's rows, as they lie in memory, as a part of the whole parameter."""
        local = rows.t() if self._split.dim == 1 else rows
        device_mesh = self._mesh.device_mesh
        if device_mesh is None:
            return local
        stride = torch.empty(self.shape, device="meta").stride()
        mesh, placements = device_mesh["replica"], [Shard(0)]
        if self._split.dim is not None:  # a part of the weights, and of that the rows of a replica
            mesh, placements = self._mesh.by_part, [Shard(self._split.dim)] * 2
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=self.shape, stride=stride)

    def rows_of(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole tensor of the parameter's shape, as they lie in memory."""
        part = self._split.of_full(whole.reshape(self.shape))
        part = part.t() if self._split.dim == 1 else part
        return part[Rows(len(part), self._mesh.num_replicas).of(self._mesh.replica)]


def names_by_index(optimizer: Optimizer, leaves: Mapping[str, nn.Parameter]) -> list[str]:
    """The parameters' names in the order of PyTorch's own `Optimizer.state_dict`."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    return [names[id(leaf)] for group in optimizer.param_groups for leaf in group["params"]]


def tensors_of(
    optimizer: Optimizer, leaves: Mapping[str, nn.Parameter], places: Mapping[str, StatePlacement], mesh: Mesh
) -> dict[str, Tensor]:
    """All tensors of the state by name; `leaves` are this rank's rows, on which the optimizer steps."""
    tensors: dict[str, Tensor] = {}
    maps = quantization_maps(optimizer)
    for name, leaf in leaves.items():
        tensors[f"weights/{name}"] = places[name].placed(leaf.detach())
        for key, value in optimizer.state.get(leaf, {}).items():
            if not isinstance(value, Tensor):
                continue
            if _is_one_of(value, maps):
                tensors[f"maps/{name}/{key}"] = value.detach()
            elif value.shape == leaf.shape:
                tensors[f"state/{name}/{key}"] = places[name].placed(value.detach())
            elif value.numel() == 1:
                tensors[f"state/{name}/{key}"] = value.detach()
            else:
                of_rank = f"{mesh.rank}of{mesh.num_ranks}t{mesh.num_weight_parts}"
                tensors[f"state/{name}/{key}@{of_rank}"] = value.detach()
    return tensors


def quantization_maps(optimizer: Optimizer) -> list[Tensor]:
    """The tables of 256 values by which bitsandbytes' optimizers read their 8-bit codes; none of others."""
    return list(getattr(optimizer, "name2qmap", {}).values())


def _is_one_of(value: Tensor, maps: list[Tensor]) -> bool:
    # A state that was loaded holds copies.
    return any(
        value is table or (value.dtype == table.dtype and torch.equal(value, table.to(value.device)))
        for table in maps
        if value.shape == table.shape
    )


def numbers_of(optimizer: Optimizer, leaves: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
    """The optimizer's state besides tensors (bitsandbytes' count of steps), by parameter name."""
    return {
        name: {k: v for k, v in optimizer.state.get(leaf, {}).items() if not isinstance(v, Tensor)}
        for name, leaf in leaves.items()
    }


def check_names(found: Shapes, leaves: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError if the saved state is of other parameters than `leaves`."""
    saved = {name.removeprefix("weights/") for name in found if name.startswith("weights/")}
    if differing := sorted(saved ^ leaves.keys()):
        raise ValueError(
            f"The saved optimizer holds weights of {len(saved)} parameters, this run of {len(leaves)}; "
            f"{len(differing)} differ, {differing[0]} for one. Resume with the `bf16`, `peft_config` and "
            "`optimizers` of the run that saved it."
        )


def read_state(
    leaves: Mapping[str, nn.Parameter],
    found: Shapes,
    read: Read,
    places: Mapping[str, StatePlacement],
    mesh: Mesh,
) -> dict[str, dict[str, Tensor]]:
    """Read the leaves' values in place, and return the optimizer's state by parameter name."""
    check_names(found, leaves)
    targets = {f"weights/{name}": places[name].placed(leaf.detach()) for name, leaf in leaves.items()}
    state: dict[str, dict[str, Tensor]] = {name: {} for name in leaves}
    for full_name, (shape, dtype) in found.items():
        kind, _, rest = full_name.partition("/")
        if kind not in ("state", "maps"):
            continue
        name, _, key = rest.rpartition("/")
        leaf = leaves[name]
        if kind == "maps":
            local = targets[full_name] = torch.zeros(shape, dtype=dtype, device=leaf.device)
        elif (of_rank := _OF_RANK.search(key)) is not None:
            rank, num_ranks, num_parts = map(int, of_rank.groups())
            _check_ranks(name, key, num_ranks, num_parts, mesh)
            if rank != mesh.rank:
                continue
            key = key.partition("@")[0]
            local = targets[full_name] = torch.zeros(shape, dtype=dtype, device=leaf.device)
        elif shape == places[name].shape and (shape.numel() != 1 or key != "step"):
            local = torch.zeros_like(leaf, dtype=dtype)
            targets[full_name] = places[name].placed(local)
        else:
            local = targets[full_name] = torch.zeros(shape, dtype=dtype)
        state[name][key] = local
    read(targets)
    return state


def _check_ranks(name: str, key: str, num_ranks: int, num_parts: int, mesh: Mesh) -> None:
    """Raise ValueError if blocks of other rows than those of the ranks of `mesh` were saved."""

    def way(num_ranks: int, num_parts: int) -> str:
        whole = "one process or shard='none'"
        return f"{num_ranks} processes and shard={num_parts}" if num_ranks > 1 else whole

    saved, now = way(num_ranks, num_parts), way(mesh.num_ranks, mesh.num_weight_parts)
    if saved != now:
        raise ValueError(
            f"The optimizer's state of {name} is in blocks ({key.partition('@')[0]}), which cannot be cut "
            f"anew: it was saved with {saved}, and this run has {now}. Resume with {saved}, or train with "
            "optim='adamw_torch_fused', whose state can be divided."
        )


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def tensors_of_whole(
    saved: Mapping[str, Any], names: list[str], maps: list[Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the numbers by name of a `PolicyOptimizer.state_dict`, which has the whole state;
    `maps` are the `quantization_maps` of an optimizer of the same class."""
    tensors: dict[str, Tensor] = {f"weights/{name}": weights for name, weights in saved["weights"].items()}
    numbers: dict[str, Any] = {}
    for name, key, value in _entries(saved["optimizer"]["state"], names):
        if isinstance(value, Tensor) and _is_one_of(value, maps):
            tensors[f"maps/{name}/{key}"] = value
        elif isinstance(value, Tensor):
            is_block = value.shape != saved["weights"][name].shape and value.numel() != 1
            tensors[f"state/{name}/{key}" + (f"@{_WHOLE}" if is_block else "")] = value
        else:
            numbers.setdefault(name, {})[key] = value
    return tensors, numbers


def _entries(state: Mapping[int, Mapping[str, Any]], names: list[str]) -> Iterator[tuple[str, str, Any]]:
    for index, values in state.items():
        for key, value in values.items():
            # bitsandbytes hides the tensors of 8-bit state in a mapping, from those who cut tensors by rows.
            inner = value if isinstance(value, Mapping) else {key: value}
            yield from ((names[index], inner_key, inner_value) for inner_key, inner_value in inner.items())


def reader_of_whole(tensors: Mapping[str, Tensor], places: Mapping[str, StatePlacement]) -> Read:
    """Reads this rank's rows of whole tensors."""

    def read(targets: dict[str, Tensor]) -> None:
        for full_name, target in targets.items():
            if isinstance(target, DTensor):
                name = full_name.split("/")[1]
                rows = places[name].placed(places[name].rows_of(tensors[full_name]))
                assert isinstance(rows, DTensor), "placed as the target is"
                target.to_local().copy_(rows.to_local())
            else:
                target.copy_(tensors[full_name].reshape(target.shape))

    return read
