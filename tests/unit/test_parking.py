"""KV that is copied aside: what counts as parked, how files are shared, when they are dropped."""

from __future__ import annotations

import msgspec

from flexslurm.engine.load import RunningKv
from flexslurm.engine.ownership import ReplicaAt, Seat
from flexslurm.head.moving import OldEnd, Tickets
from flexslurm.head.parking import Parking
from flexslurm.head.stored import Stored
from flexslurm.messages import KvParked, ParkKv, UnparkKv
from tests.reshard_cases import replica

BLOCK = 4


class Driver:
    def __init__(self, *sequences: RunningKv) -> None:
        self.sequences, self.idle = list(sequences), False

    def running_kv(self) -> list[RunningKv]:
        return self.sequences


def kv(name: str, blocks: tuple[int, ...], computed: int, arrival: int = 0) -> RunningKv:
    return RunningKv(name, blocks, computed, arrival, 100, 1)


AT = ReplicaAt(7, 0, replica((2, 0, 6)), (Seat("w0", "n"), Seat("w1", "n")))


def parking(driver: Driver, **options: object) -> Parking:
    made = Parking((OldEnd(AT, driver),), BLOCK, Tickets(), deadline_s=5.0, **options)  # type: ignore[arg-type]
    made.advance()
    return made


def answer(made: Parking, ask: ParkKv, worker: str, failed: tuple[int, ...] = ()) -> None:
    message = KvParked(
        worker=worker, epoch=7, ticket=ask.ticket, parked_bytes=1, seconds=0.1, failed=failed
    )
    assert made.take(message)


def test_nothing_is_asked_before_a_step_boundary() -> None:
    driver = Driver(kv("a", (1, 2), 7))
    made = parking(driver)
    assert not made.outbox and not made.done
    driver.idle = True
    made.advance()
    made.advance()
    assert [(worker, ask.blocks) for worker, ask in made.outbox] == [("w0", (1, 2)), ("w1", (1, 2))]


def test_a_sequence_is_parked_as_far_as_every_worker_could() -> None:
    driver = Driver(kv("a", (1, 2, 3), 11), kv("b", (4,), 3, 1))
    driver.idle = True
    made = parking(driver)
    (_, first), (_, second) = made.outbox
    answer(made, first, "w0", failed=(3,))
    assert made.kept(0) == {}, "the other has not answered"
    answer(made, second, "w1", failed=(4,))
    assert made.done
    assert made.kept(0) == {
        "a": msgspec.structs.replace(kv("a", (1, 2, 3), 11), blocks=(1, 2), computed=8)
    }


def test_the_longest_go_first_and_each_part_counts_alone() -> None:
    driver = Driver(kv("short", (1,), 4), kv("long", (2, 3, 4), 12, 1), kv("mid", (5, 6), 8, 2))
    driver.idle = True
    made = parking(driver, directory="/d", most_asks=3)
    assert [ask.blocks for worker, ask in made.outbox if worker == "w0"] == [
        (2, 3, 4),
        (5, 6),
        (1,),
    ]
    assert all(ask.directory == "/d" for _, ask in made.outbox)
    for worker, ask in made.outbox[:4]:
        answer(made, ask, worker)
    assert made.kept(0).keys() == {"long", "mid"} and not made.done


def test_parts_are_bounded() -> None:
    driver = Driver(*(kv(f"s{n}", (n,), 4, n) for n in range(10)))
    driver.idle = True
    made = parking(driver, directory="/d", most_asks=4)
    assert len(made.outbox) == 2 * 4
    shared = {tuple(parts) for parts in made.parts.values()}
    assert len(shared) == 4


def test_a_lost_member_is_not_waited_for() -> None:
    driver = Driver(kv("a", (1,), 4))
    driver.idle = True
    made = parking(driver)
    made.lose(0)
    assert made.done and made.kept(0) == {}


def test_nothing_to_park_is_done_at_once() -> None:
    driver = Driver()
    driver.idle = True
    assert parking(driver).done


def test_answers_to_others_are_not_taken() -> None:
    driver = Driver(kv("a", (1,), 4))
    made = parking(driver)
    assert not made.take(KvParked(worker="w0", epoch=7, ticket=99, parked_bytes=0, seconds=0.0))


# ----------------------------------------------------------------------------------- stored


def stored() -> Stored:
    made = Stored("/d", age_s=100.0)
    kept = {name: kv(name, (n,), 4, n) for n, name in enumerate("abc")}
    parts = {"a": [("w0", 7, 1)], "b": [("w0", 7, 1)], "c": [("w0", 7, 2)]}
    made.add(0.0, AT, kept, parts)
    return made


def test_a_file_goes_with_the_last_sequence_in_it() -> None:
    made = stored()
    assert made.prune(1.0, lambda name: True, done={"a"}) == []
    assert made.prune(2.0, lambda name: name != "b") == [("w0", 7, 1)]
    assert made.names() == {"c"}
    assert made.prune(101.0, lambda name: True) == [("w0", 7, 2)], "it is too old"
    assert not made


