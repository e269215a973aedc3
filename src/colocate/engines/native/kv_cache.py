"""Storage of keys and values, in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colocate.engines.native.pages import PagePool
from colocate.kernels.fp8.int8 import head_block_size
from colocate.memory.arena import Arena

SCRATCH_ALIGNMENT_BYTES = 512
PAGES_PER_COPY = 64
"""Pages that one operation copies; it bounds the temporary memory that a copy takes."""


class KVCache:
    """Keys and values of all layers, in pages of `page_size` tokens.

    On a CPU it is one tensor [layers, 2, num_pages, K, block], K key-value heads; the second dimension is
    keys, values. A block is [page_size, D], D the head size; in 8 bits it ends with the scales of its tokens,
    one byte each (`kernels.fp8.int8`).

    On a GPU it lies in the device's arena, page after page: [num_pages, layers, 2, K, block] behind
    `scratch_bytes`. A smaller cache maps a shorter part of the same addresses. So a CUDA graph that has
    captured them stays valid when the cache shrinks, grows, or is freed and taken again.

    Pages that have names in `pool` keep what is in them until they are handed out anew, the memory is given
    back or `forget` is called.

    Args:
        scratch_bytes: memory for the engine's own buffers, taken and freed with the cache.
    """

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, scratch_bytes: int = 0
    ) -> None:
        if scratch_bytes < 0 or scratch_bytes % SCRATCH_ALIGNMENT_BYTES:
            raise ValueError(
                f"scratch_bytes={scratch_bytes} must be a multiple of {SCRATCH_ALIGNMENT_BYTES}, which keeps "
                "the pages behind it aligned."
            )
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self.scratch_bytes = scratch_bytes
        self._arena: Arena | None = None
        self._num_pages = 0
        self.pool = PagePool(0)
        # [layers, 2, pages, K, block]; on a GPU a view of all pages that the whole device could hold.
        self._data: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._scratch: Tensor | None = None

    @property
    def num_pages(self) -> int:
        """Number of pages that have memory; 0 while freed."""
        return self._num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes taken, scratch included; on a GPU the arena takes whole handles."""
        if self._arena is not None:
            return self._arena.mapped_bytes
        return sum(tensor.nbytes for tensor in (self._data, self._scratch) if tensor is not None)

    @property
    def scratch(self) -> Tensor:
        """[scratch_bytes] uint8, undefined after every `allocate`. On a GPU its address never changes."""
        assert self._scratch is not None and self._num_pages, "the KV cache has no storage"
        return self._scratch

    def is_on(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the cache has memory now, for this type and on this device."""
        if self._data is None or not self._num_pages:
            return False
        return self._dtype == dtype and self._data.device == device

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page: keys and values of `page_size` tokens in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self._block_size(dtype) * dtype.itemsize

    def bytes_of(self, num_pages: int) -> int:
        """Bytes of pages in the type that the cache has."""
        assert self._dtype is not None, "the KV cache has no storage"
        return num_pages * self.page_bytes(self._dtype)

    def allocate(
        self, num_pages: int, dtype: torch.dtype, device: torch.device, *, has_room_to_copy: bool = False
    ) -> None:
        """Take memory for `num_pages` pages, of which nobody holds any.

        On a GPU only the pages that are missing are mapped, and those beyond `num_pages` are unmapped. Old
        pages with names keep them if what is in them has stayed: on a GPU always, on a CPU if it is copied.

        Args:
            has_room_to_copy: on a CPU, whether there is memory for the old pages beside the new ones.

        Raises:
            ArenaExhausted: the device has too little free memory; the cache is as it was.
        """
        pool, old = self.pool, self._data
        stays = self.is_on(dtype, device) and pool.has_names
        arena = self._arena_on(device)
        if arena is not None:
            self._map(arena, num_pages, dtype)
        else:
            num_kept = min(self._num_pages, num_pages)
            stays = stays and has_room_to_copy
            self.close()
            shape = (self.num_layers, 2, num_pages, self.num_kv_heads, self._block_size(dtype))
            # Zeros, because attention on a CPU multiplies masked positions by 0, and 0 * NaN would be NaN.
            self._data = torch.zeros(shape, dtype=dtype, device=device)
            self._dtype = dtype
            if stays and old is not None:
                self._data[:, :, :num_kept].copy_(old[:, :, :num_kept])
            self._scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
        self._num_pages = num_pages
        self.pool = pool if stays else PagePool(0)
        self.pool.resize(num_pages)

    def forget(self) -> None:
        """Have all pages free and without names, whatever held them."""
        self.pool = PagePool(self._num_pages)

    def free(self, keep_bytes: int = 0) -> None:
        """Give the memory back, on a GPU all but `keep_bytes` (rounded down to whole handles)."""
        if self._arena is None or self._dtype is None:
            self.close()
            return
        handle_bytes = self._arena.handle_bytes
        self._arena.resize(min(keep_bytes // handle_bytes * handle_bytes, self._arena.mapped_bytes))
        kept_bytes = max(0, self._arena.mapped_bytes - self.scratch_bytes)
        self._num_pages = min(self._num_pages, kept_bytes // self.page_bytes(self._dtype))
        self.forget()

    def close(self) -> None:
        """Give the memory back, and on a GPU the reserved addresses, too."""
        if self._arena is not None:
            self._arena.close()
        self._arena = self._data = self._dtype = self._scratch = None
        self._num_pages = 0
        self.forget()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [pages, K, page_size, D].

        A page is contiguous, but for the scales behind each head's numbers in 8 bits; the next page begins
        `stride(0)` elements after it. On a GPU the first dimension may exceed `num_pages`: pages from
        `num_pages` on have no memory and must not be read or written.
        """
        assert self._data is not None, "the KV cache has no storage"
        values = self._data[index, ..., : self.page_size * self.head_dim]
        keys, values = values.unflatten(-1, (self.page_size, self.head_dim))
        return keys, values

    def copy_pages(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole pages, in all layers at once. No page is both a source and a destination."""
        assert self._data is not None and self._num_pages, "the KV cache has no storage"
        device = self._data.device
        destination = torch.tensor(destinations, dtype=torch.long, device=device).split(PAGES_PER_COPY)
        source = torch.tensor(sources, dtype=torch.long, device=device).split(PAGES_PER_COPY)
        # In the arena a page of all layers is contiguous, and copying whole rows is fastest.
        data, dim = (self._data, 2) if self._arena is None else (self._data.movedim(2, 0), 0)
        for to, from_ in zip(destination, source, strict=True):
            data.index_copy_(dim, to, data.index_select(dim, from_))

    def read_pages(self, pages: Sequence[int]) -> Tensor:
        """Copies of pages in host memory, [pages, layers, 2, K, block]; pinned, if a GPU's."""
        assert self._data is not None, "the KV cache has no storage"
        by_page, is_gpu = self._data.movedim(2, 0), self._data.is_cuda
        shape = (len(pages), *by_page.shape[1:])
        copies = torch.empty(shape, dtype=by_page.dtype, pin_memory=is_gpu)
        numbers = torch.tensor(pages, dtype=torch.long, device=by_page.device).split(PAGES_PER_COPY)
        for to, from_ in zip(copies.split(PAGES_PER_COPY), numbers, strict=True):
            to.copy_(by_page.index_select(0, from_), non_blocking=True)
        if is_gpu:
            torch.cuda.current_stream(self._data.device).synchronize()  # the pages may be unmapped now
        return copies

    def write_pages(self, pages: Sequence[int], copies: Tensor) -> None:
        """Put what `read_pages` has copied into pages of the cache."""
        assert self._data is not None and self._num_pages, "the KV cache has no storage"
        by_page = self._data.movedim(2, 0)
        numbers = torch.tensor(pages, dtype=torch.long, device=by_page.device).split(PAGES_PER_COPY)
        for to, from_ in zip(numbers, copies.split(PAGES_PER_COPY), strict=True):
            by_page.index_copy_(0, to, from_.to(by_page.device, non_blocking=True))

    def _arena_on(self, device: torch.device) -> Arena | None:
        """The arena of this device; None on a CPU, where the cache is an ordinary tensor."""
        if device.type != "cuda":
            return None
        if self._arena is None or self._arena.device != device:
            self.close()
            self._arena = Arena(device, torch.cuda.get_device_properties(device).total_memory)
        return self._arena

    def _map(self, arena: Arena, num_pages: int, dtype: torch.dtype) -> None:
        arena.resize(self.scratch_bytes + num_pages * self.page_bytes(dtype))
        if arena.mapped_bytes and self._dtype != dtype:
            max_pages = (arena.capacity_bytes - self.scratch_bytes) // self.page_bytes(dtype)
            shape = (max_pages, self.num_layers, 2, self.num_kv_heads, self._block_size(dtype))
            pages = arena.tensor(shape, dtype, offset_bytes=self.scratch_bytes)
            self._data, self._dtype = pages.permute(1, 2, 0, 3, 4), dtype
            self._scratch = arena.tensor((self.scratch_bytes,), torch.uint8)

    def _block_size(self, dtype: torch.dtype) -> int:
        return head_block_size(self.page_size, self.head_dim, dtype)
