"""From gears in their places to the plan of a shift: who is where, what lives, what fits; pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flexslurm.control.actions import PlanShift
from flexslurm.control.installed import InstalledReplica, ReplicaKey
from flexslurm.control.phases import Mode, ShiftOrder
from flexslurm.engine.kv_cache import blocks_for
from flexslurm.engine.load import RunningKv
from flexslurm.engine.memory_plan import MemoryVerdict
from flexslurm.engine.ownership import ReplicaAt, Seat, ShardMap
from flexslurm.engine.reshard import LinkKind
from flexslurm.engine.routing import LiveKv
from flexslurm.engine.shift_plan import LinkRates, ShiftFacts, ShiftPlan, plan_shift


def replica_at(one: InstalledReplica) -> ReplicaAt:
    """A replica in its place, as the engine's planning knows it."""
    seats = tuple(Seat(s.worker, s.node, s.address, s.data_port) for s in one.seats)
    return ReplicaAt(one.key.epoch, one.key.index, one.replica, seats)


@dataclass(frozen=True, slots=True)
class RoomBounds:
    """Blocks that replicas may use while two gears share the memory; none where they do not."""

    limits: dict[ReplicaKey, int] = field(default_factory=dict)
    """Of old replicas, while the new weights are beside them."""
    foreseen: dict[ReplicaKey, int] = field(default_factory=dict)
    """Of old replicas, that the plan has room for, and for what is moved of them in the new."""
    spare: dict[ReplicaKey, int] = field(default_factory=dict)
    """Of new replicas, beyond those that are moved in, until room is free."""
    grown_cost: dict[ReplicaKey, float] = field(default_factory=dict)
    """What a block beyond the foreseen ones costs, in blocks of each new replica."""

    def room(self, used: Mapping[ReplicaKey, int]) -> dict[ReplicaKey, int]:
        """What is left of `spare` when the old replicas have come to use so many blocks."""
        grown = sum(max(used.get(key, 0) - blocks, 0) for key, blocks in self.foreseen.items())
        costs = self.grown_cost
        return {key: max(n - math.ceil(grown * costs[key]), 0) for key, n in self.spare.items()}


@dataclass(frozen=True, slots=True)
class MovePlan:
    """What is known of a shift before it begins."""

    ask: PlanShift
    order: ShiftOrder
    plan: ShiftPlan | None = None
    """None where nothing can be moved."""
    bounds: RoomBounds = field(default_factory=RoomBounds)
    nominal: ShiftPlan | None = None
    """The plan with the times that the links' rates alone give."""

    @property
    def going(self) -> tuple[InstalledReplica, ...]:
        """Replicas that are to go, by their numbers."""
        old = self.ask.old
        if old is None:
            return ()
        stays = self.ask.new.keys
        return tuple(one for _, one in sorted(old.replicas.items()) if one.key not in stays)


def plan_moves(
    shards: ShardMap,
    ask: PlanShift,
    running: Mapping[ReplicaKey, list[RunningKv]],
    rates: LinkRates,
    step_s: float,
    stored: int = 0,
    corrected: Callable[[ShiftPlan], ShiftPlan] = lambda plan: plan,
) -> MovePlan:
    """Work out how to get from the old gear to the new one.

    `running`: what the open drivers have; `stored`: how many sequences wait with their KV in
    files; `corrected` makes expected times those of this machine. Without data servers on every
    worker that takes part, or without anything that serves, the sequences that are live are
    recomputed.
    """
    words = "1 sequence waits with its" if stored == 1 else f"{stored} sequences wait with their"
    lines = (f"{words} KV in files",) if stored else ()
    bare = MovePlan(ask, ShiftOrder(Mode.RECOMPUTE, stored=bool(stored), lines=lines))
    going = bare.going
    if ask.old is None:
        return bare
    seats = [
        seat for gear in (ask.old, ask.new) for one in gear.replicas.values() for seat in one.seats
    ]
    if not all(seat.data_port for seat in seats):
        mode = Mode.RECOMPUTE if going else Mode.BESIDE
        why = ("KV cannot be moved: a worker has no data server",) if going else ()
        return MovePlan(ask, ShiftOrder(mode, lines=(*why, *lines), stored=bool(stored)))
    nominal = plan_shift(shards, _facts(shards, ask, running, rates, step_s))
    plan = corrected(nominal)
    mode = Mode.BESIDE
    if going and plan.memory.verdict is MemoryVerdict.STOP:
        mode = Mode.PARK if plan.routes.to else Mode.RECOMPUTE
    order = ShiftOrder(
        mode=mode,
        holders=plan.holders,
        rate_bytes_per_s=rate_beside(plan, rates),
        lines=(*plan.lines(), *lines),
        stored=bool(stored),
        evicted=plan.routes.evicted,
        turn_layers=plan.memory.turn_layers if going else 0,
        transfer_s=plan.transfer_s,
        pause_s=plan.pause_s,
    )
    if mode is not Mode.BESIDE or not going:
        return MovePlan(ask, order, plan, nominal=nominal)
    return MovePlan(ask, order, plan, _bounds(shards, ask, plan, going, running), nominal)


