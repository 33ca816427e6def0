"""All pipelines of a pool that can be part of a best plan; dominated ones are dropped.

A multiset of stage kinds is *irreducible* if no set of other pipelines that fits into its groups
(taken apart, cut smaller or left idle) is worth as much. A best plan needs no others.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from flexslurm.gear import Signature
from flexslurm.planner.problem import Ints, Need, Problem, StageKind, Tier
from flexslurm.planner.worth import worth

KEY_SHIFT = 24
"""A key is a worth in thousandths of a token per second, above this many bits of simplicity."""


class Column(msgspec.Struct, frozen=True):
    """One pipeline as plans count it."""

    need: Need
    key: int
    """Worth and simplicity in one number, see `keys_of`; the keys of a plan's pipelines add up."""
    tokens_per_s: float
    batch: int

    @property
    def gpus(self) -> int:
        return sum(kind.tp * count for kind, count in self.need)

    @property
    def depth(self) -> int:
        return sum(count for _, count in self.need)


class Multisets(msgspec.Struct, frozen=True):
    """Multisets of stage kinds as rows of counts."""

    kinds: tuple[StageKind, ...]
    counts: Ints
    complete: bool
    """Whether all are there that the pool could hold, up to the depth asked for."""
    depth: int
    """All of up to so many stages are there."""


def stage_kinds(problem: Problem, pool: Signature) -> tuple[StageKind, ...]:
    """All kinds that a pool's nodes allow, sorted."""
    found = {k for shape, _ in pool.counts for k in problem.kinds(shape.gpu_type, shape.gpus)}
    return tuple(sorted(found))


def multisets(problem: Problem, pool: Signature, max_depth: int, most: int) -> Multisets:
    """Multisets of up to `max_depth` stages that fit into the pool; no more than about `most`.

    With more than that, they are those of fewer stages.
    """
    kinds = stage_kinds(problem, pool)
    room = _rooms(pool, kinds)
    depth = min(max_depth, problem.layers, pool.gpus())
    level = np.zeros((1, len(kinds)), dtype=np.int64)
    found: list[Ints] = []
    total = 0
    for listed in range(depth):
        level = _one_more(level, room)
        total += len(level)
        if total > most and found:
            return Multisets(kinds, np.concatenate(found), False, listed)
        if len(level) == 0:
            break
        found.append(level)
    counts = np.concatenate(found) if found else np.zeros((0, len(kinds)), dtype=np.int64)
    return Multisets(kinds, counts, True, depth)


class _Rooms(msgspec.Struct, frozen=True):
    """Conditions that all sets of groups in a pool's nodes meet: `weights @ counts <= at_most`."""

    weights: Ints
    at_most: Ints


