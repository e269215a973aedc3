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

    @rule(data=st.data())
    def allocate(self, data):
        free = self.pool.num_pages - len(self.holders)
        count = data.draw(st.integers(0, free))
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not set(pages) & set(self.holders), "a page was handed out twice"
        assert all(0 <= page < self.pool.num_pages for page in pages)
        self.holders |= dict.fromkeys(pages, 1)

    @rule(extra=st.integers(1, 3))
    def allocate_too_many(self, extra):
        with pytest.raises(AssertionError, match="wanted"):
            self.pool.allocate(self.pool.num_pages - len(self.holders) + extra)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sets(st.sampled_from(sorted(self.holders))))
        self.pool.share(pages)
        for page in pages:
            self.holders[page] += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        pages = data.draw(st.sets(st.sampled_from(sorted(self.holders))))
        self.pool.release(pages)
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                del self.holders[page]

    @precondition(lambda self: len(self.holders) < self.pool.num_pages)
    @rule(data=st.data())
    def misuse_a_free_page(self, data):
        page = data.draw(st.sampled_from(sorted(set(range(self.pool.num_pages)) - set(self.holders))))
        with pytest.raises(AssertionError, match="released more often"):
            self.pool.release([page])
        with pytest.raises(AssertionError, match="cannot be shared"):
            self.pool.share([page])

    @invariant()
    def counts_add_up(self):
        if hasattr(self, "pool"):
            assert self.pool.num_free == self.pool.num_pages - len(self.holders)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPool = PoolMachine.TestCase


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for(num_tokens, expected):
    assert pages_for(num_tokens, 4) == expected
