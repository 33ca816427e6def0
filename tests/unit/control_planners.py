"""Planners so simple that a test can say the gear: one stage, or one replica, of each node."""

from __future__ import annotations

from collections.abc import Sequence

from flexslurm.control.installed import InstalledGear
from flexslurm.control.members import AgentRecord, GpuAt
from flexslurm.errors import CapacityError
from flexslurm.gear import Estimates, Gear, NoGear, Replica, Shape, Signature, Slot, Stage, slots
from tests.plain_planner import PlainPlanner

LAYERS = 12


class OneStagePerNode(PlainPlanner):
    """A planner that makes one stage of each node, TP over its GPUs; needs `least` GPUs."""

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def choose(self, signature: Signature) -> Gear | NoGear:
        nodes = signature.nodes()
        if signature.gpus() < self.least or not nodes:
            return NoGear(signature, f"{self.least} GPUs are needed, {signature.gpus()} are here")
        estimates = Estimates(100.0 * signature.gpus(), 0.1, 0.01, 1000, 1.0)
        return Gear(f"g-{signature}", signature, 16, self.replicas(signature), estimates)

    def replicas(self, signature: Signature) -> tuple[Replica, ...]:
        nodes = signature.nodes()
        cuts = [LAYERS * i // len(nodes) for i in range(len(nodes) + 1)]
        stages = tuple(
            Stage(shape.gpu_type, shape.gpus, cuts[i], cuts[i + 1], 64, i)
            for i, shape in enumerate(nodes)
        )
        return (Replica(stages, max_batch=8, max_batch_tokens=64, max_context=256),)

    def place(
        self, gear: Gear, agents: Sequence[AgentRecord], current: InstalledGear | None
    ) -> dict[Slot, GpuAt]:
        free = list(agents)
        nodes: dict[int, AgentRecord] = {}
        for index, shape in enumerate(gear.signature.nodes()):
            match = self._pick(shape, index, gear, free, current)
            free.remove(match)
            nodes[index] = match
        placed = {}
        for slot in slots(gear):
            stage = gear.replicas[slot.replica].stages[slot.stage]
            placed[slot] = GpuAt(nodes[stage.node].id, slot.tp_rank)
        return placed

    def _pick(
        self,
        shape: Shape,
        index: int,
        gear: Gear,
        free: Sequence[AgentRecord],
        current: InstalledGear | None,
    ) -> AgentRecord:
        """An agent of this shape; the one that has the node's first slot now, if it is free."""
        fit = [a for a in free if Shape(a.hello.gpu_type, len(a.hello.gpus)) == shape]
        if not fit:
            raise CapacityError(f"no {shape} for node {index} of {gear.name}")
        if current is not None:
            used = current.agents
            fit.sort(key=lambda agent: agent.id not in used)
        return fit[0]

    needs_s: float | None = None
    """How long parking in files takes."""

    def parking_s(self, current: InstalledGear) -> float | None:
        return self.needs_s


class OneReplicaPerNode(OneStagePerNode):
    """Each node is a replica of its own."""

    def replicas(self, signature: Signature) -> tuple[Replica, ...]:
        return tuple(
            Replica((Stage(shape.gpu_type, shape.gpus, 0, LAYERS, 64, i),), 8, 64, 256)
            for i, shape in enumerate(signature.nodes())
        )
