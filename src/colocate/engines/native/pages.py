"""The pool of KV pages: how many holders each page has, and which pages are free."""

from __future__ import annotations

from collections.abc import Iterable


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens occupy."""
    return -(-num_tokens // page_size)


class PagePool:
    """Hands out pages 0 .. num_pages - 1. A page is free when its last holder lets go."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_holders = [0] * num_pages
        # A stack with the lowest number on top, so that pages in use lie close together and every run takes
        # the same pages.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one holder. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each page."""
        for page in pages:
            assert self._num_holders[page] > 0, f"page {page} is free and cannot be shared"
            self._num_holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder from each page."""
        for page in pages:
            assert self._num_holders[page] > 0, f"page {page} is released more often than it was taken"
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                self._free.append(page)
