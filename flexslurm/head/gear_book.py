"""The gears of a running service, looked up in microseconds; never plans and never waits.

An allocation that the table does not have gets the best gear that the table's allocations within
it have, at once, and is asked for; whoever plans brings the exact gear by `learn`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.planner.table import GearTable

MOST_KNOWN = 4096
"""Gears that are held decoded; the least used go first."""
MOST_ASKED = 64
"""Gears that are being planned; beyond, stand-ins are given and nothing is asked."""

MOST_NAMES = 512

Found = Gear | NoGear


@dataclass(slots=True)
class _Asked:
    """A gear that is being planned."""

    stand_in: Found
    """Given until the answer comes."""
    cards: int
    """For which cards it is planned, by their count."""


class GearBook:
    """Gears by signature: planned ones, the table's, and stand-ins for what is being planned."""

    def __init__(
        self,
        ask: Callable[[Signature], None],
        fit: Callable[[Gear], Gear | None] = lambda gear: gear,
    ) -> None:
        """`ask` is called, once until the answer comes, with a signature to plan.

        `fit` makes a gear fit the cards that are here; None: it cannot be made to.
        """
        self._ask, self._fit = ask, fit
        self._table: GearTable | None = None
        self._known: OrderedDict[Signature, Found] = OrderedDict()
        self._asked: dict[Signature, _Asked] = {}
        self._cards = 0
        """How often there have been others."""

    def use(self, table: GearTable) -> None:
        """Look gears up in this table from now on."""
        self._table = table
        self.forget()

    def forget(self) -> None:
        """Look everything up anew: there are other cards, or there is another table."""
        self._known.clear()
        self._cards += 1
        for signature, asked in self._asked.items():
            asked.stand_in = self._stand_in(signature)

    def names(self) -> list[str]:
        """Names of gears that there are, the table's first: at most a few hundred."""
        table = self._table.signatures() if self._table is not None else ()
        named = (str(signature) for signature in itertools.islice(table, MOST_NAMES))
        known = (gear.name for gear in self._known.values() if isinstance(gear, Gear))
        return list(dict.fromkeys((*named, *known)))

    def choose(self, signature: Signature) -> Found:
        """The exact gear where it is known, else a stand-in."""
        found = self.look(signature)
        if found is not None:
            self._known.move_to_end(signature)
            return found
        if signature in self._asked:
            return self._asked[signature].stand_in
        stand_in = self._stand_in(signature)
        if len(self._asked) < MOST_ASKED:
            self._asked[signature] = _Asked(stand_in, self._cards)
            self._ask(signature)
        return stand_in

    def look(self, signature: Signature) -> Found | None:
        """What is known exactly; asks nobody, and gives no stand-in."""
        found = self._known.get(signature)
        if found is None and self._table is not None:
            found = self._fitting(self._table.gear(signature))
            if found is not None:
                self._remember(signature, found)
        return found

    def _fitting(self, found: Found | None) -> Found | None:
        return self._fit(found) if isinstance(found, Gear) else found

    def others(self, signature: Signature) -> tuple[Gear, ...]:
        """The next best gears of an allocation, where the table has some."""
        found = self._table.others(signature) if self._table is not None else ()
        return tuple(gear for gear in map(self._fit, found) if gear is not None)

    def learn(self, signature: Signature, found: Found | None) -> None:
        """What was planned; None: planning failed, and the stand-in stays.

        So it does where one does not fit the cards that it was planned for: planning it again would
        give the same. Planned for others, it is asked for again when it is needed.
        """
        asked, fits = self._asked.pop(signature, None), self._fitting(found)
        if found is not None and fits is None and (asked is None or asked.cards != self._cards):
            return
        answer = fits
        if fits is None and asked is not None:
            answer = asked.stand_in
        if isinstance(answer, NoGear) and fits is None:
            why = "its gear could not be planned; the head's log says why"
            if found is not None:
                why = "its gear does not fit the memory that the cards really have"
            answer = NoGear(signature, why)
        if answer is not None:
            self._remember(signature, answer)

    def _remember(self, signature: Signature, found: Found) -> None:
        self._known[signature] = found
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def _stand_in(self, signature: Signature) -> Found:
        gear = self._table.dominated(signature) if self._table is not None else None
        return (gear and self._fit(gear)) or NoGear(
            signature, f"the gear of {signature} is still being planned"
        )
