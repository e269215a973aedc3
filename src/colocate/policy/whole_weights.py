"""Checksums and checks of all of a model's weights, of which each rank may hold a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colocate.checkpoints.snapshot import as_text, bit_sum
from colocate.parallel.mesh import Mesh
from colocate.policy.reference import FrozenAdapter, FrozenCopy, Reference
from colocate.weights.layouts import WHOLE
from colocate.weights.weight_parts import local_part, splits_of


def starting_checksums(
    model: nn.Module, reference: Reference | None, mesh: Mesh, *, has_new_adapter: bool
) -> dict[str, str | None]:
    """`snapshot.checksum` of the weights that a policy's state leaves out, with which a resumed run must
    start as this run did: whole weights, of which this rank may hold parts.

    All ranks that share the weights must call it together.

    Returns:
        "base": frozen weights under an adapter; "reference": the reference's own weights, None without a
        reference; "origin": the weights that a reference made now is, or would be, a copy of
        (`make_reference`).
    """
    models = [model]
    if isinstance(reference, FrozenCopy):
        with reference.model() as copied:
            models.append(copied)
    parts = {
        id(p)
        for each in models
        for (_, p), split in zip(each.named_parameters(), splits_of(each).values(), strict=True)
        if split.dim is not None and split.part != WHOLE
    }
    return {
        role: None if weights is None else _checksum(weights, parts, mesh)
        for role, weights in _starting_weights(model, reference, has_new_adapter).items()
    }


def _starting_weights(
    model: nn.Module, reference: Reference | None, has_new_adapter: bool
) -> dict[str, list[Tensor] | None]:
    own = list(model.parameters())
    origin: list[Tensor] = list(own)
    if hasattr(model, "peft_config"):
        origin = [] if has_new_adapter else [p for p in own if p.requires_grad]
    begun = None if reference is None else reference.weights()
    if has_new_adapter and isinstance(reference, FrozenAdapter):
        begun = []  # a policy's state has it
    return {"base": [p for p in own if not p.requires_grad], "reference": begun, "origin": origin}


def _checksum(weights: Sequence[Tensor], parts: set[int], mesh: Mesh) -> str:
    """The checksum of whole weights; `parts` are ids of those of which this rank has a part only."""
    numbered = list(enumerate(weights, start=1))
    total = bit_sum((number, local_part(weight)) for number, weight in numbered if id(weight) in parts)
    totals: list[int] = [total]
    if (group := mesh.weight_group) is not None:
        totals = [0] * mesh.num_weight_parts
        dist.all_gather_object(totals, total, group=group)
    return as_text(sum(totals) + bit_sum((n, weight) for n, weight in numbered if id(weight) not in parts))


@torch.no_grad()
def find_nonfinite_weight(model: nn.Module, mesh: Mesh) -> str | None:
    """The name of a parameter with a NaN or an infinity, or None.

    Ranks with the same weights find the same without asking; those with parts of them ask one another, so
    that all must call it together. It reads every parameter once and waits for the device.
    """
    local = ((n, local_part(p)) for n, p in model.named_parameters())
    named = [(n, p) for n, p in local if p.is_floating_point() and p.numel()]
    # The largest magnitude is NaN or infinite if any is, and needs no second tensor of the weight's size.
    largest = torch.stack([torch.linalg.vector_norm(p, torch.inf).float() for _, p in named])
    bad = (~largest.isfinite()).nonzero().flatten().tolist()
    found = [named[bad[0]][0] if bad else None]
    if (group := mesh.weight_group) is not None:
        mine, found = found[0], found * mesh.num_weight_parts
        dist.all_gather_object(found, mine, group=group)
    return next((name for name in found if name is not None), None)
