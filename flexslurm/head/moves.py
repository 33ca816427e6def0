"""A shift's moves as the head performs them: plans, pauses, pulls, and what becomes of them.

It does what the controller orders and tells it how far it is; the deciding is in `control.shift`,
`move_plan`, `mover` and `parking`. At most one shift is under way; what is left of one that was
given up (pulls into a replica that serves on) is waited for on the side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from flexslurm.control.actions import PlanShift, SwitchOver
from flexslurm.control.choices import ShiftPrice
from flexslurm.control.events import MoveFigures, ShiftEvent, ShiftPlanned, Switched
from flexslurm.control.installed import InstalledGear, ReplicaKey
from flexslurm.engine.load import RunningKv
from flexslurm.engine.ownership import ShardMap
from flexslurm.engine.routing import LiveKv
from flexslurm.engine.shift_plan import BESIDE_SHARE, LinkRates
from flexslurm.gear import Gear
from flexslurm.head.away import Away
from flexslurm.head.ledger import Adoption, Ledger
from flexslurm.head.lessons import Lessons
from flexslurm.head.move_plan import MovePlan, in_parts, live_kv, plan_moves, replica_at
from flexslurm.head.mover import Mover
from flexslurm.head.moving import MoverSettings, NewEnd, OldEnd, Tickets
from flexslurm.head.planning import ServicePlanner
from flexslurm.head.redone import redone_tokens
from flexslurm.head.replicas import Replicas
from flexslurm.head.under_way import UnderWay
from flexslurm.messages import KvParked, KvPulled, Message, UnparkKv
from flexslurm.planner.recompute import RecomputeCost

log = logging.getLogger(__name__)

_ANSWERS_S = 1.0
_PARTS = 64
"""Sequences that a placement looks at one by one."""
_PULL_SHARE = 0.4
"""Of the cut-over's time, what one pull may take: so that one that fails leaves time to go on."""


class MovePlanner:
    """What the moves ask of the service's planner."""

    def __init__(
        self,
        shards: Callable[[], ShardMap],
        rates: Callable[[Iterable[str]], LinkRates],
        speeds: Callable[[Gear], Mapping[int, float]],
        recompute: Callable[[Gear], RecomputeCost] = lambda gear: RecomputeCost(1, 0.0),
    ) -> None:
        """`recompute`: what computing KV anew costs in a gear; by default nothing."""
        self._shards, self._rates, self.speeds = shards, rates, speeds
        self.recompute = recompute

    @classmethod
    def of(cls, planner: ServicePlanner) -> MovePlanner:
        return cls(lambda: planner.shards, planner.rates, planner.speeds, planner.recompute)

    @property
    def shards(self) -> ShardMap:
        """What every place of a gear has, as the engine cuts it."""
        return self._shards()

    def file_rate(self, gpu_types: Iterable[str]) -> float:
        """Bytes per second that one worker may write to files."""
        rates = self._rates(gpu_types)
        whole = rates.checkpoint * rates.share
        return whole if rates.limit is None else min(whole, rates.limit)

    def rates(self, ask: PlanShift) -> LinkRates:
        """Of the links between all GPUs that take part."""
        gears = [gear for gear in (ask.old, ask.new) if gear is not None]
        return self._rates(
            stage.gpu_type
            for gear in gears
            for one in gear.replicas.values()
            for stage in one.replica.stages
        )


