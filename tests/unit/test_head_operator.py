"""What an operator asks of a running service, its answers, and what is refused."""

from __future__ import annotations

import pytest

from flexslurm.control.actions import PlanShift
from flexslurm.control.events import Cordon, Event, ShiftWanted
from flexslurm.errors import CapacityError, ConfigError, ServiceError
from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.head.operator import Operator
from flexslurm.messages import AskDone, CordonAsk, DrainAsk, ReleaseAgent, ShiftAnswer, ShiftAsk
from tests.unit.control_planners import OneStagePerNode
from tests.unit.control_world import World


class Finder:
    """The planner's part that reads names."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.stand_in: Gear | None = None

    def find(self, name: str, present: Signature) -> Gear:
        try:
            wanted = Signature.parse(name)
        except ConfigError as error:
            raise ConfigError(error.message, hint=self.legal_names(present)) from None
        found = self.stand_in or self._world.control.planner.choose(wanted)
        if isinstance(found, NoGear):
            raise CapacityError(f"'{name}' has no gear: {found.reason}")
        return found

    def legal_names(self, present: Signature) -> str:
        return f"give one of {present}, or 'best'"


class Previews:
    """The moves' part that says what a shift would do."""

    def __init__(self) -> None:
        self.asked: list[PlanShift] = []

    def preview(self, ask: PlanShift) -> tuple[str, ...]:
        self.asked.append(ask)
        return (f"{len(ask.new.replicas)} replicas", "nothing moves")


class Desk:
    """An operator before a service of two pilots."""

    def __init__(self) -> None:
        self.world = World(planner=OneStagePerNode(least=2))
        self.world.join("a")
        self.world.join("b")
        self.world.run(3)
        self.previews, self.told = Previews(), list[Event]()
        self.finder = Finder(self.world)
        self.operator = Operator(
            self.world.control,
            self.finder,  # type: ignore[arg-type]
            self.previews,  # type: ignore[arg-type]
            fragments=lambda: {"a", "b", "c"},
            tell=self._tell,
            now=lambda: self.world.now,
            bring_back=lambda name: "another is submitted" if name == "drained" else "",
        )

    def _tell(self, event: Event) -> None:
        self.told.append(event)
        self.world.take(event)

    def shift(self, to: str, *, dry_run: bool = False) -> ShiftAnswer:
        answer = self.operator.answer(ShiftAsk(to=to, dry_run=dry_run))
        assert isinstance(answer, ShiftAnswer)
        return answer


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_dry_run_plans_and_changes_nothing(desk: Desk) -> None:
    answer = desk.shift("a100:2", dry_run=True)
    assert answer.to == "a100 tp2 [0,12)"
    assert answer.lines == ("1 replicas", "nothing moves") and answer.epoch == 0
    [ask] = desk.previews.asked
    assert ask.epoch == 2 and ask.old is not None and desk.world.control.epoch == 1
    assert not desk.told and desk.world.serving() == "a100:2x2"


def test_a_shift_is_begun_and_stays_until_members_come_or_go(desk: Desk) -> None:
    answer = desk.shift("a100:2")
    assert answer.epoch == 2
    desk.world.run(3)
    assert desk.world.serving() == "a100:2"
    assert "asked for by 'flexslurm shift'" in desk.world.control.reason
    desk.world.join("c", "l40s")
    desk.world.run(5)
    assert desk.world.serving() == "a100:2x2,l40s:2", "then the policy decides again"


def test_best_gives_the_choice_back(desk: Desk) -> None:
    desk.shift("a100:2")
    desk.world.run(3)
    before = len(desk.told)
    dry = desk.shift("best", dry_run=True)
    assert len(desk.told) == before and dry.epoch == 0
    assert dry.to == "a100 tp2 [0,6) → a100 tp2 [6,12)"
    assert dry.lines == ("the policy chooses the gear again", "1 replicas", "nothing moves")
    answer = desk.shift("best")
    assert (answer.to, answer.lines, answer.epoch) == (dry.to, dry.lines, 3)
    assert desk.told[-1] == ShiftWanted(None, "flexslurm shift --to best", at_once=True)
    desk.world.run(3)
    assert desk.world.serving() == "a100:2x2"
    assert desk.shift("best").lines[-1] == "the gear in place stays"


