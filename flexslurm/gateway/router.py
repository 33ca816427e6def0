"""Which replica a sequence goes to, and whether it is taken at all; never sends anything.

A replica *can start* a sequence if it has a place in its batch and blocks for it. Among those that
can, the sequence goes to the one with the least work for its speed: `(sequences + 1) / speed`, with
the speed weighed down while the replica is ramped up. If none can, a few sequences may queue at a
replica, so that it never runs dry; the others are held back, and go to whichever replica gets room
first. The best place for a sequence is known only then.

A sequence that was accepted when the gear was larger may reach more tokens than any replica holds
now. It goes to the largest, for as far as that holds it: most answers end before their limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from flexslurm.errors import ContextTooLong, Overloaded

RAMP = (0.2, 0.5, 1.0)
"""Weights of a new replica, each kept until enough answers were good."""
_QUEUE_SHARE = 8  # a replica's own queue: one part in eight of its batch
_QUEUE_LEAST = 2


class RoutingVerdict(StrEnum):
    """What becomes of a sequence that looks for a replica."""

    PLACED = "placed"
    HELD = "held"
    """Every replica that could take it is busy."""
    UNFIT = "unfit"
    """No replica of this gear is large enough for one token more."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as the router sees it."""

    replica: int
    running: int
    waiting: int
    max_batch: int
    free_blocks: int
    """Blocks that are neither in use nor wanted by sequences that wait; may be below zero."""
    block_tokens: int
    max_context: int
    """Tokens of prompt and answer that one sequence may reach."""
    speed: float = 1.0
    """Output tokens per second as estimated or measured; only the ratio counts."""
    ramp: float = 1.0
    """Share of its usual traffic that it is given, above 0 and at most 1."""

    @property
    def sequences(self) -> int:
        return self.running + self.waiting

    @property
    def places(self) -> int:
        """Sequences it may run at once, as far as it is ramped up."""
        return max(1, int(self.max_batch * self.ramp))

    @property
    def queue_bound(self) -> int:
        return max(_QUEUE_LEAST, self.max_batch // _QUEUE_SHARE)

    def score(self) -> float:
        """The work it would have with one sequence more, for its speed; the least is the best."""
        return (self.sequences + 1) / (self.speed * self.ramp)


class RoutingDecision(msgspec.Struct, frozen=True):
    """The answer, with its reason; `replica` is None unless it is placed."""

    verdict: RoutingVerdict
    replica: int | None
    reason: str
    cap_tokens: int | None = None
    """Set where the sequence may outgrow the replica: the tokens at which it must leave it."""


def choose(loads: Sequence[ReplicaLoad], tokens_now: int, tokens_most: int) -> RoutingDecision:
    """Choose a replica for a sequence.

    `tokens_now` are those it has (prompt, and answer so far if it moved here), `tokens_most` those
    it may reach. Equal scores go to the lower replica number.
    """
    largest = max((load.max_context for load in loads), default=0)
    if tokens_now >= largest:
        return RoutingDecision(
            RoutingVerdict.UNFIT, None, f"it has {tokens_now} tokens of at most {largest}"
        )
    cap = None if tokens_most <= largest else largest
    fit = [load for load in loads if min(tokens_most, largest) <= load.max_context]
    start = [load for load in fit if _can_start(load, tokens_now)]
    if start:
        best = min(start, key=lambda load: (load.score(), load.replica))
        return RoutingDecision(
            RoutingVerdict.PLACED, best.replica, _reason(best, start, loads), cap
        )
    # A replica that is ramped up would start what queues there, beyond its share.
    queue = [load for load in fit if load.ramp >= 1 and load.waiting < load.queue_bound]
    if queue:
        best = min(queue, key=lambda load: (load.score(), load.replica))
        why = f"none can start it now; replica {best.replica} has room in its queue"
        return RoutingDecision(
            RoutingVerdict.PLACED, best.replica, f"{why}, {best.waiting} wait there", cap
        )
    numbers = ", ".join(str(load.replica) for load in fit)
    return RoutingDecision(
        RoutingVerdict.HELD, None, f"no room in the batches and queues of replicas {numbers}"
    )


def _can_start(load: ReplicaLoad, tokens: int) -> bool:
    blocks = -(-tokens // load.block_tokens)
    return load.sequences < load.places and blocks <= load.free_blocks


def _reason(best: ReplicaLoad, start: Sequence[ReplicaLoad], loads: Sequence[ReplicaLoad]) -> str:
    if len(loads) == 1:
        return "the only replica"
    if len(start) == 1:
        return f"only replica {best.replica} can start it now"
    ramped = f", ramped to {best.ramp:.0%}" if best.ramp < 1 else ""
    return (
        f"replica {best.replica} has the least work for its speed: {best.sequences} sequences at "
        f"{best.speed:.3g} tokens/s{ramped}, of {len(start)} that can start it"
    )


def check_context(prompt: int, answer: int, limit: int, *, whose: str = "this gear") -> None:
    """Raise ContextTooLong, with the limit in the message, if a sequence may outgrow it."""
    if prompt + answer > limit:
        raise ContextTooLong(
            f"{prompt} tokens of prompt and up to {answer} of answer are more than the {limit} "
            f"tokens that {whose} holds for one sequence",
            param="max_tokens" if prompt < limit else "prompt",
        )


def check_queue(new: int, live: int, places: int, max_waiting: int) -> None:
    """Raise Overloaded if `new` sequences more would make more wait than may.

    `live` sequences are accepted and not ended, `places` may run at once.
    """
    if live + new > places + max_waiting:
        waiting = max(0, live - places)
        raise Overloaded(
            f"{waiting} sequences are waiting, and at most {max_waiting} may",
            hint="try again later",
        )