class Moves:
    """See the module's docstring. `tell` takes events for the controller."""

    def __init__(
        self,
        replicas: Replicas,
        ledger: Ledger,
        planner: MovePlanner,
        *,
        send: Callable[[str, Message], object],
        tell: Callable[[ShiftEvent], None],
        broken: Callable[[ReplicaKey, str], None],
        now: Callable[[], float],
        tickets: Tickets,
        away: Away,
        settings: MoverSettings | None = None,
        weights_s: Callable[[int], float] = lambda epoch: 0.0,
    ) -> None:
        """`weights_s`: how long an epoch's weights were on their way."""
        self._weights_s = weights_s
        self._replicas, self._ledger, self._planner = replicas, ledger, planner
        self._send, self._tell, self._broken, self._now = send, tell, broken, now
        self._settings = settings or MoverSettings()
        self._tickets, self._away = tickets, away
        self._under: UnderWay | None = None
        self._left: list[Mover] = []
        """Movers that were given up while replicas that serve on were being filled."""
        self._lessons = Lessons()
        self._tight: dict[int, tuple[ReplicaKey, ...]] = {}
        """By epoch: replicas that may not use all their blocks yet."""

    # ------------------------------------------------------------------ what is ordered

    def plan(self, ask: PlanShift) -> ShiftEvent:
        """Plan the moves; with both gears side by side, bound what the old one may use."""
        plan = self._planned(ask, self._away.ends())
        keys = tuple(one.key for one in plan.going)
        drivers = self._replicas.open
        old = tuple(OldEnd(replica_at(one), drivers[one.key]) for one in plan.going)
        self._under = UnderWay(plan, old, keys, stored=self._away.ends())
        for key in keys:
            drivers[key].limit_blocks(plan.bounds.limits.get(key))
        return ShiftPlanned(ask.epoch, plan.order)

    def preview(self, ask: PlanShift) -> tuple[str, ...]:
        """The plan of a shift in words, for people; begins nothing."""
        return self._planned(ask).order.lines

    def price(self, ask: PlanShift) -> ShiftPrice:
        """What a shift would cost now; nothing where nothing serves."""
        if ask.old is None:
            return ShiftPrice()
        found = self._planned(ask)
        redone = redone_tokens(found, self._running(), self._planner.shards.block_tokens)
        cost, plan = self._planner.recompute(ask.new.gear), found.plan
        lost = sum(map(cost.of, redone.values()))
        if plan is None:  # all weights come from the files
            kept = 0.0 if found.going else BESIDE_SHARE * self._rate(ask)
            load_s = ask.new.gear.estimates.load_s
            return ShiftPrice(load_s, kept, lost, redone=len(redone))
        return ShiftPrice(
            seconds=plan.transfer_s + plan.pause_s,
            tokens_per_s=plan.served_share * self._rate(ask),
            lost_tokens=lost,
            evicted=plan.routes.evicted,
            redone=len(redone),
        )

    def held(self, current: InstalledGear) -> tuple[LiveKv, ...]:
        """What the replicas of a gear hold now, for a placement."""
        return in_parts(self._live(current), _PARTS)

    def _live(self, current: InstalledGear) -> tuple[LiveKv, ...]:
        """Whose KV the replicas of a gear hold now, by their numbers in it."""
        running = self._running()
        numbers = {one.key: number for number, one in current.replicas.items()}
        return live_kv(self._planner.shards.block_tokens, numbers, running)

    def _rate(self, ask: PlanShift) -> float:
        """Tokens per second of what serves, as estimated: a replica that is lost does not."""
        if ask.old is None:
            return 0.0
        gear = ask.old.gear
        speeds = self._planner.speeds(gear) if ask.old.lost else {}
        left = sum(speeds.get(number, 0.0) for number in ask.old.replicas)
        share = left / sum(speeds.values()) if speeds else 1.0
        return gear.estimates.tokens_per_s * share

    def _running(self) -> dict[ReplicaKey, list[RunningKv]]:
        return {key: driver.running_kv() for key, driver in self._replicas.open.items()}

    def _planned(self, ask: PlanShift, stored: tuple[OldEnd, ...] = ()) -> MovePlan:
        running = self._running()
        times = [driver.step_times.mean_s for driver in self._replicas.open.values()]
        rates, step_s = self._planner.rates(ask), max(times, default=0.0)
        count = sum(len(end.view()) for end in stored)
        return plan_moves(
            self._planner.shards, ask, running, rates, step_s, count, self._lessons.corrected
        )

    def park_ahead(self, epoch: int, deadline_s: float) -> ShiftEvent | None:
        """Copy full blocks aside while the old drivers go on."""
        under = self._mine(epoch)
        parking = under.begin_parking(self._planner.shards.block_tokens, self._tickets)
        parking.begin_ahead(deadline_s, under.plan.order.rate_bytes_per_s)
        under.ahead_until = self._now() + deadline_s - _ANSWERS_S
        return self._go_on()

    def park(self, epoch: int) -> ShiftEvent | None:
        under = self._mine(epoch)
        parking = under.begin_parking(self._planner.shards.block_tokens, self._tickets)
        parking.end_ahead(cut_short=self._now() < under.ahead_until)
        self._pause(under)
        return self._go_on()

    def transfer(self, epoch: int) -> ShiftEvent | None:
        under = self._mine(epoch)
        under.began_at = self._now()
        under.mover = self._mover(under, whole=False)
        return self._go_on()

    def cut_over(self, epoch: int, deadline_s: float) -> ShiftEvent | None:
        under = self._mine(epoch)
        if under.mover is None:
            under.mover = self._mover(under, whole=True)
        self._pause(under)
        under.mover.begin_last(self._now(), deadline_s * _PULL_SHARE)
        return self._go_on()

    def switch(self, switch: SwitchOver) -> ShiftEvent:
        """Open the new drivers with what was moved to them, then close the old ones."""
        under, self._under = self._under, None
        gear = switch.gear.gear
        for one in switch.opened.values():
            self._replicas.arrive(one, gear.block_tokens)
        speeds = under.speeds if under is not None and under.speeds else self._speeds(switch.gear)
        opened = [one.key for _, one in sorted(switch.opened.items())]
        if under is None:
            self._replicas.switch(opened, switch.closed, {}, speeds)
            return Switched(switch.epoch, MoveFigures())
        counts = {key: self._replicas.open[key].step_times.count for key in switch.closed}
        adoptions = self._adoptions(under)
        self._bound_new(switch, under, adoptions)
        adopted = self._replicas.switch(opened, switch.closed, adoptions, speeds)
        # Streams go on from here; all that follows may take its time.
        under.stay(self._live(switch.gear), adopted)
        self._unpark(under)
        if under.mover is not None and not under.mover.release(adopted):
            self._left.append(under.mover)
        self._away.tidy(adopted)
        figures = under.figures(self._now(), adopted, counts, self._ledger.has)
        if under.plan.nominal is not None and figures.moved:  # else there was nothing to wait for
            move_s = self._weights_s(switch.epoch) + figures.move_s
            self._lessons.learn(under.plan.nominal, move_s, figures.pause_s)
        return Switched(switch.epoch, figures)

    def drop(self, epoch: int, reason: str) -> None:
        """Forget what was begun; the old replicas go on."""
        under = self._under
        if under is not None and under.plan.ask.epoch == epoch:
            self._under = None
            for key in under.keys:
                driver = self._replicas.open.get(key)
                if driver is not None:
                    driver.limit_blocks(None)
                    driver.resume()
        self._replicas.forget_arriving()
        if under is None:
            return
        self._unpark(under)
        if under.mover is not None:
            under.mover.fail(reason)
            if not under.mover.release():
                self._left.append(under.mover)

    def room_free(self, epoch: int) -> None:
        """What was replaced is closed: the replicas of this epoch may use all their blocks."""
        for key in self._tight.pop(epoch, ()):
            driver = self._replicas.open.get(key)
            if driver is not None:
                driver.limit_blocks(None)
                driver.pump()

    def before_detach(self, keys: Iterable[ReplicaKey]) -> None:
        """These drivers are about to be closed: by a loss, or as there is no way to keep them."""
        under = self._under
        for key in keys:
            if under is not None and key in under.keys:
                under.close_end(self._now(), under.keys.index(key))

    # ------------------------------------------------------------------ what is heard

    @property
    def awaits_steps(self) -> bool:
        """Whether a step's answer may be what the shift waits for."""
        return self._under is not None and self._under.awaits_steps

    def take(self, message: KvPulled | KvParked) -> None:
        """An answer of a worker; of what is over it is dropped."""
        now, under = self._now(), self._under
        if isinstance(message, KvParked):
            if under is not None and under.parking is not None:
                under.parking.take(message)
        else:
            movers = [m for m in (under.mover if under else None, *self._left) if m is not None]
            if message.reason:
                log.info("pull %d of %s: %s", message.ticket, message.worker, message.reason)
            any(mover.pulled(now, message) for mover in movers)
        self.advance()

    def advance(self) -> None:
        """Go on as far as what is known allows, and tell the controller of what it waits for."""
        event = self._go_on()
        if event is not None:
            self._tell(event)

    # ------------------------------------------------------------------ how

    def _mine(self, epoch: int) -> UnderWay:
        under = self._under
        assert under is not None and under.plan.ask.epoch == epoch, f"epoch {epoch} has no plan"
        return under

    def _speeds(self, gear: InstalledGear) -> dict[ReplicaKey, float]:
        by_number = self._planner.speeds(gear.gear)
        return {
            one.key: by_number[number]
            for number, one in gear.replicas.items()
            if number in by_number
        }

    def _mover(self, under: UnderWay, *, whole: bool) -> Mover:
        ask, shards = under.plan.ask, self._planner.shards
        under.speeds = self._speeds(ask.new)
        new = []
        for _, one in sorted(ask.new.replicas.items()):
            if one.key.epoch == ask.epoch:
                driver = self._replicas.arrive(one, ask.new.gear.block_tokens)
            else:
                driver = self._replicas.open[one.key]
            new.append(NewEnd(replica_at(one), driver))
        settings = MoverSettings(
            rate_bytes_per_s=under.plan.order.rate_bytes_per_s,
            pull_timeout_s=self._settings.pull_timeout_s,
            batch_bytes=self._settings.batch_bytes,
            most_last_blocks=None if whole else self._settings.most_last_blocks,
        )
        return Mover(
            shards,
            (*under.old, *under.stored),
            new,
            settings,
            alive=self._ledger.has,
            tickets=self._tickets,
            longest_first=bool(ask.leaving_s),
        )

    def _go_on(self) -> ShiftEvent | None:
        now, under = self._now(), self._under
        self._clear_left(now)
        if under is None:
            return None
        event = under.progress(now)
        self._post(under.take_outbox())
        return event

    def _pause(self, under: UnderWay) -> None:
        open_still = [key for key in under.keys if key in self._replicas.open]
        for key in open_still:
            self._replicas.open[key].pause()
        counts = {key: self._replicas.open[key].step_times.count for key in open_still}
        under.pause(self._now(), counts)

    def _post(self, outbox: Iterable[tuple[str, Message]]) -> None:
        for worker, message in outbox:
            self._send(worker, message)

    def _clear_left(self, now: float) -> None:
        for mover in list(self._left):
            mover.advance(now)
            if mover.release():
                self._left.remove(mover)
            elif mover.overdue(now):
                self._left.remove(mover)
                for end in mover.unanswered():
                    key = ReplicaKey(end.at.epoch, end.at.index)
                    self._broken(key, "a pull into its blocks was not answered")

    def _adoptions(self, under: UnderWay) -> dict[str, Adoption]:
        found: dict[str, Adoption] = {}
        for seq_id, (number, computed) in under.adoptions().items():
            assert under.mover is not None
            at = under.mover.new[number].at
            driver = self._replicas.driver(ReplicaKey(at.epoch, at.index))
            if driver is not None:
                found[seq_id] = Adoption(driver.seat, computed)
        return found

    def _bound_new(
        self, switch: SwitchOver, under: UnderWay, adoptions: Mapping[str, Adoption]
    ) -> None:
        """Before anything is placed: until the old epoch is closed, its weights and pages stay."""
        used = {key: self._replicas.open[key].load().used_blocks for key in switch.closed}
        spare, coming = under.plan.bounds.room(used), [one.seat for one in adoptions.values()]
        bounded = [one for one in switch.opened.values() if one.key in spare]
        for one in bounded:
            driver = self._replicas.arrive(one, switch.gear.gear.block_tokens)
            held = driver.load().used_blocks + coming.count(driver.seat)
            driver.limit_blocks(held + spare[one.key])
        if bounded:
            self._tight[switch.epoch] = tuple(one.key for one in bounded)

    def _unpark(self, under: UnderWay) -> None:
        if under.parking is not None:
            for worker, epoch in under.parking.workers():
                self._send(worker, UnparkKv(epoch=epoch))
