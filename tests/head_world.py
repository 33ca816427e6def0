"""A whole head with its real controller, ledger, drivers and moves; nodes and time are played."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fake_replica import undisturbed

from flexslurm.control.choices import PolicySettings
from flexslurm.control.controller import Controller
from flexslurm.control.events import ControlSettings, Event, ShiftWanted, Tick
from flexslurm.control.installed import InstalledGear
from flexslurm.control.members import AgentRecord, GpuAt
from flexslurm.control.phases import InstallSettings
from flexslurm.control.state import Control
from flexslurm.engine.shift_plan import LinkRates
from flexslurm.gear import Estimates, Gear, NoGear, Replica, Shape, Signature, Slot, Stage
from flexslurm.head.effects import HeadEffects
from flexslurm.head.ledger import Ledger, LedgerSettings
from flexslurm.head.moves import MovePlanner
from flexslurm.head.storage import Storage
from flexslurm.head.stream import Stream
from flexslurm.messages import (
    AgentHello,
    DirectoryProbed,
    Message,
    SequenceRequest,
    TokenEvent,
)
from flexslurm.planner.placement import Current, GpuRef, PhysicalNode
from tests.plain_planner import PlainPlanner
from tests.played_nodes import BEAT_S, PlayedNodes
from tests.reshard_cases import BLOCK_TOKENS, LAYERS, shard_map

CONTEXT = 48
TICK_S, LOST_S = 0.05, 2.0


class Gears(PlainPlanner):
    """A planner: one gear for each allocation, drawn once, and places as the product's."""

    def __init__(self, seed: int, parking_s: Callable[[InstalledGear], float | None]) -> None:
        self._seed, self.parking_s = seed, parking_s
        self._known: dict[Signature, Gear | NoGear] = {}
        self.lived_by: Callable[[InstalledGear], Any] | None = None

    def choose(self, signature: Signature) -> Gear | NoGear:
        if signature not in self._known:
            rng = random.Random(f"{self._seed} {signature}")
            self._known[signature] = random_gear(rng, signature, "chosen")
        return self._known[signature]

    def place(
        self, gear: Gear, agents: Sequence[AgentRecord], current: InstalledGear | None
    ) -> dict[Slot, GpuAt]:
        from flexslurm.engine.placing import place_gear

        nodes = [
            PhysicalNode(a.id, a.hello.gpu_type, tuple(g.index for g in a.hello.gpus))
            for a in agents
        ]
        before = None
        if current is not None:
            at = {slot: GpuRef(at.agent, at.gpu) for slot, at in current.placement.items()}
            before = Current(current.gear, at)
        placed = place_gear(shard_map(), gear, nodes, before)
        return {slot: GpuAt(ref.node, ref.gpu) for slot, ref in placed.placement.slots.items()}


def random_gear(rng: random.Random, signature: Signature, name: str) -> Gear | NoGear:
    """Replicas of one to three stages over the allocation's nodes."""
    shapes = signature.nodes()
    free = [shape.gpus for shape in shapes]
    if not free:
        return NoGear(signature, "there are no GPUs")
    replicas = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        depth = rng.choice((1, 2, 3))
        stages: list[Stage] = []
        ends = [0, *sorted(rng.sample(range(1, LAYERS), depth - 1)), LAYERS]
        blocks = rng.choice((12, 12, 16, 40))
        for lo, hi in itertools.pairwise(ends):
            nodes = [n for n, left in enumerate(free) if left]
            if not nodes:
                break
            node = rng.choice(nodes)
            tp = rng.randint(1, min(free[node], 3))
            free[node] -= tp
            stages.append(Stage(shapes[node].gpu_type, tp, lo, hi, blocks, node))
        if len(stages) < depth:
            break
        replicas.append(Replica(tuple(stages), rng.choice((3, 6)), rng.choice((7, 20)), CONTEXT))
    if not replicas:
        one = (Stage(shapes[0].gpu_type, 1, 0, LAYERS, 24, 0),)
        replicas.append(Replica(one, 4, 12, CONTEXT))
    estimates = Estimates(100.0 * len(replicas), 0.1, 0.01, 1000, 1.0)
    return Gear(f"{name}-{signature}", signature, BLOCK_TOKENS, tuple(replicas), estimates)


class Notes:
    """A journal that is never full."""

    path = Path("journal.log")

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def append(self, record: dict[str, Any], *, sync: bool = True) -> None:
        self.records.append(record)


