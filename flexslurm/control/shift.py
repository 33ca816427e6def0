"""One attempt to install a gear: a table of phases and the conditions between them; pure.

                 ┌───────────── ABORT: forget the new epoch ─────────────┐
    PREPARE ──▶ CLOSE ──▶ INSTALL ──▶ COMMIT                             │
       └──────────┴──────────┴────────────────────────────────────────────┘

PREPARE starts the workers that are missing while the old gear serves on. CLOSE detaches the
drivers (the streams pause, their tokens stay with the head) and closes the groups of every earlier
epoch: a worker that does not answer in time is killed and started anew, so a peer that hangs in a
collective cannot hold the shift. INSTALL builds the stages; COMMIT opens the drivers, and every
sequence goes on from its tokens. `advance` looks at what is, not at what happened, so the order in
which messages arrive does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from flexslurm.control.actions import Action, Detach, ForgetEpoch, MeetEpoch, Send
from flexslurm.control.members import GpuAt, Members, WorkerState
from flexslurm.gear import Gear, Slot
from flexslurm.messages import Install, Pacing, Peer, Retire, StartWorkers, StopWorkers


class Phase(StrEnum):
    PREPARE = "prepare"
    CLOSE = "close"
    INSTALL = "install"
    COMMIT = "commit"
    ABORT = "abort"


LEGAL: Mapping[Phase, frozenset[Phase]] = {
    Phase.PREPARE: frozenset({Phase.CLOSE, Phase.ABORT}),
    Phase.CLOSE: frozenset({Phase.INSTALL, Phase.ABORT}),
    Phase.INSTALL: frozenset({Phase.COMMIT, Phase.ABORT}),
    Phase.COMMIT: frozenset(),
    Phase.ABORT: frozenset(),
}


class Held(NamedTuple):
    """A worker has this epoch, whole or in part, and has not said that it is closed."""

    worker: str
    epoch: int


def close_epoch(epoch: int, held: set[Held]) -> list[Action]:
    """End an epoch wherever it is held, at once: members wait for each other's groups."""
    retire = [Send(h.worker, Retire(epoch=epoch)) for h in sorted(held) if h.epoch == epoch]
    return [ForgetEpoch(epoch), *retire]


@dataclass(frozen=True, slots=True)
class InstallSettings:
    """What every install of this service has in common."""

    model: str
    dtype: str
    memory_fraction: float
    prepare_timeout_s: float
    close_timeout_s: float
    install_timeout_s: float


@dataclass(frozen=True, slots=True)
class InstalledGear:
    """A gear in its place."""

    epoch: int
    gear: Gear
    placement: Mapping[Slot, GpuAt]
    workers: Mapping[Slot, str]

    def peers(self, members: Members, replica: int) -> tuple[Peer, ...]:
        """Who fills the slots of a replica, in slot order."""
        return tuple(
            Peer(slot, worker, members.agents[self.placement[slot].agent].hello.address)
            for slot, worker in sorted(self.workers.items())
            if slot.replica == replica
        )


