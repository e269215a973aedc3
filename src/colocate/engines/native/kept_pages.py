"""Pages of the KV cache that wait in host memory while training has the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from colocate.engines.native.kv_cache import KVCache
from colocate.memory import host
from colocate.memory.offload import SLAB_BYTES

logger = logging.getLogger(__name__)


class KeptPages:
    """Copies of pages, in slabs: PyTorch's allocator of pinned memory rounds every block up to a power of
    two, and keeps it for the next copies when these are given up.

    Args:
        salt: names all but tokens that keys and values depend on. See `PrefixCache`.
    """

    def __init__(self, cache: KVCache, numbers: Sequence[int], salt: bytes) -> None:
        self.salt = salt
        num_together = max(1, SLAB_BYTES // cache.bytes_of(1))
        parts = [numbers[first : first + num_together] for first in range(0, len(numbers), num_together)]
        self._slabs: list[tuple[Sequence[int], Tensor]] = [(part, cache.read_pages(part)) for part in parts]

    def restore(self, cache: KVCache, numbers: Mapping[int, int]) -> None:
        """Put copies into pages of a cache.

        Args:
            numbers: the new number of each wanted page, by its old one.
        """
        for old, copies in self._slabs:
            places = [place for place, page in enumerate(old) if page in numbers]
            wanted = copies if len(places) == len(old) else copies[places]
            cache.write_pages([numbers[old[place]] for place in places], wanted)


class HostRoom:
    """The host memory that copies of pages may take.

    The allocator of pinned memory keeps the memory of the largest copies, so only bytes beyond that are taken
    from the host.
    """

    def __init__(self) -> None:
        self._held_bytes = 0
        self._has_told = False

    def has(self, size_bytes: int) -> bool:
        """Whether there is room, and a warning where there is none for the first time."""
        # The processes of this machine do it at the same moment.
        num_processes = host.num_processes()
        missing, available = num_processes * (size_bytes - self._held_bytes), host.available_bytes()
        if missing <= available:
            self._held_bytes = max(self._held_bytes, size_bytes)
            return True
        if not self._has_told:
            gib = 2**30
            logger.warning(
                f"The pages of unfinished completions take {size_bytes / gib:.2f} GiB, and keeping them over "
                f"an update needs {num_processes} process(es) × that beyond what is held = "
                f"{missing / gib:.2f} GiB of host memory, of which {available / gib:.2f} GiB are available. "
                "Such completions go on all the same, but their tokens are read anew. Give the machine or "
                "container more memory, or set a smaller max_policy_lag."
            )
            self._has_told = True
        return False
