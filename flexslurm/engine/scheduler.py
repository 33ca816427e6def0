"""Continuous batching for one replica: what goes into the next micro-batch; never sends anything.

Rules, in the order in which they give way
------------------------------------------
1. The oldest sequence that runs always goes on: it may take blocks from every younger one, and
   nobody may take its blocks. A sequence alone always fits, since longer ones are refused. So
   whatever the load, something finishes.
2. Admission is strictly by arrival. The head of the queue is never overtaken, so never starved.
3. Decodes go before prefill chunks, those that waited longest first; but while there is prefill to
   do, a quarter of the token budget is kept for it.
4. Decodes are spread over as many micro-batches as there are stages, so that all stages work.

Blocks of a sequence in flight are not given out before its micro-batch is answered.

A sequence that moved here from a larger replica may be taken *partly*: it goes on until it has as
many tokens as fit, and then rests, decoding but never ready, until the head takes it away.

A sequence that is to come from another replica with its KV has blocks *reserved* here, which are
filled from outside; `adopt` makes it one of those that run, or `release` gives the blocks back.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flexslurm.engine.kv_cache import BlockPool, blocks_for
from flexslurm.engine.load import LiveSequence, MicroBatch, RunningKv, SchedulerLoad
from flexslurm.engine.roster import Roster
from flexslurm.engine.sequence import Sequence, SequenceState
from flexslurm.errors import ContextTooLong, InvalidRequest, ProtocolError
from flexslurm.gear import Replica
from flexslurm.messages import Chunk, SampledToken, SequenceRequest, TokenEvent

_PREFILL_SHARE = 4  # one part in four of the budget is kept for prefill while there is some
_COMING = "\0"  # before the name of a sequence whose blocks are reserved
_SPARE_SHARE = 4  # blocks left free at admission: one for every four sequences that may grow


class _Entry(msgspec.Struct, frozen=True):
    """A sequence's part of a micro-batch in flight."""

    sequence: Sequence
    tokens: int
    samples: bool


