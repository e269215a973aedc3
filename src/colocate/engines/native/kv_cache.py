"""Storage of keys and values, in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """One tensor [layers, 2, num_pages, K, page_size, D]; the second dimension is keys, values."""

    def __init__(self, *, num_layers: int, num_kv_heads: int, head_dim: int, page_size: int) -> None:
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self._data: Tensor | None = None

    @property
    def num_pages(self) -> int:
        """Pages there are storage for; 0 while freed."""
        return 0 if self._data is None else self._data.shape[2]

    @property
    def num_bytes(self) -> int:
        return 0 if self._data is None else self._data.nbytes

    @property
    def data_ptr(self) -> int:
        """Address of the storage; 0 while freed."""
        return 0 if self._data is None else self._data.data_ptr()

    def is_on(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there is storage, of this type and on this device."""
        return self._data is not None and self._data.dtype == dtype and self._data.device == device

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Size of one page over all layers."""
        return self.num_layers * 2 * self.page_size * self.num_kv_heads * self.head_dim * dtype.itemsize

    def allocate(self, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take memory for `num_pages` pages; what was stored before is lost."""
        self.free()
        shape = (self.num_layers, 2, num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        # Zeros, not empty: attention multiplies masked positions by 0, and 0 * NaN would be NaN.
        self._data = torch.zeros(shape, dtype=dtype, device=device)

    def free(self) -> None:
        """Give the memory back."""
        self._data = None

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [num_pages, K, page_size, D]."""
        assert self._data is not None, "the KV cache has no storage"
        return self._data[index, 0], self._data[index, 1]

    def copy_pages(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole pages, in all layers at once."""
        assert self._data is not None, "the KV cache has no storage"
        device = self._data.device
        destination = torch.tensor(destinations, dtype=torch.long, device=device)
        source = torch.tensor(sources, dtype=torch.long, device=device)
        self._data.index_copy_(2, destination, self._data.index_select(2, source))
