"""The agents' last readings of their nodes; keeps one of each agent, and forgets who has left."""

from __future__ import annotations

import msgspec

from flexslurm.control.members import Members
from flexslurm.messages import Message, NodeReadings

MOST_AGENTS = 16_384
"""More than a head has; beyond it the oldest goes, where nobody asks for metrics."""


class NodeBook:
    """`take` what agents say; `by_node` is what metrics ask for at each scrape."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._readings: dict[str, NodeReadings] = {}

    def take(self, sender: str, message: Message) -> bool:
        """Whether it was a reading; one that is not the sender's own is dropped."""
        if not isinstance(message, NodeReadings):
            return False
        if message.incarnation == sender:
            self._readings[sender] = message
            if len(self._readings) > MOST_AGENTS:
                del self._readings[next(iter(self._readings))]
        return True

    def by_node(self) -> dict[str, NodeReadings]:
        """Of members alone. Agents of one node see the same ports, and cards of their own."""
        agents = self._members.agents
        self._readings = {who: told for who, told in self._readings.items() if who in agents}
        found: dict[str, NodeReadings] = {}
        for who, told in self._readings.items():
            node = agents[who].hello.node
            gpus = (*found[node].gpus, *told.gpus) if node in found else told.gpus
            found[node] = msgspec.structs.replace(told, gpus=gpus)
        return found
