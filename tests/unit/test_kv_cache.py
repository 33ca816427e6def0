"""The block pool: whole allocations, the lowest numbers first, books that are checked."""

from __future__ import annotations

import pytest

from flexslurm.engine.kv_cache import BlockPool, blocks_for


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10)]
)
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate("a", 3)
    assert not pool.allocate("b", 2)
    assert pool.table("b") == ()
    assert (pool.free_count, pool.used_count) == (1, 3)
    assert pool.allocate("b", 1)
    pool.check_integrity()


def test_a_table_grows_at_its_end_and_keeps_its_order() -> None:
    pool = BlockPool(6)
    pool.allocate("a", 2)
    pool.allocate("b", 1)
    pool.allocate("a", 1)
    assert pool.table("a") == (0, 1, 3)
    assert pool.held("a") == 3


def test_the_lowest_free_block_is_given_first() -> None:
    pool = BlockPool(6)
    for owner in "abc":
        pool.allocate(owner, 2)
    assert pool.free("b") == 2
    assert pool.free("a") == 2
    pool.allocate("d", 3)
    assert pool.table("d") == (0, 1, 2)


def test_freeing_nothing_is_no_error() -> None:
    pool = BlockPool(2)
    assert pool.free("nobody") == 0
    assert pool.allocate("a", 0)
    assert "a" not in pool.tables
    pool.check_integrity()


def _lost(pool: BlockPool) -> None:
    pool._free.pop()


def _doubled(pool: BlockPool) -> None:
    pool._free.append(pool.table("a")[0])


def _shared(pool: BlockPool) -> None:
    pool._tables["b"] = pool.table("a")


def _repeated(pool: BlockPool) -> None:
    pool._tables["a"] = pool.table("a") * 2


def _unknown(pool: BlockPool) -> None:
    pool._free.append(99)


@pytest.mark.parametrize(
    ("damage", "story"),
    [
        (_lost, "nobody has block"),
        (_doubled, "block 0 is with the free list and with a"),
        (_shared, "block 0 is with a and with b"),
        (_repeated, "a has a block twice"),
        (_unknown, "block 99, which is not ours"),
    ],
)
def test_damage_is_named(damage: object, story: str) -> None:
    pool = BlockPool(4)
    pool.allocate("a", 2)
    pool.check_integrity()
    damage(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=story):
        pool.check_integrity()
