"""What is left of one GPU type's nodes, as numbered states; the steps of the dynamic programme.

Taking a TP group from a node leaves a smaller node. Where the sizes in use divide one another, how
many groups of each size still fit says all there is to say; else the multiset of what is left on
each node does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import comb
from typing import Protocol

import numpy as np

from flexslurm.planner.packing import patterns
from flexslurm.planner.problem import Ints

Nodes = Mapping[int, int]
"""How many nodes have how many GPUs."""


class Space(Protocol):
    """States of one GPU type's nodes."""

    size: int
    level: Ints
    """By state, a number that falls with every group that is taken."""

    def state(self, nodes: Nodes) -> int:
        """The state of untouched nodes."""
        ...

    def after(self, tp: int) -> Ints:
        """`[way, state]`: the states that taking a group of `tp` may lead to; -1: none."""
        ...


def space(pool: Nodes, sizes: Sequence[int], most_states: int) -> Space | None:
    """The states of a pool whose groups have these sizes; None where there are too many."""
    sizes = sorted(set(sizes))
    if all(big % small == 0 for small, big in itertools.pairwise(sizes)):
        chain = ChainSpace(pool, sizes)
        return chain if chain.size <= most_states else None
    return RestSpace.build(pool, sizes, most_states)


class ChainSpace:
    """Sizes that divide one another: a state is how many groups of each size still fit.

    Groups `q` fit into nodes `g` if and only if for each size d the groups of at least d take no
    more than `sum(g // d)` pieces of d. Where a condition follows from a smaller size's, it is left
    out; with nodes of 4 and 8 GPUs and powers of two only the number of GPUs remains.
    """

    def __init__(self, pool: Nodes, sizes: Sequence[int]) -> None:
        self.sizes: list[int] = []
        for size in sizes:
            implied = any(
                all(gpus // size * size == gpus // kept * kept for gpus in pool)
                for kept in self.sizes
            )
            if not implied:
                self.sizes.append(size)
        self._room = [self._pieces(pool, size) for size in self.sizes]
        self._strides = [1] * len(self.sizes)
        for i in range(len(self.sizes) - 2, -1, -1):
            self._strides[i] = self._strides[i + 1] * (self._room[i + 1] + 1)
        self.size = int(np.prod([room + 1 for room in self._room], dtype=np.int64))
        if self.size <= 1 << 24:
            states = np.arange(self.size)
            self._left = [
                states // stride % (room + 1)
                for stride, room in zip(self._strides, self._room, strict=True)
            ]
            self.level = self._left[0] * self.sizes[0] if self.sizes else states

    def state(self, nodes: Nodes) -> int:
        return sum(
            self._pieces(nodes, size) * stride
            for size, stride in zip(self.sizes, self._strides, strict=True)
        )

    def after(self, tp: int) -> Ints:
        result = np.arange(self.size)
        fits = np.ones(self.size, dtype=bool)
        for size, stride, left in zip(self.sizes, self._strides, self._left, strict=True):
            if size <= tp:
                fits &= left >= tp // size
                result = result - tp // size * stride
        return np.where(fits, result, -1)[None, :]

    @staticmethod
    def _pieces(nodes: Nodes, size: int) -> int:
        return sum(gpus // size * count for gpus, count in nodes.items())


class RestSpace:
    """Any sizes: a state is the multiset of what is left on the nodes."""

    def __init__(self, rests: Sequence[int], alike: Sequence[int]) -> None:
        self.rests = rests
        """What may be left on a node and is of use, ascending."""
        self._alike = alike
        """By GPUs left, the fewest that are of the same use."""
        self.index: dict[tuple[int, ...], int] = {}
        self._steps: dict[int, list[dict[int, int]]] = {}
        self.size = 0
        self.level = np.zeros(0, dtype=np.int64)

    @classmethod
    def build(cls, pool: Nodes, sizes: Sequence[int], most_states: int) -> RestSpace | None:
        alike = _alike(max(pool, default=0), tuple(sizes))
        if any(_ways(gpus, count, sizes, alike) > most_states for gpus, count in pool.items()):
            return None
        rests = sorted({rest for rest in alike if rest})
        result = cls(rests, alike)
        start = result._vector(pool)
        result.index[start] = 0
        queue = [start]
        for vector in queue:
            for after in result._smaller(vector, sizes):
                if after not in result.index:
                    if len(queue) >= most_states:
                        return None
                    result.index[after] = len(queue)
                    queue.append(after)
        result.size = len(queue)
        result.level = np.array(queue, dtype=np.int64).reshape(len(queue), -1) @ np.array(
            rests, dtype=np.int64
        )
        return result

    def state(self, nodes: Nodes) -> int:
        return self.index[self._vector(nodes)]

    def after(self, tp: int) -> Ints:
        cuts = [rest for rest in self.rests if rest >= tp]
        result = np.full((max(1, len(cuts)), self.size), -1, dtype=np.int64)
        for vector, state in self.index.items():
            for way, rest in enumerate(cuts):
                if vector[self.rests.index(rest)]:
                    result[way, state] = self.index[self._cut(vector, rest, tp)]
        return result

    def _vector(self, nodes: Nodes) -> tuple[int, ...]:
        counts = [0] * len(self.rests)
        for gpus, count in nodes.items():
            rest = self._alike[gpus]
            if rest:
                counts[self.rests.index(rest)] += count
        return tuple(counts)

    def _cut(self, vector: tuple[int, ...], rest: int, tp: int) -> tuple[int, ...]:
        counts = list(vector)
        counts[self.rests.index(rest)] -= 1
        left = self._alike[rest - tp]
        if left:
            counts[self.rests.index(left)] += 1
        return tuple(counts)

    def _smaller(self, vector: tuple[int, ...], sizes: Sequence[int]) -> set[tuple[int, ...]]:
        """States after one cut, or with one node less."""
        found: set[tuple[int, ...]] = set()
        for rest, count in zip(self.rests, vector, strict=True):
            if count:
                found.update(self._cut(vector, rest, tp) for tp in sizes if tp <= rest)
                found.add(self._cut(vector, rest, rest))
        return found


def _ways(gpus: int, count: int, sizes: Sequence[int], alike: Sequence[int]) -> int:
    """How many multisets of rests so many nodes may come to."""
    seen = {alike[gpus]}
    queue = list(seen)
    for rest in queue:
        for left in {0, *(alike[rest - tp] for tp in sizes if tp <= rest)} - seen:
            seen.add(left)
            queue.append(left)
    return comb(count + len(seen) - 1, len(seen) - 1)


def _alike(most: int, sizes: tuple[int, ...]) -> list[int]:
    """For each number of GPUs the smallest that can be cut in the same ways."""
    seen: dict[frozenset[tuple[int, ...]], int] = {}
    result = []
    for gpus in range(most + 1):
        ways = frozenset(patterns(gpus, sizes))
        result.append(seen.setdefault(ways, gpus))
    return result