@dataclass(slots=True)
class Shift:
    """The state of one attempt. Invariant: phases follow LEGAL, deadlines only tighten."""

    epoch: int
    gear: Gear
    placement: dict[Slot, GpuAt]
    old: InstalledGear | None
    """What serves while this prepares; its groups are closed in CLOSE."""
    reason: str
    started_at: float
    settings: InstallSettings
    pacing: Mapping[Slot, Pacing] = field(default_factory=dict)
    phase: Phase = Phase.PREPARE
    deadline: float = 0.0
    failure: str = ""
    fatal: bool = False
    blamed: str | None = None
    """The agent whose GPU the failure points to."""
    closed_old: bool = False
    """Whether the old gear has been told to close: there is no way back to it."""
    killed: bool = False
    """Whether the workers that did not close in time were killed."""
    asked: set[GpuAt] = field(default_factory=set)
    target: InstalledGear | None = None
    installed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.deadline = self.started_at + self.settings.prepare_timeout_s

    @property
    def over(self) -> bool:
        return not LEGAL[self.phase]

    def enter(self, phase: Phase) -> None:
        assert phase in LEGAL[self.phase], (
            f"epoch {self.epoch}: {self.phase} → {phase} is not legal; reason: {self.reason}"
        )
        self.phase = phase

    # ------------------------------------------------------------------ what is heard

    def on_installed(self, worker: str) -> None:
        if self.target is not None and worker in self.target.workers.values():
            self.installed.add(worker)

    def on_worker_gone(self, worker: str) -> None:
        """A worker died: in INSTALL the attempt fails."""
        if self.target is not None and worker in self.target.workers.values() and not self.over:
            slot = next(s for s, w in self.target.workers.items() if w == worker)
            self.fail(f"the worker of {slot} died during the install", self.placement[slot].agent)

    def fail(self, why: str, agent: str | None = None, *, fatal: bool = False) -> None:
        if not self.over:
            self.failure, self.blamed, self.fatal = why, agent, fatal
            self.enter(Phase.ABORT)

    # ------------------------------------------------------------------ what is to be done

    def advance(self, now: float, members: Members, held: set[Held]) -> list[Action]:
        """Go as far as what is known allows; `held` are the epochs that workers still hold."""
        actions: list[Action] = []
        gone = sorted({at.agent for at in self.placement.values()} - set(members.agents))
        if gone:
            self.fail("a node it was to use is gone", gone[0])
        if self.phase is Phase.PREPARE and self._workers_ready(members, actions):
            self._begin_close(now, held, actions)
        if self.phase is Phase.CLOSE and not held and self._workers_ready(members, actions):
            self._begin_install(now, members, actions)
        if (
            self.phase is Phase.INSTALL
            and self.target is not None
            and self.installed >= set(self.target.workers.values())
        ):
            self.enter(Phase.COMMIT)
        if not self.over and now >= self.deadline:
            self._on_deadline(now, members, held, actions)
        if self.phase is Phase.ABORT:
            actions += close_epoch(self.epoch, held)
        return actions

    def _workers_ready(self, members: Members, actions: list[Action]) -> bool:
        ready = True
        missing: dict[str, list[int]] = {}
        for at in sorted(set(self.placement.values())):
            record = members.worker_at(at)
            if record is None:
                if at not in self.asked:
                    missing.setdefault(at.agent, []).append(at.gpu)
                    self.asked.add(at)
                ready = False
            else:
                self.asked.discard(at)
                ready = ready and record.state is WorkerState.READY
        actions += [Send(agent, StartWorkers(gpus=tuple(g))) for agent, g in missing.items()]
        return ready

    def _begin_close(self, now: float, held: set[Held], actions: list[Action]) -> None:
        self.enter(Phase.CLOSE)
        self.closed_old = True
        self.deadline = now + self.settings.close_timeout_s
        if self.old is not None:
            actions.append(Detach(self.reason))
            actions.append(ForgetEpoch(self.old.epoch))
        actions += [Send(h.worker, Retire(epoch=h.epoch)) for h in sorted(held)]

    def _begin_install(self, now: float, members: Members, actions: list[Action]) -> None:
        self.enter(Phase.INSTALL)
        self.deadline = now + self.settings.install_timeout_s
        workers = {}
        for slot, at in self.placement.items():
            record = members.worker_at(at)
            assert record is not None, f"epoch {self.epoch}: no worker at {at} after PREPARE"
            workers[slot] = record.worker
        self.target = InstalledGear(self.epoch, self.gear, self.placement, workers)
        actions.append(MeetEpoch(self.epoch))
        for slot, worker in sorted(workers.items()):
            actions.append(Send(worker, self._install(slot, self.target, members)))

    def _install(self, slot: Slot, target: InstalledGear, members: Members) -> Install:
        return Install(
            epoch=self.epoch,
            model=self.settings.model,
            dtype=self.settings.dtype,
            block_tokens=self.gear.block_tokens,
            slot=slot,
            replica=self.gear.replicas[slot.replica],
            peers=target.peers(members, slot.replica),
            arena_bytes=members.arena_bytes(self.placement[slot], self.settings.memory_fraction),
            timeout_s=self.settings.install_timeout_s,
            pacing=self.pacing.get(slot),
        )

    def _on_deadline(
        self, now: float, members: Members, held: set[Held], actions: list[Action]
    ) -> None:
        if self.phase is not Phase.CLOSE or not held or self.killed:
            self.fail(f"{self.phase} took too long: {self._missing(members)}")
            return
        # hung in a collective or worse: kill them; what they held goes with them
        self.killed = True
        self.deadline = now + self.settings.prepare_timeout_s
        for worker in sorted({h.worker for h in held}):
            record = members.worker(worker)
            if record is not None:
                record.state = WorkerState.STOPPING
                stop = StopWorkers(gpus=(record.at.gpu,), grace_s=0.0)
                actions.append(Send(record.at.agent, stop))

    def _missing(self, members: Members) -> str:
        if self.phase is Phase.INSTALL and self.target is not None:
            late = sorted(s for s, w in self.target.workers.items() if w not in self.installed)
            return f"{', '.join(map(str, late))} not installed"
        absent = sorted(
            f"{members.agents[at.agent].name} gpu {at.gpu}"
            for at in set(self.placement.values())
            if (record := members.worker_at(at)) is None or record.state is not WorkerState.READY
        )
        return f"no worker yet on {', '.join(absent)}" if absent else "old groups not closed"
