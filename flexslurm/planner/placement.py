"""Which physical GPU fills which slot of a gear: the one that has most of what the slot needs.

A gear's abstract nodes go to physical nodes one to one, and the slots of a node to its GPUs. Both
are assignment problems, and the inner one's answer is the outer one's figure, so together they
keep the most bytes that any placement keeps. What a GPU has of a slot's needs is the caller's to
say; this never knows what a layer is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from flexslurm.errors import CapacityError
from flexslurm.gear import Gear, Replica, Shape, Slot, replica_slots, slots
from flexslurm.planner.leaves import gather

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class GpuRef(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A physical GPU."""

    node: str
    """Identifies the node for the caller: a name, or an agent's incarnation."""
    gpu: int

    def __str__(self) -> str:
        return f"{self.node}:{self.gpu}"


class PhysicalNode(msgspec.Struct, frozen=True):
    """A node and the GPUs on it that may be used."""

    node: str
    gpu_type: str
    gpus: tuple[int, ...]


class Current(msgspec.Struct, frozen=True):
    """The gear that is left, in its place; its GPUs need not be present any more."""

    gear: Gear
    at: Mapping[Slot, GpuRef]


class Placement(msgspec.Struct, frozen=True):
    """A GPU for every slot of a gear."""

    slots: dict[Slot, GpuRef]
    kept_bytes: int
    """What need not move: the sum of `kept` over the slots."""
    kept_replicas: dict[int, int]
    """Replicas that stay as they are where they are: new number → old number."""


Kept = Callable[[Sequence[Slot], Sequence[GpuRef]], "npt.NDArray[np.float64]"]
"""Whole bytes of what each slot needs that each GPU has, `[slots, GPUs]`.

Asked only for GPUs of the current gear.
"""

At = TypeVar("At", bound=Hashable)


def place(
    gear: Gear,
    nodes: Sequence[PhysicalNode],
    current: Current | None = None,
    kept: Kept | None = None,
    leaves: Mapping[str, str] | None = None,
) -> Placement:
    """Put the gear's abstract nodes on physical ones and its slots on their GPUs.

    No placement keeps more bytes. Among those that keep as many, one where whole replicas stay
    as they are is taken, then one that leaves slots with their present owners; nodes that hold
    nothing are chosen so that replicas cross few leaf switches (`leaves`: the switch of each
    node). Raises CapacityError where the nodes cannot hold the gear.
    """
    problem = _Problem(gear, nodes, current, kept)
    found = problem.solve({})
    pins = whole_replicas(gear, nodes, current) if found is not None and current else {}
    pinned = problem.solve(pins) if pins else None
    if found is None:
        raise CapacityError(f"the nodes present cannot hold gear {gear.name}")
    if pinned is not None and problem.bytes_of(pinned) >= problem.bytes_of(found):
        found = pinned
    if leaves:
        found = _under_few_leaves(gear, nodes, found, current, leaves)
    same = match_replicas(current.gear, current.at, gear, found) if current else {}
    return Placement(dict(sorted(found.items())), problem.bytes_of(found), same)


def _under_few_leaves(
    gear: Gear,
    nodes: Sequence[PhysicalNode],
    found: Mapping[Slot, GpuRef],
    current: Current | None,
    leaves: Mapping[str, str],
) -> dict[Slot, GpuRef]:
    """Exchange nodes that hold nothing, GPU for GPU, so that replicas cross fewer switches."""
    held = {ref.node for ref in current.at.values()} if current is not None else set()
    free = {n.node: (n.gpu_type, len(n.gpus)) for n in nodes if n.node not in held}
    index_of = {slot: gear.replicas[slot.replica].stages[slot.stage].node for slot in found}
    before = {index_of[slot]: ref.node for slot, ref in found.items()}
    after = gather(gear, before, free, leaves)
    gpus = {node.node: sorted(node.gpus) for node in nodes}

    def moved(slot: Slot, ref: GpuRef) -> GpuRef:
        node = after[index_of[slot]]
        return ref if node == ref.node else GpuRef(node, gpus[node][gpus[ref.node].index(ref.gpu)])

    return {slot: moved(slot, ref) for slot, ref in found.items()}


