"""A whole shift on paper: what stays, what moves over which link, how long, what is lost; pure.

The head acts on the parts; `flexslurm shift --dry-run` prints the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from flexslurm.config.size_words import show_bytes
from flexslurm.engine.deadline import Candidate, Scheduled, deadline_schedule, source_budgets
from flexslurm.engine.kv_moves import meetings, movable, route_costs
from flexslurm.engine.memory_plan import MemoryPlan, MemoryVerdict, memory_plan
from flexslurm.engine.ownership import ReplicaAt, Seat, ShardMap
from flexslurm.engine.reshard import CHECKPOINT, LinkKind, WeightMove, weight_moves
from flexslurm.engine.routing import LiveKv, Routes, rooms_of, route_sequences
from flexslurm.gear import Slot
from flexslurm.messages import WeightHolder
from flexslurm.planner.topology import Topology

BESIDE_SHARE = 0.85
"""Of its throughput, what the old gear keeps at least while transfers run beside it."""


class LinkRates(msgspec.Struct, frozen=True, kw_only=True):
    """What transfers may count on, in bytes per second of the whole link."""

    gpu: float = 200e9
    node: float = 20e9
    network: float = 12.5e9
    checkpoint: float = 1e9
    share: float = 0.6
    """Of node and network links, while the old gear serves."""
    limit: float | None = None
    """Absolute bound of what one source sends, where the service sets one."""

    @classmethod
    def of(
        cls, topology: Topology, gpu_types: Iterable[str], limit_mbps: float | None = None
    ) -> LinkRates:
        """A site's links; where GPUs of several types take part, the slowest of each kind."""
        gpus = [topology.gpu(name) for name in sorted(set(gpu_types))]
        return cls(
            gpu=min(gpu.memory_bandwidth for gpu in gpus) / 2,
            node=min(gpu.link.bandwidth for gpu in gpus),
            network=topology.node_link.bandwidth,
            checkpoint=min(gpu.storage_bandwidth for gpu in gpus),
            limit=None if limit_mbps is None else limit_mbps * 1e6,
        )

    def rate(self, link: LinkKind, *, paced: bool = True) -> float:
        """Bytes per second; `paced`: beside the serving gear."""
        whole: float = {
            LinkKind.GPU: self.gpu,
            LinkKind.NODE: self.node,
            LinkKind.NETWORK: self.network,
            LinkKind.CHECKPOINT: self.checkpoint,
        }.get(link, float("inf"))
        if link not in (LinkKind.NODE, LinkKind.NETWORK):
            return whole
        bound = whole * self.share if paced else whole
        return min(bound, self.limit) if self.limit is not None else bound


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    """Bytes from a source to a target over a link; `source` is "" for the checkpoint."""

    source: str
    target: str
    link: LinkKind
    nbytes: int


class SlotMoves(msgspec.Struct, frozen=True):
    """What one slot of the new gear takes."""

    slot: Slot
    worker: str
    moves: tuple[WeightMove, ...]


class ShiftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a shift is planned from."""

    old: tuple[ReplicaAt, ...]
    new: tuple[ReplicaAt, ...]
    """Kept replicas under their old epoch and index."""
    kept: dict[int, int]
    """New number → old number."""
    live: tuple[LiveKv, ...]
    """Their `replica` is an index into `old`."""
    arenas: dict[str, int]
    """Bytes by worker, of all workers of both gears."""
    spares: tuple[WeightHolder, ...] = ()
    """Further workers that hold weights."""
    gone: frozenset[str] = frozenset()
    """Workers that are lost: they give nothing."""
    leaving_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds that workers on notice still answer."""
    rates: LinkRates = LinkRates()
    step_s: float = 0.05
    probe_s: float = 0.0


