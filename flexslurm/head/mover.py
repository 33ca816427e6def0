"""The KV of sequences on its way from old replicas to new ones; pure: gives out messages to send.

    ROUNDS ──▶ LAST ──▶ DONE          (any of them ──▶ FAILED)

In ROUNDS the old drivers go on, and full blocks are pulled, which never change. It is *settled*
when little is left, or when what is left no longer shrinks. LAST begins with the pause: once the
old drivers are at a step boundary everything else is pulled, the partly filled blocks too. DONE
says for each sequence how many of its tokens have their KV in the new replica; the rest of a
sequence, or all of it, is recomputed there. So a pull that fails costs time and nothing else.

What may happen on the way: a sequence ends (its reserved blocks go back once nothing fills them);
it is evicted by the old scheduler and gets other blocks (what was pulled stays right, what is
under way is believed only if the blocks were its own all the time); its old replica is lost (what
was pulled counts); the new replica has no room left (the youngest gives way and is recomputed). An
answer that does not come fails the whole: blocks that may yet be written to can be given to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from flexslurm.engine.kv_cache import blocks_for
from flexslurm.engine.kv_moves import kv_pulls, route_costs
from flexslurm.engine.load import RunningKv
from flexslurm.engine.ownership import ShardMap
from flexslurm.engine.routing import LiveKv, Room, route_sequences
from flexslurm.head.moving import (
    LEGAL,
    Move,
    MoverPhase,
    MoverSettings,
    NewEnd,
    OldEnd,
    PullBatch,
    Tickets,
)
from flexslurm.head.pulls import Pulls
from flexslurm.messages import KvPulled, PullKv

ANSWER_MARGIN_S = 5.0
"""How much later than its own deadline a worker may answer a pull."""
_SHRINKING = 0.8
"""A round that leaves more than this of what the one before left is not worth another."""
_MOST_PAIRS = 4096
"""Blocks in one message."""

Views = Sequence[Mapping[str, RunningKv]]
"""What each old replica has, by sequence."""


class Mover:
    """See the module's docstring. `outbox` holds messages to send, by worker."""

    def __init__(
        self,
        shards: ShardMap,
        old: Sequence[OldEnd],
        new: Sequence[NewEnd],
        settings: MoverSettings,
        *,
        alive: Callable[[str], bool],
        tickets: Tickets,
        longest_first: bool = False,
    ) -> None:
        self.old, self.new = tuple(old), tuple(new)
        self.phase = MoverPhase.ROUNDS
        self.failure = ""
        self.settled = False
        self.outbox: list[tuple[str, PullKv]] = []
        self.pulls = Pulls()
        self.rounds = 0
        self._shards, self._settings = shards, settings
        self._timeout_s = settings.pull_timeout_s
        self._alive, self._tickets = alive, tickets
        self._longest_first = longest_first
        self._costs = route_costs(
            shards, [end.at for end in self.old], [end.at for end in self.new]
        )
        self._moves: dict[str, Move] = {}
        self._batches: dict[tuple[int, int], PullBatch] = {}
        self._goal: dict[str, int] = {}
        """Blocks of each sequence that this round is to bring."""
        self._left_before: int | None = None
        self._homeless: frozenset[str] = frozenset()
        """Sequences for which there was no room when they were looked at."""

    @property
    def over(self) -> bool:
        return not LEGAL[self.phase]

    def _enter(self, phase: MoverPhase) -> None:
        assert phase in LEGAL[self.phase], f"{self.phase} → {phase} is not legal"
        self.phase = phase

    # ------------------------------------------------------------------ what is heard

    def pulled(self, now: float, answer: KvPulled) -> bool:
        """Take an answer; whether it was to a pull of ours."""
        for key, batch in self._batches.items():
            if answer.ticket in batch.tickets:
                batch.tickets.discard(answer.ticket)
                batch.failed.update(answer.failed)
                self.pulls.add(now, answer)
                if not batch.tickets:
                    del self._batches[key]
                    self._take_in(batch, self.old[key[0]].view())
                self.advance(now)
                return True
        return False

    def _take_in(self, batch: PullBatch, view: Mapping[str, RunningKv]) -> None:
        for move, count, tenure in batch.pieces:
            move.in_flight = False
            kv = view.get(move.seq_id)
            asked = move.blocks[move.done : move.done + count]
            good = next((i for i, block in enumerate(asked) if block in batch.failed), count)
            if kv is None or kv.tenure != tenure:
                good = 0  # it had other blocks meanwhile: these may hold another's
            move.done += good
            if good < count:
                move.tries += 1
                last = self.phase is not MoverPhase.ROUNDS
                move.stuck = move.stuck or last or move.tries >= self._settings.most_tries

    def lose(self, number: int) -> None:
        """An old replica lost a member and is about to be closed: nothing more comes of it."""
        self.freeze(number)
        self.old[number].pullable = False

    def freeze(self, number: int) -> None:
        """An old replica's driver is about to be closed; its pages can still be had."""
        self.old[number].frozen = self.old[number].view()

    def begin_last(self, now: float, timeout_s: float) -> None:
        """The old drivers are paused: move what is left as soon as they are idle."""
        self._enter(MoverPhase.LAST)
        self._timeout_s = min(timeout_s, self._timeout_s)
        self.advance(now)

    def fail(self, why: str) -> None:
        if not self.over:
            self.failure = why
            self._enter(MoverPhase.FAILED)

    # ------------------------------------------------------------------ what is to be done

    def advance(self, now: float) -> None:
        """Go as far as what is known allows; fills `outbox`."""
        self._let_go()
        if self.overdue(now):
            self.fail("a pull of KV was not answered")
        if self.over:
            return
        last = self.phase is MoverPhase.LAST
        if last and not all(end.idle for end in self.old):
            return
        views = [end.view() for end in self.old]
        self._route(views)
        if not last and self._end_round(views):
            return  # what was begun now would be awaited in the pause
        began = self._pull(now, views, last=last)
        if last and not began and not self._awaits_answers:
            self._enter(MoverPhase.DONE)

    @property
    def _awaits_answers(self) -> bool:
        """Whether something may still come; of a source that is lost, only late failures."""
        return any(self.old[number].pullable for number, _ in self._batches)

    def _end_round(self, views: Views) -> bool:
        """Begin a round once the goal of the last is reached; whether it is settled only now."""
        full = {
            move.seq_id: views[move.old][move.seq_id].computed // self._shards.block_tokens
            for move in self._moves.values()
            if move.seq_id in views[move.old] and self.old[move.old].pullable and not move.is_out
        }
        done = {seq_id: self._moves[seq_id].done for seq_id in full}
        goals = ((seq_id, goal) for seq_id, goal in self._goal.items() if seq_id in done)
        if any(done[seq_id] < min(goal, full[seq_id]) for seq_id, goal in goals):
            return False
        left = sum(full[seq_id] - done[seq_id] for seq_id in full)
        before, self._left_before = self._left_before, left
        slow = before is not None and left >= _SHRINKING * before
        was, few = self.settled, left == 0 or slow
        self.settled = was or few or self.rounds >= self._settings.most_rounds
        self.rounds += 1
        self._goal = full
        return self.settled and not was

    def _route(self, views: Views) -> None:
        """Choose a new replica for the sequences that have none."""
        block_tokens = self._shards.block_tokens
        waiting = [
            LiveKv(
                seq_id=kv.seq_id,
                replica=number,
                blocks=max(blocks_for(kv.computed, block_tokens), 1),
                tokens=kv.computed,
                arrival=kv.arrival,
                context=kv.most_tokens,
            )
            for number, view in enumerate(views)
            for kv in view.values()
            if kv.seq_id not in self._moves and kv.computed and self._alive(kv.seq_id)
        ]
        without = frozenset(one.seq_id for one in waiting)
        if without <= self._homeless:
            return
        rooms = [self._room(number, views) for number in range(len(self.new))]
        routes = route_sequences(waiting, self._costs, rooms)
        for one in waiting:
            target = routes.to.get(one.seq_id)
            if target is not None:
                move = Move(one.seq_id, one.replica, target, one.arrival)
                self._moves[one.seq_id] = move
        self._homeless = without - routes.to.keys()

    def _room(self, number: int, views: Views) -> Room:
        load = self.new[number].driver.load()
        coming = [m for m in self._moves.values() if m.new == number and not m.gone]
        there = ((m, views[m.old].get(m.seq_id)) for m in coming)
        promised = sum(max(len(kv.blocks) - len(m.blocks), 0) for m, kv in there if kv is not None)
        blocks = max(load.free_blocks - promised, 0)
        sequences = max(load.max_batch - load.running - len(coming), 0)
        return Room(blocks=blocks, sequences=sequences, max_context=load.max_context)

    # ------------------------------------------------------------------ pulling

    def _pull(self, now: float, views: Views, *, last: bool) -> bool:
        """Begin a batch wherever none is under way; whether any was begun."""
        began = False
        for i in range(len(self.old)):
            for j in range(len(self.new)):
                if (i, j) not in self._batches and self.old[i].pullable:
                    began = self._pull_between(now, i, j, views[i], last=last) or began
        return began

    def _pull_between(
        self, now: float, i: int, j: int, view: Mapping[str, RunningKv], *, last: bool
    ) -> bool:
        room = max(self._settings.batch_bytes // max(self._costs[i][j], 1), 1)
        room = min(room, _MOST_PAIRS)
        pieces: list[tuple[Move, int, int]] = []
        pairs: list[tuple[int, int]] = []
        for move in self._in_order(i, j, view):
            if len(pairs) >= room:
                break
            kv = view[move.seq_id]
            count = min(self._lacks(move, kv, last=last), room - len(pairs))
            if move.is_out or count <= 0 or not self._reserve(move, move.done + count):
                continue
            pieces.append((move, count, kv.tenure))
            move.in_flight = True  # from now on it gives way to nobody, also in this batch
            theirs = kv.blocks[move.done : move.done + count]
            pairs += zip(theirs, move.blocks[move.done : move.done + count], strict=True)
        if not pairs:
            return False
        self._send(now, i, j, pieces, pairs, last=last)
        return True

    def _in_order(self, i: int, j: int, view: Mapping[str, RunningKv]) -> list[Move]:
        moves = [
            move
            for move in self._moves.values()
            if (move.old, move.new) == (i, j)
            and not (move.is_out or move.in_flight)
            and move.seq_id in view
        ]
        if self._longest_first:
            return sorted(moves, key=lambda m: (-view[m.seq_id].computed, m.arrival))
        return sorted(moves, key=lambda m: (m.arrival, m.seq_id))

    def _lacks(self, move: Move, kv: RunningKv, *, last: bool) -> int:
        """Blocks of it that can be pulled now and are not here."""
        block_tokens = self._shards.block_tokens
        if not last:
            return min(kv.computed // block_tokens, self._goal.get(move.seq_id, 0)) - move.done
        lacks = blocks_for(kv.computed, block_tokens) - move.done
        most = self._settings.most_last_blocks
        if most is not None and lacks > most:
            move.stuck = True
            return 0
        return lacks

    def _send(
        self,
        now: float,
        i: int,
        j: int,
        pieces: list[tuple[Move, int, int]],
        pairs: Sequence[tuple[int, int]],
        *,
        last: bool,
    ) -> None:
        pulls = kv_pulls(
            self._shards,
            self.old[i].at,
            self.new[j].at,
            pairs,
            first_ticket=self._tickets.next,
            rate_bytes_per_s=0.0 if last else self._settings.rate_bytes_per_s,
            timeout_s=self._timeout_s,
        )
        first = self._tickets.take(len(pulls))
        directory = self.old[i].directory
        for pull in pulls:
            message = msgspec.structs.replace(pull.message, directory=directory)
            self.outbox.append((pull.to, message))
        tickets = set(range(first, first + len(pulls)))
        self._batches[i, j] = PullBatch(pieces, tickets, now + self._timeout_s + ANSWER_MARGIN_S)

    # ------------------------------------------------------------------ blocks in the new replicas

    def _reserve(self, move: Move, total: int) -> bool:
        """See that it has so many blocks; the youngest give way to those that came before them."""
        driver = self.new[move.new].driver
        while len(move.blocks) < total:
            more = driver.reserve(move.seq_id, total - len(move.blocks))
            if more is not None:
                move.blocks += more
                break
            others = (other for other in self._moves.values() if other.new == move.new)
            idle = (other for other in others if not (other.in_flight or other.gone))
            younger = [one for one in idle if one.blocks and one.arrival > move.arrival]
            if not younger:
                move.stuck = True
                return False
            youngest = max(younger, key=lambda other: other.arrival)
            youngest.gone = True
            self._let_go()
        return True

    def _let_go(self) -> None:
        """Give back the blocks of what ended or gave way, unless they are being filled."""
        self._forget_closed()
        for move in list(self._moves.values()):
            ended = not self._alive(move.seq_id)
            move.gone = move.gone or ended
            if not move.gone or move.in_flight:
                continue
            if move.blocks:
                self.new[move.new].driver.release(move.seq_id)
                move.blocks, move.done = [], 0
            if ended:
                del self._moves[move.seq_id]

    # ------------------------------------------------------------------ what comes of it

    def adoptions(self) -> dict[str, tuple[int, int]]:
        """Sequences that have some of their KV there: the new replica, and how many tokens.

        Not those into whose blocks something may still be written.
        """
        assert self.phase is MoverPhase.DONE, f"nothing may be adopted in {self.phase}"
        found = {}
        for move in self._moves.values():
            kv = self.old[move.old].view().get(move.seq_id)
            computed = move.done * self._shards.block_tokens
            if kv is not None:
                computed = min(computed, kv.computed)
            if computed and not (move.gone or move.in_flight):
                found[move.seq_id] = (move.new, computed)
        return found

    def origin(self, seq_id: str) -> int:
        """The number of the old replica that a sequence comes from."""
        return self._moves[seq_id].old

    def release(self, but: Collection[str] = ()) -> bool:
        """Give back all blocks that nothing fills, except those of `but`.

        Returns whether nothing is left. What is being filled is given back by a later call, when
        its answer has come.
        """
        for move in self._moves.values():
            move.gone = move.gone or move.seq_id not in but
        self._let_go()
        return not any(move.blocks for move in self._moves.values() if move.gone)

    def overdue(self, now: float) -> bool:
        """Whether an answer is missing that should have come."""
        return any(now >= batch.expires_at for batch in self._batches.values())

    def unanswered(self) -> list[NewEnd]:
        """New replicas into which something may still come."""
        return [self.new[number] for number in sorted({key[1] for key in self._batches})]

    def _forget_closed(self) -> None:
        """With a new replica goes what was to come into it: no answer is due any more."""
        closed = {number for number, end in enumerate(self.new) if end.driver.closed}
        if not closed:
            return
        for key in [key for key in self._batches if key[1] in closed]:
            del self._batches[key]
        for move in self._moves.values():
            if move.new in closed:
                move.blocks, move.done, move.in_flight, move.gone = [], 0, False, True
