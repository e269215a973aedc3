"""fp32 master weights over parameters that may be bf16.

bf16 has 8 bits of mantissa: next to a weight of 0.02 the neighbouring values are 1.2e-4 apart, and an Adam
step at learning rate 1e-6 moves it by 1e-6. Added to the bf16 weight it rounds to nothing, every time. So
steps are summed in an fp32 copy and the bf16 parameters are that copy, rounded.

With n ranks that hold the same weights each steps on ceil(rows / n) rows of every parameter: torch.chunk's
rule, and that of `DTensor`'s `Shard(0)`. Masters, moments and reduced gradients are then n times smaller
(stage 2 of ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054), and a step has two exchanges:

    after the last micro-batch   reduce-scatter   each rank gets the mean gradient of its rows
    after the step               all-gather       in place: the engine reads the weights where they are

A matrix whose rows n divides needs no copy for either: its rows lie rank after rank already. Small matrices,
and those whose rows n does not divide, are copied into buckets of equal shares, padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from colocate.parallel.collectives import all_gather, reduce_scatter
from colocate.parallel.mesh import Mesh
from colocate.weights.weight_parts import UNSPLIT, Split, local_part


class Masters:
    """The tensors that an optimizer steps on. A float32 parameter is its own master.

    Args:
        parameters: the trained ones, by name.
        shards: how the ranks split the masters by rows; None: every rank has all of them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], shards: MasterShards | None) -> None:
        self._parameters = dict(parameters)
        self._shards = shards
        self.of_low: dict[str, nn.Parameter] = {}
        """The masters of bf16 parameters, by name."""
        self._views: dict[str, nn.Parameter] = {}
        """This rank's rows of float32 parameters, their own masters; empty without shards."""

    def make(self, originals: Mapping[str, Tensor], splits: Mapping[str, Split]) -> None:
        """Make the masters of bf16 parameters, from `originals` (the weights before the cast) if they are
        there; with shards also those of this rank's rows of float32 parameters. `splits` says how weights are
        split; others are whole."""
        for name, parameter in self._parameters.items():
            is_low = parameter.dtype in (torch.bfloat16, torch.float16)
            weights = parameter.detach()
            if is_low and name in originals:
                weights = splits.get(name, UNSPLIT).of_full(originals[name])
            if self._shards is not None:
                weights = self._shards.own_rows(rows_in_memory(weights, parameter))
            if is_low:
                # A copy even where there is nothing to convert: rows must not keep a whole original alive.
                keeps = self._shards is not None
                self.of_low[name] = nn.Parameter(weights.to(parameter.device, torch.float32, copy=keeps))
            elif self._shards is not None:
                self._views[name] = nn.Parameter(weights)

    @property
    def names(self) -> list[str]:
        """The parameters that are not their own masters."""
        return [*self.of_low, *self._views]

    @property
    def leaves(self) -> dict[str, nn.Parameter]:
        """The tensors that the optimizer steps on, by parameter name."""
        for name, view in self._views.items():
            rows = self._own_rows(name)
            if view.data_ptr() != rows.data_ptr():  # the parameter was moved, into a fused one for example
                view.data = rows.detach()
        return self._parameters | self._views | self.of_low

    def _own_rows(self, name: str) -> Tensor:
        """This rank's rows of a parameter, or all of them."""
        if self._shards is None:
            return self._parameters[name].detach()
        return self._shards.own_rows(rows_in_memory(self._parameters[name]))

    @torch.no_grad()
    def are_current(self) -> bool:
        """Whether the parameters are the masters rounded; not if somebody else has changed the parameters."""
        pairs = [(self._own_rows(name), master.detach()) for name, master in self.of_low.items()]
        pairs = [pair for pair in pairs if pair[0].numel()]  # of few rows some ranks have none
        masters = iter([master for _, master in pairs])
        # A few launches for many tensors, and one wait for all: this is asked before every step and rollout.
        differences = [
            difference
            for bucket in _buckets([rows for rows, _ in pairs], [rows.nbytes for rows, _ in pairs])
            for difference in _largest_differences(bucket, [next(masters) for _ in bucket])
        ]
        # NaN, the difference of two NaNs, is not 0 either.
        return not differences or bool((torch.stack(differences) == 0).all())

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Set the masters to the present parameters."""
        for name, master in self.of_low.items():
            master.copy_(self._own_rows(name))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters' own storage, where the engine reads them, on every rank."""
        if self.of_low:
            torch._foreach_copy_([self._own_rows(name) for name in self.of_low], list(self.of_low.values()))
        if self._shards is not None:
            self._shards.gather([rows_in_memory(parameter) for parameter in self._parameters.values()])


