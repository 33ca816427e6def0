"""Drives one replica for one epoch: micro-batches out, tokens back; never waits and never decides.

The driver is called by the head's loop (`submit`, `on_step_done`, `tick`, ...) and calls back
(`Hooks`). What goes into a step is the scheduler's; what to do about a replica
that is broken is the controller's, which closes this driver and gives what is left to another.

Numbers of steps rise by one within an epoch, and the workers do steps in that order. An answer of
another epoch, or after `close`, belongs to a replica that is no more, and is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from flexslurm.engine.load import LiveSequence, RunningKv, SchedulerLoad
from flexslurm.engine.scheduler import Scheduler
from flexslurm.errors import ProtocolError
from flexslurm.gear import Epoch, Replica
from flexslurm.messages import (
    FreeBlocks,
    Message,
    SequenceRequest,
    Step,
    StepDone,
    StepFailed,
    TokenEvent,
)

STEP_TIMEOUT_S = 60.0


class StepLatency(msgspec.Struct, frozen=True):
    """How long steps took, from sending to the answer: the last, and a moving average."""

    last_s: float = 0.0
    mean_s: float = 0.0
    compute_s: float = 0.0
    """The last stage's own part, the moving average."""
    count: int = 0

    def with_step(self, took_s: float, compute_s: float) -> StepLatency:
        weight = max(1 / (self.count + 1), 0.05)
        return StepLatency(
            last_s=took_s,
            mean_s=self.mean_s + weight * (took_s - self.mean_s),
            compute_s=self.compute_s + weight * (compute_s - self.compute_s),
            count=self.count + 1,
        )


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a driver calls; none of it waits."""

    send: Callable[[tuple[str, ...], Message], object]
    """To all of these workers at once, so that a step is encoded once."""
    emit: Callable[[TokenEvent], None]
    broken: Callable[[str], None]
    """At most once, with a reason: the replica can serve no more. Nothing is sent after that."""
    now: Callable[[], float]
    """Seconds on a clock that only goes forward."""


class Driver:
    """One replica of one epoch; its scheduler, and the steps that are not answered.

    `workers` are the replica's workers in slot order; every step goes to all of them.
    """

    def __init__(
        self,
        epoch: Epoch | int,
        replica_index: int,
        replica: Replica,
        block_tokens: int,
        workers: tuple[str, ...],
        hooks: Hooks,
        *,
        step_timeout_s: float = STEP_TIMEOUT_S,
        seat: int | None = None,
        paused: bool = False,
    ) -> None:
        assert len(workers) == replica.gpus, f"{len(workers)} workers for {replica.gpus} GPUs"
        self.epoch = Epoch(epoch)
        self.replica_index = replica_index
        """Its number in its epoch, which its messages carry."""
        self.seat = replica_index if seat is None else seat
        """Tells it from all other drivers that are open."""
        self.replica = replica
        self.workers = workers
        self.scheduler = Scheduler(replica, block_tokens)
        self.step_times = StepLatency()
        self.closed = False
        self.broken_reason: str | None = None
        self.dropped = 0
        """Answers that came too late: of another epoch, or after the end."""
        self._hooks = hooks
        self._step_timeout_s = step_timeout_s
        self._sent_at: dict[int, float] = {}
        self._progress_at = hooks.now()
        self._paused = paused
        self._emitting = False

    # --------------------------------------------------------------------------- requests

    def submit(
        self, request: SequenceRequest, output: tuple[int, ...] = (), *, partly: bool = False
    ) -> None:
        """Queue a sequence; `pump` starts it, so that those of one request start together.

        With `partly` it may be one that outgrows the replica; whoever submits it aborts it when it
        has `load().max_context` tokens. Raises ContextTooLong if the replica cannot hold it.
        """
        assert not self.closed, f"{request.seq_id} came to the closed driver of epoch {self.epoch}"
        self.scheduler.add(request, output, partly=partly)

    def abort(self, seq_id: str) -> bool:
        """End a sequence without an event; whether it was here."""
        return self.scheduler.abort(seq_id)

    # -------------------------------------------------------- sequences that come with their KV

    def running_kv(self) -> list[RunningKv]:
        """What could be moved from here; see `Scheduler.running_kv`."""
        return self.scheduler.running_kv()

    def reserve(self, seq_id: str, count: int) -> tuple[int, ...] | None:
        """Blocks to be filled from outside; see `Scheduler.reserve`."""
        return None if self.closed else self.scheduler.reserve(seq_id, count)

    def release(self, seq_id: str) -> None:
        """Give reserved blocks back, if there are any, to sequences that wait for room."""
        if not self.closed:
            self.scheduler.release(seq_id)
            self.pump()

    def adopt(
        self,
        request: SequenceRequest,
        output: tuple[int, ...],
        computed: int,
        *,
        partly: bool = False,
    ) -> bool:
        """Run a sequence with its reserved blocks; see `Scheduler.adopt`. `pump` starts it."""
        assert not self.closed, f"{request.seq_id} came to the closed driver of epoch {self.epoch}"
        return self.scheduler.adopt(request, output, computed, partly=partly)

    def limit_blocks(self, blocks: int | None) -> None:
        """Use no more blocks than these from now on; None: all there are."""
        pool = self.scheduler.pool
        pool.limit = pool.num_blocks if blocks is None else min(blocks, pool.num_blocks)

    def close(self) -> list[LiveSequence]:
        """End for good; returns what has not ended, by arrival, with the tokens given out."""
        assert not self._emitting, "a driver is not closed from within an event it emits"
        self.closed = True
        self._sent_at.clear()
        return self.scheduler.live()

    # ------------------------------------------------------------------------------ steps

    @property
    def serving(self) -> bool:
        return not self.closed and self.broken_reason is None

    @property
    def idle(self) -> bool:
        """At a step boundary: no step is unanswered."""
        return self.scheduler.idle

    def pause(self) -> None:
        """Send no further step; those in flight end, and then the driver is `idle`."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.pump()

    def pump(self) -> int:
        """Send steps until enough are in flight or nothing is ready; returns how many."""
        sent = 0
        while self.serving and not self._paused and self._send_next():
            sent += 1
        if self.serving and self.idle:
            self._tell_freed()
        return sent

    def _send_next(self) -> bool:
        """Send a step if there is anything to do."""
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        now = self._hooks.now()
        if not self._sent_at:
            self._progress_at = now
        self._sent_at[batch.step] = now
        step = Step(
            epoch=self.epoch,
            replica=self.replica_index,
            step=batch.step,
            chunks=batch.chunks,
            freed=batch.freed,
        )
        try:
            self._hooks.send(self.workers, step)
        except Exception as error:
            self._break(f"step {batch.step} could not be sent: {error}")  # it is never answered
            raise
        return True

    def _tell_freed(self) -> None:
        """What is free is free at once where no step follows that would say so."""
        freed = self.scheduler.tell_freed()
        if freed:
            told = FreeBlocks(epoch=self.epoch, replica=self.replica_index, blocks=freed)
            self._hooks.send(self.workers, told)

    def on_step_done(self, message: StepDone) -> None:
        """Take a step's tokens, emit their events, send what can be sent next."""
        if not self._concerns_us(message.epoch) or message.replica != self.replica_index:
            self.dropped += 1
            return
        sent_at = self._sent_at.pop(message.step, None)
        try:
            events = self.scheduler.complete(message.step, message.tokens)
        except ProtocolError as error:
            self._break(f"worker {message.worker}: {error.message}")
            return
        assert sent_at is not None, f"step {message.step} was in flight and not sent"
        self._progress_at = self._hooks.now()
        took_s = self._progress_at - sent_at
        self.step_times = self.step_times.with_step(took_s, message.compute_s)
        self.pump()  # first, so that the workers compute while the events go out
        self._emitting = True
        for event in events:
            self._hooks.emit(event)
        self._emitting = False
        self.pump()
        if self.scheduler.empty:
            used = self.scheduler.pool.used_count
            assert used == 0, f"{used} blocks of replica {self.replica_index} were not given back"

    def on_step_failed(self, message: StepFailed) -> None:
        """A worker could not do a step: the epoch is broken."""
        if not self._concerns_us(message.epoch) or message.worker not in self.workers:
            self.dropped += 1
            return
        self._break(f"worker {message.worker} failed in step {message.step}: {message.reason}")

    def tick(self, now: float) -> None:
        """Report broken if a step is unanswered and none was answered for too long.

        The time counts from the last answer, since a step waits for those sent before it.
        """
        if not self.serving or not self._sent_at:
            return
        silent_s = now - self._progress_at
        if silent_s > self._step_timeout_s:
            self._break(f"step {min(self._sent_at)} was not answered within {silent_s:.1f} s")

    def load(self) -> SchedulerLoad:
        return self.scheduler.load()

    def _concerns_us(self, epoch: int) -> bool:
        return self.serving and epoch == self.epoch

    def _break(self, reason: str) -> None:
        if self.serving:
            self.broken_reason = reason
            self._hooks.broken(reason)
