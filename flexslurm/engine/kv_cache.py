"""Which blocks of KV cache belong to which sequence; never touches the cache itself.

The pool hands out block *numbers*. What a number means on a GPU (pages per layer and head) is the
worker's. Every stage of a replica uses the same numbers, so one pool serves the whole replica.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from types import MappingProxyType


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` positions."""
    return -(-tokens // block_tokens)


class BlockPool:
    """The free blocks and the block tables of one replica.

    Invariant: every block from 0 to `num_blocks - 1` is either free or in exactly one table, once.
    The lowest free number is given out first, so that the used part of the pool stays low: a pool
    that shrinks then has few blocks to relocate.
    """

    __slots__ = ("_free", "_tables", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))  # sorted, hence a heap
        self._tables: dict[str, tuple[int, ...]] = {}

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def tables(self) -> Mapping[str, tuple[int, ...]]:
        """All block tables by owner, read only."""
        return MappingProxyType(self._tables)

    def table(self, owner: str) -> tuple[int, ...]:
        """The owner's blocks in the order of their positions; empty if it has none."""
        return self._tables.get(owner, ())

    def held(self, owner: str) -> int:
        """How many blocks the owner has."""
        return len(self._tables.get(owner, ()))

    def allocate(self, owner: str, count: int) -> bool:
        """Give the owner `count` more blocks, at the end of its table; all of them or none.

        Returns whether there were enough.
        """
        assert count >= 0, f"{owner} asks for {count} blocks"
        if count > len(self._free):
            return False
        if count:
            new = tuple(heapq.heappop(self._free) for _ in range(count))
            self._tables[owner] = self._tables.get(owner, ()) + new
        return True

    def free(self, owner: str) -> int:
        """Take all the owner's blocks back and return how many they were; 0 if it has none."""
        table = self._tables.pop(owner, ())
        for block in table:
            heapq.heappush(self._free, block)
        return len(table)

    def check_integrity(self) -> None:
        """Raise AssertionError naming the first block that is lost, doubled or unknown."""
        owner_of: dict[int, str] = {}
        for owner, table in (("the free list", tuple(self._free)), *self._tables.items()):
            for block in table:
                assert 0 <= block < self.num_blocks, f"{owner} has block {block}, which is not ours"
                before = owner_of.setdefault(block, owner)
                assert before is owner, f"block {block} is with {before} and with {owner}"
            assert len(set(table)) == len(table), f"{owner} has a block twice: {table}"
        lost = set(range(self.num_blocks)) - owner_of.keys()
        assert not lost, f"nobody has block {min(lost)} (and {len(lost) - 1} more)"
        assert all(self._tables.values()), "an owner without blocks is still in the tables"
