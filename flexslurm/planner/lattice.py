"""The best plans for all allocations of a pool at once, by one dynamic programme.

A state is what is left of every GPU type's nodes. The best plan of a state is the best, over all
pipelines, of the pipeline and the best plan of what it leaves; a pipeline's groups are taken one by
one, since a group may be cut from one node or another. States with fewer GPUs left come first.
Keys of pipelines are whole numbers that add up exactly, so ties fall the same way every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flexslurm.gear import Signature
from flexslurm.planner.columns import Column
from flexslurm.planner.problem import Ints, StageKind
from flexslurm.planner.spaces import Space, space

MOST_CELLS = 30_000_000
"""States times partial pipelines that are kept in memory, eight bytes each."""
_NOTHING = -(1 << 62)

Groups = tuple[StageKind, ...]
"""Groups still to be taken for a pipeline, in the order they are taken."""


class Lattice:
    """Best plans for every signature that a pool covers; built by `Lattice.build`."""

    def __init__(
        self, columns: Sequence[Column], spaces: Mapping[str, Space], types: Sequence[str]
    ) -> None:
        self.columns = tuple(columns)
        self._types, self._spaces = tuple(types), dict(spaces)
        sizes = [spaces[name].size for name in types]
        self._strides = [int(np.prod(sizes[i + 1 :], dtype=np.int64)) for i in range(len(sizes))]
        self.size = int(np.prod(sizes, dtype=np.int64))
        self._needs = [_in_order(column) for column in self.columns]
        self._partial = _suffixes(self._needs)

    @classmethod
    def build(cls, columns: Sequence[Column], pool: Signature) -> Lattice | None:
        """None where the pool has too many states for it."""
        nodes = _nodes_by_type(pool)
        types = sorted(nodes)
        sizes = {
            name: {k.tp for c in columns for k, _ in c.need if k.gpu_type == name} for name in types
        }
        partial = len(_suffixes([_in_order(column) for column in columns])) + 1
        most = max(1, MOST_CELLS // partial)
        spaces: dict[str, Space] = {}
        cells = 1
        for name in types:
            found = space(nodes[name], sorted(sizes[name]), min(most // cells, 50_000))
            if found is None:
                return None
            spaces[name] = found
            cells *= found.size
        if cells > most:
            return None
        result = cls(columns, spaces, types)
        result._fill()
        return result

    def key(self, signature: Signature) -> int:
        """The key of the best plan; 0 where no pipeline fits."""
        return int(self._best[self._state(signature)])

    def plan(self, signature: Signature) -> Counter[Column]:
        """The best plan's pipelines."""
        return self._plan_of(self._state(signature))

    def next_plan(self, signature: Signature) -> Counter[Column]:
        """The best of the plans that have a pipeline which the best plan has not; empty: none."""
        state = self._state(signature)
        own = self._plan_of(state)
        left = self._after[self._rows, state]
        other = np.array([column not in own for column in self.columns], dtype=bool)
        value = np.where(other & (left >= 0), self._keys + left, 0)
        if not len(value) or value.max() <= 0:
            return Counter()
        column = int(value.argmax())
        after = self._take(self._needs[column], state)
        return Counter({self.columns[column]: 1}) + self._plan_of(after)

    def _plan_of(self, state: int) -> Counter[Column]:
        chosen = Counter[Column]()
        while self._best[state] > 0:
            step = self._steps.get(state)
            if step is None:
                step = self._steps[state] = self._step(state)
            chosen[self.columns[step[0]]] += 1
            state = step[1]
        return chosen

    def _step(self, state: int) -> tuple[int, int]:
        """A pipeline of the state's best plan, the first that is, and the state it leaves."""
        value = self._keys + self._after[self._rows, state]
        explains = value == self._best[state]
        assert explains.any(), "no pipeline explains the best plan"
        column = int(explains.argmax())
        return column, self._take(self._needs[column], state)

    def _state(self, signature: Signature) -> int:
        nodes = _nodes_by_type(signature)
        unknown = set(nodes) - set(self._types)
        assert not unknown, f"{signature} has {unknown}, which the pool does not"
        return sum(
            self._spaces[name].state(nodes.get(name, {})) * stride
            for name, stride in zip(self._types, self._strides, strict=True)
        )

    def _fill(self) -> None:
        levels = np.zeros(1, dtype=np.int64)
        for name in self._types:
            levels = (levels[:, None] + self._spaces[name].level[None, :]).ravel()
        order = np.argsort(levels, kind="stable")
        borders = np.flatnonzero(np.diff(levels[order])) + 1
        self._row: dict[Groups, int] = {(): 0}
        self._row |= {groups: row for row, groups in enumerate(self._partial, start=1)}
        self._moves = {
            kind: self._spaces[kind.gpu_type].after(kind.tp)
            for kind in sorted({groups[0] for groups in self._partial})
        }
        self._after = np.full((len(self._row), self.size), _NOTHING, dtype=np.int64)
        """By what is to be taken: the best key of what is left then."""
        self._best = self._after[0]
        self._rows = np.array([self._row[groups] for groups in self._needs], dtype=np.int64)
        self._keys = np.array([column.key for column in self.columns], dtype=np.int64)
        self._steps: dict[int, tuple[int, int]] = {}
        for states in np.split(order, borders):
            self._fill_level(states)

    def _fill_level(self, states: Ints) -> None:
        place = {
            name: states // stride % self._spaces[name].size
            for name, stride in zip(self._types, self._strides, strict=True)
        }
        for groups in self._partial:
            kind = groups[0]
            stride = self._strides[self._types.index(kind.gpu_type)]
            rest = self._after[self._row[groups[1:]]]
            here = place[kind.gpu_type]
            value = np.full(len(states), _NOTHING, dtype=np.int64)
            for way in self._moves[kind]:
                after = way[here]
                found = rest[states + (after - here) * stride]
                np.maximum(value, np.where(after >= 0, found, _NOTHING), out=value)
            self._after[self._row[groups], states] = value
        best = np.zeros(len(states), dtype=np.int64)
        for column, groups in zip(self.columns, self._needs, strict=True):
            left = self._after[self._row[groups], states]
            np.maximum(best, np.where(left >= 0, left + column.key, 0), out=best)
        self._best[states] = best

    def _take(self, groups: Groups, state: int) -> int:
        """The state that is left best when the groups are taken."""
        while groups:
            kind, wanted = groups[0], self._after[self._row[groups], state]
            index = self._types.index(kind.gpu_type)
            stride, size = self._strides[index], self._spaces[kind.gpu_type].size
            here = state // stride % size
            rest = self._after[self._row[groups[1:]]]
            for way in self._moves[kind]:
                after = int(way[here])
                next_state = state + (after - here) * stride
                if after >= 0 and rest[next_state] == wanted:
                    state = next_state
                    break
            else:
                raise AssertionError("no cut explains the best plan")
            groups = groups[1:]
        return state


def _in_order(column: Column) -> Groups:
    """A pipeline's groups, large ones first."""
    groups = [kind for kind, count in column.need for _ in range(count)]
    return tuple(sorted(groups, key=lambda kind: (kind.gpu_type, -kind.tp)))


def _suffixes(needs: Iterable[Groups]) -> list[Groups]:
    found = {groups[i:] for groups in needs for i in range(len(groups))}
    return sorted(found, key=lambda groups: (len(groups), groups))


def _nodes_by_type(signature: Signature) -> dict[str, dict[int, int]]:
    result: dict[str, dict[int, int]] = {}
    for shape, count in signature.counts:
        result.setdefault(shape.gpu_type, {})[shape.gpus] = count
    return result
