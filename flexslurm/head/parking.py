"""Copies of KV that outlive its epoch, while a gear that does not fit beside is installed; pure.

Every worker of an old replica copies its pages of all blocks of the replica's sequences aside. A
sequence is parked as far as all of its workers could do so. Full blocks, which never change, may be
copied ahead, while the drivers go on: what is left then is what was written since.
"""

from __future__ import annotations

import msgspec

from flexslurm.engine.load import RunningKv
from flexslurm.head.moving import OldEnd, Tickets
from flexslurm.messages import KvParked, ParkKv, UnparkKv


class Parking:
    """`outbox` holds messages to send, by worker."""

    def __init__(
        self,
        old: tuple[OldEnd, ...],
        block_tokens: int,
        tickets: Tickets,
        *,
        deadline_s: float,
        directory: str | None = None,
        rate_bytes_per_s: float = 0.0,
        most_asks: int = 1,
    ) -> None:
        """`most_asks` of each worker: into how many parts the sequences are divided at most.

        With a directory each part is a file, which can be dropped when its sequences have ended.
        """
        self.old, self._block_tokens, self._tickets = old, block_tokens, tickets
        self._deadline_s, self._directory, self._rate = deadline_s, directory, rate_bytes_per_s
        self._most_asks = most_asks
        self.outbox: list[tuple[str, ParkKv | UnparkKv]] = []
        self.parked_bytes = 0
        self._asked: dict[int, int] = {}
        """Tickets without an answer, and the number of the old replica that each is about."""
        self._begun = False
        """All that there is was asked for."""
        self._goes_on = False
        """The drivers serve yet."""
        self._ahead: dict[tuple[int, str], RunningKv] = {}
        """What was asked for ahead, as it was then: by old replica and sequence."""
        self._failed: dict[int, set[int]] = {number: set() for number in range(len(old))}
        self.parts: dict[str, list[tuple[str, int, int]]] = {}
        """By sequence: the worker, epoch and ticket of each part of it."""

    @property
    def done(self) -> bool:
        return self._begun and not self._asked

    @property
    def is_ahead(self) -> bool:
        """Whether what was asked for ahead is there, and nothing else was asked for."""
        return self._goes_on and not self._asked

    def begin_ahead(self, deadline_s: float, rate_bytes_per_s: float) -> None:
        """Ask for full blocks, while the drivers go on; answers come within this time."""
        self._goes_on = True
        for number, end in enumerate(self.old):
            full = [self._full(kv) for kv in end.view().values()]
            self._ahead |= {(number, kv.seq_id): kv for kv in full if kv.blocks}
            self._ask(number, end, full, deadline_s, rate_bytes_per_s)

    def _full(self, kv: RunningKv) -> RunningKv:
        blocks = kv.blocks[: kv.computed // self._block_tokens]
        return msgspec.structs.replace(kv, blocks=blocks)

    def end_ahead(self, *, cut_short: bool = False) -> None:
        """The drivers are about to stand still.

        `cut_short`: sooner than was said, so that what is not answered yet, at the pace of who
        stands back, is not waited for: it is called off and asked for again.
        """
        self._goes_on = False
        for number in sorted(set(self._asked.values())) if cut_short else ():
            self._call_off(number)

    def _call_off(self, number: int) -> None:
        """Forget what was asked for ahead of an old replica, which its workers do first too."""
        at = self.old[number].at
        told = UnparkKv(epoch=at.epoch)
        self.outbox = [(w, ask) for w, ask in self.outbox if w not in at.workers]
        self.outbox += [(worker, told) for worker in at.workers]
        self._asked = {t: n for t, n in self._asked.items() if n != number}
        for key in [key for key in self._ahead if key[0] == number]:
            del self._ahead[key]
            self.parts.pop(key[1], None)
        self._failed[number].clear()

    def advance(self) -> None:
        """Ask once all drivers are at a step boundary, and what was asked ahead is answered.

        So a block that has gone to another sequence since has its later copy, which counts.
        """
        if self._begun or self._goes_on or self._asked:
            return
        if not all(end.idle for end in self.old):
            return
        self._begun = True
        for number, end in enumerate(self.old):
            if end.pullable:
                left = [self._left(number, kv) for kv in end.view().values()]
                self._failed[number].clear()  # what failed ahead is asked for again
                for part in self._divide(left):
                    self._ask(number, end, part, self._deadline_s, self._rate)

    def _left(self, number: int, kv: RunningKv) -> RunningKv:
        """What is not there of a sequence; it had other blocks if its tenure is another."""
        before = self._ahead.get((number, kv.seq_id))
        if before is None or before.tenure != kv.tenure:
            return kv
        failed = self._failed[number]
        there = next((n for n, b in enumerate(before.blocks) if b in failed), len(before.blocks))
        return msgspec.structs.replace(kv, blocks=kv.blocks[there:])

    def _divide(self, sequences: list[RunningKv]) -> list[list[RunningKv]]:
        """The most valuable first: recomputing the longest costs most for each byte."""
        ordered = sorted(sequences, key=lambda kv: (-kv.computed, kv.arrival))
        size = -(-len(ordered) // self._most_asks)
        return [ordered[n : n + size] for n in range(0, len(ordered), max(size, 1))]

    def _ask(
        self, number: int, end: OldEnd, part: list[RunningKv], deadline_s: float, rate: float
    ) -> None:
        blocks = tuple(block for kv in part for block in kv.blocks)
        for worker in end.at.workers if blocks else ():
            ticket = self._tickets.take(1)
            self._asked[ticket] = number
            for kv in (kv for kv in part if kv.blocks):
                self.parts.setdefault(kv.seq_id, []).append((worker, end.at.epoch, ticket))
            ask = ParkKv(
                epoch=end.at.epoch,
                ticket=ticket,
                blocks=blocks,
                directory=self._directory,
                rate_bytes_per_s=rate,
                deadline_s=deadline_s,
            )
            self.outbox.append((worker, ask))

    def take(self, answer: KvParked) -> bool:
        """Take an answer; whether it was to us."""
        if answer.ticket not in self._asked:
            return False
        self._failed[self._asked.pop(answer.ticket)].update(answer.failed)
        self.parked_bytes += answer.parked_bytes
        return True

    def lose(self, number: int) -> None:
        """An old replica lost a member: its answers are not waited for, and nothing comes of it."""
        self.old[number].pullable = False
        self._asked = {t: n for t, n in self._asked.items() if n != number}

    def kept(self, number: int) -> dict[str, RunningKv]:
        """What is parked of an old replica's sequences, as long as their driver is open.

        A sequence counts when every worker has answered for it.
        """
        end = self.old[number]
        if not end.pullable or not self._begun:
            return {}
        answered = {
            seq_id: kv
            for seq_id, kv in end.view().items()
            if seq_id in self.parts
            and not any(ticket in self._asked for _, _, ticket in self.parts[seq_id])
        }
        found = {seq_id: self._cut(number, kv) for seq_id, kv in answered.items()}
        return {seq_id: kv for seq_id, kv in found.items() if kv.blocks}

    def _cut(self, number: int, kv: RunningKv) -> RunningKv:
        failed = self._failed[number]
        whole = next((n for n, block in enumerate(kv.blocks) if block in failed), len(kv.blocks))
        return msgspec.structs.replace(
            kv,
            blocks=kv.blocks[:whole],
            computed=min(kv.computed, whole * self._block_tokens),
        )

    def workers(self) -> tuple[tuple[str, int], ...]:
        """Who may hold parked pages, and of which epoch: to be told to forget them."""
        return tuple((worker, end.at.epoch) for end in self.old for worker in end.at.workers)
