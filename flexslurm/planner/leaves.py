"""Leaf switches: who hangs on which, and keeping the stages of a replica under one; pure.

Between equal nodes a placement takes those that keep replicas under one leaf switch. Nodes that
hold anything of the gear that is left stay where the bytes say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from flexslurm.errors import ConfigError, FlexslurmError
from flexslurm.gear import Gear

ROUNDS = 20
"""Passes over all pairs of nodes; each but the last makes some replica cross fewer switches."""

_PAIR = re.compile(r"(\w+)\s*=\s*([^\s=]+)")


def read_leaves(
    text: str, expand: Callable[[str], Sequence[str]], file: str = "topology.conf"
) -> dict[str, str]:
    """The leaf switch of every node, from `topology.conf` or `scontrol show topology`.

    `expand` expands Slurm's node lists. Lines of switches that only join others are passed over,
    and of a node on several leaves the first counts. Raises ConfigError naming the line.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].strip()
        if not words:
            continue
        pairs = {key.lower(): value for key, value in _PAIR.findall(words)}
        name = pairs.get("switchname", pairs.get("blockname"))
        if name is None and "blocksizes" in pairs:
            continue
        if name is None:
            raise ConfigError("SwitchName=… or BlockName=… is expected", file=file, line=number)
        if "nodes" not in pairs or "switches" in pairs or pairs.get("level", "0") != "0":
            continue
        try:
            nodes = expand(pairs["nodes"])
        except FlexslurmError as error:
            raise ConfigError(error.message, file=file, line=number) from error
        for node in nodes:
            found.setdefault(node, name)
    return found


def gather(
    gear: Gear, node_of: Mapping[int, str], movable: Mapping[str, object], leaves: Mapping[str, str]
) -> dict[int, str]:
    """Exchange nodes so that fewer replicas cross leaf switches.

    `node_of` is the physical node of each abstract one; `movable` are the nodes that may be
    exchanged, used or not, with what must be equal of two that are. A node whose leaf is not known
    hangs on one of its own.
    """
    return _Gathering(gear, node_of, movable, leaves).run()


class _Gathering:
    """A local search: exchanges two nodes wherever that makes replicas cross fewer switches."""

    def __init__(
        self,
        gear: Gear,
        node_of: Mapping[int, str],
        movable: Mapping[str, object],
        leaves: Mapping[str, str],
    ) -> None:
        self._replicas = [sorted({s.node for s in replica.stages}) for replica in gear.replicas]
        self._mine: dict[int, list[int]] = {}
        for number, nodes in enumerate(self._replicas):
            for node in nodes:
                self._mine.setdefault(node, []).append(number)
        used = set(node_of.values())
        spare = [name for name in sorted(movable) if name not in used]
        # Spare nodes stand at places below zero, which no replica looks at.
        self._at = dict(node_of) | {-1 - i: name for i, name in enumerate(spare)}
        self._kept = set(node_of)
        self._movable, self._leaves = movable, leaves

    def run(self) -> dict[int, str]:
        places = [place for place in sorted(self._at) if self._at[place] in self._movable]
        for _ in range(ROUNDS):
            improved = [self._improve(place, places) for place in places if place >= 0]
            if not any(improved):
                break
        return {place: name for place, name in self._at.items() if place in self._kept}

    def _improve(self, first: int, places: Sequence[int]) -> bool:
        """Exchange a place's node with the first that helps; whether there was one."""
        if self._cost(first) == 0:
            return False
        kind = self._movable[self._at[first]]
        for second in places:
            if second == first or self._movable[self._at[second]] != kind:
                continue
            before = self._cost(first, second)
            self._exchange(first, second)
            if self._cost(first, second) < before:
                return True
            self._exchange(first, second)
        return False

    def _exchange(self, first: int, second: int) -> None:
        self._at[first], self._at[second] = self._at[second], self._at[first]

    def _cost(self, *places: int) -> int:
        """Crossings of the replicas at these places."""
        numbers = {number for place in places for number in self._mine.get(place, ())}
        return sum(
            len({self._leaves.get(self._at[n], self._at[n]) for n in self._replicas[number]}) - 1
            for number in numbers
        )
