"""What a pause consists of, in played time: one round of pulls, and nothing else that takes any."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flexslurm.control.events import ShiftReport
from flexslurm.gear import Gear
from flexslurm.messages import PullKv, Step
from tests.unit.test_head_moves import ONE, PIPELINE, TWO, WIDE, Service, gear

MESSAGE_S, PULL_S, STEP_S = 0.004, 0.03, 0.02
"""The longest that the played nodes take."""
DEEP = gear("deep", (1, 1, 1))
MIXED = gear("mixed", (2, 1))


class Watched(Service):
    """Keeps what was written and sent from the beginning of the cut-over to its end."""

    def __init__(self, first: Gear) -> None:
        super().__init__(first)
        self.within = False
        self.written: list[tuple[dict[str, Any], bool]] = []
        self.pulls: list[tuple[str, PullKv]] = []
        self.first_steps: list[float] = []
        self.on_phase = self._phase
        append, send = self.journal.append, self.effects._send_or_tell

        def noted(record: dict[str, Any], *, sync: bool = True) -> None:
            if self.within:
                self.written.append((record, sync))
            append(record, sync=sync)

        def sent(worker: str, message: Any) -> None:
            if self.within and isinstance(message, PullKv):
                self.pulls.append((worker, message))
            send(worker, message)

        self.journal.append = noted  # type: ignore[method-assign]
        self.effects.moves._send = sent

    def _phase(self, name: str) -> None:
        if name == "begin_cutover":
            self.within, self.written, self.pulls = True, [], []
        elif name == "after switch_over":
            self.within = False

    def loaded(self, to: Gear, count: int = 4) -> ShiftReport:
        self.load(count)
        self.run(0.15)
        return self.go(to)


@pytest.mark.parametrize(
    ("first", "to"),
    [(ONE, PIPELINE), (PIPELINE, ONE), (ONE, WIDE), (WIDE, DEEP), (DEEP, MIXED), (TWO, WIDE)],
    ids=lambda one: one.name,
)
def test_one_round_of_pulls_and_the_new_gear_goes_on_at_once(first: Gear, to: Gear) -> None:
    world = Watched(first)
    figures = world.loaded(to).figures
    assert figures.moved == 4 and figures.recomputed == 0
    in_flight = max(len(replica.stages) for replica in first.replicas)
    assert figures.drain_s <= in_flight * STEP_S + 2 * MESSAGE_S + 1e-9
    assert figures.last_move_s <= PULL_S + 2 * MESSAGE_S + 1e-9, "asked once, all at the same time"
    assert figures.pause_s == pytest.approx(figures.drain_s + figures.last_move_s), (
        "from the last answer to the first steps no time passes"
    )
    asked = [(w, p.source.worker, p.source.epoch, p.layers, p.heads) for w, p in world.pulls]
    assert len(asked) == len(set(asked)), f"more than one round: {asked}"
    assert all(pull.rate_bytes_per_s == 0 for _, pull in world.pulls), "streams stand still"
    world.end()


def test_nothing_is_awaited_on_disk_while_streams_stand_still() -> None:
    world = Watched(ONE)
    world.loaded(PIPELINE)
    assert [record["event"] for record, sync in world.written if sync] == []
    events = [record["event"] for record in world.journal.records]
    ours = [event for event in events if event in ("cutover", "committed", "switched")]
    assert ours[-3:] == ["cutover", "committed", "switched"]
    world.end()


def test_the_history_says_whose_kv_was_kept() -> None:
    world = Watched(TWO)
    figures = world.loaded(ONE, count=6).figures
    [before] = [r for r in world.journal.records if r["event"] == "switched"][-1:]
    assert [tuple(one) for one in before["kv"]] == list(figures.kv)
    assert len(figures.kv) == 6 and {replica for replica, _ in figures.kv} == {0, 1}
    assert all(tokens > 0 for _, tokens in figures.kv)
    world.end()


def test_no_step_of_the_old_gear_is_sent_once_it_is_to_pause() -> None:
    world = Watched(PIPELINE)
    sent: list[tuple[bool, int]] = []
    send = world.effects.replicas._send

    def noted(workers: tuple[str, ...], message: Any) -> object:
        if isinstance(message, Step):
            sent.append((world.within, message.epoch))
        return send(workers, message)

    for driver in world.effects.replicas.open.values():
        driver._hooks = dataclasses.replace(driver._hooks, send=noted)
    world.effects.replicas._send = noted
    world.loaded(ONE)
    old = world.control.epoch - 1
    assert any(epoch == old for within, epoch in sent if not within)
    assert not any(epoch == old for within, epoch in sent if within)
    assert any(epoch == old + 1 for within, epoch in sent if within), "first of all in the commit"
    world.end()
