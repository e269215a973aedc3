"""The pool of KV pages: how many holders each page has, which are free, and what can be found in them."""

from __future__ import annotations

from collections.abc import Iterable


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens occupy."""
    return -(-num_tokens // page_size)


class PagePool:
    """Hands out pages 0 .. num_pages - 1. A page is free when its last holder lets go.

    A page may have a name, which says what is in it. Free pages with names can still be found, until their
    memory is wanted: pages without names are handed out first, then those that have been free for longest.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = 0
        self._num_holders: list[int] = []
        self._nameless: list[int] = []
        """Free pages without names."""
        self._findable: dict[int, None] = {}
        """Free pages with names, in the order in which they became free."""
        self._names: dict[int, bytes] = {}
        self._by_name: dict[bytes, int] = {}
        self.resize(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._nameless) + len(self._findable)

    @property
    def has_names(self) -> bool:
        return bool(self._names)

    def resize(self, num_pages: int) -> None:
        """Change the number of pages while nobody holds any. Old pages keep their names."""
        assert self.num_free == self.num_pages, f"{self.num_pages - self.num_free} pages are held"
        for page in [page for page in self._findable if page >= num_pages]:
            del self._findable[page]
            self._forget(page)
        self.num_pages = num_pages
        self._num_holders = [0] * num_pages
        # A stack with the lowest number on top, so that pages in use lie close together and every run takes
        # the same pages.
        self._nameless = [page for page in range(num_pages - 1, -1, -1) if page not in self._names]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one holder and no name. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = [self._nameless.pop() if self._nameless else self._evict() for _ in range(count)]
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each page, which others hold or `find` has found."""
        for page in pages:
            is_held = self._num_holders[page] > 0
            assert is_held or page in self._findable, f"page {page} is free and cannot be shared"
            self._findable.pop(page, None)
            self._num_holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder from each page of a sequence, which are in the order of its tokens."""
        findable: list[int] = []
        for page in pages:
            assert self._num_holders[page] > 0, f"page {page} is released more often than it was taken"
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                (findable if page in self._names else self._nameless).append(page)
        # A page is of use only with those before it: the last of a sequence goes first.
        self._findable.update(dict.fromkeys(reversed(findable)))

    # ── What can be found ────────────────────────────────────────────────────────────────────────────────

    def name(self, page: int, name: bytes) -> None:
        """Name a page that is held. If another page has this name already, it keeps it."""
        assert self._num_holders[page] > 0, f"page {page} is free and cannot be named"
        if self._by_name.setdefault(name, page) == page:
            self._names[page] = name

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The pages of `names`, up to the first name that no page has."""
        found = []
        for name in names:
            if (page := self._by_name.get(name)) is None:
                break
            found.append(page)
        return found

    def count_free(self, pages: Iterable[int]) -> int:
        """How many of `pages` are free: sharing them lowers `num_free` by as many."""
        return sum(self._num_holders[page] == 0 for page in pages)

    def _evict(self) -> int:
        page = next(iter(self._findable))
        del self._findable[page]
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        del self._by_name[self._names.pop(page)]