class ShiftPlan(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    """The answer; every figure in bytes and seconds."""

    kept: dict[int, int]
    holders: tuple[WeightHolder, ...]
    """For `Install.holders`; the sources of `slots` are numbers in it."""
    slots: tuple[SlotMoves, ...]
    routes: Routes
    staying: tuple[str, ...]
    """Sequences whose replica is kept."""
    recomputed: tuple[str, ...]
    """Sequences that go on from their tokens: a member of their replica is lost."""
    scheduled: tuple[Scheduled, ...]
    """With a deadline: what is moved, best first; other sequences are recomputed."""
    memory: MemoryPlan
    weights: tuple[Traffic, ...]
    kv: tuple[Traffic, ...]
    transfer_s: float
    pause_s: float
    ahead_s: float = 0.0
    """Where both gears do not fit: of the transfers, what comes to host memory before the pause."""

    @cached_property
    def totals(self) -> dict[str, dict[LinkKind, int]]:
        """Bytes by link, of `weights` and of `kv`."""
        return {"weights": _totals(self.weights), "kv": _totals(self.kv)}

    @property
    def served_share(self) -> float:
        """Of the throughput before, what the shift leaves of it on average while it lasts."""
        whole = self.transfer_s + self.pause_s
        stop = self.memory.verdict is MemoryVerdict.STOP
        beside_s = self.ahead_s if stop else self.transfer_s
        return BESIDE_SHARE * beside_s / whole if whole > 0 else 0.0

    def _handing_over(self) -> str:
        turn = self.memory.turn_layers
        if not turn:
            return "not even layer by layer do both fit: weights are read from the files"
        layers = "layer by layer" if turn == 1 else f"up to {turn} layers at once"
        return (
            f"weights are handed over from the old gear, {layers}, and not read from the files; "
            "what other GPUs give comes to host memory while it serves"
        )

    def lines(self) -> tuple[str, ...]:
        """The plan in words, for people."""
        kept = ", ".join(f"{old} → {new}" for new, old in sorted(self.kept.items()))
        found = [f"replicas that stay: {kept or 'none'}"]
        for what, by_link in self.totals.items():
            parts = [
                f"{show_bytes(by_link[link])} {_WORDS[link]}" for link in LinkKind if by_link[link]
            ]
            found.append(f"{what}: {', '.join(parts) or 'nothing'}")
        found.append(f"memory: {self.memory.why}")
        if self.memory.verdict is MemoryVerdict.STOP:
            found.append(f"serving stops; {show_bytes(self.memory.parked_bytes)} of KV are parked")
            found.append(self._handing_over())
        moving, lost = len(self.routes.to), len(self.recomputed)
        found.append(
            f"sequences: {len(self.staying)} stay, {moving} move, {lost} are recomputed, "
            f"{len(self.routes.evicted)} are evicted, {len(self.routes.unfit)} are too long"
        )
        if self.routes.evicted:
            found.append(f"they wait for room, the newest first: {_named(self.routes.evicted)}")
        if self.routes.unfit:
            found.append(f"they wait for a larger gear: {_named(self.routes.unfit)}")
        if self.scheduled:
            words = ", ".join(f"{one.seq_id} ({one.blocks})" for one in self.scheduled[:8])
            more = ", …" if len(self.scheduled) > 8 else ""
            found.append(f"before the notice ends, by blocks that make it: {words}{more}")
        found.append(f"estimated: {self.transfer_s:.2f} s of transfer, {self.pause_s:.3f} s pause")
        return tuple(found)


_WORDS = {
    LinkKind.HELD: "stay in place",
    LinkKind.GPU: "copied inside a GPU",
    LinkKind.NODE: "inside a node",
    LinkKind.NETWORK: "over the network",
    LinkKind.CHECKPOINT: "from the checkpoint",
}


def _named(sequences: Sequence[str]) -> str:
    return ", ".join(sequences[:8]) + (", …" if len(sequences) > 8 else "")


def plan_shift(shards: ShardMap, facts: ShiftFacts) -> ShiftPlan:
    """Everything a shift moves, keeps and needs, from who is where and what is live."""
    stay = set(facts.kept.values())
    staying = [one for one in facts.live if one.replica in stay]
    able = [movable(replica, facts.gone) for replica in facts.old]
    moving = [one for one in facts.live if one.replica not in stay and able[one.replica]]
    lost = [one for one in facts.live if one.replica not in stay and not able[one.replica]]
    costs = route_costs(shards, facts.old, facts.new)
    rooms = rooms_of([r.replica for r in facts.new], facts.kept, staying)
    routes = route_sequences(moving, costs, rooms)
    memory = memory_plan(
        shards, facts.old, facts.new, facts.kept, (*staying, *moving), routes.to, facts.arenas
    )
    stop = memory.verdict is MemoryVerdict.STOP
    # What is retired before the install gives nothing, unless its weights can stay meanwhile.
    gone = stop and not memory.turn_layers
    givers = [one for i, one in enumerate(facts.old) if i in stay] if gone else facts.old
    holders = holders_of(givers, facts.spares, facts.gone)
    slots = tuple(_slot_moves(shards, facts, holders))
    weights = _weight_traffic(slots, holders)
    kv = _kv_traffic(shards, facts, moving, routes, last=False)
    last = _kv_traffic(shards, facts, moving, routes, last=True)
    # What does not fit beside waits on the hosts, if its givers live until then.
    ahead_s = _seconds(weights, facts, paced=True) if stop and memory.turn_layers else 0.0
    moving_s = _seconds(kv if ahead_s else (*weights, *kv), facts, paced=not stop)
    ending = _seconds(last, facts, paced=False) + facts.probe_s + 3 * facts.step_s
    return ShiftPlan(
        kept=dict(facts.kept),
        holders=holders,
        slots=slots,
        routes=routes,
        staying=tuple(one.seq_id for one in staying),
        recomputed=tuple(one.seq_id for one in lost),
        scheduled=_scheduled(shards, facts, moving, routes, weights),
        memory=memory,
        weights=weights,
        kv=kv,
        transfer_s=ahead_s + moving_s,
        pause_s=moving_s + ending if stop else ending,
        ahead_s=ahead_s,
    )


def holders_of(
    old: Sequence[ReplicaAt], spares: Sequence[WeightHolder] = (), gone: Collection[str] = ()
) -> tuple[WeightHolder, ...]:
    """Everyone who may be asked for weights, in a fixed order: for `Install.holders`."""
    known = [holder for replica in old for holder in replica.holders()]
    return tuple(holder for holder in (*known, *spares) if holder.worker not in gone)


def _slot_moves(
    shards: ShardMap, facts: ShiftFacts, holders: Sequence[WeightHolder]
) -> Sequence[SlotMoves]:
    found = []
    for number, replica in enumerate(facts.new):
        if number in facts.kept:
            continue
        for slot, seat, need in zip(replica.slots, replica.seats, replica.holdings, strict=True):
            moves = weight_moves(shards, need, seat.worker, seat.node, holders)
            found.append(SlotMoves(slot, seat.worker, moves))
    return found


def _weight_traffic(
    slots: Sequence[SlotMoves], holders: Sequence[WeightHolder]
) -> tuple[Traffic, ...]:
    sums: Counter[tuple[str, str, LinkKind]] = Counter()
    for slot in slots:
        for move in slot.moves:
            source = "" if move.source == CHECKPOINT else holders[move.source].worker
            sums[source, slot.worker, move.link] += move.nbytes
    return _traffic(sums)


def _kv_traffic(
    shards: ShardMap,
    facts: ShiftFacts,
    moving: Sequence[LiveKv],
    routes: Routes,
    *,
    last: bool,
) -> tuple[Traffic, ...]:
    """All blocks that move; with `last`, only the one of each sequence that is not full."""
    blocks: Counter[tuple[int, int]] = Counter()
    for one in moving:
        if one.seq_id in routes.to:
            blocks[one.replica, routes.to[one.seq_id]] += min(one.blocks, 1) if last else one.blocks
    sums: Counter[tuple[str, str, LinkKind]] = Counter()
    for (i, j), count in blocks.items():
        old, new = facts.old[i], facts.new[j]
        for met in meetings(shards, old, new):
            key = (old.seats[met.old].worker, new.seats[met.new].worker, met.link)
            sums[key] += met.box.pages * shards.page_bytes * count
    return _traffic(sums)


def _traffic(sums: Counter[tuple[str, str, LinkKind]]) -> tuple[Traffic, ...]:
    return tuple(Traffic(*key, nbytes) for key, nbytes in sorted(sums.items()))


def _totals(traffic: Sequence[Traffic]) -> dict[LinkKind, int]:
    found = dict.fromkeys(LinkKind, 0)
    for one in traffic:
        found[one.link] += one.nbytes
    return found


def _seconds(traffic: Sequence[Traffic], facts: ShiftFacts, *, paced: bool) -> float:
    """Time of what runs side by side: the busiest end of any link decides.

    Workers send and receive inside a node each for itself; the network is the node's.
    """
    places = _places(facts)
    ends: Counter[tuple[str, str, LinkKind]] = Counter()
    for one in traffic:
        network = one.link is LinkKind.NETWORK
        for way, worker in (("out", one.source), ("in", one.target)):
            if worker:
                end = places[worker].node if network else worker
                ends[way, end, one.link] += one.nbytes
    return max(
        (nbytes / facts.rates.rate(link, paced=paced) for (_, _, link), nbytes in ends.items()),
        default=0.0,
    )


def _places(facts: ShiftFacts) -> Mapping[str, Seat]:
    seats = {s.worker: s for replica in (*facts.old, *facts.new) for s in replica.seats}
    return {h.worker: Seat(h.worker, h.node) for h in facts.spares} | seats


def _scheduled(
    shards: ShardMap,
    facts: ShiftFacts,
    moving: Sequence[LiveKv],
    routes: Routes,
    weights: Sequence[Traffic],
) -> tuple[Scheduled, ...]:
    """What fits before workers on notice go, best first; empty where nobody leaves."""
    if not facts.leaving_s:
        return ()
    reserved: Counter[str] = Counter()
    for flow in weights:
        if flow.link in (LinkKind.NODE, LinkKind.NETWORK):
            reserved[flow.source] += flow.nbytes
    rate = facts.rates.rate(LinkKind.NETWORK)
    budgets: dict[str, int] = {}
    for worker, seconds in facts.leaving_s.items():
        budgets |= source_budgets([worker], rate, seconds, reserved)
    sent: dict[tuple[int, int], dict[str, int]] = {}
    candidates = []
    for one in moving:
        target = routes.to.get(one.seq_id)
        if target is None:
            continue
        key = (one.replica, target)
        if key not in sent:
            sent[key] = _sent_per_block(shards, facts.old[one.replica], facts.new[target])
        candidates.append(Candidate(one.seq_id, one.blocks, sent[key]))
    return deadline_schedule(candidates, budgets, shards.block_tokens)


def _sent_per_block(shards: ShardMap, old: ReplicaAt, new: ReplicaAt) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for met in meetings(shards, old, new):
        if met.link is not LinkKind.HELD:
            sums[old.seats[met.old].worker] += met.box.pages * shards.page_bytes
    return dict(sums)
