"""The page pool against a model of it: a dictionary of pages and their holders."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from colocate.engines.native.pages import PagePool, pages_for


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 12))
    def create(self, num_pages):
        self.pool = PagePool(num_pages)
        self.holders: dict[int, int] = {}
        self.names: dict[bytes, int] = {}
        self.findable: list[int] = []
        """Free pages with names; the first is the first to be handed out."""

    @rule(data=st.data())
    def allocate(self, data):
        free = self.pool.num_pages - len(self.holders)
        count = data.draw(st.integers(0, free))
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not set(pages) & set(self.holders), "a page was handed out twice"
        assert all(0 <= page < self.pool.num_pages for page in pages)
        evicted = self.findable[: max(0, count - (free - len(self.findable)))]
        assert set(pages) & set(self.findable) == set(evicted), "what can be found went before its time"
        self.forget(evicted)
        self.holders |= dict.fromkeys(pages, 1)

    def forget(self, pages):
        self.findable = [page for page in self.findable if page not in pages]
        self.names = {name: page for name, page in self.names.items() if page not in pages}

    @rule(extra=st.integers(1, 3))
    def allocate_too_many(self, extra):
        with pytest.raises(AssertionError, match="wanted"):
            self.pool.allocate(self.pool.num_pages - len(self.holders) + extra)

    @precondition(lambda self: self.holders or self.findable)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sets(st.sampled_from(sorted([*self.holders, *self.findable]))))
        assert self.pool.count_free(pages) == len(pages & set(self.findable))
        self.pool.share(pages)
        for page in pages:
            self.holders[page] = self.holders.get(page, 0) + 1
        self.findable = [page for page in self.findable if page not in pages]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.holders)), unique=True))
        self.pool.release(pages)
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                del self.holders[page]
        freed = [page for page in pages if page not in self.holders]
        self.findable += [page for page in reversed(freed) if page in self.names.values()]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def name(self, data, name):
        page = data.draw(st.sampled_from(sorted(self.holders)))
        if page not in self.names.values():  # what is in a page does not change while it has a name
            self.pool.name(page, name)
            self.names.setdefault(name, page)

    @rule(names=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"])))
    def find(self, names):
        found = [self.names.get(name) for name in names]
        until = found.index(None) if None in found else len(found)
        assert self.pool.find(names) == found[:until]

    @precondition(lambda self: not self.holders)
    @rule(num_pages=st.integers(1, 12))
    def resize(self, num_pages):
        self.pool.resize(num_pages)
        self.forget([page for page in self.findable if page >= num_pages])
        nameless = [page for page in range(num_pages) if page not in self.findable]
        assert self.pool.allocate(len(nameless)) == nameless, "the lowest pages come first"
        self.pool.release(nameless)

    @precondition(lambda self: len(self.holders) + len(self.findable) < self.pool.num_pages)
    @rule(data=st.data())
    def misuse_a_free_page(self, data):
        nameless = set(range(self.pool.num_pages)) - set(self.holders) - set(self.findable)
        page = data.draw(st.sampled_from(sorted(nameless)))
        with pytest.raises(AssertionError, match="released more often"):
            self.pool.release([page])
        with pytest.raises(AssertionError, match="cannot be shared"):
            self.pool.share([page])
        with pytest.raises(AssertionError, match="cannot be named"):
            self.pool.name(page, b"e")

    @precondition(lambda self: self.holders)
    @rule()
    def resize_while_pages_are_held(self):
        with pytest.raises(AssertionError, match=f"{len(self.holders)} pages are held"):
            self.pool.resize(20)

    @invariant()
    def counts_add_up(self):
        if hasattr(self, "pool"):
            assert self.pool.num_free == self.pool.num_pages - len(self.holders)
            assert self.pool.has_names == bool(self.names)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPool = PoolMachine.TestCase


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for(num_tokens, expected):
    assert pages_for(num_tokens, 4) == expected