def test_the_gear_that_serves_is_no_shift(desk: Desk) -> None:
    answer = desk.shift("a100:2x2")
    assert answer.lines == ("that gear is in place",) and answer.epoch == 0
    assert not desk.previews.asked
    desk.world.run(3)
    assert desk.world.serving() == "a100:2x2" and desk.world.control.epoch == 1


def test_a_dry_run_of_the_gear_that_serves_tells_nobody(desk: Desk) -> None:
    assert desk.shift("a100:2x2", dry_run=True).lines == ("that gear is in place",)
    assert not desk.told


@pytest.mark.parametrize(
    ("name", "kind", "said", "hint"),
    [
        ("a100:2x3", CapacityError, "cannot hold", "give one of a100:2x2"),
        ("a100:1", CapacityError, "2 GPUs are needed", None),
        ("nonsense", ConfigError, "nonsense", "give one of a100:2x2"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(
    desk: Desk, name: str, kind: type[ServiceError], said: str, hint: str | None
) -> None:
    with pytest.raises(kind) as caught:
        desk.shift(name)
    assert said in caught.value.message
    assert hint is None or hint in str(caught.value.hint)
    assert not desk.told and desk.world.serving() == "a100:2x2"


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_stand_in_does_not_serve_for_gpus_that_are_not_here(desk: Desk, dry_run: bool) -> None:
    present = desk.world.control.planner.choose(Signature.parse("a100:2"))
    assert isinstance(present, Gear)
    desk.finder.stand_in = present  # as the book gives for an allocation that is not in the table
    with pytest.raises(CapacityError) as caught:
        desk.shift("a100:9", dry_run=dry_run)
    assert "cannot hold a100:9: there are 4 a100 (a100:2x2)" in caught.value.message
    assert not desk.told and not desk.previews.asked


def test_a_cordon_takes_a_pilot_out_and_back_in(desk: Desk) -> None:
    answer = desk.operator.answer(CordonAsk(fragment="b"))
    assert answer == AskDone(message="b: cordoned")
    desk.world.run(3)
    assert desk.world.serving() == "a100:2"
    assert not desk.world.told(ReleaseAgent), "it is kept, empty"
    answer = desk.operator.answer(CordonAsk(fragment="b", cordon=False))
    assert answer == AskDone(message="b: in use")
    desk.world.run(3)
    assert desk.world.serving() == "a100:2x2"


def test_a_drain_ends_a_pilot_once_nothing_of_it_is_used(desk: Desk) -> None:
    answer = desk.operator.answer(DrainAsk(fragment="b"))
    assert isinstance(answer, AskDone) and "ends once nothing of it is used" in answer.message
    assert desk.told == [Cordon("b", cordon=True, drain=True)]
    desk.world.run(3)
    assert desk.world.serving() == "a100:2"
    [released] = desk.world.told(ReleaseAgent)
    assert released.to == "b" and isinstance(released.message, ReleaseAgent)
    assert not released.message.give_back, "it must not come back by itself"


def test_a_drained_pilot_that_has_ended_is_had_back(desk: Desk) -> None:
    answer = desk.operator.answer(CordonAsk(fragment="drained", cordon=False))
    assert answer == AskDone(message="another is submitted")
    assert not desk.told
    with pytest.raises(ServiceError, match="there is no pilot 'drained'"):
        desk.operator.answer(CordonAsk(fragment="drained"))


@pytest.mark.parametrize("ask", [CordonAsk(fragment="x"), DrainAsk(fragment="x")])
def test_an_unknown_pilot_is_refused_with_the_known_ones(
    desk: Desk, ask: CordonAsk | DrainAsk
) -> None:
    with pytest.raises(ServiceError) as caught:
        desk.operator.answer(ask)
    assert caught.value.message == "there is no pilot 'x'"
    assert caught.value.hint == "it has a, b, c"
    assert not desk.told