class Scheduler:
    """The sequences of one replica, its block pool, and the micro-batches in flight.

    Invariants (`check_invariants`): a sequence owns blocks exactly while it runs, is aborted and
    still in flight, or is to be adopted; it is in at most one micro-batch in flight; at most
    `max_batch` run.
    """

    def __init__(self, replica: Replica, block_tokens: int, first_step: int = 0) -> None:
        assert replica.max_batch >= 1 and replica.max_batch_tokens >= 1, f"no room in {replica}"
        self.block_tokens = block_tokens
        self.max_batch = replica.max_batch
        self.max_batch_tokens = replica.max_batch_tokens
        self.max_in_flight = len(replica.stages)
        self.pool = BlockPool(replica.kv_blocks)
        self.max_context = min(replica.max_context, replica.kv_blocks * block_tokens)
        self._roster = Roster(block_tokens, self.max_context)
        self._in_flight: dict[int, tuple[_Entry, ...]] = {}
        self._reserved: set[str] = set()
        self._next_step = first_step
        self._first_step = first_step
        self._evictions = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._prefill_turn = False

    # ------------------------------------------------------------------------ in and out

    def add(
        self, request: SequenceRequest, output: tuple[int, ...] = (), *, partly: bool = False
    ) -> None:
        """Queue a sequence, new or with the part of its answer that it already has.

        Raises ContextTooLong if it could outgrow the replica, or, with `partly`, if it could not
        even get its next token; InvalidRequest if it is empty.
        """
        self._check_fits(request, len(output), partly)
        assert request.seq_id not in self._roster.all, f"{request.seq_id} is here already"
        assert len(output) < request.stop.max_tokens, f"{request.seq_id} is complete"
        self._roster.enqueue(Sequence(request, output))

    def _check_fits(self, request: SequenceRequest, has: int, partly: bool) -> None:
        prompt, answer = len(request.prompt), request.stop.max_tokens
        if prompt < 1:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if answer < 1:
            raise InvalidRequest("at least one token must be asked for", param="max_tokens")
        if prompt + (has + 1 if partly else answer) > self.max_context:
            raise ContextTooLong(
                f"{prompt} tokens of prompt and up to {answer} of answer are more than the "
                f"{self.max_context} tokens that this gear holds for one sequence"
            )

    def abort(self, seq_id: str) -> bool:
        """End a sequence without an event; whether it was here.

        Its blocks are free at once, or, if it is in flight, when its micro-batch is answered.
        """
        sequence = self._roster.all.get(seq_id)
        if sequence is None:
            return False
        self._roster.finish(sequence)
        if sequence.step is None:
            self.pool.free(seq_id)
        return True

    # ---------------------------------------------------------------- from and to elsewhere

    def running_kv(self) -> list[RunningKv]:
        """What could be moved to another replica, by arrival; full blocks never change."""
        return [
            RunningKv(
                seq_id=s.seq_id,
                blocks=self.pool.table(s.seq_id),
                computed=s.computed,
                arrival=s.request.arrival,
                most_tokens=len(s.prompt) + s.request.stop.max_tokens,
                tenure=s.tenure,
            )
            for s in self._roster.running_in_order()
        ]

    def reserve(self, seq_id: str, count: int) -> tuple[int, ...] | None:
        """Give a sequence that is to come `count` more blocks, to be filled from outside.

        Returns these blocks, or None if there are not enough.
        """
        owner = _COMING + seq_id  # the sequence itself may be here meanwhile, and leave again
        held = self.pool.held(owner)
        if not self.pool.allocate_cold(owner, count):
            return None
        if count:
            self._reserved.add(seq_id)
        return self.pool.table(owner)[held:]

    def release(self, seq_id: str) -> None:
        """Give reserved blocks back; nothing may still be filling them."""
        if seq_id in self._reserved:
            self._reserved.discard(seq_id)
            self.pool.free(_COMING + seq_id)

    def adopt(
        self,
        request: SequenceRequest,
        output: tuple[int, ...],
        computed: int,
        *,
        partly: bool = False,
    ) -> bool:
        """Run a sequence whose reserved blocks hold the KV of its first `computed` tokens.

        Where there is no place in the batch, or no block for its next token, its blocks are given
        back and the answer is False: it is to be added as any other. Raises as `add`.
        """
        self._check_fits(request, len(output), partly)
        sequence = Sequence(request, output)
        computed = min(computed, sequence.length - 1)
        assert sequence.seq_id not in self._roster.all, f"{sequence.seq_id} is here already"
        owner = _COMING + sequence.seq_id
        held = self.pool.held(owner)
        assert computed <= held * self.block_tokens, f"{computed} tokens in {held} blocks"
        more = max(blocks_for(sequence.length, self.block_tokens) - held, 0)
        full = self._roster.running >= self.max_batch
        if full or not self.pool.allocate(owner, more):
            self.release(sequence.seq_id)
            return False
        self._reserved.discard(sequence.seq_id)
        self.pool.hand_over(owner, sequence.seq_id)
        sequence.computed = computed
        self._roster.prefill(sequence)
        if output and computed == sequence.length - 1:
            self._roster.decode(sequence)
        return True

    def live(self) -> list[LiveSequence]:
        """All sequences that have not ended, by arrival."""
        every = self._roster.in_order()
        return [LiveSequence(s.request, tuple(s.output), s.step is not None) for s in every]

    @property
    def idle(self) -> bool:
        """No micro-batch is in flight."""
        return not self._in_flight

    @property
    def empty(self) -> bool:
        """No sequence is left, not even an aborted one in flight, and none is to come."""
        return not self._roster.all and not self._in_flight and not self._reserved

    def load(self) -> SchedulerLoad:
        return SchedulerLoad(
            running=self._roster.running,
            waiting=len(self._roster.queue),
            in_flight=len(self._in_flight),
            blocks=self.pool.num_blocks,
            used_blocks=self.pool.used_count,
            free_blocks=self.pool.free_count,
            queued_blocks=self._roster.queued_blocks,
            block_tokens=self.block_tokens,
            max_batch=self.max_batch,
            max_context=self.max_context,
            steps=self._next_step - self._first_step,
            evictions=self._evictions,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
        )

    # -------------------------------------------------------------------------- deciding

    def schedule(self) -> MicroBatch | None:
        """The next micro-batch, or None: nothing is ready, or enough are in flight."""
        if len(self._in_flight) >= self.max_in_flight or not self._roster.all:
            return None
        step = self._next_step
        decodes = self._pick_decodes(step, self.max_batch_tokens - self._kept_for_prefill())
        chunks = [self._decode_chunk(s) for s in decodes]
        entries = [_Entry(s, 1, True) for s in decodes]
        self._pick_prefills(step, self.max_batch_tokens - len(decodes), chunks, entries)
        if not entries:
            return None
        self._in_flight[step] = tuple(entries)
        self._next_step += 1
        prefill = sum(entry.tokens for entry in entries) - len(decodes)
        self._decode_tokens += len(decodes)
        self._prefill_tokens += prefill
        freed = self.pool.tell_freed(step)
        return MicroBatch(step, tuple(chunks), len(decodes), prefill, freed)

    def tell_freed(self) -> tuple[int, ...]:
        """What `schedule` would tell of freed blocks with its next micro-batch, told before it."""
        return self.pool.tell_freed(self._next_step)

    def _kept_for_prefill(self) -> int:
        """Tokens of the budget that decodes must leave; takes turns where one token is all."""
        pending = any(s.step is None for s in self._roster.prefilling)
        if not pending and not (self._roster.queue and self._admissible(self._roster.queue[0])):
            return 0
        if self.max_batch_tokens > 1:
            return max(1, self.max_batch_tokens // _PREFILL_SHARE)
        self._prefill_turn = not self._prefill_turn
        return int(self._prefill_turn)

    def _pick_decodes(self, step: int, limit: int) -> list[Sequence]:
        quota = min(limit, -(-len(self._roster.decoding) // self.max_in_flight))
        picked: list[Sequence] = []
        for sequence in list(self._roster.ready.values()) if quota > 0 else ():
            if sequence.state is not SequenceState.DECODING or not self._can_grow(sequence):
                continue  # evicted by one before it in this loop, or without room for now
            del self._roster.ready[sequence.seq_id]
            sequence.step = step
            picked.append(sequence)
            if len(picked) == quota:
                break
        return picked

    def _pick_prefills(
        self, step: int, budget: int, chunks: list[Chunk], entries: list[_Entry]
    ) -> None:
        """Fill the budget with chunks: of those that run, oldest first, then of new ones."""
        for sequence in self._roster.prefilling:
            if budget and sequence.step is None:
                budget -= self._add_prefill(sequence, step, budget, chunks, entries)
        while budget and self._roster.queue and self._admissible(self._roster.queue[0]):
            sequence = self._roster.queue[0]
            self._admit(sequence)
            budget -= self._add_prefill(sequence, step, budget, chunks, entries)

    def _add_prefill(
        self, sequence: Sequence, step: int, budget: int, chunks: list[Chunk], entries: list[_Entry]
    ) -> int:
        start, length = sequence.computed, sequence.length
        end = min(start + budget, length)
        chunks.append(
            Chunk(
                seq_id=sequence.seq_id,
                tokens=sequence.tokens(start, end),
                start=start,
                blocks=self.pool.table(sequence.seq_id),
                sample=sequence.sampling() if end == length else None,
            )
        )
        entries.append(_Entry(sequence, end - start, end == length))
        sequence.step = step
        return end - start

    def _decode_chunk(self, sequence: Sequence) -> Chunk:
        return Chunk(
            seq_id=sequence.seq_id,
            tokens=(sequence.output[-1],),
            start=sequence.computed,
            blocks=self.pool.table(sequence.seq_id),
            sample=sequence.sampling(),
        )

    # -------------------------------------------------------------------- blocks and queue

    def _admissible(self, sequence: Sequence) -> bool:
        running = self._roster.running
        spare = running // _SPARE_SHARE  # else one is admitted only to be evicted again
        need = blocks_for(sequence.length, self.block_tokens)
        return running < self.max_batch and need + spare <= self.pool.free_count

    def _admit(self, sequence: Sequence) -> None:
        """Give it the blocks for all the tokens it has, so that prefill never waits for any."""
        self._roster.dequeue(sequence)
        need = blocks_for(sequence.length, self.block_tokens)
        given = self.pool.allocate(sequence.seq_id, need)
        assert given, f"{sequence} was admitted without room"
        self._roster.prefill(sequence)

    def _can_grow(self, sequence: Sequence) -> bool:
        """Make sure of a block for the position it computes next; evicts younger ones for it."""
        if sequence.computed < self.pool.held(sequence.seq_id) * self.block_tokens:
            return True
        while not self.pool.allocate(sequence.seq_id, 1):
            victim = self._roster.youngest_after(sequence)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _evict(self, victim: Sequence) -> None:
        self._roster.evict(victim)
        self.pool.free(victim.seq_id)
        self._evictions += 1

    # --------------------------------------------------------------------------- answers

    def complete(self, step: int, tokens: Iterable[SampledToken]) -> list[TokenEvent]:
        """Take the sampled tokens of a micro-batch; returns an event for each live sequence's.

        Raises ProtocolError, and changes nothing, if the step is not in flight or its tokens are
        not those that were asked for.
        """
        entries = self._in_flight.get(step)
        if entries is None:
            raise ProtocolError(f"step {step} is answered, but it is not in flight")
        given = {token.seq_id: token for token in tokens}
        asked = {entry.sequence.seq_id for entry in entries if entry.samples}
        if given.keys() != asked:
            odd = ", ".join(sorted(given.keys() ^ asked))
            raise ProtocolError(f"step {step} was to sample {len(asked)} tokens; not so for {odd}")
        del self._in_flight[step]
        self.pool.cool(step)
        events = []
        for entry in entries:
            sequence = entry.sequence
            sequence.step = None
            if sequence.state is SequenceState.FINISHED:
                self.pool.free(sequence.seq_id)
                continue
            sequence.computed += entry.tokens
            if entry.samples:
                events.append(self._append(sequence, given[sequence.seq_id]))
        return events

    def _append(self, sequence: Sequence, sampled: SampledToken) -> TokenEvent:
        position = len(sequence.output)
        finish = sequence.append(sampled.token)
        if finish is not None:
            self._roster.finish(sequence)
            self.pool.free(sequence.seq_id)
        else:
            self._roster.decode(sequence)
        return TokenEvent(
            seq_id=sequence.seq_id,
            token=sampled.token,
            position=position,
            logprobs=sampled.logprobs,
            finish=finish,
        )

    # ------------------------------------------------------------------------ invariants

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not agree; costs a walk over everything."""
        self.pool.check_integrity()
        flying = [e.sequence for entries in self._in_flight.values() for e in entries]
        assert len({id(s) for s in flying}) == len(flying), f"twice in flight: {flying}"
        assert len(self._in_flight) <= self.max_in_flight, f"in flight: {list(self._in_flight)}"
        aborted = {s.seq_id for s in flying if s.state is SequenceState.FINISHED}
        running = {s.seq_id for s in self._roster.running_in_order()}
        owners = running | aborted | {_COMING + seq_id for seq_id in self._reserved}
        assert set(self.pool.tables) == owners, "blocks are not with those that run"
        assert len(running) <= self.max_batch, f"{len(running)} run, {self.max_batch} may"
        for sequence in self._roster.all.values():
            flies = sequence in self._in_flight_sequences(sequence.step)
            assert flies == (sequence.step is not None), f"{sequence} flies?"
        self._roster.check_invariants(self.pool)

    def _in_flight_sequences(self, step: int | None) -> list[Sequence]:
        return [e.sequence for e in self._in_flight.get(-1 if step is None else step, ())]
