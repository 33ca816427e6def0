"""What is left to do after a loss or a shift: end what hangs, free room, give GPUs back.

Never decides about gears.
"""

from __future__ import annotations

from collections.abc import Collection

from flexslurm.control.actions import Action, RoomFree, Send
from flexslurm.control.holdings import Held, Holdings
from flexslurm.control.members import AgentRecord, AgentState, GpuAt, Members, WorkerState
from flexslurm.messages import ReleaseAgent, StopWorkers

_SPARED_S = 30.0
"""Longer than a worker itself takes to give up closing, which ends it."""


class Aftermath:
    """`close_timeout_s` bounds how long a worker may take to close an epoch."""

    def __init__(self, members: Members, holdings: Holdings, close_timeout_s: float) -> None:
        self._members, self._holdings = members, holdings
        self._close_timeout_s = close_timeout_s
        self._closing: list[tuple[int, frozenset[Held]]] = []
        self._told_to_end: frozenset[str] = frozenset()

    def kill_hung(self, now: float) -> list[Action]:
        """End workers that do not close an epoch in time.

        They hang in a collective, or worse; what they held goes with them. Those that serve
        another epoch are spared for a while, as streams wait for what is ended; no longer, as what
        is not closed is in the way of every shift.
        """
        busy = {held.worker for held in self._holdings.in_use()}
        late = self._holdings.late(now, self._close_timeout_s)
        actions: list[Action] = []
        for worker in sorted(late - busy):
            record = self._members.worker(worker)
            if record is not None and record.state is not WorkerState.STOPPING:
                record.state = WorkerState.STOPPING
                actions.append(_end(record.at))
        too_late = self._holdings.late(now, self._close_timeout_s + _SPARED_S) & busy
        for worker in sorted(too_late - self._told_to_end):
            record = self._members.worker(worker)
            if record is not None:  # it serves until its agent says that it has ended
                actions.append(_end(record.at))
        self._told_to_end = too_late
        return actions

    def replaced(self, epoch: int) -> None:
        """What closes now has made place for this epoch, which may use its room afterwards."""
        self._closing.append((epoch, self._holdings.closing()))

    def room_free(self) -> list[Action]:
        """Say so when all that an epoch replaced is closed."""
        closing = self._holdings.closing()
        done = [RoomFree(epoch) for epoch, waits in self._closing if not waits & closing]
        self._closing = [(e, waits & closing) for e, waits in self._closing if waits & closing]
        return list(done)

    def release(self, now: float, used: Collection[str] | None) -> list[Action]:
        """Give GPUs that must go and are no longer used back at once: others wait for them.

        `used`: agents of the gear that serves; None: none serves, and what is on notice may yet.
        """
        late = self._holdings.late(now, self._close_timeout_s)
        actions: list[Action] = []
        for agent in self._members.agents.values():
            if agent.released or not self._is_over(agent, used):
                continue
            mine = {worker.worker for worker in agent.workers.values()}
            if self._holdings.closing(mine - late):
                continue  # its peers close better while it lives
            agent.released = True
            unwanted = agent.parting or agent.hello.fragment in self._members.draining
            leaving = agent.state is AgentState.LEAVING and not unwanted
            reason = f"given back ({agent.leave_source if leaving else 'drained'})"
            actions.append(Send(agent.id, ReleaseAgent(reason=reason, give_back=leaving)))
        return actions

    def _is_over(self, agent: AgentRecord, used: Collection[str] | None) -> bool:
        if agent.parting or agent.hello.fragment in self._members.draining:
            return agent.id not in (used or ())
        if agent.dismissed:
            return True
        return agent.state is AgentState.LEAVING and used is not None and agent.id not in used


def _end(at: GpuAt) -> Send:
    return Send(at.agent, StopWorkers(gpus=(at.gpu,), grace_s=0.0))
