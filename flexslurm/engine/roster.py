"""The sequences of one replica by what they wait for; never decides what is next.

Every sequence is queued, or running: prefilling or decoding. The states are `engine.sequence`'s.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from flexslurm.engine.kv_cache import BlockPool, blocks_for
from flexslurm.engine.sequence import QUEUED, RUNNING, Sequence, SequenceState

_rank = attrgetter("rank")


class Roster:
    """Collections of one scheduler's sequences, read by it and changed by the methods here."""

    def __init__(self, block_tokens: int, max_context: int) -> None:
        self.block_tokens, self.max_context = block_tokens, max_context
        self.all: dict[str, Sequence] = {}
        self.queue: list[Sequence] = []  # by rank
        self.prefilling: list[Sequence] = []  # by rank
        self.decoding: dict[str, Sequence] = {}
        self.ready: dict[str, Sequence] = {}  # decoding, not in flight, longest wait first
        self.queued_blocks = 0

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def in_order(self) -> list[Sequence]:
        """All, by arrival."""
        return sorted(self.all.values(), key=_rank)

    def running_in_order(self) -> list[Sequence]:
        return sorted((*self.prefilling, *self.decoding.values()), key=_rank)

    def youngest_after(self, sequence: Sequence) -> Sequence | None:
        """The running sequence that arrived last, if after this one; none that is in flight."""
        candidates = (*self.prefilling, *self.ready.values())
        free = (s for s in candidates if s.step is None and s.rank > sequence.rank)
        return max(free, key=_rank, default=None)

    # ------------------------------------------------------------------------------ changes

    def enqueue(self, sequence: Sequence) -> None:
        self.all[sequence.seq_id] = sequence
        insort(self.queue, sequence, key=_rank)
        self.queued_blocks += blocks_for(sequence.length, self.block_tokens)

    def dequeue(self, sequence: Sequence) -> None:
        del self.queue[bisect_left(self.queue, sequence.rank, key=_rank)]
        self.queued_blocks -= blocks_for(sequence.length, self.block_tokens)

    def prefill(self, sequence: Sequence) -> None:
        """It runs from now on; it has its blocks."""
        self.all[sequence.seq_id] = sequence
        sequence.tenure += 1
        sequence.move(SequenceState.PREFILLING)
        insort(self.prefilling, sequence, key=_rank)

    def decode(self, sequence: Sequence) -> None:
        """All its tokens but the last are computed."""
        if sequence.state is SequenceState.PREFILLING:
            self.stop(sequence)
            sequence.move(SequenceState.DECODING)
            self.decoding[sequence.seq_id] = sequence
        if sequence.length < self.max_context:
            self.ready[sequence.seq_id] = sequence

    def stop(self, sequence: Sequence) -> None:
        """Take it out of the collections of running sequences."""
        if sequence.state is SequenceState.PREFILLING:
            del self.prefilling[bisect_left(self.prefilling, sequence.rank, key=_rank)]
        elif sequence.state is SequenceState.DECODING:
            del self.decoding[sequence.seq_id]
            self.ready.pop(sequence.seq_id, None)

    def evict(self, victim: Sequence) -> None:
        """Back to the queue; its blocks are the caller's to take."""
        self.stop(victim)
        victim.move(SequenceState.EVICTED)
        victim.computed = 0
        self.enqueue(victim)

    def finish(self, sequence: Sequence) -> None:
        if sequence.state in QUEUED:
            self.dequeue(sequence)
        self.stop(sequence)
        sequence.move(SequenceState.FINISHED)
        del self.all[sequence.seq_id]

    # --------------------------------------------------------------------------- invariants

    def check_invariants(self, pool: BlockPool) -> None:
        """Raise AssertionError if the collections do not agree with the sequences' states."""
        running = {s.seq_id for s in self.all.values() if s.state in RUNNING}
        assert {s.seq_id for s in self.prefilling} | self.decoding.keys() == running
        queued = [s for s in self.all.values() if s.state in QUEUED]
        assert self.queue == sorted(queued, key=_rank), f"the queue is {self.queue}"
        wanted = sum(blocks_for(s.length, self.block_tokens) for s in queued)
        assert self.queued_blocks == wanted, f"{self.queued_blocks} queued blocks, not {wanted}"
        for sequence in self.all.values():
            self._check_sequence(sequence, pool)

    def _check_sequence(self, s: Sequence, pool: BlockPool) -> None:
        assert len(s.output) < s.request.stop.max_tokens, f"{s} should have ended"
        held = pool.held(s.seq_id) * self.block_tokens
        if s.state in QUEUED:
            assert s.computed == 0 and s.step is None, f"{s} waits and is computed"
        elif s.state is SequenceState.PREFILLING:
            assert s.computed < s.length <= held, f"{s} with {held} positions"
        else:
            assert s.computed == s.length - 1 <= held, f"{s} with {held} positions"
            may_go_on = s.step is None and s.length < self.max_context
            assert (s.seq_id in self.ready) == may_go_on, f"{s} ready?"
