"""Fills a gear table: a plan for every allocation that can be made of the pool's pilots.

Where plans are exact they are read off the lattice. Where pipelines are generated, most plans are
put together from plans of smaller allocations; as long as that comes near to what prices prove
to be possible, nothing is solved anew.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from flexslurm.errors import ConfigError
from flexslurm.gear import Shape, Signature, Stage
from flexslurm.planner.build import no_gear
from flexslurm.planner.columns import Column, key_worth
from flexslurm.planner.hashing import inputs_hash
from flexslurm.planner.packing import seat
from flexslurm.planner.planner import TIERS, Planner
from flexslurm.planner.problem import Ints, Tier
from flexslurm.planner.shifts import ShiftCosts
from flexslurm.planner.solver import Solution
from flexslurm.planner.substitutes import Substitutes
from flexslurm.planner.table import Header, OtherPlan, TableEntry, TablePipeline, encode
from flexslurm.planner.workload import Objective

MOST_ENTRIES = 1_000_000
TABLE_GAP = 0.005
"""Composed plans are kept where they are proved to be within this share of the best."""
OTHER_SHARE = 0.5
"""Next best plans that give less than this share of the best are left out."""
Counts = tuple[tuple[Shape, int], ...]

_COMPOSED = 600
"""Solved plans that others are put together from."""

Progress = Callable[[int, int], None]
"""Called with how many entries are done, of how many."""


class PilotKind(msgspec.Struct, frozen=True):
    """Pilots of one kind: what one holds, and how many there may be."""

    nodes: Signature
    count: int


def pilots_of(pool: Signature) -> tuple[PilotKind, ...]:
    """Every node a pilot of its own."""
    return tuple(PilotKind(Signature(((shape, 1),)), count) for shape, count in pool.counts)


def allocations(pilots: Sequence[PilotKind]) -> Iterator[tuple[int, ...]]:
    """How many pilots of each kind there may be, few GPUs first."""
    weights = [p.nodes.gpus() for p in pilots]
    every = itertools.product(*(range(p.count + 1) for p in pilots))
    yield from sorted(every, key=lambda u: (sum(w * n for w, n in zip(weights, u, strict=True)), u))


def pilots_signature(pilots: Sequence[PilotKind], counts: Sequence[int]) -> Signature:
    """The allocation that so many pilots of each kind hold."""
    total: Counter[Shape] = Counter()
    for pilot, times in zip(pilots, counts, strict=True):
        for shape, count in pilot.nodes.counts:
            total[shape] += count * times
    return Signature(tuple(sorted((shape, n) for shape, n in total.items() if n)))


def plans(
    planner: Planner, pilots: Sequence[PilotKind], progress: Progress = lambda done, total: None
) -> Iterator[tuple[Signature, Solution | None]]:
    """The plan of every allocation of these pilots, which the planner's pool must cover.

    Raises ConfigError where there are too many.
    """
    total = int(np.prod([p.count + 1 for p in pilots], dtype=np.int64))
    if total > MOST_ENTRIES:
        raise ConfigError(
            f"the pool has {total:,} allocations, a table holds at most {MOST_ENTRIES:,}",
            hint="plan in larger pilots, or for fewer of them",
        )
    composers = [_Composer(planner, pilots, tier) for tier in TIERS]
    for done, counts in enumerate(allocations(pilots), start=1):
        signature = pilots_signature(pilots, counts)
        found = (composer.choose(counts, signature) for composer in composers)
        choice = next((choice for choice in found if choice.plan), None)
        yield signature, choice if choice is None else planner.adapt(choice, signature)
        if done % 256 == 0 or done == total:
            progress(done, total)


def make_table(
    planner: Planner, pilots: Sequence[PilotKind], progress: Progress = lambda done, total: None
) -> bytes:
    """The table of all allocations of these pilots."""
    filler = _Filler(planner, pilots_signature(pilots, [p.count for p in pilots]))
    for signature, choice in plans(planner, pilots, progress):
        filler.add(signature, choice)
    return filler.encode()


class _Filler:
    def __init__(self, planner: Planner, pool: Signature) -> None:
        self.planner, self.pool = planner, pool
        self.entries: dict[Signature, TableEntry] = {}
        self.pipelines: dict[tuple[Column, Tier], int] = {}
        self.reasons: dict[str, int] = {}
        self.shifts = ShiftCosts(planner.problem, pool)
        self._smallest: tuple[int, int, Counts] | None = None
        self._substitutes: dict[Tier, Substitutes] = {}

    def add(self, signature: Signature, choice: Solution | None) -> None:
        if signature in self.entries:
            return  # two kinds of pilots can hold the same
        if choice is None:
            missing = no_gear(self.planner.problem, signature)
            self.entries[signature] = TableEntry(
                (), (), self._reason(missing.reason), 0.0, missing.short_bytes
            )
            return
        self.entries[signature] = self._entry(signature, choice)
        types = len({shape.gpu_type for shape, _ in signature.counts})
        rank = (signature.gpus(), types, signature.counts)
        if self._smallest is None or rank < self._smallest:
            self._smallest = rank

    def _entry(self, signature: Signature, choice: Solution) -> TableEntry:
        plan, seats = self._seated(signature, choice.plan, choice.tier)
        other = self._other(signature, choice)
        return TableEntry(
            plan=plan,
            seats=seats,
            reason=self._reason(choice.reason),
            gap=choice.gap,
            shifts=self.shifts.add(
                signature,
                [
                    (self.planner.builder.pipeline(c, choice.tier), times)
                    for c, times in choice.plan.items()
                ],
            ),
            others=(OtherPlan(*self._seated(signature, other, choice.tier)),) if other else (),
        )

    def _seated(
        self, signature: Signature, plan: Mapping[Column, int], tier: Tier
    ) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """A plan by numbers of its pipelines, and the nodes of their stages."""
        ordered = sorted(plan, key=lambda c: (-c.tokens_per_s, c.need))
        stages = [
            [s.kind for s in self.planner.builder.pipeline(c, tier).stages]
            for c in ordered
            for _ in range(plan[c])
        ]
        seats = tuple(itertools.chain.from_iterable(seat(signature, stages)))
        return tuple((self._pipeline(c, tier), plan[c]) for c in ordered), seats

    def _other(self, signature: Signature, choice: Solution) -> Mapping[Column, int]:
        """The next best plan, where one is nearly as good."""
        if self.planner.problem.goal.objective is not Objective.THROUGHPUT:
            return {}
        solver = self.planner.solver(choice.tier)
        plan: Mapping[Column, int]
        if solver.lattice is not None:
            plan = solver.lattice.next_plan(signature)
        else:
            if choice.tier not in self._substitutes:
                self._substitutes[choice.tier] = Substitutes(solver)
            plan = self._substitutes[choice.tier].next_plan(choice.plan)
        key = sum(column.key * times for column, times in plan.items())
        return plan if key_worth(key) >= OTHER_SHARE * key_worth(choice.key) else {}

    def _pipeline(self, column: Column, tier: Tier) -> int:
        return self.pipelines.setdefault((column, tier), len(self.pipelines))

    def _reason(self, reason: str) -> int:
        return self.reasons.setdefault(reason, len(self.reasons))

    def encode(self) -> bytes:
        problem = self.planner.problem
        header = Header(
            inputs=inputs_hash(
                problem.spec,
                problem.topology,
                problem.goal,
                self.pool,
                problem.acted,
                [problem.profiles[kind] for kind in sorted(problem.profiles)],
            ),
            model=problem.spec.name,
            pool=self.pool,
            block_tokens=problem.limits.block_tokens,
            max_batch_tokens=problem.limits.max_batch_tokens,
            pipelines=tuple(self._table_pipeline(c, tier) for c, tier in self.pipelines),
            reasons=tuple(self.reasons),
            fallback=Signature(self._smallest[2]) if self._smallest else None,
        )
        return encode(header, self.entries)

    def _table_pipeline(self, column: Column, tier: Tier) -> TablePipeline:
        problem = self.planner.problem
        p = self.planner.builder.pipeline(column, tier)
        return TablePipeline(
            stages=tuple(
                Stage(s.kind.gpu_type, s.kind.tp, s.lo, s.hi, s.kv_blocks, 0) for s in p.stages
            ),
            max_batch=p.max_batch,
            max_context=min(problem.max_context, p.kv_blocks * problem.limits.block_tokens),
            kv_blocks=p.kv_blocks,
            tokens_per_s=p.tokens_per_s,
            ttft_s=p.ttft_s,
            tpot_s=p.tpot_s,
            load_s=p.load_s,
            margins=p.margins,
        )


class _Composer:
    """Plans of one tier for allocations asked for in order of size."""

    def __init__(self, planner: Planner, pilots: Sequence[PilotKind], tier: Tier) -> None:
        self.planner, self.tier = planner, tier
        self.dims = [p.count + 1 for p in pilots]
        self.plans: dict[int, Solution] = {}
        self._strides = np.array(
            [int(np.prod(self.dims[i + 1 :], dtype=np.int64)) for i in range(len(self.dims))]
        )
        self._keys = np.zeros(int(np.prod(self.dims, dtype=np.int64)), dtype=np.int64)
        self._parts = np.zeros((0, len(self.dims)), dtype=np.int64)

    def choose(self, counts: tuple[int, ...], signature: Signature) -> Solution:
        solver = self.planner.solver(self.tier)
        if not self.plans:
            solver.prepare()
        ready = solver.chosen_in_table(signature)
        if ready is not None:
            self.plans[0] = ready
            return ready
        at = int(np.array(counts) @ self._strides)
        composed = self._compose(np.array(counts), signature)
        if composed is None or key_worth(composed.key) < composed.bound_tokens_per_s * (
            1 - TABLE_GAP
        ):
            solved = solver.solve(signature)
            if composed is None or solved.key > composed.key:
                composed = solved
            if solved.plan and len(self._parts) < _COMPOSED:
                self._parts = np.concatenate([self._parts, [counts]])
        self.plans[at], self._keys[at] = composed, composed.key
        return composed

    def _compose(self, counts: Ints, signature: Signature) -> Solution | None:
        """The best sum of a solved plan and the plan of what it leaves."""
        fitting = self._parts[(self._parts <= counts).all(axis=1)]
        if len(fitting) == 0:
            return None
        rest, part = (counts - fitting) @ self._strides, fitting @ self._strides
        best = int((self._keys[rest] + self._keys[part]).argmax())
        plan = Counter(self.plans[int(part[best])].plan)
        other = self.plans.get(int(rest[best]))
        if other is not None:
            plan.update(other.plan)
        key = int(self._keys[rest[best]] + self._keys[part[best]])
        return Solution(self.tier, dict(plan), key, self.planner.solver(self.tier).bound(signature))
