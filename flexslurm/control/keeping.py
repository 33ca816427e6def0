"""The pilots that are kept, how many there are to be, and letting some of them go; pure.

Nothing here asks for a call to Slurm: `keeper` does, from what is left here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from flexslurm.control.keeper_trials import Trials
from flexslurm.control.keeper_values import (
    Drain,
    KeeperSettings,
    KeptPilot,
    PilotStage,
    PoolEntry,
    Tell,
    Word,
)
from flexslurm.control.keeper_waits import Waits
from flexslurm.wire.service_dir import Pilot

_NONE: Mapping[str, int] = MappingProxyType({})


class Keeping:
    """What a pool keeper knows. An entry's `wanted` is between its bounds, or below by an order."""

    def __init__(
        self,
        entries: Sequence[PoolEntry],
        settings: KeeperSettings,
        pilots: Iterable[Pilot],
        now: float,
        wanted: Sequence[int] = (),
        drained: Mapping[str, int] = _NONE,
    ) -> None:
        """`pilots`: what was written down; intents among them may or may not have been done.

        `wanted`, `drained`: the sizes of the entries that a head before this one had come to, and
        what was `away` then.
        """
        self.entries, self.settings = tuple(entries), settings
        self.trials, self.waits = Trials(settings), Waits()
        self.wanted = [entry.wanted for entry in entries]
        if len(wanted) == len(entries):
            self.wanted = [min(w, entry.most) for w, entry in zip(wanted, entries, strict=True)]
        self.kept: dict[str, KeptPilot] = {}
        self.away = {name: of for name, of in drained.items() if 0 <= of < len(self.entries)}
        """Entries of pilots that an operator drained, by name; until the load takes the place."""
        self._strays: dict[str, int] = {}
        self._words: list[Word] = []
        self._quiet_until = 0.0
        self._began = now
        self._no_answers = 0
        self._said_stuck: dict[int, str] = {}
        for pilot in pilots:
            stage = PilotStage.WAITING if pilot.job_id else PilotStage.INTENT
            unsure = not pilot.job_id
            self.kept[pilot.fragment] = KeptPilot(pilot, now, stage, unsure)

    def pilots(self) -> tuple[Pilot, ...]:
        """What is to be written down, before any call is made."""
        return tuple(kept.pilot for kept in self.kept.values())

    def of_entry(self, entry: int) -> list[KeptPilot]:
        return [kept for kept in self.kept.values() if kept.pilot.entry == entry]

    def count(self, entry: int) -> int:
        """Pilots there are or may be; one and its successor count as one."""
        return sum(kept.pilot.replaces not in self.kept for kept in self.of_entry(entry))

    def staying(self, entry: int) -> list[KeptPilot]:
        """Pilots that are to stay, and successors of those that are not; without hole fillers."""
        return [
            kept
            for kept in self.of_entry(entry)
            if not kept.ending
            and not kept.pilot.fills_hole
            and ((before := self.kept.get(kept.pilot.replaces)) is None or before.ending)
        ]  # fmt: skip

    def words(self) -> list[Word]:
        """What is to be said and done without Slurm, once."""
        said, self._words = self._words, []
        return said

    def _tell(self, text: str, warning: bool = False, **record: object) -> None:
        self._words.append(Tell(text, warning, {"event": "pool", **record} if record else None))

    def _once(self, kept: KeptPilot, what: str, text: str) -> None:
        if what not in kept.told:
            kept.told |= {what}
            self._tell(text, True, what=what, fragment=kept.fragment)

    def _target(self, entry: int) -> int:
        return min(self.wanted[entry], self.entries[entry].most)

    def _shape_of(self, pilot: Pilot) -> int:
        shapes = self.entries[pilot.entry].shapes
        found = (n for n, s in enumerate(shapes) if (s.gpus, s.nodes) == (pilot.gpus, pilot.nodes))
        return next(found, 0)

    def free_name(self, gpu_type: str) -> str:
        number = 1
        while (name := f"{gpu_type}-{number}") in self.kept or name in self.away:
            number += 1
        return name

    # ------------------------------------------------------------------ letting go

    def end(self, fragment: str, why: str) -> None:
        """It is no longer wanted: cancelled where it waits, drained where it runs."""
        kept = self.kept[fragment]
        if not kept.ending and kept.stage is not PilotStage.INTENT:
            kept.ending, kept.stage = why, PilotStage.ENDING
            self._let_go(kept)

    def _let_go(self, kept: KeptPilot) -> None:
        """Have one end that shall; nothing while it is not known whether it runs."""
        if kept.info is None:
            return
        if kept.running_since is None:
            kept.cancel = True
        elif not kept.draining:
            kept.draining = True
            self._words.append(Drain(kept.fragment, kept.ending))

    def drained_by_hand(self, fragment: str, before: bool = False) -> None:
        """An operator has drained it: its place stays empty until the load asks for more.

        `before`: it was drained under an earlier head, which has counted it off.
        """
        kept = self.kept.get(fragment)
        if kept is None or kept.ending:
            return
        kept.ending, kept.drained, kept.draining = "an operator has drained it", True, True
        if not before and not kept.pilot.fills_hole:
            self.wanted[kept.pilot.entry] = max(self.wanted[kept.pilot.entry] - 1, 0)
        if kept.stage is not PilotStage.INTENT:
            kept.stage = PilotStage.ENDING
            self._let_go(kept)

    def taken_back(self, fragment: str) -> None:
        """An operator wants it in use again."""
        kept = self.kept.get(fragment)
        if kept is None or not kept.drained:
            return
        kept.drained, kept.draining, kept.cancel, kept.ending = False, False, False, ""
        entry = kept.pilot.entry
        if not kept.pilot.fills_hole:
            self.wanted[entry] = min(self.wanted[entry] + 1, self.entries[entry].most)
        if kept.stage is not PilotStage.INTENT:
            kept.stage = PilotStage.WAITING if kept.running_since is None else PilotStage.RUNNING

    def bring_back(self, fragment: str) -> bool:
        """Have another in the place of one that was drained and has ended; False for any other."""
        entry = self.away.pop(fragment, None)
        if entry is None:
            return False
        self.wanted[entry] = min(self.wanted[entry] + 1, self.entries[entry].most)
        return True

    def part(self, fragment: str, node: str) -> None:
        """The node's agent has ended: the job can do without it."""
        kept = self.kept[fragment]
        kept.part_with |= {node}

    def wish(self, entry: int, count: int, why: str) -> bool:
        """Another size for an entry, within its bounds; whether it is another one."""
        bounds = self.entries[entry]
        least = min(bounds.least, self.wanted[entry])  # an operator may have gone below
        count = min(max(count, least), bounds.most)
        if count == self.wanted[entry]:
            return False
        words = f"{count} pilot{'s' * (count != 1)} instead of {self.wanted[entry]}"
        self._tell(f"{bounds.gpu_type}: {words}: {why}",
                   what="wish", entry=entry, count=count, why=why)  # fmt: skip
        places = max(count - self.wanted[entry], 0)
        for name in [n for n, of in self.away.items() if of == entry][:places]:
            del self.away[name]  # its place is taken
        self.wanted[entry] = count
        return True

    def first_to_go(self, entry: int) -> KeptPilot | None:
        """The pilot that goes when there is one too many; None: none can yet."""
        return next(iter(self._by_worth(entry)), None)

    def _by_worth(self, entry: int) -> list[KeptPilot]:
        """What waits first, then what is idle, then the newest."""
        known = (PilotStage.WAITING, PilotStage.RUNNING)
        return sorted(
            (kept for kept in self.staying(entry) if kept.stage in known),
            key=lambda k: (k.stage is not PilotStage.WAITING, k.serving, -k.since),
        )

    def _shrink(self, entry: int) -> None:
        """End what is too much."""
        excess = max(len(self.staying(entry)) - self._target(entry), 0)
        for kept in self._by_worth(entry)[:excess]:
            self.end(kept.fragment, "it is more than is asked for")
