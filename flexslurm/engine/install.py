"""The parts of an install: groups, stage, probe; each says how far it is and can be called back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from flexslurm.engine import faults
from flexslurm.engine.arena import Arena
from flexslurm.engine.epoch_groups import EpochGroups
from flexslurm.engine.families import ModelInfo, check_model
from flexslurm.engine.faults import Point
from flexslurm.engine.groups import Network
from flexslurm.engine.hand_over import LayersInTurn
from flexslurm.engine.ownership import Holding, ShardMap
from flexslurm.engine.pipeline import StageRunner
from flexslurm.engine.rendezvous import HeadStore, Rendezvous
from flexslurm.engine.stage import HandOver, LoadedStage, StagePlan, build_stage
from flexslurm.engine.tenants import Tenant
from flexslurm.engine.transfers import Transfers
from flexslurm.engine.weight_pull import PeerFiller, Peers
from flexslurm.engine.weights import FileSource
from flexslurm.errors import DeadlineExceeded, StaleEpoch
from flexslurm.messages import (
    Chunk,
    ChunkSampling,
    Install,
    InstallProgress,
    Message,
    SamplingParams,
    Step,
)

_PROGRESS_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Host:
    """What an epoch needs of its worker."""

    worker: str
    network: Network
    rendezvous: Rendezvous
    arena: Callable[[int], Arena]
    """The worker's arena of so many bytes; raises CapacityError where it has another size."""
    send: Callable[[Message], None]
    """Never raises: once the link is closed, the process is about to end."""
    transfers: Transfers
    ended: Callable[[int, bool], None]
    """An epoch is torn down, and whether nothing of it is left."""


class AwaitedRoom(Protocol):
    """Whether there is room in the arena yet."""

    def waits(self) -> bool:
        """There is none."""
        ...

    def come(self, *, staged: bool) -> Install:
        """Wait for it, and give what is asked; `staged`: all that peers have is on this host.

        Raises DeadlineExceeded.
        """
        ...


