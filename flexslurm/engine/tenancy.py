"""The life of one epoch in a worker, on a thread of its own: build, serve, tear down.

    installing → serving → broken → retired      (any of them → retired, when told)

Several epochs may live side by side; they share the arena and nothing else. Whatever happens to
one is told to the head and never touches another. `retire` may come at any time, from any thread:
it calls the epoch's thread back from wherever it waits.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import re
import threading
import time
from enum import StrEnum

from flexslurm.engine import faults
from flexslurm.engine.epoch_groups import EpochGroups, route
from flexslurm.engine.faults import Point
from flexslurm.engine.install import Host, Installer
from flexslurm.engine.pacing import Pacer
from flexslurm.engine.pipeline import Pending, StageRunner, StepOrder
from flexslurm.engine.stage import LoadedStage
from flexslurm.errors import DeadlineExceeded, FlexslurmError, ModelError, ProtocolError
from flexslurm.messages import (
    Assembled,
    FreeBlocks,
    Install,
    Installed,
    InstallFailed,
    Step,
    StepDone,
    StepFailed,
)

log = logging.getLogger(__name__)

Order = Step | FreeBlocks
"""What is done one after another."""

_MAX_WAITING_STEPS = 1024
_CLOSE_S = 5.0
_CAUSE_FIRST_S = 0.5
_FINISH_S = 0.1
"""For a step that is just ending: a group is best closed when nothing is under way in it."""
_LINGER_S = 150.0
"""For the last word on an epoch whose weights are kept; its groups then close without it."""


class TenancyPhase(StrEnum):
    """What an epoch is doing in this worker."""

    INSTALLING = "installing"
    SERVING = "serving"
    BROKEN = "broken"
    """A step failed: no more are done, and what it holds stays until it is retired."""
    RETIRED = "retired"


class Tenancy:
    """One epoch; its stage, runner and groups are touched by its thread only."""

    def __init__(self, install: Install, host: Host, *, room_s: float | None = None) -> None:
        """`room_s`: no memory is taken until `go_on`, which comes within this time."""
        self.epoch = install.epoch
        self.phase = TenancyPhase.INSTALLING
        self._install, self._host = install, host
        self._groups = EpochGroups(install.epoch, install.replica, install.slot, host.network)
        self._stage: LoadedStage | None = None
        self._runner: StageRunner | None = None
        self._order = StepOrder(install.epoch, install.slot.replica)
        self._steps: queue.Queue[Order | None] = queue.Queue(_MAX_WAITING_STEPS)
        self._overflow = False
        self._keep_weights = False
        self._vacated, self._last = threading.Event(), threading.Event()
        """Its memory is free, bar weights that are kept; these are not needed any more."""
        self._stop = threading.Event()
        self._room = threading.Event()
        """There is room for the stage, or nothing is waited for any more."""
        self._room_by = time.monotonic() + (room_s or 0.0)
        if room_s is None:
            self._room.set()
        self._thread = threading.Thread(
            target=self._live, name=f"epoch-{install.epoch}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def go_on(self, install: Install) -> None:
        """There is room now; idempotent."""
        if not self._room.is_set():
            self._install = install
            self._room.set()

    def put(self, order: Order) -> None:
        """Queue what is done in order; never blocks. Too much of it breaks the epoch."""
        try:
            self._steps.put_nowait(order)
        except queue.Full:
            self._overflow = True

    def retire(self, timeout_s: float, *, keep_weights: bool = False) -> bool:
        """End the epoch and wait for its thread; whether it ended in time. Idempotent.

        `keep_weights`: others may take from them until `Transfers.let_go`. Streams wait then: its
        pages are free when this returns, and its groups are closed once it is retired for good.
        What waits is dropped and what runs is broken off, also in a collective with a peer that
        is dead or hangs.
        """
        faults.reach(Point.RETIRE)
        self._keep_weights = keep_weights
        self._stop.set()
        self._room.set()
        self._host.transfers.cut(self.epoch)
        self._host.rendezvous.cancel(self.epoch, "it was retired")
        with contextlib.suppress(queue.Full):  # then the thread does not wait for steps
            self._steps.put_nowait(None)
        if keep_weights:
            if not self._vacated.wait(_FINISH_S):
                self._groups.abort()
            return self._vacated.wait(timeout_s)
        self._last.set()
        self._thread.join(_FINISH_S)
        self._groups.abort()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------ on the epoch's thread

    def _live(self) -> None:
        try:
            if self._build():
                self._serve()
        finally:
            try:
                self._tear_down()
            except Exception:  # nobody knows what it holds now
                log.exception("epoch %d: it could not be torn down", self.epoch)
                self._host.ended(self.epoch, False)

    def _build(self) -> bool:
        """Whether the epoch serves now; what went wrong has been told."""
        try:
            done = self._install_stage()
        except Exception as error:  # whatever it is, the head is told
            reason, trace = reason_of(error), _unexpected(error)
            log.warning("epoch %d: install failed: %s", self.epoch, reason, exc_info=trace)
            self._tell_failed(error)
            return False
        self.phase = TenancyPhase.SERVING
        self._host.send(done)
        return True

    def _tell_failed(self, error: Exception) -> None:
        """Tell why before the groups close, which makes the peers fail for no reason of theirs.

        Such a failure of our own may wait: by then the head has the cause, and ends the epoch.
        """
        if isinstance(error, RuntimeError):
            self._stop.wait(_CAUSE_FIRST_S)
        if self._stop.is_set():
            return
        self._host.send(
            InstallFailed(
                worker=self._host.worker,
                epoch=self.epoch,
                reason=reason_of(error),
                fatal=isinstance(error, ModelError),
            )
        )

    def _install_stage(self) -> Installed:
        install = self._install
        installer = Installer(install, self._host, self._stop.is_set, self)
        pacer = Pacer(install.pacing, self._stop.wait)  # first, as it may refuse its figures
        samples = route(install.replica, install.slot).samples
        stages = len(install.replica.stages)
        began = time.monotonic()
        installer.form(self._groups)
        formed = time.monotonic()
        self._stage = stage = installer.load(self._groups)
        loaded = time.monotonic()

        def runner(pacer: Pacer) -> StageRunner:
            return StageRunner(stage, self._groups, samples=samples, stages=stages, pacer=pacer)

        installer.probe(runner(Pacer(None, self._stop.wait)))
        self._runner = runner(pacer)
        return Installed(
            worker=self._host.worker,
            epoch=self.epoch,
            weights_bytes=stage.weights_bytes,
            kv_blocks=stage.plan.kv_blocks,
            load_s=loaded - formed,
            groups_s=formed - began,
            moved_bytes=stage.filled.moved_bytes,
            kept_bytes=stage.kept_bytes,
            read_bytes=stage.filled.read_bytes,
            move_s=stage.filled.move_s,
        )

    def waits(self) -> bool:
        """Whether there is no room for the stage yet."""
        return not self._room.is_set()

    def come(self, *, staged: bool) -> Install:
        """The install that is to be done, once there is room for it; see `install.AwaitedRoom`."""
        if self.waits():
            done = Assembled(worker=self._host.worker, epoch=self.epoch, staged=staged)
            self._host.send(done)
            if not self._room.wait(max(self._room_by - time.monotonic(), 0.0)):
                raise DeadlineExceeded("there was no room for the stage in time")
        return self._install

    def _serve(self) -> None:
        pending: collections.deque[Pending | FreeBlocks] = collections.deque()
        ahead = len(self._install.replica.stages) + 1
        number = 0
        try:
            while True:
                waited = not pending
                while not pending or (len(pending) < ahead and not self._steps.empty()):
                    order = self._steps.get()
                    if order is None or self._stop.is_set():
                        return
                    number = order.step if isinstance(order, Step) else number
                    pending.append(self._accept(order))
                item = pending.popleft()
                if isinstance(item, FreeBlocks):
                    self._free(item)
                else:
                    number = item.step.step
                    self._do(item, waited=waited)
        except Exception as error:  # noqa: BLE001 - whatever it is, the head is told
            if not self._stop.is_set():
                self._break(number, error)

    def _accept(self, order: Order) -> Pending | FreeBlocks:
        assert self._runner is not None
        if self._overflow:
            raise ProtocolError(f"more than {_MAX_WAITING_STEPS} steps wait")
        if isinstance(order, FreeBlocks):
            return order
        self._order.check(order)
        return self._runner.begin(order)

    def _free(self, order: FreeBlocks) -> None:
        assert self._runner is not None
        self._runner.free(order.blocks)

    def _do(self, pending: Pending, *, waited: bool) -> None:
        assert self._runner is not None
        outcome = self._runner.finish(pending, waited=waited, stopped=self._stop.is_set)
        if outcome.tokens is not None:
            self._host.send(
                StepDone(
                    worker=self._host.worker,
                    epoch=self.epoch,
                    replica=self._install.slot.replica,
                    step=pending.step.step,
                    tokens=outcome.tokens,
                    compute_s=outcome.compute_s,
                )
            )

    def _break(self, step: int, error: Exception) -> None:
        """Tell the head, let the peers notice, and wait for the end, which the head bounds.

        The memory stays: what it holds of the KV cache may be moved yet.
        """
        self.phase = TenancyPhase.BROKEN
        reason, trace = reason_of(error), _unexpected(error)
        log.warning("epoch %d: step %d failed: %s", self.epoch, step, reason, exc_info=trace)
        self._host.send(
            StepFailed(worker=self._host.worker, epoch=self.epoch, step=step, reason=reason)
        )
        self._groups.abort()
        self._stop.wait()

    def _tear_down(self) -> None:
        self.phase = TenancyPhase.RETIRED
        self._runner = None
        settled = self._host.transfers.close(self.epoch, _CLOSE_S)
        if not settled:
            log.error("epoch %d: still moved after %g s", self.epoch, _CLOSE_S)
        stage, self._stage = self._stage, None
        keep_weights = self._keep_weights
        if stage is not None:
            stage.close(keep_weights=keep_weights)
            if keep_weights:
                self._host.transfers.keep_weights(self.epoch, stage.arena)
        del stage
        self._vacated.set()
        if keep_weights and settled:
            self._last.wait(_LINGER_S)
        left = self._groups.close(_CLOSE_S)
        if left:
            log.error("epoch %d: still open after %g s: %s", self.epoch, _CLOSE_S, ", ".join(left))
        self._host.ended(self.epoch, settled and not left)


def _unexpected(error: Exception) -> Exception | None:
    """The error where its traceback tells something: ours and those of lost peers do not."""
    return None if isinstance(error, FlexslurmError | RuntimeError) else error


def reason_of(error: Exception) -> str:
    """An error in one line for the head, without gloo's source positions and advice."""
    if isinstance(error, FlexslurmError):
        return error.message
    line = (str(error).splitlines() or [""])[0]
    if isinstance(error, RuntimeError) and line:
        line = re.sub(r"\[/[^\]]*\]\s*", "", line)
        return re.sub(r"\. This is (typically|often) .*", "", line)[:300]
    return f"{type(error).__name__}: {line[:300]}"
