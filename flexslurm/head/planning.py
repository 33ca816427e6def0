"""The planner as the head asks it: the service's model, site and limits filled in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.installed import InstalledGear
from flexslurm.control.members import AgentRecord, GpuAt
from flexslurm.engine.families import check_model
from flexslurm.engine.ownership import ShardMap
from flexslurm.engine.placing import place_gear
from flexslurm.errors import ModelError
from flexslurm.gear import Gear, NoGear, Shape, Signature, Slot, slots
from flexslurm.messages import Pacing
from flexslurm.planner.files import load_acted
from flexslurm.planner.gears import plan_gear
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.placement import Current, GpuRef, PhysicalNode
from flexslurm.planner.problem import Problem, StageKind
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal


class ServicePlanner:
    """Implements `control.events.Planner`; remembers the gears it has planned."""

    def __init__(self, service: Service, site: Site) -> None:
        self.spec = read_spec(Path(service.model.path), service.model.dtype)
        self.topology = Topology.from_site(site, service.model.dtype)
        self.goal = Goal.from_service(service)
        self._acted = load_acted(self.topology, service.model.dtype)
        self._virtual = {
            name: entry.virtual for name, entry in site.gpu_types.items() if entry.virtual
        }
        self._problem = Problem(self.spec, self.topology, self.goal, self._acted)
        self._known: dict[Signature, Gear | NoGear] = {}
        self._service = service

    @cached_property
    def shards(self) -> ShardMap:
        """What every place of a gear has, as the engine cuts it."""
        model, serving = self._service.model, self._service.serving
        return ShardMap(check_model(model.path), model.dtype, serving.block_tokens)

    def choose(self, signature: Signature) -> Gear | NoGear:
        """The gear for an allocation; planned once."""
        found = self._known.get(signature)
        if found is None:
            found = plan_gear(self.spec, self.topology, self.goal, signature, acted=self._acted)
            self._known[signature] = found
        return found

    def place(
        self, gear: Gear, agents: Sequence[AgentRecord], current: InstalledGear | None
    ) -> dict[Slot, GpuAt]:
        """The GPUs for the gear's slots; those that hold most of what a slot needs come first."""
        nodes = [
            PhysicalNode(a.id, a.hello.gpu_type, tuple(gpu.index for gpu in a.hello.gpus))
            for a in agents
        ]
        before: Current | None = None
        if current is not None:
            at = {slot: GpuRef(at.agent, at.gpu) for slot, at in current.placement.items()}
            before = Current(current.gear, at)
        placed = place_gear(self.shards, gear, nodes, before)
        return {slot: GpuAt(ref.node, ref.gpu) for slot, ref in placed.placement.slots.items()}

    def speeds(self, gear: Gear) -> dict[int, float]:
        """Output tokens per second of each replica, by its number, as the planner estimates."""
        problem, found = self._problem, {}
        for number, replica in enumerate(gear.replicas):
            depth = len(replica.stages)
            slots = -(-replica.max_batch // depth)
            slowest = max(
                float(problem.times(StageKind(s.gpu_type, s.tp), slots)[s.lo, s.hi])
                for s in replica.stages
            )
            cycle_s = float(problem.cycle_s(depth, slowest))
            found[number] = replica.max_batch / cycle_s
        return found

    def pacing(self, gear: Gear) -> dict[Slot, Pacing]:
        """How virtual GPUs spend time in this gear; real ones have no entry."""
        paced: dict[Slot, Pacing] = {}
        for slot in slots(gear):
            stage = gear.replicas[slot.replica].stages[slot.stage]
            virtual = self._virtual.get(stage.gpu_type)
            if virtual is None:
                continue
            if virtual.pacing == "acted":
                cost = self._problem.cost(StageKind(stage.gpu_type, stage.tp), stage.lo, stage.hi)
                paced[slot] = Pacing(acted=msgspec.to_builtins(cost))
            elif virtual.speed < 1.0:
                paced[slot] = Pacing(speed=virtual.speed)
        return paced


def read_spec(path: Path, dtype: str) -> ModelSpec:
    """The model's sizes from its config.json (or the directory that holds one)."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} does not hold a model's configuration")
    return ModelSpec.from_config(config, dtype, name=path.name)


def full_pool(service: Service) -> Signature:
    """The allocation with every pilot of the service's pool."""
    return Signature.of(
        Shape(entry.gpu_type, entry.gpus)
        for entry in service.pool
        for _ in range(entry.count * entry.nodes)
    )
