"""The KV cache of one stage on one GPU: the table that finds its pages in the arena; no model.

A page holds keys and values of one KV head of one layer for one block of tokens, the same size
whatever the pipeline and tensor degrees, and is one contiguous run of bytes. So a change of degrees
moves pages and edits tables; nothing is reshaped. A block has pages from its first token until it
is freed. Pages may be shared with other tables; one that is written to is not.

The serving thread prepares blocks, writes and frees; pulls come from other threads and concern
blocks that no step uses. All of them edit the table under the arena's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flexslurm.engine.arena import Arena
from flexslurm.engine.page_pool import Cells, PageShape
from flexslurm.errors import ProtocolError

NOWHERE = -1
"""In a table: there is no page."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """Sizes of a stage's KV cache on one rank."""

    layers: int
    heads: int
    """KV heads of this rank."""
    blocks: int
    block_tokens: int
    head_dim: int

    @property
    def pages(self) -> int:
        """When every block is in use."""
        return self.layers * self.heads * self.blocks


class KvStore:
    """Pages in an arena, found by `(local layer, local KV head, block)`.

    Invariant: a block that a step writes to has pages of its own.
    """

    def __init__(self, shape: KvShape, dtype: torch.dtype, arena: Arena) -> None:
        """A table without pages; raises CapacityError where the arena has pages of another size."""
        self.shape = shape
        self._arena = arena
        self._pages = arena.page_pool(PageShape(shape.block_tokens, shape.head_dim, dtype.itemsize))
        self.page_bytes = self._pages.page_bytes
        size = (-1, 2, shape.block_tokens, shape.head_dim)
        self.pool = arena.data[self._pages.base :].view(dtype).view(size)
        """`[cells, 2 (K, V), block_tokens, head_dim]`: the grid of the whole arena."""
        # Rows of one token: K of page p at offset o is row 2 * p * block_tokens + o.
        self.rows = self.pool.view(-1, shape.head_dim)
        self.cells = np.full((shape.blocks, shape.layers, shape.heads), NOWHERE, np.int64)
        """The table, by block."""
        self.turns = np.zeros(shape.blocks, np.int64)
        """How often each block was freed: what was on its way to an earlier use is told by it."""
        self._whole = np.zeros(shape.blocks, np.bool_)
        """Blocks with all their pages."""
        on_host = torch.from_numpy(self.cells)
        self._device_cells = on_host if arena.device.type == "cpu" else on_host.to(arena.device)
        self._changed: set[int] = set()
        """Blocks whose row on the device is out of date; not used on CPU."""
        self.table = self._device_cells.permute(1, 2, 0)
        """`[layers, heads, blocks] -> page`, int64."""
        with arena.lock:
            self._pages.tables.append(self)

    # -------------------------------------------------------------------- blocks and pages

    def prepare(self, opened: Sequence[int], continued: Sequence[int], read: Sequence[int]) -> None:
        """Give blocks the pages that a step writes to; before the step, not within.

        `opened` get their first token, and what they held is nobody's any more; `continued` are
        written to and hold tokens already, as do all that are `read`. Raises CapacityError where
        the arena is full, and ProtocolError for a block that should hold something and is not here.
        """
        if read and not self._whole[np.array(read)].all():
            gone = next(block for block in read if not self._whole[block])
            raise ProtocolError(f"the step reads block {gone}, which holds nothing")
        missing = [block for block in opened if not self._whole[block]]
        if missing:
            self._fill_up(np.array(missing), slice(None), slice(None))
        if self._pages.shared:
            self._own(list(opened), copy=False)
            self._own(list(continued), copy=True)

    def claim(self, blocks: Sequence[int], layers: slice, heads: slice) -> None:
        """Give a part of blocks pages of its own, with any contents, to be filled from elsewhere.

        Raises CapacityError where the arena is full.
        """
        self._fill_up(np.array(blocks), layers, heads)
        if self._pages.shared:
            self._own(blocks, copy=False, layers=layers, heads=heads)

    def _fill_up(self, blocks: Cells, layers: slice, heads: slice) -> None:
        """Take pages where there are none."""
        while True:
            with self._arena.lock:
                part = self.cells[blocks, layers, heads]
                empty = part == NOWHERE
                count = int(np.count_nonzero(empty))
                if self._pages.has(count):
                    part[empty] = self._pages.take(count)
                    self._put(blocks, layers, heads, part)
                    return
            self._arena.make_room(count)

    def _own(
        self, blocks: Sequence[int], *, copy: bool, layers: slice = slice(None),
        heads: slice = slice(None),
    ) -> None:  # fmt: skip
        """Take pages in place of those that other tables have too."""
        at = np.array(blocks, np.int64)
        while True:
            with self._arena.lock:
                part = self.cells[at, layers, heads]
                shared = self._pages.is_shared(part)
                count = int(np.count_nonzero(shared))
                if count == 0:
                    return
                if self._pages.has(count):
                    old, new = part[shared], self._pages.take(count)
                    if copy:
                        self.pool[self._index(new)] = self.pool[self._index(old)]
                    part[shared] = new
                    self._put(at, layers, heads, part)
                    self._pages.drop(old)
                    return
            self._arena.make_room(count)

    def share(
        self, source: KvStore, pairs: Sequence[tuple[int, int]], theirs: tuple[slice, slice],
        ours: tuple[slice, slice],
    ) -> list[int]:  # fmt: skip
        """Take a part (layers, heads) of another table's blocks as our own; nothing is copied.

        `pairs`: `(their block, our block)`. Returns our blocks that could not be filled, since
        theirs are not here.
        """
        both = np.array(pairs, np.int64).reshape(-1, 2)
        with self._arena.lock:
            found = source.cells[both[:, 0], *theirs]
            here = (found != NOWHERE).all(axis=(1, 2))
            blocks, found = both[here, 1], found[here]
            before = self.cells[blocks, *ours]
            self._pages.add(found.ravel())
            self._pages.drop(before[before != NOWHERE])
            self._put(blocks, *ours, found)
        return [int(block) for block in both[~here, 1]]

    def _put(self, blocks: Cells, layers: slice, heads: slice, part: Cells) -> None:
        self.cells[blocks, layers, heads] = part
        self._whole[blocks] = (self.cells[blocks] != NOWHERE).all(axis=(1, 2))
        self._mark(blocks)

    def _mark(self, blocks: Cells) -> None:
        if self._arena.device.type != "cpu":
            self._changed.update(blocks.tolist())

    def free(self, blocks: Sequence[int]) -> int:
        """These blocks hold nothing any more; how many pages are free by that. Idempotent."""
        at = np.unique(np.array(blocks, np.int64))
        with self._arena.lock:
            part = self.cells[at]
            self.cells[at] = NOWHERE
            self._whole[at] = False
            self.turns[at] += 1
            return self._pages.drop(part[part != NOWHERE])

    def close(self) -> int:
        """Free all blocks and leave the arena; the pages that are free by that. Idempotent."""
        with self._arena.lock:
            if self not in self._pages.tables:
                return 0
            freed = self.free(np.flatnonzero((self.cells != NOWHERE).any(axis=(1, 2))).tolist())
            self._pages.tables.remove(self)
            return freed

    def held(self) -> Cells:
        """All pages of the table."""
        found: Cells = self.cells[self.cells != NOWHERE]
        return found

    @property
    def live_bytes(self) -> int:
        """Of all pages in the table, shared ones too."""
        with self._arena.lock:
            return len(self.held()) * self.page_bytes

    def renumber(self, old: Cells, new: Cells) -> None:
        """Page `old[i]`, rising, lies in cell `new[i]` now; under the lock and with no step."""
        at = np.flatnonzero((self.cells != NOWHERE).any(axis=(1, 2)))
        part = self.cells[at]
        place = np.minimum(np.searchsorted(old, part), len(old) - 1)
        hit = old[place] == part
        part[hit] = new[place[hit]]
        self.cells[at] = part
        self._mark(at[hit.any(axis=(1, 2))])

    def whole(self, blocks: Sequence[int]) -> NDArray[np.bool_]:
        """Which of these blocks have all their pages."""
        return self._whole[np.array(blocks, np.int64)]

    def sync(self) -> None:
        """Bring the device's table up to date; at the beginning of a step."""
        if self._changed:
            with self._arena.lock:
                blocks = np.array(sorted(self._changed))
                self._changed.clear()
                rows = torch.from_numpy(self.cells[blocks])
            at = torch.from_numpy(blocks).to(self._arena.device)
            self._device_cells.index_copy_(0, at, rows.to(self._arena.device))

    def _index(self, cells: Cells) -> torch.Tensor:
        return torch.from_numpy(cells).to(self._arena.device)

    # ---------------------------------------------------------------------- within a step

    def slots(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Rows of K for tokens at `offsets` in `blocks` (both `[T]`): `[layers, heads, T]`.

        The row of V is `block_tokens` further.
        """
        pages = self.table[:, :, blocks]
        return pages * (2 * self.shape.block_tokens) + offsets

    def pages_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Pages of `blocks` (any shape): `[layers, heads, *blocks.shape]`."""
        return self.table[:, :, blocks]

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero all pages of these blocks.

        Attention reads whole blocks and masks what is beyond a sequence's end, and a mask does not
        stop a NaN: arena memory may hold any bits, and a block the leavings of another sequence.
        """
        if blocks.numel():
            self.pool.index_fill_(0, self.table[:, :, blocks].reshape(-1), 0)

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's new tokens: `slots` `[heads, T]`, keys and values `[heads, T, D]`."""
        at = slots.reshape(-1)
        self.rows.index_copy_(0, at, keys.reshape(-1, self.shape.head_dim))
        at = at + self.shape.block_tokens
        self.rows.index_copy_(0, at, values.reshape(-1, self.shape.head_dim))

    def gather(self, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the first `tokens` tokens of runs of pages: `[..., n] -> 2 of [..., tokens, D]`."""
        size = self.shape.block_tokens
        # Copying whole pages is one straight run each; only short contexts gain by a part.
        within = tokens if 2 * tokens < size else size
        halves = self.pool.view(-1, size, self.shape.head_dim).narrow(1, 0, within)
        flat = pages.reshape(-1) * 2
        runs = (*pages.shape[:-1], pages.shape[-1] * within, self.shape.head_dim)
        keys = halves.index_select(0, flat).view(runs)
        values = halves.index_select(0, flat + 1).view(runs)
        return keys.narrow(-2, 0, tokens), values.narrow(-2, 0, tokens)