# -------------------------------------------------------------------------------- whole replicas


def match_replicas(
    old: Gear, old_at: Mapping[Slot, At], new: Gear, new_at: Mapping[Slot, At]
) -> dict[int, int]:
    """Replicas that are the same in the same places: new number → old number."""
    places = {_places(old, number, old_at): number for number in range(len(old.replicas))}
    found: dict[int, int] = {}
    for number, replica in enumerate(new.replicas):
        before = places.get(_places(new, number, new_at))
        if before is not None and same_replica(old.replicas[before], replica):
            found[number] = before
    return found


def _places(gear: Gear, number: int, at: Mapping[Slot, At]) -> tuple[At | None, ...]:
    return tuple(at.get(slot) for slot in replica_slots(gear.replicas[number], number))


def same_replica(one: Replica, other: Replica) -> bool:
    """Whether two replicas are equal but for the abstract nodes they name."""
    return bare_replica(one) == bare_replica(other)


def bare_replica(replica: Replica) -> Replica:
    """The replica with no word on which nodes it is on."""
    stages = tuple(msgspec.structs.replace(stage, node=0) for stage in replica.stages)
    return msgspec.structs.replace(replica, stages=stages)


def whole_replicas(
    gear: Gear, nodes: Sequence[PhysicalNode], current: Current | None
) -> dict[Slot, GpuRef]:
    """Places of replicas that could stay as they are, each with one old replica, consistently.

    First come, first served: not always the most replicas that could stay, but all of them
    where replicas are only added or taken away.
    """
    if current is None:
        return {}
    keeper = _Keeper(gear, nodes, current)
    for number in range(len(gear.replicas)):
        keeper.keep(number)
    return keeper.pins


class _Keeper:
    """Finds a home for one replica after the other; node for node, GPU for GPU."""

    def __init__(self, gear: Gear, nodes: Sequence[PhysicalNode], current: Current) -> None:
        self._gear, self._current = gear, current
        self._present = {node.node: node for node in nodes}
        self._wanted = _slots_by_node(gear)
        self._shapes = gear.signature.nodes()
        self._node_of: dict[int, str] = {}
        self._left = list(range(len(current.gear.replicas)))
        self._bare = [bare_replica(replica) for replica in current.gear.replicas]
        self.pins: dict[Slot, GpuRef] = {}

    def keep(self, number: int) -> None:
        bare = bare_replica(self._gear.replicas[number])
        for old in sorted(self._left, key=lambda old: (old != number, old)):
            if self._bare[old] != bare:
                continue
            pins = self._pins(number, old)
            if pins is not None:
                self._left.remove(old)
                self.pins |= pins
                return

    def _pins(self, number: int, old: int) -> dict[Slot, GpuRef] | None:
        node_of = dict(self._node_of)
        pins: dict[Slot, GpuRef] = {}
        replica = self._gear.replicas[number]
        for slot in replica_slots(replica, number):
            ref = self._current.at.get(Slot(old, slot.stage, slot.tp_rank))
            node = self._present.get(ref.node) if ref is not None else None
            if ref is None or node is None or ref.gpu not in node.gpus:
                return None
            index = replica.stages[slot.stage].node
            if node_of.setdefault(index, ref.node) != ref.node or not _fits(
                self._shapes[index], node, len(self._wanted[index])
            ):
                return None
            pins[slot] = ref
        if len(set(node_of.values())) < len(node_of):
            return None
        self._node_of = node_of
        return pins


# ------------------------------------------------------------------------------------ assignment


def _slots_by_node(gear: Gear) -> dict[int, list[Slot]]:
    wanted: dict[int, list[Slot]] = {}
    for slot in slots(gear):
        wanted.setdefault(gear.replicas[slot.replica].stages[slot.stage].node, []).append(slot)
    return wanted


def _fits(shape: Shape, node: PhysicalNode, slots: int) -> bool:
    return node.gpu_type == shape.gpu_type and len(node.gpus) >= max(slots, 1)


