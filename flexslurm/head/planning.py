"""The planner as the head asks it: the service's model, site and limits filled in."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.actions import PlanShift
from flexslurm.control.cards import Cards
from flexslurm.control.choices import ShiftPrice
from flexslurm.control.installed import InstalledGear, InstalledReplica
from flexslurm.control.members import AgentRecord, GpuAt
from flexslurm.engine.families import check_model
from flexslurm.engine.ownership import ShardMap
from flexslurm.engine.placing import place_gear
from flexslurm.engine.routing import LiveKv
from flexslurm.engine.shift_plan import LinkRates
from flexslurm.errors import CapacityError, ConfigError
from flexslurm.gear import Gear, NoGear, Shape, Signature, Slot, slots
from flexslurm.head.card_memory import memory_to_plan_with
from flexslurm.head.gear_book import GearBook
from flexslurm.head.gear_tables import Progress, fits, full_pool, make_service_table, pilot_kinds
from flexslurm.messages import Pacing
from flexslurm.planner.build import no_gear
from flexslurm.planner.files import load_acted, load_measured, load_spec, open_table
from flexslurm.planner.fitting import fit_gear
from flexslurm.planner.hashing import inputs_hash
from flexslurm.planner.keeping import KeptReplica, keeping_gear
from flexslurm.planner.layouts import gear_of_layout, is_layout, replica_tokens_per_s
from flexslurm.planner.placement import Current, GpuRef, PhysicalNode
from flexslurm.planner.planner import Planner
from flexslurm.planner.problem import Problem, StageKind
from flexslurm.planner.recompute import RecomputeCost, gear_recompute_cost
from flexslurm.planner.table import GearTable
from flexslurm.planner.targets import WithinTargets
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal

log = logging.getLogger(__name__)


class ServicePlanner:
    """A `control.observing.GearSource`: `choose` looks up, `exact` and `make_table` plan."""

    def __init__(
        self,
        service: Service,
        site: Site,
        ask: Callable[[Signature], None] = lambda signature: None,
        leaves: Mapping[str, str] | None = None,
        memory: Mapping[str, int] | None = None,
    ) -> None:
        """`ask` is told of allocations whose gears are to be planned elsewhere.

        `leaves`: the leaf switch of each node, where it is known. `memory`: what `planned_memory`
        of another one says. Raises ConfigError for measured files that the site names and that are
        not there or malformed.
        """
        self.spec = load_spec(service.model.path, service.model.dtype)
        figures = Topology.from_site(site, service.model.dtype)
        self._site_topology, self._profiles = load_measured(site.measured, self.spec, figures)
        self.promised = {n: gpu.memory_bytes for n, gpu in self._site_topology.gpus.items()}
        self.planned_memory: Mapping[str, int] = dict(memory or {})
        """Bytes of a card by type, where cards have less than the site file says."""
        self.topology = self._site_topology.with_memory(self.planned_memory)
        self._cards = Cards()
        self._leaves = dict(leaves or {})
        self.goal = Goal.from_service(service)
        self._acted = load_acted(self.topology, service.model.dtype)
        self._virtual = {
            name: entry.virtual for name, entry in site.gpu_types.items() if entry.virtual
        }
        self._set_problem()
        self._service = service
        self.book = GearBook(ask, self._fit)
        self.on_other_memory: Callable[[], None] = lambda: None
        """Called when the gears of another table are wanted, for cards with other memory."""
        self.priced_by: Callable[[PlanShift], ShiftPrice] | None = None
        self.parked_by: Callable[[InstalledGear], float | None] | None = None
        self.lived_by: Callable[[InstalledGear], Sequence[LiveKv]] | None = None
        """Whose KV a gear holds now: placements keep as much of it where it is as they can."""

    # -------------------------------------------------------------------------------- memory

    def _set_problem(self) -> None:
        self._problem = Problem(self.spec, self.topology, self.goal, self._acted, self._profiles)
        self._within = WithinTargets(self._problem)

    def meet(self, cards: Cards) -> None:
        """What cards there are now: gears are cut to what they have, and planned for it beside."""
        if cards.memory == self._cards.memory:
            self._cards = cards
            return
        self._cards = cards
        wanted = memory_to_plan_with(cards.memory, self.promised)
        other, self.planned_memory = wanted != self.planned_memory, wanted
        self.topology = self._site_topology.with_memory(wanted)
        self._set_problem()
        self.book.forget()
        if other:
            log.warning("gears are planned for other memory: %s", cards.words or "as the site says")
            self.on_other_memory()

    def _fit(self, gear: Gear) -> Gear | None:
        return fit_gear(self.spec, self.goal.limits, self._cards.memory, gear)

    def _with_words(self, found: Gear | NoGear) -> Gear | NoGear:
        """Of a gear that there is not, also which cards have less than they should."""
        if isinstance(found, Gear) or not self._cards.words:
            return found
        return NoGear(found.signature, f"{found.reason} ({self._cards.words})", found.short_bytes)

    # ------------------------------------------------------------------------------ planning

    def exact(self, signature: Signature) -> Gear | NoGear:
        """Plan one allocation; takes seconds where the pool is large."""
        return self._planner(signature).plan(signature)

    def make_table(self, progress: Progress) -> bytes:
        """Plan the allocations of the service's pilots; takes a minute or two at most."""
        pool = full_pool(self._service)
        return make_service_table(self._planner(pool), pilot_kinds(self._service), progress)

    def _planner(self, pool: Signature) -> Planner:
        return Planner(
            self.spec, self.topology, self.goal, pool, acted=self._acted, profiles=self._profiles
        )

    def fitting_table(self, path: Path) -> tuple[GearTable | None, str]:
        """The table in a file, if it was made for just this; else why not, in words."""
        if not path.exists():
            return None, "there is no gear table"
        try:
            table = open_table(path)
        except ConfigError as error:
            return None, error.message
        kinds, pool = pilot_kinds(self._service), full_pool(self._service)
        profiles = [self._profiles[kind] for kind in sorted(self._profiles)]
        inputs = inputs_hash(self.spec, self.topology, self.goal, pool, self._acted, profiles)
        if not fits(table, inputs, kinds):
            return None, f"{path.name} was made for another model, site, workload or pool"
        return table, ""

    # ---------------------------------------------------------------------------- looking up

    def choose(self, signature: Signature) -> Gear | NoGear:
        """The gear for an allocation, from the table; never plans."""
        found = self.look(signature)
        return found if found is not None else self._with_words(self.book.choose(signature))

    def look(self, signature: Signature) -> Gear | NoGear | None:
        """What is known for an allocation that there may come to be; asks nobody to plan it."""
        found = self.book.look(signature)
        if found is not None:
            return self._with_words(found)
        missing = no_gear(self._problem, signature)
        return self._with_words(missing) if missing.short_bytes else None

    def options(self, signature: Signature) -> tuple[Gear, ...]:
        """The gears named in the service file that an allocation can hold, the preferred first."""
        found = (self.choose(s) for s in self._named if signature.covers(s))
        return tuple(gear for gear in found if isinstance(gear, Gear))

    def others(
        self, agents: Sequence[AgentRecord], current: InstalledGear | None
    ) -> tuple[Gear, ...]:
        """Gears besides the best one: what leaves replicas as they are, and the next best.

        Where members are lost or must leave, the next best are not worth the time to look at them.
        """
        nodes = {a.id: Shape(a.hello.gpu_type, len(a.hello.gpus)) for a in agents if a.hello.gpus}
        kept = self._kept(current, nodes) if current is not None else None
        stays = current is None or not (current.lost or current.agents - nodes.keys())
        more = self.book.others(Signature.of(nodes.values())) if stays else ()
        return (*((kept,) if kept else ()), *more)

    def _kept(self, current: InstalledGear, nodes: Mapping[str, Shape]) -> Gear | None:
        gear, speeds = current.gear, self.speeds(current.gear)
        share = gear.estimates.tokens_per_s / sum(speeds.values())
        kept = [
            KeptReplica(one.replica, _nodes_of(one), speeds[number] * share)
            for number, one in sorted(current.replicas.items())
            if one.agents <= nodes.keys()
        ]

        def known(signature: Signature) -> Gear | None:
            found = self.book.look(signature)
            return found if isinstance(found, Gear) else None

        return keeping_gear(gear, kept, nodes, known)

    @cached_property
    def _named(self) -> tuple[Signature, ...]:
        wanted = self._service.scheduling
        names = (wanted.default_plan, *(wanted.plans or ()), wanted.fallback_plan)
        return tuple(dict.fromkeys(Signature.parse(name) for name in names if name))

    @cached_property
    def shards(self) -> ShardMap:
        """What every place of a gear has, as the engine cuts it."""
        model, serving = self._service.model, self._service.serving
        return ShardMap(check_model(model.path), model.dtype, serving.block_tokens)

    def warm_up(self) -> None:
        """Load now what the first placement would load, while nobody waits for an answer."""
        import scipy.optimize  # noqa: F401

        _ = self.shards

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
        hangs_on = {
            a.id: self._leaves[a.hello.node] for a in agents if a.hello.node in self._leaves
        }
        live = self.lived_by(current) if self.lived_by is not None and current is not None else ()
        placed = place_gear(self.shards, gear, nodes, before, live, leaves=hangs_on)
        return {slot: GpuAt(ref.node, ref.gpu) for slot, ref in placed.placement.slots.items()}

    def rates(self, gpu_types: Iterable[str]) -> LinkRates:
        """What transfers between GPUs of these types may count on."""
        limit_mbps = self._service.executor.bandwidth_limit_mbps
        return LinkRates.of(self.topology, gpu_types, limit_mbps)

    def speeds(self, gear: Gear) -> dict[int, float]:
        """Output tokens per second of each replica, by its number, as the planner estimates."""
        return {
            number: replica_tokens_per_s(self._problem, replica)
            for number, replica in enumerate(gear.replicas)
        }

    def recompute(self, gear: Gear) -> RecomputeCost:
        """What computing KV anew costs in a gear, in the mean over its replicas."""
        return gear_recompute_cost(self._problem, gear)

    def within_targets(self, gear: Gear, speed: float) -> float:
        """Tokens per second that come within the targets; `speed`: measured over estimated."""
        slo = self.goal.slo
        if slo.ttft_s is None and slo.tpot_s is None:
            return gear.estimates.tokens_per_s * speed
        return self._within.gear(gear, speed)

    def price(self, ask: PlanShift) -> ShiftPrice:
        """What a shift would cost; nothing until `priced_by` is set."""
        return self.priced_by(ask) if self.priced_by is not None else ShiftPrice()

    def parking_s(self, current: InstalledGear) -> float | None:
        """How long parking live KV in files takes; None until `parked_by` is set."""
        return self.parked_by(current) if self.parked_by is not None else None

    def find(self, name: str, present: Signature) -> Gear:
        """The gear that an operator means: an allocation's name, or a layout written out.

        Raises ConfigError or CapacityError with what may be said instead.
        """
        if is_layout(name):
            return gear_of_layout(self._problem, present, name)
        try:
            wanted = Signature.parse(name)
        except ConfigError:
            raise ConfigError(
                f"there is no gear '{name}'", hint=self.legal_names(present)
            ) from None
        found = self.choose(wanted)
        if isinstance(found, NoGear):
            raise CapacityError(f"'{name}' has no gear: {found.reason}")
        return found

    def legal_names(self, present: Signature) -> str:
        """What `find` takes here, for a hint."""
        fit = (name for name in self.book.names() if present.covers(Signature.parse(name)))
        names = [name for name in fit if name]
        some = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
        layout = "a layout such as 'a100 tp2 [0,20) → l40s tp1 [20,30)'"
        return f"give one of {some or str(present)}, or {layout}, or 'best'"

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


