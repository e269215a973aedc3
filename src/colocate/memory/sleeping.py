"""Weights of reward models and of a reference: one phase reads them, in others they are on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from colocate.memory.offload import HostStore
from colocate.weights.weight_parts import local_part


class SleepingWeights:
    """Frozen weights that are awake, on their device, or asleep, in pinned host memory.

    They are awake at first. Asleep, they must not be read or changed.

    Args:
        tensors: the weights, on `device`; none: sleeping and waking do nothing.
        in_use: tensors that are read meanwhile.

    Raises:
        ValueError, MemoryError: when they first sleep; see `HostStore.offload`.
    """

    def __init__(
        self, tensors: Sequence[Tensor], device: torch.device, *, in_use: Iterable[Tensor] = ()
    ) -> None:
        self._tensors, self._in_use = list(tensors), list(in_use)
        self._store = HostStore(device, "offload_scorers=False") if self._tensors else None

    @property
    def num_bytes_away(self) -> int:
        """Bytes that are on the host now."""
        return 0 if self._store is None else self._store.num_bytes

    def sleep(self) -> None:
        """Free their memory on the device. Sleeping twice is harmless."""
        if self._store is not None:
            self._store.offload(self._tensors, in_use=self._in_use)

    def wake(self) -> None:
        """Bring them back. Waking twice is harmless."""
        if self._store is not None:
            self._store.fetch()


def give_own_memory(weights: Iterable[Tensor], in_use: Iterable[Tensor]) -> None:
    """Copy each weight in a mapped file, whose memory cannot be freed, into memory of PyTorch's own.

    Weights loaded for a CPU stay in their file if they keep its type. Those that share their memory with a
    tensor `in_use` are left for `SleepingWeights` to refuse.
    """
    busy = {tensor.untyped_storage().data_ptr() for tensor in in_use}
    for weight in weights:
        storage = local_part(weight).untyped_storage()
        if not storage.resizable() and storage.data_ptr() not in busy:
            weight.data = weight.data.clone()