Item = TypeVar("Item")

SMALL_BYTES = 2**20
"""Smaller tensors travel together: one collective costs some 20 µs, in which NVLink moves 6 MB."""
BUCKET_BYTES = 256 * 2**20
"""Bytes of small tensors that travel together at most."""
ALIGNMENT = 64
"""Values that a tensor's share in a bucket is padded to, so that kernels find their rows aligned."""


@dataclass(frozen=True)
class Rows:
    """The rows of one tensor that each of n ranks has."""

    num_rows: int
    num_ranks: int

    @property
    def per_rank(self) -> int:
        """Rows of a rank that has all of its share."""
        return -(-self.num_rows // self.num_ranks)

    def of(self, rank: int) -> slice:
        """A rank's rows; the last ranks may have fewer, or none."""
        start = min(rank * self.per_rank, self.num_rows)
        return slice(start, min(start + self.per_rank, self.num_rows))


def rows_in_memory(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """A parameter, or a tensor shaped `like` it, as rows [n, ...] in the order in which the parameter lies
    in memory, without autograd; those that FSDP2 has left on this rank."""
    parameter = tensor if like is None else like
    own = local_part(tensor)
    if parameter.ndim == 0:
        return own.view(1)
    return own.t() if not parameter.is_contiguous() else own


class MasterShards:
    """The exchanges between ranks that hold the same weights and split their masters.

    All ranks must make the same calls with tensors of the same shapes in the same order.

    Args:
        mesh: its `replica_group` are the ranks that split the masters.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._num_ranks, self._rank, self._group = mesh.num_replicas, mesh.replica, mesh.replica_group

    def own_rows(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor [rows, ...], a view."""
        return tensor[Rows(len(tensor), self._num_ranks).of(self._rank)]

    def reduce(self, gradients: dict[str, Tensor], divisor: int) -> Iterator[tuple[str, Tensor]]:
        """Sum contiguous float32 gradients over the ranks, emptying the mapping on the way, and yield this
        rank's rows of each, divided by `divisor`."""
        small: list[str] = []
        for name in list(gradients):
            if self._travels_alone(gradients[name]):
                rows = self._scattered(gradients.pop(name))
                yield name, rows.div_(divisor)
            else:
                small.append(name)
        for names in _buckets(small, [gradients[name].nbytes for name in small]):
            tensors = [gradients.pop(name) for name in names]
            shares = self._scattered(self._packed(tensors).flatten()).div_(divisor)
            for name, share, tensor in zip(names, shares.split(self._shares(tensors)), tensors, strict=True):
                own = self.own_rows(tensor)
                yield name, share[: own.numel()].view_as(own)

    def exchange_bytes(self, gradients: Sequence[Tensor]) -> int:
        """The most that `reduce` of these gradients takes at a time, besides what it frees on its way."""
        small = [tensor for tensor in gradients if not self._travels_alone(tensor)]
        alone = [tensor.nbytes // self._num_ranks for tensor in gradients if self._travels_alone(tensor)]
        packed = [
            4 * sum(self._shares(bucket)) * (self._num_ranks + 1)
            for bucket in _buckets(small, [tensor.nbytes for tensor in small])
        ]
        return max([*alone, *packed], default=0)

    @torch.no_grad()
    def gather(self, tensors: Sequence[Tensor]) -> None:
        """Complete contiguous tensors [rows, ...] in place, after every rank has changed its own rows."""
        if self._group is None:
            return
        small: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if self._travels_alone(tensor):
                _all_gather(tensor, self.own_rows(tensor), self._group)
            else:
                small.setdefault(tensor.dtype, []).append(tensor)
        for of_type in small.values():
            for bucket in _buckets(of_type, [tensor.nbytes for tensor in of_type]):
                self._gather_bucket(bucket)

    def _gather_bucket(self, tensors: Sequence[Tensor]) -> None:
        assert self._group is not None, "one rank has nothing to gather"
        packed = self._packed(tensors)
        _all_gather(packed.flatten(), packed[self._rank], self._group)
        for rank in range(self._num_ranks):
            for tensor, share in zip(tensors, packed[rank].split(self._shares(tensors)), strict=True):
                rows = tensor[Rows(len(tensor), self._num_ranks).of(rank)]
                rows.copy_(share[: rows.numel()].view_as(rows))

    def _travels_alone(self, tensor: Tensor) -> bool:
        return tensor.nbytes >= SMALL_BYTES and len(tensor) % self._num_ranks == 0

    def _shares(self, tensors: Sequence[Tensor]) -> list[int]:
        """The number of values that a rank's share of each tensor takes in a bucket."""
        sizes = (Rows(len(t), self._num_ranks).per_rank * t[:1].numel() for t in tensors)
        return [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]

    def _packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """A bucket [ranks, sum of shares] with every rank's rows of every tensor, padded with zeros."""
        shares = self._shares(tensors)
        packed = tensors[0].new_zeros(self._num_ranks, sum(shares))
        for rank, of_rank in enumerate(packed):
            for tensor, share in zip(tensors, of_rank.split(shares), strict=True):
                rows = tensor[Rows(len(tensor), self._num_ranks).of(rank)]
                share[: rows.numel()].copy_(rows.flatten())
        return packed

    def _scattered(self, tensor: Tensor) -> Tensor:
        """This rank's 1/n of the sum of a contiguous tensor over the ranks."""
        if self._group is None:
            return tensor
        own = tensor[: len(tensor) // self._num_ranks]
        if dist.get_backend(self._group) == "gloo":  # which has no reduce-scatter everywhere
            dist.all_reduce(tensor, group=self._group)
            return tensor[self._rank * len(own) :][: len(own)].clone()
        scattered = torch.empty_like(own)
        reduce_scatter(scattered, tensor, self._group)
        return scattered


def sum_over(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Replace float32 tensors by their sums over the ranks of a group, in place."""
    for bucket in _buckets(tensors, [tensor.nbytes for tensor in tensors]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])


def _largest_differences(tensors: list[Tensor], masters: list[Tensor]) -> Iterable[Tensor]:
    """The largest difference between each tensor and its master rounded to the tensor's type."""
    rounded = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(rounded, masters)
    torch._foreach_sub_(rounded, tensors)
    return torch._foreach_norm(rounded, torch.inf)


def _all_gather(whole: Tensor, own: Tensor, group: ProcessGroup) -> None:
    # NCCL gathers in place where the rank's own rows are already in theirs; gloo copies while it sends.
    all_gather(whole, own.clone() if dist.get_backend(group) == "gloo" else own, group)


def _buckets(items: Sequence[Item], sizes_bytes: Sequence[int]) -> Iterator[list[Item]]:
    """Consecutive items, of `BUCKET_BYTES` at most together, or one item that is larger."""
    bucket: list[Item] = []
    total_bytes = 0
    for item, size_bytes in zip(items, sizes_bytes, strict=True):
        if bucket and total_bytes + size_bytes > BUCKET_BYTES:
            yield bucket
            bucket, total_bytes = [], 0
        bucket.append(item)
        total_bytes += size_bytes
    if bucket:
        yield bucket