class HeadWorld(PlayedNodes):
    """The head, its members, and a clock that runs as fast as the events are handled."""

    def __init__(self, seed: int, memory_bytes: int, directory: Path | None = None) -> None:
        """`directory`: where KV may be parked in files."""
        super().__init__(seed, memory_bytes)
        self.storage = None if directory is None else Storage(directory, "svc")
        if self.storage is not None:
            self.storage.begin()
        self.on_phase: Callable[[str], None] = lambda phase: None
        self.streams: dict[str, tuple[SequenceRequest, Stream, list[TokenEvent]]] = {}
        self.cancelled: set[str] = set()
        self.journal = Notes()
        self.ledger = Ledger(
            LedgerSettings(model_context=CONTEXT, wait_for_gpus_s=1e6), now=lambda: self.now
        )
        shards = shard_map()
        self.effects = HeadEffects(
            self.ledger,
            self.journal,  # type: ignore[arg-type]
            MovePlanner(lambda: shards, lambda types: LinkRates(), lambda gear: {}),
            tell=self.later,
            storage=self.storage,
            tell_now=lambda event: self.controller.take(event),
            now=lambda: self.now,
        )
        self.effects.bind(self)  # type: ignore[arg-type]
        self.planner = Gears(seed, self.effects.away.needed_s)
        settings = ControlSettings(
            head="head",
            install=InstallSettings("/model", "float32", 1.0, 30.0, 3.0, 10.0),
            policy=PolicySettings(min_action_gap_s=0.0),
            gpu_types=frozenset({"a"}),
            beat_s=BEAT_S,
            lost_s=LOST_S,
        )
        self.control = Control(settings, self.planner)
        self.controller = Controller(self.control, self.effects, lambda: self.now)
        self._tell_of_phases()
        self.at(TICK_S, self._tick)

    def _tell_of_phases(self) -> None:
        for name in ("plan_shift", "meet_epoch", "begin_transfer", "begin_cutover", "switch_over",
                     "park_all"):  # fmt: skip
            act = getattr(self.effects, name)

            def told(*args: Any, name: str = name, act: Any = act) -> Any:
                self.on_phase(name)
                found = act(*args)
                self.on_phase(f"after {name}")
                return found

            setattr(self.effects, name, told)

    # ------------------------------------------------------------------ time and links

    def run_until(self, what: Callable[[], bool], limit_s: float) -> None:
        end = self.now + limit_s
        while not what():
            assert self.now < end, f"not within {limit_s} s: {self.describe()}"
            self.run(TICK_S)

    def describe(self) -> str:
        control, shift = self.control, self.control.shift
        phase = f"{shift.phase} of epoch {shift.epoch}" if shift is not None else "no shift"
        gear = control.current.gear.layout() if control.current is not None else "none"
        open_still = [s for s, (_, _, events) in self.streams.items() if not is_over(events)]
        return f"{control.state}, {phase}, gear {gear}: {control.reason}; open: {open_still}"

    def later(self, event: Event) -> None:
        self.at(0.0, lambda: self.controller.take(event))

    def hear(self, sender: str, message: Message) -> None:
        if isinstance(message, AgentHello) and self.storage is not None:
            self.storage.heard(
                DirectoryProbed(incarnation=sender, path=str(self.storage.path), reason="")
            )
        if not self.effects.take(sender, message):
            self.controller.hear(sender, message)

    def _tick(self) -> None:
        self.at(TICK_S, self._tick)
        self.controller.take(Tick())
        self.ledger.tick(self.now)
        self.effects.tick()
        self.ledger.check_invariants()
        for _, stream, events in self.streams.values():
            events += stream.ready()

    # ------------------------------------------------------------------ clients and operators

    def submit(self, request: SequenceRequest) -> None:
        self.streams[request.seq_id] = (request, self.ledger.submit([request]), [])

    def cancel(self, seq_id: str) -> None:
        _, stream, events = self.streams[seq_id]
        events += stream.ready()
        self.cancelled.add(seq_id)
        stream.close()

    def want(self, name: str) -> None:
        """An operator asks for a random gear over all that is there."""
        shapes = [Shape("a", a.gpus) for a in self.agents.values() if a.alive]
        gear = random_gear(self.rng, Signature.of(shapes), name)
        if isinstance(gear, Gear):
            self.later(ShiftWanted(gear, "test"))

    def serves(self) -> bool:
        control = self.control
        return control.shift is None and control.current is not None and not control.current.lost

    # ------------------------------------------------------------------ what must hold in the end

    def check_answers(self) -> None:
        for seq_id, (request, _, events) in self.streams.items():
            tokens, finish = undisturbed(request)
            given = [event.token for event in events if event.token is not None]
            if seq_id in self.cancelled:
                assert given == tokens[: len(given)], seq_id
                continue
            assert given == tokens, f"{seq_id}: {given}, not {tokens}"
            assert [e.finish for e in events if e.finish is not None] == [finish], seq_id

    def check_nothing_left(self) -> None:
        """Workers hold the epochs that serve and no block; nothing is parked, owed or reserved."""
        current = self.control.current
        assert current is not None
        serving = {(key.epoch, key.index) for key in current.keys}
        live = {name for name, worker in self.workers.items() if worker.alive}
        bodies = {k: b for k, b in self.bodies.items() if live & (set(b.workers) - b.lost)}
        assert set(bodies) == serving, f"{sorted(bodies)} are held, {sorted(serving)} serve"
        for key, body in bodies.items():
            assert not body.engine.cells, f"{key} holds cells {sorted(body.engine.cells)[:5]}"
            assert not body.parts, f"{key} holds parts of blocks {sorted(body.parts)[:5]}"
        for name in live:
            worker = self.workers[name]
            mine = {e for e, i in serving if name in bodies[e, i].workers}
            assert worker.epochs == mine, f"{name} holds {worker.epochs}, not {mine}"
            assert not any(worker.parked.values()), f"{name} has parked {worker.parked}"
        if self.storage is not None:
            found = list(self.storage.path.glob("*.park"))
            assert not found, f"{found} nobody waits for"
        assert not self.control.holdings.closing()
        pages = set(self.effects._board._pages)
        assert pages == {epoch for epoch, _ in serving}, f"rendezvous of {pages} is open"
        assert {(k.epoch, k.index) for k in self.effects.replicas.open} == serving
        assert not self.effects.replicas._arriving and not self.effects.moves._left
        for driver in self.effects.replicas.open.values():
            pool = driver.scheduler.pool
            assert pool.used_count == 0 and pool.limit == pool.num_blocks, "blocks are missing"


def is_over(events: Sequence[TokenEvent]) -> bool:
    return any(event.finish is not None for event in events)