def _nodes_of(one: InstalledReplica) -> tuple[str, ...]:
    """The agent that holds each stage: a stage's GPUs are of one node."""
    agents = [seat.at.agent for seat in one.seats]
    firsts = itertools.accumulate((stage.tp for stage in one.replica.stages[:-1]), initial=0)
    return tuple(agents[first] for first in firsts)


def plan_name(name: str) -> str:
    """A gear's name as the table has it: the allocation it is for, in one order. ConfigError."""
    return str(Signature.parse(name))


def check_plans(service: Service, table: GearTable) -> None:
    """Raises ConfigError where the service file names a plan that the table does not have."""
    wanted = service.scheduling
    named = {
        "scheduling.plans": wanted.plans or [],
        "scheduling.default_plan": [wanted.default_plan] if wanted.default_plan else [],
        "scheduling.fallback_plan": [wanted.fallback_plan] if wanted.fallback_plan else [],
    }
    for key, names in named.items():
        for name in names:
            found = table.gear(Signature.parse(name))
            if isinstance(found, NoGear):
                raise ConfigError(f"'{name}' has no gear: {found.reason}", key=key)
            if not table.header.pool.covers(Signature.parse(name)):
                raise ConfigError(
                    f"'{name}' is not an allocation of this pool",
                    key=key,
                    hint=f"plans are called by their allocation, such as {table.header.pool}",
                )
