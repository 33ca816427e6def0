"""What an operator asks of a running service: shift, cordon, drain; answers, decides nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import le

from flexslurm.control.events import Cordon, Event, ShiftWanted
from flexslurm.control.members import signature_of
from flexslurm.control.state import Control
from flexslurm.errors import CapacityError, ServiceError
from flexslurm.gear import Gear, Signature
from flexslurm.head.moves import Moves
from flexslurm.head.planning import ServicePlanner
from flexslurm.messages import AskDone, CordonAsk, DrainAsk, ShiftAnswer, ShiftAsk
from flexslurm.planner.layouts import is_layout

BEST = "best"
"""The name that gives the choice back to the policy."""


class Operator:
    """Raises FlexslurmErrors for what cannot be done, with what could be."""

    def __init__(
        self,
        control: Control,
        planner: ServicePlanner,
        moves: Moves,
        *,
        fragments: Callable[[], Iterable[str]],
        tell: Callable[[Event], None],
        now: Callable[[], float],
        bring_back: Callable[[str], str] = lambda fragment: "",
    ) -> None:
        """`bring_back`: have another for a pilot that has ended, in words; '' where it has not."""
        self._control, self._planner, self._moves = control, planner, moves
        self._fragments, self._tell, self._now = fragments, tell, now
        self._bring_back = bring_back

    def answer(self, ask: ShiftAsk | CordonAsk | DrainAsk) -> AskDone | ShiftAnswer:
        match ask:
            case CordonAsk(fragment=fragment, cordon=False) if back := self._bring_back(fragment):
                return AskDone(message=back)
            case CordonAsk(fragment=fragment, cordon=cordon):
                self._check_fragment(fragment)
                self._tell(Cordon(fragment, cordon))
                here = bool(self._control.members.of_fragment(fragment))
                use = "in use" if here else "in use once it is here"
                return AskDone(message=f"{fragment}: {'cordoned' if cordon else use}")
            case DrainAsk(fragment=fragment):
                self._check_fragment(fragment)
                self._tell(Cordon(fragment, cordon=True, drain=True))
                return AskDone(message=f"{fragment}: cordoned; it ends once nothing of it is used")
            case ShiftAsk(to=name, dry_run=dry_run):
                return self._shift(name, dry_run=dry_run)

    def _check_fragment(self, fragment: str) -> None:
        known = set(self._fragments())
        if fragment not in known:
            hint = f"it has {', '.join(sorted(known))}" if known else None
            raise ServiceError(f"there is no pilot '{fragment}'", hint=hint)

    def _shift(self, name: str, *, dry_run: bool) -> ShiftAnswer:
        if name == BEST:
            return self._give_back(dry_run=dry_run)
        gear = self._gear(name)
        current = self._control.current
        if current is not None and current.gear == gear and not current.lost:
            if not dry_run:  # it is to stay, and a shift away from it is called off
                self._tell(ShiftWanted(gear, "flexslurm shift"))
            return ShiftAnswer(to=gear.layout(), lines=("that gear is in place",))
        now = self._now()
        ask = self._control.preview(now, gear)
        if ask is None:
            raise CapacityError(
                f"the GPUs that are here cannot hold {gear.layout()}", hint=self._legal()
            )
        lines = self._moves.preview(ask)
        if not dry_run:
            self._tell(ShiftWanted(gear, "flexslurm shift"))
        return ShiftAnswer(to=gear.layout(), lines=lines, epoch=0 if dry_run else ask.epoch)

    def _give_back(self, *, dry_run: bool) -> ShiftAnswer:
        """The policy chooses again; what it chooses now, and the moves that takes."""
        now = self._now()
        gear = self._control.choice(now, at_once=True).gear
        ask = self._control.preview(now, gear) if gear is not None else None
        moves: tuple[str, ...] = ("the gear in place stays",)
        to, epoch = BEST, 0
        if ask is not None:
            to, epoch, moves = ask.new.gear.layout(), ask.epoch, self._moves.preview(ask)
        if not dry_run:
            self._tell(ShiftWanted(None, "flexslurm shift --to best", at_once=True))
        lines = ("the policy chooses the gear again", *moves)
        return ShiftAnswer(to=to, lines=lines, epoch=0 if dry_run else epoch)

    def _gear(self, name: str) -> Gear:
        """The gear meant. Raises CapacityError for an allocation of GPUs that are not here.

        The planner's book gives a stand-in for what it does not know: that must not serve for it.
        """
        members = self._control.members
        found = self._planner.find(name, signature_of(members.usable()))
        here = signature_of(members.usable(leaving=True))
        wanted = found.signature if is_layout(name) else Signature.parse(name)
        if not _holds(here, wanted):
            words = _gpus_in_words(here)
            raise CapacityError(
                f"the GPUs that are here cannot hold {name}: there are {words or 'none'}"
                + (f" ({here})" if words else ""),
                hint=self._legal(),
            )
        return found

    def _legal(self) -> str:
        present = signature_of(self._control.members.usable())
        return self._planner.legal_names(present)


def _holds(here: Signature, wanted: Signature) -> bool:
    """Whether every node of `wanted` can have one of its own here with as many GPUs or more."""
    mine, asked = _nodes_by_type(here), _nodes_by_type(wanted)
    return all(
        len(sizes) <= len(mine[kind]) and all(map(le, sizes, mine[kind]))
        for kind, sizes in asked.items()
    )


def _nodes_by_type(signature: Signature) -> defaultdict[str, list[int]]:
    """GPUs of the nodes of each type, the largest node first."""
    found = defaultdict[str, list[int]](list)
    for shape in sorted(signature.nodes(), key=lambda shape: -shape.gpus):
        found[shape.gpu_type].append(shape.gpus)
    return found


def _gpus_in_words(here: Signature) -> str:
    return ", ".join(f"{sum(sizes)} {kind}" for kind, sizes in sorted(_nodes_by_type(here).items()))
