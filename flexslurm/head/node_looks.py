"""Looks at the nodes that hold our agents: what Slurm takes out of use is told; acts on nothing.

A node that drains lets its jobs go on, and one that Slurm calls down may only have lost its slurmd:
agents and heartbeats say what is lost. Still, a pilot there will not come back to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from flexslurm.control.events import Event, NodeNoticed
from flexslurm.control.members import AgentRecord
from flexslurm.errors import FlexslurmError
from flexslurm.slurm.allocation import AllocationSubmitter
from flexslurm.slurm.client import NodeInfo
from flexslurm.slurm.pilot import SlurmSubmitter, Submitter

log = logging.getLogger(__name__)

_EVERY_INTERVALS = 5


class NodeLooks:
    """One call for all our nodes, in the place of a look at jobs, once in a few intervals."""

    def __init__(
        self,
        ask: Callable[[Sequence[str]], Sequence[NodeInfo]],
        nodes: Callable[[], Iterable[str]],
        tell: Callable[[Event], None],
        interval_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`nodes`: where our agents are; `ask` raises FlexslurmError where nothing is known."""
        self._ask, self._nodes, self._tell, self._now = ask, nodes, tell, now
        self._every_s = _EVERY_INTERVALS * interval_s
        self._next_at = now() + self._every_s
        self._told: dict[str, str] = {}

    def due(self) -> bool:
        return self._now() >= self._next_at and bool(set(self._nodes()))

    async def look(self) -> None:
        """Tell what has changed; no answer is no news."""
        self._next_at = self._now() + self._every_s
        names = sorted(set(self._nodes()))
        try:
            infos = await asyncio.to_thread(self._ask, names)
        except FlexslurmError as error:
            log.info("nothing is known of our nodes now: %s", error.message)
            return
        self._told = {name: words for name, words in self._told.items() if name in names}
        for info in infos:
            words = out_of_use(info)
            if info.name in names and words != self._told.get(info.name, ""):
                self._told[info.name] = words
                self._tell(NodeNoticed(info.name, words))


def looks_at_nodes(
    submitter: Submitter,
    agents: Callable[[], Iterable[AgentRecord]],
    tell: Callable[[Event], None],
    interval_s: float,
) -> NodeLooks | None:
    """None where no Slurm has the nodes."""
    if not isinstance(submitter, SlurmSubmitter | AllocationSubmitter):
        return None

    def nodes() -> set[str]:
        return {agent.hello.node for agent in agents()}

    return NodeLooks(submitter.client.nodes, nodes, tell, interval_s)


def out_of_use(info: NodeInfo) -> str:
    """Why Slurm would start nothing more there, in a word and its reason; empty: it would."""
    state = info.state
    known = {"NOT_RESPONDING": "not responding", "FAIL": "failing", "MAINT": "in maintenance"}
    word = state.slurm_drain or next((known[flag] for flag in state.flags if flag in known), "")
    if state.base in ("DOWN", "ERROR"):
        word = "down"
    return f"{word}: {info.reason}" if word and info.reason else word
