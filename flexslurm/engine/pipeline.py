"""The work of a step at one stage: receive, compute, sample or send on.

A step is the same batch at every stage. Its hidden state comes from one rank of the stage before
and goes to the ranks after; tokens go to the head. Never decides what is in a step.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flexslurm.engine import faults
from flexslurm.engine.batch import Batch
from flexslurm.engine.epoch_groups import EpochGroups
from flexslurm.engine.faults import Point
from flexslurm.engine.groups import Ticket
from flexslurm.engine.pacing import Pacer, StepWork
from flexslurm.engine.sampling import sample
from flexslurm.engine.stage import LoadedStage
from flexslurm.errors import ProtocolError
from flexslurm.messages import SampledToken, Step

_IDLE_S = 0.001


class StepOrder:
    """Checks that steps of an epoch come for one replica and rise."""

    def __init__(self, epoch: int, replica: int) -> None:
        self._epoch, self._replica = epoch, replica
        self._last: int | None = None

    def check(self, step: Step) -> None:
        """Raises ProtocolError for a step of another epoch or replica, or out of order."""
        if (step.epoch, step.replica) != (self._epoch, self._replica):
            raise ProtocolError(
                f"step {step.step} is for epoch {step.epoch}, replica {step.replica}; "
                f"this is epoch {self._epoch}, replica {self._replica}"
            )
        if self._last is not None and step.step <= self._last:
            raise ProtocolError(f"step {step.step} after step {self._last}")
        if not step.chunks:
            raise ProtocolError(f"step {step.step} has no chunks")
        self._last = step.step


@dataclass(slots=True)
class Pending:
    """A step whose hidden state is on its way."""

    step: Step
    batch: Batch
    hidden: torch.Tensor | None
    arriving: Ticket | None
    """None at the first stage."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave at this rank; tokens are None where it does not sample."""

    tokens: tuple[SampledToken, ...] | None
    compute_s: float


class StageRunner:
    """Does the steps of one stage, in order, on one thread.

    Sends do not hold up the next step: their tensors are kept until they are through, at most
    `stages + 2` of them for each link.
    """

    def __init__(
        self, stage: LoadedStage, groups: EpochGroups, *, samples: bool, stages: int, pacer: Pacer
    ) -> None:
        self._stage, self._pacer, self._samples = stage, pacer, samples
        self._source, self._targets = groups.source, groups.targets
        assert (self._source is None) == stage.is_first
        self._sends: collections.deque[tuple[Ticket, torch.Tensor]] = collections.deque()
        self._most_sends = (stages + 2) * len(self._targets)

    def begin(self, step: Step) -> Pending:
        """Lay out the batch and open the receive, so that it comes in during the step before.

        Steps must begin in the order in which the stage before sends them.
        """
        batch = Batch.from_chunks(step.chunks, self._stage.plan.block_tokens, self._stage.device)
        if self._source is None:
            return Pending(step, batch, None, None)
        hidden = self._stage.empty_hidden(batch.tokens_count)
        return Pending(step, batch, hidden, self._source.broadcast(hidden))

    def finish(self, pending: Pending, *, waited: bool, stopped: Callable[[], bool]) -> Outcome:
        """Compute the step and pass it on; `waited`: nothing was to do before it came.

        Raises RuntimeError when a peer is gone or the groups were aborted; then nothing of the
        step may be believed.
        """
        faults.reach(Point.STEP)
        began = time.monotonic()
        if pending.arriving is not None:
            pending.arriving.wait()
        self._pacer.begin(waited=waited or time.monotonic() - began > _IDLE_S)
        self._stage.free(pending.step.freed)
        out = self._stage.forward(pending.batch, pending.hidden)
        tokens = self._sampled(pending.batch, out) if self._samples else None
        compute_s = self._pacer.end(StepWork.of(pending.step.chunks))
        if stopped():  # what an aborted group left in the tensors is no result
            raise RuntimeError("the epoch was ended during the step")
        for target in self._targets:
            self._sends.append((target.broadcast(out), out))
        self._wait_sends(self._most_sends)
        return Outcome(tokens, compute_s)

    def free(self, blocks: Sequence[int]) -> None:
        """These blocks hold nothing any more, once the steps before are finished."""
        self._stage.free(blocks)

    def flush(self) -> None:
        """Wait until all that was sent is through."""
        self._wait_sends(0)

    def _sampled(self, batch: Batch, logits: torch.Tensor) -> tuple[SampledToken, ...]:
        chosen = sample(logits, [sampling for _, sampling in batch.sampled])
        return tuple(
            SampledToken(seq_id, token, logprobs)
            for (seq_id, _), (token, logprobs) in zip(batch.sampled, chosen, strict=True)
        )

    def _wait_sends(self, most: int) -> None:
        while len(self._sends) > most:
            self._sends[0][0].wait()
            self._sends.popleft()