def _rooms(pool: Signature, kinds: Sequence[StageKind]) -> _Rooms:
    weights, at_most = [], []
    for kind in kinds:
        # No more groups of a size or above than nodes can be cut into.
        weights.append([int(k.gpu_type == kind.gpu_type) * (k.tp // kind.tp) for k in kinds])
        at_most.append(
            sum(
                shape.gpus // kind.tp * count
                for shape, count in pool.counts
                if shape.gpu_type == kind.gpu_type
            )
        )
    return _Rooms(np.array(weights, dtype=np.int64), np.array(at_most, dtype=np.int64))


def _one_more(level: Ints, room: _Rooms) -> Ints:
    """Each multiset with one more stage, of a kind no earlier than its last."""
    kinds = level.shape[1]
    last = np.where(level.any(axis=1), kinds - 1 - (level[:, ::-1] > 0).argmax(axis=1), 0)
    parts = []
    for kind in range(kinds):
        grown = level[last <= kind].copy()
        grown[:, kind] += 1
        parts.append(grown[(grown @ room.weights.T <= room.at_most).all(axis=1)])
    return np.concatenate(parts) if parts else level[:0]


def keys_of(
    kinds: Sequence[StageKind], counts: Ints, tokens_per_s: npt.NDArray[np.float64]
) -> Ints:
    """Keys: equal worth goes to fewer types, then fewer stages, then less TP, then fewer GPUs."""
    depth = counts.sum(axis=1)
    gpus = counts @ np.array([kind.tp for kind in kinds], dtype=np.int64)
    names = sorted({kind.gpu_type for kind in kinds})
    types = sum(
        counts[:, [i for i, kind in enumerate(kinds) if kind.gpu_type == name]].any(axis=1)
        for name in names
    )
    penalty = 1000 * (types - 1) + 100 * (depth - 1) + 10 * (gpus - depth) + gpus
    milli = np.rint(tokens_per_s * 1000).astype(np.int64)
    return np.where(milli > 0, (milli << KEY_SHIFT) - penalty, 0)


def key_worth(key: int) -> float:
    """Tokens per second of a key or a sum of keys."""
    return ((key + (1 << (KEY_SHIFT - 1))) >> KEY_SHIFT) / 1000


def columns(problem: Problem, found: Multisets, tier: Tier) -> list[Column]:
    """The irreducible pipelines among multisets, most worth per GPU first."""
    kinds, counts = found.kinds, found.counts
    value = worth(problem, kinds, counts, tier)
    keys = keys_of(kinds, counts, value.tokens_per_s)
    keep = np.flatnonzero(irreducible(kinds, counts, keys))
    result = [
        Column(
            need=tuple((k, int(c)) for k, c in zip(kinds, counts[row], strict=True) if c),
            key=int(keys[row]),
            tokens_per_s=float(value.tokens_per_s[row]),
            batch=int(value.batch[row]),
        )
        for row in keep
    ]
    return sorted(result, key=lambda c: (-c.key / c.gpus, c.need))


class _RowIndex:
    """Finds rows of counts by a hash of small numbers, and checks what it found."""

    def __init__(self, counts: Ints) -> None:
        generator = np.random.default_rng(20250101)
        self.counts = counts
        self.weights = generator.integers(1, 1 << 62, size=counts.shape[1], dtype=np.int64)
        codes = counts @ self.weights  # wraps around, which is as good a hash
        self.order = np.argsort(codes, kind="stable")
        self.codes = codes[self.order]

    def find(self, rows: Ints) -> Ints:
        """Index of each row; -1 for one that is not there."""
        at = np.searchsorted(self.codes, rows @ self.weights)
        at = self.order[np.minimum(at, len(self.codes) - 1)]
        return np.where((self.counts[at] == rows).all(axis=1), at, -1)


def irreducible(kinds: Sequence[StageKind], counts: Ints, keys: Ints) -> npt.NDArray[np.bool_]:
    """Which multisets no plan of others within their groups equals."""
    result = np.zeros(len(counts), dtype=bool)
    if len(counts) == 0:
        return result
    index = _RowIndex(counts)
    best = np.zeros(len(counts), dtype=np.int64)  # of plans within the multiset's groups
    gpus = counts @ np.array([kind.tp for kind in kinds], dtype=np.int64)
    depth = counts.sum(axis=1)
    parts = np.zeros((0, counts.shape[1]), dtype=np.int64)
    part_keys = np.zeros(0, dtype=np.int64)
    levels = sorted(set(zip(gpus.tolist(), (-depth).tolist(), strict=True)))
    for gpu_count, less in levels:
        rows = np.flatnonzero((gpus == gpu_count) & (depth == -less))
        other = _best_other(kinds, counts[rows], index, best, parts, part_keys)
        own = keys[rows]
        result[rows] = own > other
        best[rows] = np.maximum(own, other)
        fresh = rows[result[rows]]
        parts = np.concatenate([parts, counts[fresh]])
        part_keys = np.concatenate([part_keys, keys[fresh]])
    return result


def _best_other(
    kinds: Sequence[StageKind],
    rows: Ints,
    index: _RowIndex,
    best: Ints,
    parts: Ints,
    part_keys: Ints,
) -> Ints:
    """The best plan for each multiset's groups that is not the multiset as one pipeline."""
    other = np.zeros(len(rows), dtype=np.int64)

    def consider(at: Ints, smaller: Ints, extra: Ints | int) -> None:
        found = index.find(smaller)
        known = found >= 0
        value = np.where(known, best[found], 0) + extra
        np.maximum.at(other, at, value)

    for k, kind in enumerate(kinds):
        has = np.flatnonzero(rows[:, k])
        if len(has) == 0:
            continue
        smaller = rows[has].copy()
        smaller[:, k] -= 1
        consider(has, smaller, 0)
        for size in range(1, kind.tp // 2 + 1):
            halves = [StageKind(kind.gpu_type, s) for s in (size, kind.tp - size)]
            if not all(half in kinds for half in halves):
                continue
            cut = smaller.copy()
            for half in halves:
                cut[:, kinds.index(half)] += 1
            consider(has, cut, 0)
    chunk = max(1, 2_000_000 // max(1, parts.size))
    for start in range(0, len(rows) if len(parts) else 0, chunk):
        some = rows[start : start + chunk]
        at, part = np.nonzero((some[:, None, :] >= parts[None, :, :]).all(axis=2))
        consider(at + start, some[at] - parts[part], part_keys[part])
    return other