class _Problem:
    """The two assignment problems, with some slots pinned to their GPUs or none."""

    def __init__(
        self,
        gear: Gear,
        nodes: Sequence[PhysicalNode],
        current: Current | None,
        kept: Kept | None,
    ) -> None:
        import numpy as np

        self._shapes = gear.signature.nodes()
        self._slots = slots(gear)
        self._row = {slot: row for row, slot in enumerate(self._slots)}
        self._wanted = sorted(_slots_by_node(gear).items())
        self._nodes = sorted(nodes, key=lambda node: node.node)
        self._refs = [GpuRef(n.node, gpu) for n in self._nodes for gpu in sorted(n.gpus)]
        self._column = {ref: column for column, ref in enumerate(self._refs)}
        self._bytes = np.zeros((len(self._slots), len(self._refs)))
        self._worth = np.zeros_like(self._bytes)
        self._held: set[str] = set()
        if current is not None:
            self._weigh(current, kept)

    def _weigh(self, current: Current, kept: Kept | None) -> None:
        """Fill the columns of GPUs that the current gear is on."""
        import numpy as np

        old = {ref: slot for slot, ref in current.at.items() if ref in self._column}
        refs, columns = list(old), [self._column[ref] for ref in old]
        self._held = {ref.node for ref in refs}
        if kept is not None and refs:
            self._bytes[:, columns] = kept(self._slots, refs)
        # A byte outweighs all ties together.
        self._worth = self._bytes * (2 * len(self._slots) + 1)
        mine = np.array([slot.replica for slot in self._slots])
        for ref, column in zip(refs, columns, strict=True):
            self._worth[mine == old[ref].replica, column] += 1
            if old[ref] in self._row:
                self._worth[self._row[old[ref]], column] += 1

    def bytes_of(self, found: Mapping[Slot, GpuRef]) -> int:
        return int(sum(self._bytes[self._row[s], self._column[r]] for s, r in found.items()))

    def solve(self, pins: Mapping[Slot, GpuRef]) -> dict[Slot, GpuRef] | None:
        """The best placement, or None where there is none."""
        import numpy as np
        from scipy.optimize import linear_sum_assignment

        if len(self._nodes) < len(self._wanted):
            return None
        worth = np.full((len(self._wanted), len(self._nodes)), -np.inf)
        owner = {ref.node: slot for slot, ref in pins.items()}
        inner: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, (index, wanted) in enumerate(self._wanted):
            rows = [self._row[slot] for slot in wanted]
            own = {self._row[s]: self._column[pins[s]] for s in wanted if s in pins}
            at = 0
            for j, node in enumerate(self._nodes):
                columns = range(at, at + len(node.gpus))
                at = columns.stop
                if not _fits(self._shapes[index], node, len(wanted)) or (
                    node.node in owner and owner[node.node] not in wanted
                ):
                    continue
                if any(column not in columns for column in own.values()):
                    continue
                inner[i, j] = self._inner(rows, columns, own, node.node in self._held)
                worth[i, j] = sum(self._worth[pair] for pair in inner[i, j])
        try:
            found = zip(*linear_sum_assignment(worth, maximize=True), strict=True)
        except ValueError:  # every assignment uses a pair that is barred
            return None
        return {
            self._slots[row]: self._refs[column]
            for i, j in found
            for row, column in inner[int(i), int(j)]
        }

    def _inner(
        self, rows: Sequence[int], columns: Sequence[int], pins: Mapping[int, int], held: bool
    ) -> list[tuple[int, int]]:
        """The best GPUs of one node for the slots of one abstract node: `(row, column)` each."""
        from scipy.optimize import linear_sum_assignment

        taken = set(pins.values())
        free = [column for column in columns if column not in taken]
        rest = [row for row in rows if row not in pins]
        found = list(pins.items())
        if not held or not rest:
            return found + list(zip(rest, free, strict=False))
        block = self._worth[rest][:, free]
        chosen = zip(*linear_sum_assignment(block, maximize=True), strict=True)
        return found + [(rest[i], free[j]) for i, j in chosen]