def rate_beside(plan: ShiftPlan, rates: LinkRates) -> float:
    """What one source may send beside the serving gear: the slowest link in use bounds it."""
    used = {flow.link for flow in (*plan.weights, *plan.kv)} & {LinkKind.NODE, LinkKind.NETWORK}
    return min(rates.rate(link) for link in used or {LinkKind.NETWORK})


def _facts(
    shards: ShardMap,
    ask: PlanShift,
    running: Mapping[ReplicaKey, list[RunningKv]],
    rates: LinkRates,
    step_s: float,
) -> ShiftFacts:
    assert ask.old is not None
    old = [one for _, one in sorted(ask.old.replicas.items())]
    new = [one for _, one in sorted(ask.new.replicas.items())]
    number = {one.key: n for n, one in enumerate(old)}
    live = live_kv(shards.block_tokens, number, running)
    return ShiftFacts(
        old=tuple(map(replica_at, old)),
        new=tuple(map(replica_at, new)),
        kept={n: number[one.key] for n, one in enumerate(new) if one.key in number},
        live=live,
        arenas=dict(ask.arenas),
        leaving_s=dict(ask.leaving_s),
        rates=rates,
        step_s=step_s,
    )


def live_kv(
    block_tokens: int,
    number: Mapping[ReplicaKey, int],
    running: Mapping[ReplicaKey, list[RunningKv]],
) -> tuple[LiveKv, ...]:
    """The sequences that have KV, each with the number of its replica; others are left out."""
    return tuple(
        LiveKv(
            seq_id=kv.seq_id,
            replica=number[key],
            blocks=max(blocks_for(kv.computed, block_tokens), 1),
            tokens=kv.computed,
            arrival=kv.arrival,
            context=kv.most_tokens,
        )
        for key, sequences in running.items()
        if key in number
        for kv in sequences
        if kv.computed
    )


def in_parts(live: Sequence[LiveKv], most: int) -> tuple[LiveKv, ...]:
    """The same blocks in about so many parts, none over two replicas: enough to place a gear by.

    With few sequences each is one; with thousands a placement would take too long.
    """
    size = -(-len(live) // most)
    if size <= 1:
        return tuple(live)
    by_replica: dict[int, list[LiveKv]] = {}
    for one in live:
        by_replica.setdefault(one.replica, []).append(one)
    return tuple(
        LiveKv(
            seq_id=part[0].seq_id,
            replica=replica,
            blocks=sum(one.blocks for one in part),
            tokens=sum(one.tokens for one in part),
            arrival=part[0].arrival,
            context=max(one.context for one in part),
        )
        for replica, all_of_it in sorted(by_replica.items())
        for part in (all_of_it[n : n + size] for n in range(0, len(all_of_it), size))
    )


def _bounds(
    shards: ShardMap,
    ask: PlanShift,
    plan: ShiftPlan,
    going: tuple[InstalledReplica, ...],
    running: Mapping[ReplicaKey, list[RunningKv]],
) -> RoomBounds:
    """The plan has room for what is live and a block more for each sequence. Beyond that, a block
    costs its pages in the old replica and, once it is moved, in the new one.
    """
    spare_bytes = {gpu.worker: max(gpu.arena - gpu.most, 0) for gpu in plan.memory.gpus}
    coming = [one for one in ask.new.replicas.values() if one.key.epoch == ask.epoch]
    old_cost, new_cost = _block_costs(shards, going), _block_costs(shards, tuple(coming))
    bounds = RoomBounds()
    for one in going:
        more = min(spare_bytes[w] // (old_cost[w] + new_cost.get(w, 0)) for w in one.workers)
        sequences = running.get(one.key, [])
        bounds.foreseen[one.key] = in_use = sum(len(kv.blocks) + 1 for kv in sequences)
        bounds.limits[one.key] = min(in_use + more, one.replica.kv_blocks)
    for one in coming:
        bounds.spare[one.key] = min(spare_bytes[w] // new_cost[w] for w in one.workers)
        costs = (1 + old_cost.get(w, 0) / new_cost[w] for w in one.workers)
        bounds.grown_cost[one.key] = max(costs)
    return bounds


def _block_costs(shards: ShardMap, replicas: tuple[InstalledReplica, ...]) -> dict[str, int]:
    """Bytes of one block on each worker."""
    found = {}
    for one in map(replica_at, replicas):
        for seat, held in zip(one.seats, one.holdings, strict=True):
            found[seat.worker] = shards.block_bytes(held)
    return found
