"""The block pool against a model of sets."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flexslurm.engine.kv_cache import BlockPool

OWNERS = st.sampled_from("abcdef")


class PoolAgainstSets(RuleBasedStateMachine):
    @initialize(size=st.integers(0, 24))
    def begin(self, size: int) -> None:
        self.size = size
        self.pool = BlockPool(size)
        self.free = set(range(size))
        self.owned: dict[str, list[int]] = {}

    @rule(owner=OWNERS, count=st.integers(0, 8))
    def allocate(self, owner: str, count: int) -> None:
        before = self.pool.table(owner)
        given = self.pool.allocate(owner, count)
        assert given == (count <= len(self.free))
        new = self.pool.table(owner)[len(before) :]
        assert self.pool.table(owner)[: len(before)] == before
        assert list(new) == (sorted(self.free)[:count] if given else [])
        self.free -= set(new)
        if new:
            self.owned[owner] = self.owned.get(owner, []) + list(new)

    @rule(owner=OWNERS)
    def give_back(self, owner: str) -> None:
        mine = self.owned.pop(owner, [])
        assert self.pool.free(owner) == len(mine)
        self.free |= set(mine)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free_count == len(self.free)
        assert self.pool.used_count == self.size - len(self.free)
        assert dict(self.pool.tables) == {o: tuple(b) for o, b in self.owned.items()}


TestPoolAgainstSets = PoolAgainstSets.TestCase
