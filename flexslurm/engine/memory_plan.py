"""Bytes of every GPU at each phase of a shift, and whether both gears can be held; pure.

The arena holds weights and pages. A new epoch's weights that lie inside a segment that is there are
views of it; everything else is taken anew, beside the old. Pages of full blocks that stay on their
GPU are shared; the last block of a sequence, which both epochs may write, is not. So the most is
used at the end of the cut-over, before the old epoch is retired.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from flexslurm.config.size_words import show_bytes
from flexslurm.engine.kv_moves import meetings
from flexslurm.engine.ownership import Holding, Piece, ReplicaAt, ShardMap
from flexslurm.engine.reshard import LinkKind
from flexslurm.engine.routing import LiveKv
from flexslurm.engine.turns import turns_of
from flexslurm.planner.model_spec import ALIGNMENT_BYTES, aligned


class MemoryVerdict(StrEnum):
    """Whether two gears fit into the GPUs' memory at once."""

    BESIDE = "beside"
    """The old gear serves until the cut-over."""
    STOP = "stop"
    """Both do not fit: pause, park KV in host memory, retire, install, pull back."""


class GpuBytes(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's arena through a shift."""

    worker: str
    arena: int
    old_weights: int
    """There now, and until the old epoch is retired."""
    new_weights: int
    """Taken in PREPARE, beside the old."""
    old_pages: int
    """In use by the time of the cut-over."""
    new_pages: int
    """Taken in TRANSFER and CUTOVER, shared ones left out."""
    weights_after: int
    pages_after: int

    @property
    def prepare(self) -> int:
        """In use when the new weights are in, bar the tokens decoded meanwhile."""
        return self.old_weights + self.new_weights + self.old_pages

    @property
    def most(self) -> int:
        """In use at the end of the cut-over: no phase has more."""
        return max(self.prepare + self.new_pages, self.after)

    @property
    def after(self) -> int:
        return self.weights_after + self.pages_after

    @property
    def short(self) -> int:
        return max(self.most - self.arena, 0)


class MemoryPlan(msgspec.Struct, frozen=True):
    """All GPUs, and what follows."""

    gpus: tuple[GpuBytes, ...]
    verdict: MemoryVerdict
    short_bytes: int
    """Of the GPU that lacks most; 0 with BESIDE."""
    why: str
    parked_bytes: int
    """What STOP copies to host memory, all GPUs together."""
    turn_layers: int = 0
    """With STOP: so many layers at a time can be handed over between the gears; 0: none can."""

    def of(self, worker: str) -> GpuBytes:
        return next(gpu for gpu in self.gpus if gpu.worker == worker)


@dataclass(slots=True)
class _Gpu:
    held: list[Holding] = field(default_factory=list)
    kept: list[Holding] = field(default_factory=list)
    """Of `held`: what stays because its replica does."""
    need: list[Holding] = field(default_factory=list)
    old_pages: int = 0
    new_pages: int = 0
    pages_after: int = 0


def memory_plan(
    shards: ShardMap,
    old: Sequence[ReplicaAt],
    new: Sequence[ReplicaAt],
    kept: Mapping[int, int],
    live: Sequence[LiveKv],
    routes: Mapping[str, int],
    arenas: Mapping[str, int],
    grow_blocks: int = 1,
) -> MemoryPlan:
    """What each GPU holds through the shift.

    `kept`: new replicas that are old ones as they are. `routes`: the new replica of each sequence
    that leaves its old one with KV. `arenas`: bytes by worker, of those that live. `grow_blocks`:
    how far each sequence may grow while the old gear serves on, bounded by its context.
    """
    gpus = _by_gpu(old, new, kept)
    stay = {before: number for number, before in kept.items()}
    moving = [one for one in live if one.replica not in stay]
    targets = {one.seq_id: stay[one.replica] for one in live if one.replica in stay} | dict(routes)
    _count_pages(shards, old, new, kept, live, targets, grow_blocks, gpus)
    found = tuple(
        _gpu_bytes(shards, worker, arena, gpus[worker]) for worker, arena in sorted(arenas.items())
    )
    blocks = sum(one.blocks for one in moving if one.seq_id in routes)
    whole = Holding(0, shards.info.num_layers, 1, 0)
    parked = blocks * shards.block_bytes(whole)
    judged = _judge(found, parked)
    if judged.verdict is MemoryVerdict.BESIDE:
        return judged
    return msgspec.structs.replace(judged, turn_layers=_turn_layers(shards, gpus, arenas))


def _by_gpu(
    old: Sequence[ReplicaAt], new: Sequence[ReplicaAt], kept: Mapping[int, int]
) -> dict[str, _Gpu]:
    """What each worker's GPU has and needs of weights; pages are still to be counted."""
    gpus: dict[str, _Gpu] = defaultdict(_Gpu)
    for number, replica in enumerate(old):
        stays = number in kept.values()
        for seat, held in zip(replica.seats, replica.holdings, strict=True):
            gpus[seat.worker].held.append(held)
            if stays:
                gpus[seat.worker].kept.append(held)
    for number, replica in enumerate(new):
        if number not in kept:
            for seat, held in zip(replica.seats, replica.holdings, strict=True):
                gpus[seat.worker].need.append(held)
    return gpus


def _turn_layers(shards: ShardMap, gpus: Mapping[str, _Gpu], arenas: Mapping[str, int]) -> int:
    """The most layers at a time that fit on every GPU; 0 where not even one by one does."""
    # GPUs of a replica that stays have no slot of another, and are no part of it.
    concerned = {worker: gpu for worker, gpu in gpus.items() if not gpu.kept}
    layers = 2 * shards.info.num_layers
    while layers > 1:
        layers = -(-layers // 2)  # each turn costs the pause a meeting of all workers
        if all(
            hand_over_peak(shards, gpu.held, gpu.need, layers) <= arenas.get(worker, 0)
            for worker, gpu in concerned.items()
        ):
            return layers
    return 0


def _count_pages(
    shards: ShardMap,
    old: Sequence[ReplicaAt],
    new: Sequence[ReplicaAt],
    kept: Mapping[int, int],
    live: Sequence[LiveKv],
    targets: Mapping[str, int],
    grow_blocks: int,
    gpus: Mapping[str, _Gpu],
) -> None:
    """`targets`: the new replica of every sequence that keeps its KV, by moving or by staying."""
    before, later, full = _Blocks(), _Blocks(), Counter[tuple[int, int]]()
    for one in live:
        most = max(-(-one.context // shards.block_tokens), one.blocks)
        grown = min(one.blocks + grow_blocks, most)
        before.add(one.replica, one.blocks, grown)
        target = targets.get(one.seq_id)
        if target is not None:
            later.add(target, one.blocks, grown)
            whole = min(one.tokens // shards.block_tokens, one.blocks)
            full[one.replica, target] += grown if kept.get(target) == one.replica else whole
    for number, replica in enumerate(old):
        blocks = before.most(number, replica.replica.kv_blocks)
        for seat, held in zip(replica.seats, replica.holdings, strict=True):
            gpus[seat.worker].old_pages += shards.kv_box(held).pages * blocks
    for number, replica in enumerate(new):
        blocks = later.most(number, replica.replica.kv_blocks)
        for seat, held in zip(replica.seats, replica.holdings, strict=True):
            pages = shards.kv_box(held).pages * blocks
            gpus[seat.worker].pages_after += pages
            gpus[seat.worker].new_pages += pages
    for (source, target), count in full.items():
        blocks = min(count, before.most(source, old[source].replica.kv_blocks))
        for met in meetings(shards, old[source], new[target]):
            if met.link is LinkKind.HELD:
                worker = new[target].seats[met.new].worker
                gpus[worker].new_pages -= met.box.pages * blocks


class _Blocks:
    """Blocks by replica: in use, and with the growth that is allowed for."""

    def __init__(self) -> None:
        self._now, self._grown = Counter[int](), Counter[int]()

    def add(self, replica: int, now: int, grown: int) -> None:
        self._now[replica] += now
        self._grown[replica] += grown

    def most(self, replica: int, bound: int) -> int:
        """No replica grows past its own bound."""
        return max(min(self._grown[replica], bound), self._now[replica])


def hand_over_peak(
    shards: ShardMap, held: Sequence[Holding], need: Sequence[Holding], turn_layers: int
) -> int:
    """The most bytes of weights that one GPU has while layers are handed over in turns.

    In each turn the new weights of its layers are taken, and then the old ones go, save for what
    the new ones are views of. Without pages: these are parked.
    """
    turns = turns_of(shards.info.num_layers, turn_layers)
    whole = Holding(0, shards.info.num_layers, 1, 0)
    old, fresh, viewed = [0] * len(turns), [0] * len(turns), [0] * len(turns)
    for number, (layers, edges) in enumerate(turns):
        names = {p.tensor for n in layers for p in shards.layer_pieces(n, whole)}
        if edges:
            names |= {piece.tensor for piece in shards.edge_pieces(whole)}
        have = [p for one in held for p in shards.pieces(one) if p.tensor in names]
        old[number] = sum(aligned(piece.nbytes) for piece in have)
        for piece in (p for one in need for p in shards.pieces(one) if p.tensor in names):
            near = next((p for p in have if p.holds(piece)), None)
            if near is None:
                fresh[number] += aligned(piece.nbytes)
            else:
                viewed[number] += _span(piece, near)
    taken = 0
    most = 0
    for number in range(len(turns)):
        most = max(most, taken + fresh[number] + sum(old[number:]))
        taken += fresh[number] + viewed[number]
    return max(most, taken)


def _gpu_bytes(shards: ShardMap, worker: str, arena: int, gpu: _Gpu) -> GpuBytes:
    segments: dict[str, list[Piece]] = {}
    old_weights = 0
    for held in gpu.held:
        for piece in shards.pieces(held):
            near = segments.setdefault(piece.tensor, [])
            if not any(segment.holds(piece) for segment in near):
                near.append(piece)
                old_weights += aligned(piece.nbytes)
    new_weights = viewed = 0
    for need in gpu.need:
        for piece in shards.pieces(need):
            near = [s for s in segments.get(piece.tensor, ()) if s.holds(piece)]
            if near:
                viewed += _span(piece, near[0])
            else:
                new_weights += aligned(piece.nbytes)
    stays = sum(shards.weights_bytes(held) for held in gpu.kept)
    page = shards.page_bytes
    return GpuBytes(
        worker=worker,
        arena=arena,
        old_weights=old_weights,
        new_weights=new_weights,
        old_pages=gpu.old_pages * page,
        new_pages=gpu.new_pages * page,
        weights_after=stays + new_weights + viewed,
        pages_after=gpu.pages_after * page,
    )


def _span(piece: Piece, segment: Piece) -> int:
    """Bytes of a segment that a view of it keeps, alignment at both ends included."""
    start = (piece.lo - segment.lo) * piece.unit_bytes
    stop = (piece.hi - segment.lo) * piece.unit_bytes
    return aligned(stop) - start // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def _judge(gpus: tuple[GpuBytes, ...], parked: int) -> MemoryPlan:
    worst = max(gpus, key=lambda gpu: (gpu.short, gpu.worker), default=None)
    if worst is None or worst.short == 0:
        free = min((gpu.arena - gpu.most for gpu in gpus), default=0)
        why = f"both gears fit: at least {show_bytes(free)} stay free on every GPU"
        return MemoryPlan(gpus, MemoryVerdict.BESIDE, 0, why, 0)
    why = (
        f"both gears do not fit: {worst.worker} would need {show_bytes(worst.most)} "
        f"(weights {show_bytes(worst.old_weights)} + {show_bytes(worst.new_weights)}, pages "
        f"{show_bytes(worst.old_pages)} + {show_bytes(worst.new_pages)}) "
        f"and has {show_bytes(worst.arena)}: {show_bytes(worst.short)} are short"
    )
    return MemoryPlan(gpus, MemoryVerdict.STOP, worst.short, why, parked)