def test_what_is_stored_can_be_moved_from() -> None:
    [end] = stored().ends()
    assert end.directory == "/d" and end.at is AT and end.idle and end.pullable
    assert set(end.view()) == {"a", "b", "c"}


def ahead(driver: Driver) -> Parking:
    made = Parking((OldEnd(AT, driver),), BLOCK, Tickets(), deadline_s=5.0)
    made.begin_ahead(2.0, 1e6)
    return made


def answer_all(made: Parking, failed: tuple[int, ...] = ()) -> None:
    for worker, ask in made.outbox:
        answer(made, ask, worker, failed)
    made.outbox.clear()


def asked(made: Parking) -> list[tuple[int, ...]]:
    """What each ask of the first worker is for."""
    return [ask.blocks for worker, ask in made.outbox if worker == "w0" and isinstance(ask, ParkKv)]


def test_full_blocks_go_ahead_and_the_pause_has_what_came_since() -> None:
    driver = Driver(kv("a", (1, 2), 7), kv("b", (3,), 2, 1))
    made = ahead(driver)
    assert asked(made) == [(1,)]
    assert {(ask.rate_bytes_per_s, ask.deadline_s) for _, ask in made.outbox} == {(1e6, 2.0)}
    made.end_ahead()
    driver.sequences = [kv("a", (1, 2, 4), 9), kv("b", (3,), 3, 1)]
    driver.idle = True
    made.advance()
    assert not made.done and len(made.outbox) == 2, "what was asked ahead is not answered"
    answer_all(made)
    made.advance()
    assert asked(made) == [(2, 4, 3)]
    assert {(ask.rate_bytes_per_s, ask.deadline_s) for _, ask in made.outbox} == {(0.0, 5.0)}
    answer_all(made, failed=(4,))
    assert made.done
    assert made.kept(0) == {
        "a": kv("a", (1, 2), 8),
        "b": kv("b", (3,), 3, 1),
    }


def test_drivers_that_are_idle_for_a_moment_are_not_paused() -> None:
    driver = Driver(kv("a", (1, 2), 7))
    made = ahead(driver)
    answer_all(made)
    driver.idle = True
    made.advance()
    assert made.is_ahead and not made.done and not made.outbox


def test_what_failed_ahead_is_asked_for_again() -> None:
    driver = Driver(kv("a", (1, 2, 3), 12))
    made = ahead(driver)
    answer_all(made, failed=(2,))
    made.end_ahead()
    driver.idle = True
    made.advance()
    assert asked(made) == [(2, 3)]
    answer_all(made)
    assert made.kept(0) == {"a": kv("a", (1, 2, 3), 12)}


def test_a_sequence_that_was_evicted_meanwhile_is_parked_whole() -> None:
    """Its blocks ahead may be another's by now, whose copies come later and count."""
    driver = Driver(kv("a", (1, 2), 8), kv("gone", (3, 4), 8, 1))
    made = ahead(driver)
    answer_all(made)
    made.end_ahead()
    again = msgspec.structs.replace(kv("a", (3, 1), 8), tenure=2)
    driver.sequences, driver.idle = [again, kv("new", (2,), 4, 2)], True
    made.advance()
    assert asked(made) == [(3, 1, 2)]
    answer_all(made)
    assert made.kept(0) == {"a": again, "new": kv("new", (2,), 4, 2)}


def test_nothing_is_left_for_the_pause_where_all_blocks_were_full() -> None:
    driver = Driver(kv("a", (1, 2), 8))
    made = ahead(driver)
    answer_all(made)
    made.end_ahead()
    driver.idle = True
    made.advance()
    assert made.done and not made.outbox
    assert made.kept(0) == {"a": kv("a", (1, 2), 8)}


def test_copies_ahead_that_are_cut_short_are_called_off_and_made_anew() -> None:
    driver = Driver(kv("a", (1, 2), 8))
    made = ahead(driver)
    slow = [ask for _, ask in made.outbox if isinstance(ask, ParkKv)]
    made.outbox.clear()
    answer(made, slow[0], "w0")
    made.end_ahead(cut_short=True)
    assert made.outbox == [(worker, UnparkKv(epoch=7)) for worker in ("w0", "w1")]
    driver.idle = True
    made.advance()
    assert asked(made) == [(1, 2)] and not made.done
    late = KvParked(worker="w1", epoch=7, ticket=slow[1].ticket, parked_bytes=0, seconds=1.0)
    assert not made.take(late) and made.kept(0) == {}
    made.outbox = made.outbox[2:]
    answer_all(made)
    assert made.done and made.kept(0) == {"a": kv("a", (1, 2), 8)}


def test_copies_ahead_that_are_all_there_count_when_there_is_haste() -> None:
    driver = Driver(kv("a", (1, 2), 8))
    made = ahead(driver)
    answer_all(made)
    made.end_ahead(cut_short=True)
    driver.idle = True
    made.advance()
    assert made.done and not made.outbox and made.kept(0) == {"a": kv("a", (1, 2), 8)}
