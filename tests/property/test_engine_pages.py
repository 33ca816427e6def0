"""Epochs that share a pool of pages, against a model: contents, counts, and everything freed."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine.arena import Arena
from flexslurm.engine.kv_store import NOWHERE, KvShape, KvStore
from flexslurm.engine.page_runs import PageSink, PageSource
from flexslurm.errors import CapacityError, ProtocolError
from flexslurm.planner.model_spec import aligned

LAYERS, HEADS, BLOCKS, TOKENS, SIZE = 2, 3, 3, 2, 8
PAGE = 2 * TOKENS * SIZE * 8
Place = tuple[int, int, int]


class Epochs:
    """Up to three tables over one arena, with weights that come and go at the other end."""

    def __init__(self) -> None:
        self.arena = Arena(45 * PAGE)
        self.stores: dict[int, KvStore] = {}
        self.model: dict[int, dict[Place, float | None]] = {}
        """What each page has; None: a page is there, with any contents."""
        self.weights: list[tuple[object, int]] = []
        self.next_epoch = 1
        self.stamp = 0.0
        self.install()
        self.install()

    def values(self, epoch: int, block: int) -> torch.Tensor:
        return self.stores[epoch].pool[torch.from_numpy(self.stores[epoch].cells[block])]

    def write(self, epoch: int, block: int) -> None:
        """What a step does to a block that was prepared."""
        self.stamp += 1.0
        store = self.stores[epoch]
        assert not store._pages.is_shared(store.cells[block].ravel()).any()
        for layer in range(LAYERS):
            for head in range(HEADS):
                store.pool[store.cells[block, layer, head]] = self.stamp + layer + head / 10
                self.model[epoch][layer, head, block] = self.stamp + layer + head / 10

    def pick(self, number: int) -> int:
        return sorted(self.stores)[number % len(self.stores)]

    def install(self) -> None:
        shape = KvShape(LAYERS, HEADS, BLOCKS, TOKENS, SIZE)
        self.stores[self.next_epoch] = KvStore(shape, torch.float64, self.arena)
        self.model[self.next_epoch] = {}
        self.next_epoch += 1

    def open_block(self, which: int, block: int) -> None:
        epoch = self.pick(which)
        free = self.arena.free_bytes
        try:
            self.stores[epoch].prepare([block], [], [])
        except CapacityError:
            assert free < LAYERS * HEADS * PAGE
            self.note_taken(epoch)
            return
        self.write(epoch, block)

    def note_taken(self, epoch: int) -> None:
        """What was taken before there was no room for the rest stays."""
        there = np.argwhere(self.stores[epoch].cells != NOWHERE)
        for block, layer, head in there.tolist():
            self.model[epoch].setdefault((layer, head, block), None)

    def continue_block(self, which: int, block: int) -> None:
        epoch = self.pick(which)
        whole = sum(b == block for _, _, b in self.model[epoch]) == LAYERS * HEADS
        try:
            self.stores[epoch].prepare([], [block], [block])
        except ProtocolError:
            assert not whole
            return
        except CapacityError:
            return
        assert whole
        self.check(epoch)  # a copy of what was shared has the same contents
        self.write(epoch, block)

    def free(self, which: int, blocks: set[int]) -> None:
        epoch = self.pick(which)
        self.stores[epoch].free(sorted(blocks))
        self.model[epoch] = {p: v for p, v in self.model[epoch].items() if p[2] not in blocks}

    def share(
        self, which: int, theirs: int, ours: int, layers: tuple[int, int], heads: tuple[int, int]
    ) -> None:
        source, target = self.pick(which), self.pick(which + 1)
        part = slice(*layers), slice(*heads)
        used = self.arena.used_bytes
        places = [(x, h) for x in range(*layers) for h in range(*heads)]
        had = all((x, h, theirs) in self.model[source] for x, h in places)
        failed = self.stores[target].share(self.stores[source], [(theirs, ours)], part, part)
        assert failed == ([] if had else [ours])
        assert self.arena.used_bytes <= used
        for x, h in places if had else ():
            self.model[target][x, h, ours] = self.model[source][x, h, theirs]

    def pull(self, which: int, theirs: int, ours: int, freed: bool) -> None:
        """As from another worker: claim, then bytes; perhaps the block is freed in between."""
        source, target = self.pick(which), self.pick(which + 1)
        part = slice(0, LAYERS), slice(0, HEADS)
        give = PageSource(self.arena, self.stores[source], [theirs], *part)
        if give.missing():
            return
        try:
            self.stores[target].claim([ours], *part)
        except CapacityError:
            self.note_taken(target)
            return
        take = PageSink(self.arena, self.stores[target], [ours], *part)
        if freed:
            self.stores[target].free([ours])
        for lo in range(0, give.total, 700):
            hi = min(lo + 700, give.total)
            with give.lend(lo, hi) as views, take.into(lo, hi) as landing:
                assert views is not None
                data = b"".join(views)
                for view in landing.views:
                    view[:] = data[: view.nbytes]
                    data = data[view.nbytes :]
                landing.keep()
        for x in range(LAYERS):
            for h in range(HEADS):
                if freed:
                    self.model[target].pop((x, h, ours), None)
                else:
                    self.model[target][x, h, ours] = self.model[source][x, h, theirs]

    def retire(self, which: int) -> None:
        epoch = self.pick(which)
        used = self.arena.used_bytes
        store = self.stores.pop(epoch)
        freed = store.close()
        assert store.close() == 0
        assert self.arena.used_bytes == used - freed * PAGE
        del self.model[epoch]

    def take_weights(self, nbytes: int) -> None:
        free = self.arena.free_bytes
        try:
            extent = self.arena.take(nbytes, "w")
        except CapacityError:
            assert aligned(nbytes) > free - PAGE
            return
        self.arena.bytes_of(extent).fill_(len(self.weights) + 1)
        self.weights.append((extent, len(self.weights) + 1))

    def free_weights(self, which: int) -> None:
        self.arena.free([self.weights.pop(which % len(self.weights))[0]])  # type: ignore[list-item]

    def tidy(self, most: int) -> None:
        self.arena.tidy(most)

    def check(self, epoch: int) -> None:
        store, known = self.stores[epoch], self.model[epoch]
        for (layer, head, block), value in known.items():
            cell = store.cells[block, layer, head]
            assert cell != NOWHERE
            same = value is None or (store.pool[cell] == value).all()
            assert same, (epoch, layer, head, block)

    def all_is_right(self) -> None:
        self.arena.check_integrity()
        for epoch in self.stores:
            self.check(epoch)
        for extent, value in self.weights:
            assert (self.arena.bytes_of(extent) == value).all()  # type: ignore[arg-type]
        cells = [store.held() for store in self.stores.values()]
        live = len(np.unique(np.concatenate(cells))) if cells else 0
        held = sum(extent.size for extent, _ in self.weights)  # type: ignore[attr-defined]
        assert self.arena.used_bytes == live * PAGE + held

    def do(self, name: str, a: int, b: int, c: int) -> None:
        block, other = b % BLOCKS, c % BLOCKS
        match name:
            case "install" if len(self.stores) < 3:
                self.install()
            case "open":
                self.open_block(a, block)
            case "continue":
                self.continue_block(a, block)
            case "free":
                self.free(a, {block, other})
            case "share" if len(self.stores) > 1:
                layers, heads = [(0, 2), (0, 1), (1, 2)][c % 3], [(0, 3), (1, 2)][b % 2]
                whole = a % 2 == 0
                self.share(a, block, other, (0, 2) if whole else layers, (0, 3) if whole else heads)
            case "pull" if len(self.stores) > 1:
                self.pull(a, block, other, a % 5 == 0)
            case "retire" if len(self.stores) > 1:
                self.retire(a)
            case "weights":
                self.take_weights(1 + (a * b * c * 977) % (20 * PAGE))
            case "unweights" if self.weights:
                self.free_weights(a)
            case "tidy":
                self.tidy(1 + a * PAGE)
        self.all_is_right()

    def end(self) -> None:
        for store in self.stores.values():
            store.close()
        self.arena.free([extent for extent, _ in self.weights])  # type: ignore[misc]
        assert self.arena.used_bytes == 0
        self.arena.close()


WORK = ["open", "continue", "share", "pull", "free", "weights", "unweights"]
numbers = st.integers(0, 29)
orders = st.tuples(
    st.sampled_from([*WORK, *WORK, "open", "share", "continue", "install", "retire", "tidy"]),
    numbers, numbers, numbers,
)  # fmt: skip


@given(st.lists(orders, min_size=25, max_size=120))
def test_any_order_of_work_keeps_contents_and_counts(work: list[tuple[str, int, int, int]]) -> None:
    epochs = Epochs()
    for item in work:
        epochs.do(*item)
    epochs.end()