class Installer:
    """One install; raises StaleEpoch when `stopped`, DeadlineExceeded after the install's time."""

    def __init__(
        self,
        install: Install,
        host: Host,
        stopped: Callable[[], bool],
        room: AwaitedRoom,
    ) -> None:
        self._install, self._host, self._stopped, self._room = install, host, stopped, room
        self._shape = install.replica.stages[install.slot.stage]
        self._deadline = time.monotonic() + install.timeout_s
        self._cancel = host.transfers.enter(install.epoch)
        self._next_progress = 0.0
        self._phase = ""

    def form(self, groups: EpochGroups) -> None:
        """Meet the other workers of the replica, and connect; not for a model that is at fault."""
        check_model(self._install.model)
        self.progress("groups", 0, 0)
        faults.reach(Point.GROUPS)
        groups.form(HeadStore(self._host.rendezvous, self._install.epoch, self._left_s()))

    def load(self, groups: EpochGroups) -> LoadedStage:
        """Build and fill the stage. Raises ModelError and CapacityError too."""
        install, shape = self._install, self._shape
        plan = StagePlan(
            model=install.model,
            epoch=install.epoch,
            lo=shape.lo,
            hi=shape.hi,
            tp=shape.tp,
            tp_rank=install.slot.tp_rank,
            dtype=install.dtype,
            block_tokens=install.block_tokens,
            kv_blocks=shape.kv_blocks,
        )
        group = None if groups.tp is None else groups.tp.handle
        arena = self._host.arena(install.arena_bytes)
        info = check_model(install.model)
        with FileSource(info) as files:
            filler = PeerFiller(
                files, arena, self._peers(info), self._host.transfers.fetcher, self._cancel
            )
            stage = build_stage(
                plan, arena, group, progress=self.progress, filler=filler,
                hand_over=lambda: self._hand_over(info, arena, filler),
            )  # fmt: skip
        layers = shape.lo, shape.hi
        self._host.transfers.open(Tenant(install.epoch, arena, stage.store, layers, stage.heads))
        return stage

    def _hand_over(self, info: ModelInfo, arena: Arena, filler: PeerFiller) -> HandOver | None:
        waited_from, staged = time.monotonic(), False
        if self._room.waits():
            staged = filler.stage(self._staging_bytes(), self._room.waits)
            arena.warm(filler.lacks_bytes)
        install = self._install = self._room.come(staged=staged)
        self._deadline += time.monotonic() - waited_from
        filler.go_on(install.rate_bytes_per_s, self._deadline)
        self.progress("build", 0, 0)  # raises where it is over
        if not install.hand_over:
            return None

        def meet(name: str) -> None:
            if install.hand_over == 1:
                return  # nobody takes from anybody
            self._host.rendezvous.meet(install.epoch, name, install.hand_over, self._left_s())

        kept = self._host.transfers.kept
        return LayersInTurn(self._shards(info), arena, kept, install.turn_layers, meet)

    def _staging_bytes(self) -> int:
        """Half of what the host may give to all workers here; KV that is parked needs some too."""
        install, here = self._install, self._address()
        near = {p.worker for p in install.peers if p.address == here}
        near |= {holder.worker for holder in install.holders if holder.address == here}
        return self._host.transfers.lot.spare_bytes // (2 * max(len(near), install.host_workers))

    def _address(self) -> str:
        return next(p.address for p in self._install.peers if p.worker == self._host.worker)

    def _shards(self, info: ModelInfo) -> ShardMap:
        return ShardMap(info, self._install.dtype, self._install.block_tokens)

    def _peers(self, info: ModelInfo) -> Peers:
        install = self._install
        stage, rank = install.slot.stage, install.slot.tp_rank
        return Peers(
            shards=self._shards(info),
            need=Holding.of_slot(install.replica, stage, rank),
            worker=self._host.worker,
            node=self._node(),
            holders=install.holders,
            rate_bytes_per_s=install.rate_bytes_per_s,
            deadline=self._deadline,
        )

    def _node(self) -> str:
        """The name of our node, if anybody there has weights: else nobody is near."""
        here = self._address()
        near = (
            holder.node
            for holder in self._install.holders
            if holder.worker == self._host.worker or holder.address == here
        )
        return next(near, "")

    def probe(self, runner: StageRunner) -> None:
        """Send the probe's tokens through all stages, once all have been loaded."""
        self.progress("probe", 0, 0)
        install = self._install
        replica = install.slot.replica
        self._host.rendezvous.meet(
            install.epoch, f"r{replica}/loaded", install.replica.gpus, self._left_s()
        )
        tokens = install.probe[: min(install.block_tokens, install.replica.max_batch_tokens)]
        if not tokens:
            return
        chunk = Chunk(
            seq_id="probe",
            tokens=tokens,
            start=0,
            blocks=(0,),
            sample=ChunkSampling(params=SamplingParams(), position=0),
        )
        # nothing is served yet, so block 0 is free
        step = Step(epoch=install.epoch, replica=replica, step=0, chunks=(chunk,))
        runner.finish(runner.begin(step), waited=True, stopped=self._stopped)
        runner.flush()
        runner.free((0,))

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """Tell the head at each new phase and twice a second; the place where installs end.

        Raises StaleEpoch when the epoch is over, DeadlineExceeded when its time is.
        """
        if self._stopped():
            raise StaleEpoch(f"epoch {self._install.epoch} is over")
        now = time.monotonic()
        self._left_s()
        if phase == self._phase and now < self._next_progress and done_bytes < total_bytes:
            return
        self._phase, self._next_progress = phase, now + _PROGRESS_EVERY_S
        self._host.send(
            InstallProgress(
                worker=self._host.worker,
                epoch=self._install.epoch,
                phase=phase,
                done_bytes=done_bytes,
                total_bytes=total_bytes,
            )
        )

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0.0:
            raise DeadlineExceeded(
                f"the install took longer than {self._install.timeout_s:g} s ({self._phase})"
            )
        return left
