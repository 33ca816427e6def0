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

    The workers hear of freed blocks with a later step. Until they have done that step a free block
    is *warm*: it may be written by that step or a later one, but not filled from outside.
    """

    __slots__ = ("_free", "_freed", "_tables", "_told", "limit", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self.limit = num_blocks
        """How many may be in use: less than all while memory is lent to a shift."""
        self._free = list(range(num_blocks))  # sorted, hence a heap
        self._tables: dict[str, tuple[int, ...]] = {}
        self._freed: set[int] = set()
        self._told: dict[int, int] = {}

    @property
    def free_count(self) -> int:
        """Blocks that may be given out."""
        return max(min(len(self._free), self.limit - self.used_count), 0)

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
        if count > self.free_count:
            return False
        if count:
            new = tuple(heapq.heappop(self._free) for _ in range(count))
            self._tables[owner] = self._tables.get(owner, ()) + new
        return True

    def allocate_cold(self, owner: str, count: int) -> bool:
        """As `allocate`, of blocks that are not warm: for data that comes from outside."""
        cold = [b for b in sorted(self._free) if b not in self._freed and b not in self._told]
        if count > min(self.free_count, len(cold)):
            return False
        if count:
            new = tuple(cold[:count])
            self._free = sorted(set(self._free) - set(new))
            self._tables[owner] = self._tables.get(owner, ()) + new
        return True

    def hand_over(self, owner: str, to: str) -> None:
        """Give all the owner's blocks to another, which has none."""
        assert to not in self._tables, f"{to} has blocks already"
        self._tables[to] = self._tables.pop(owner)

    def free(self, owner: str) -> int:
        """Take all the owner's blocks back and return how many they were; 0 if it has none."""
        table = self._tables.pop(owner, ())
        for block in table:
            heapq.heappush(self._free, block)
        self._freed.update(table)
        return len(table)

    # ------------------------------------------------------------------- what workers know

    def tell_freed(self, step: int) -> tuple[int, ...]:
        """The blocks freed since the last call, which the workers hear of by this step."""
        told = tuple(sorted(self._freed))
        self._freed.clear()
        self._told.update(dict.fromkeys(told, step))
        return told

    def cool(self, step: int) -> None:
        """The workers have done this step and those before it."""
        if self._told:
            self._told = {block: by for block, by in self._told.items() if by > step}

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
