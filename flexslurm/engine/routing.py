"""Which live sequence goes on in which new replica, and which cannot; pure.

Sequences go where most of their KV is, within two bounds: what a replica can hold, and a fair share
of the load, so that the nearest replica is not full while others are idle. Where the new replicas
hold less than is live, the newest sequences are evicted: admission is by arrival, and so is this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from flexslurm.gear import Replica

SLACK = 0.25
"""A replica may get this much more than its fair share of the live KV, to save moves."""


class LiveKv(msgspec.Struct, frozen=True):
    """A sequence that runs, and what it holds."""

    seq_id: str
    replica: int
    """Index of the old replica that has it."""
    blocks: int
    tokens: int
    """Positions whose KV is there."""
    arrival: int
    context: int
    """Tokens of prompt and answer that it may reach."""


class Room(msgspec.Struct, frozen=True):
    """What a new replica can take; of a kept one, what it has left."""

    blocks: int
    sequences: int
    max_context: int


class Routes(msgspec.Struct, frozen=True):
    """The answer: every sequence is in exactly one of the three."""

    to: dict[str, int]
    """New replica by sequence."""
    evicted: tuple[str, ...]
    """The newest first: they wait, and are recomputed when there is room."""
    unfit: tuple[str, ...]
    """Longer than any new replica may hold: they wait for another gear."""
    moved_bytes: int


def rooms_of(
    replicas: Sequence[Replica], kept: Mapping[int, int], live: Sequence[LiveKv]
) -> tuple[Room, ...]:
    """What each new replica can take besides the sequences of the old ones that are kept as it.

    `kept`: new number → old number.
    """
    blocks: Counter[int] = Counter()
    count: Counter[int] = Counter()
    for one in live:
        blocks[one.replica] += one.blocks
        count[one.replica] += 1
    rooms = []
    for number, replica in enumerate(replicas):
        old = kept.get(number, -1)
        rooms.append(
            Room(
                max(replica.kv_blocks - blocks[old], 0),
                max(replica.max_batch - count[old], 0),
                replica.max_context,
            )
        )
    return tuple(rooms)


def route_sequences(
    live: Sequence[LiveKv],
    costs: Sequence[Sequence[int]],
    rooms: Sequence[Room],
    slack: float = SLACK,
) -> Routes:
    """Choose a new replica for each sequence.

    `costs[old][new]`: bytes that one block moves (`kv_moves.route_costs`). With room to
    spare and no bound on balance (`slack` infinite), each sequence goes where it moves fewest.
    What fits no replica even alone is evicted whatever its age, and holds up nobody.
    """
    ordered = sorted(live, key=lambda one: (one.arrival, one.seq_id))
    longest = max((room.max_context for room in rooms), default=0)
    unfit = tuple(one.seq_id for one in ordered if one.context > longest)
    able = [one for one in ordered if any(_fits(one, room) for room in rooms)]
    low, best = len(able), _place(able, costs, rooms, slack)
    if best is None:
        low, high, best = 0, len(able), {}
        while high - low > 1:
            middle = (low + high) // 2
            placed = _place(able[:middle], costs, rooms, slack)
            if placed is None:
                high = middle
            else:
                low, best = middle, placed
    moved = sum(one.blocks * costs[one.replica][best[one.seq_id]] for one in able[:low])
    evicted = tuple(
        one.seq_id for one in reversed(ordered) if one.seq_id not in best and one.context <= longest
    )
    return Routes(best, evicted, unfit, moved)


def _fits(one: LiveKv, room: Room) -> bool:
    """Whether a replica could take it alone."""
    return one.blocks <= room.blocks and room.sequences > 0 and one.context <= room.max_context


@dataclass(slots=True)
class _Bin:
    """A new replica while it is filled."""

    blocks: int
    sequences: int
    max_context: int
    fair: int
    """Blocks of its fair share that are left; may fall below zero when nothing else fits."""

    def takes(self, one: LiveKv) -> bool:
        return one.blocks <= self.blocks and self.sequences > 0 and one.context <= self.max_context


def _place(
    live: Sequence[LiveKv], costs: Sequence[Sequence[int]], rooms: Sequence[Room], slack: float
) -> dict[str, int] | None:
    """A replica for all of them, or None where they do not fit."""
    bins = _bins(live, rooms, slack)

    def regret(one: LiveKv) -> tuple[int, int]:
        """Bytes lost by the second-best place: who loses most chooses first."""
        able = sorted(
            costs[one.replica][n] for n, room in enumerate(rooms) if one.context <= room.max_context
        )
        extra = able[1] - able[0] if len(able) > 1 else 0
        return extra * one.blocks, one.blocks

    chosen: dict[str, int] = {}
    for one in sorted(live, key=regret, reverse=True):
        number = _choose(one, costs[one.replica], bins)
        if number is None:
            return _pack(live, rooms)
        _put(one, bins[number])
        chosen[one.seq_id] = number
    _improve(live, costs, bins, chosen)
    return chosen


def _bins(live: Sequence[LiveKv], rooms: Sequence[Room], slack: float) -> list[_Bin]:
    total, capacity = sum(one.blocks for one in live), sum(room.blocks for room in rooms)
    longest = max((one.blocks for one in live), default=0)

    def fair(room: Room) -> int:
        if slack == float("inf") or not capacity:
            return room.blocks
        return max(int(total * room.blocks / capacity * (1 + slack)) + 1, longest)

    return [_Bin(room.blocks, room.sequences, room.max_context, fair(room)) for room in rooms]


def _put(one: LiveKv, bin: _Bin) -> None:
    bin.blocks -= one.blocks
    bin.fair -= one.blocks
    bin.sequences -= 1


def _choose(one: LiveKv, costs: Sequence[int], bins: Sequence[_Bin]) -> int | None:
    able = [n for n, bin in enumerate(bins) if bin.takes(one)]
    if not able:
        return None
    within = [n for n in able if bins[n].fair >= one.blocks]
    # Among equals the emptiest; beyond all fair shares too.
    if within:
        return min(within, key=lambda n: (costs[n], -bins[n].fair, n))
    return max(able, key=lambda n: (bins[n].fair, -costs[n], -n))


def _pack(live: Sequence[LiveKv], rooms: Sequence[Room]) -> dict[str, int] | None:
    """The largest first, each where it leaves least: when room is scarce, bytes come second."""
    bins = _bins(live, rooms, 0.0)
    chosen: dict[str, int] = {}
    for one in sorted(live, key=lambda one: (one.context, one.blocks), reverse=True):
        able = [n for n, bin in enumerate(bins) if bin.takes(one)]
        if not able:
            return None
        number = min(able, key=lambda n: (bins[n].max_context, bins[n].blocks, n))
        _put(one, bins[number])
        chosen[one.seq_id] = number
    return chosen


def _improve(
    live: Sequence[LiveKv],
    costs: Sequence[Sequence[int]],
    bins: Sequence[_Bin],
    chosen: dict[str, int],
) -> None:
    """Move single sequences to a cheaper replica that has room for them, until none is."""
    changed = True
    while changed:  # ends: the bytes fall each time
        changed = False
        for one in live:
            at, row = chosen[one.seq_id], costs[one.replica]
            for n in sorted(range(len(bins)), key=lambda n: row[n]):
                if row[n] >= row[at]:
                    break
                if bins[n].takes(one) and bins[n].fair >= one.blocks:
                    _put(one, bins[n])
                    bins[at].blocks += one.blocks
                    bins[at].fair += one.blocks
                    bins[at].sequences += 1
                    chosen[one.seq_id], changed = n, True
                    break
