"""Where sequences go, which are evicted, and what is moved first when time is short."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine.deadline import (
    Candidate,
    Scheduled,
    deadline_schedule,
    saved_tokens,
    source_budgets,
)
from flexslurm.engine.routing import LiveKv, Room, rooms_of, route_sequences
from tests.reshard_cases import replica

MANY = Room(10_000, 10_000, 1000)
INFINITE = float("inf")


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[LiveKv], list[list[int]], list[Room]]:
    olds, news = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    costs = [[draw(st.integers(0, 9)) for _ in range(news)] for _ in range(olds)]
    rooms = [
        Room(draw(st.integers(0, 40)), draw(st.integers(0, 8)), draw(st.sampled_from([20, 100])))
        for _ in range(news)
    ]
    arrivals = draw(st.permutations(range(12)))
    live = [
        LiveKv(
            f"s{i}",
            draw(st.integers(0, olds - 1)),
            draw(st.integers(1, 9)),
            4,
            arrivals[i],
            draw(st.integers(5, 110)),
        )
        for i in range(draw(st.integers(0, 12)))
    ]
    return live, costs, rooms


@given(cases())
def test_every_sequence_goes_somewhere_that_can_hold_it_or_is_named(
    case: tuple[list[LiveKv], list[list[int]], list[Room]],
) -> None:
    live, costs, rooms = case
    routes = route_sequences(live, costs, rooms)
    names = [*routes.to, *routes.evicted, *routes.unfit]
    assert sorted(names) == sorted(one.seq_id for one in live)
    by_name = {one.seq_id: one for one in live}
    for number, room in enumerate(rooms):
        mine = [by_name[name] for name, to in routes.to.items() if to == number]
        assert sum(one.blocks for one in mine) <= room.blocks
        assert len(mine) <= room.sequences
        assert all(one.context <= room.max_context for one in mine)
    longest = max(room.max_context for room in rooms)
    assert set(routes.unfit) == {one.seq_id for one in live if one.context > longest}
    assert routes.moved_bytes == sum(
        one.blocks * costs[one.replica][routes.to[one.seq_id]]
        for one in live
        if one.seq_id in routes.to
    )


@given(cases())
def test_only_the_newest_are_evicted_but_for_what_fits_nowhere(
    case: tuple[list[LiveKv], list[list[int]], list[Room]],
) -> None:
    live, costs, rooms = case
    routes = route_sequences(live, costs, rooms)
    by_name = {one.seq_id: one for one in live}
    evicted = [by_name[name] for name in routes.evicted]
    order = [one.arrival for one in evicted]
    assert order == sorted(order, reverse=True)
    could = [
        one.arrival
        for one in evicted
        if any(
            one.blocks <= room.blocks and one.context <= room.max_context and room.sequences
            for room in rooms
        )
    ]
    if could and routes.to:
        assert max(by_name[name].arrival for name in routes.to) < min(could)
    if len(rooms) == 1 and could:
        # One replica: the next sequence really does not fit.
        room, placed = rooms[0], [by_name[name] for name in routes.to]
        following = next(one for one in reversed(evicted) if one.arrival == min(could))
        assert (
            sum(one.blocks for one in placed) + following.blocks > room.blocks
            or len(placed) == room.sequences
        )


@given(cases())
def test_with_room_to_spare_each_goes_where_it_moves_least(
    case: tuple[list[LiveKv], list[list[int]], list[Room]],
) -> None:
    live, costs, rooms = case
    routes = route_sequences(live, costs, [MANY] * len(rooms), slack=INFINITE)
    fitting = [one for one in live if one.context <= MANY.max_context]
    assert routes.moved_bytes == sum(one.blocks * min(costs[one.replica]) for one in fitting)


@given(cases())
def test_nothing_is_evicted_from_one_replica_that_holds_all(
    case: tuple[list[LiveKv], list[list[int]], list[Room]],
) -> None:
    live, costs, _ = case
    total = sum(one.blocks for one in live)
    one_room = [Room(total, len(live), 1000)]
    routes = route_sequences(live, [row[:1] for row in costs], one_room)
    assert len(routes.to) == len(live)


def test_the_nearest_replica_is_not_filled_while_others_are_idle() -> None:
    live = [LiveKv(f"s{i}", 0, 10, 40, i, 50) for i in range(20)]
    routes = route_sequences(live, [[0, 5]], [Room(1000, 99, 100)] * 2)
    near = sum(to == 0 for to in routes.to.values())
    assert near == 12, "half and a quarter of it"
    even = route_sequences(live, [[5, 5]], [Room(1000, 99, 100)] * 2)
    assert sorted(even.to.values()).count(0) == 10


def test_a_single_sequence_goes_to_the_nearest_replica() -> None:
    live = [LiveKv("s", 0, 100, 400, 1, 500)]
    routes = route_sequences(live, [[7, 3]], [Room(5000, 9, 1000), Room(200, 9, 1000)])
    assert routes.to == {"s": 1}


def test_a_kept_replica_takes_what_it_has_room_for_besides_its_own() -> None:
    news = [replica((1, 0, 6), kv_blocks=10), replica((1, 0, 6), kv_blocks=10)]
    own = [LiveKv("own", 0, 7, 28, 1, 30)]
    assert rooms_of(news, {1: 0}, own) == (Room(10, 16, 256), Room(3, 15, 256))


# ------------------------------------------------------------------------------------ deadlines


@st.composite
def one_source(draw: st.DrawFn) -> tuple[list[Candidate], int]:
    candidates = [
        Candidate(f"s{i}", draw(st.integers(1, 5)), {"w": 10})
        for i in range(draw(st.integers(0, 4)))
    ]
    return candidates, draw(st.integers(0, 160))


@given(one_source())
def test_no_other_prefixes_save_more_recompute(case: tuple[list[Candidate], int]) -> None:
    candidates, budget = case
    chosen = deadline_schedule(candidates, {"w": budget}, block_tokens=64, attention_context=100.0)

    def saved(blocks: list[int]) -> float:
        return sum(saved_tokens(64 * count, 100.0) for count in blocks)

    found = saved([one.blocks for one in chosen])
    assert 10 * sum(one.blocks for one in chosen) <= budget
    best = max(
        saved(list(choice))
        for choice in itertools.product(*(range(one.blocks + 1) for one in candidates))
        if 10 * sum(choice) <= budget
    )
    assert found == pytest.approx(best)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.dictionaries(st.sampled_from("abc"), st.integers(1, 50))),
        max_size=8,
    ),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 500)),
)
def test_no_source_is_asked_for_more_than_it_can_send(
    sizes: list[tuple[int, dict[str, int]]], budgets: dict[str, int]
) -> None:
    candidates = [Candidate(f"s{i}", n, sends) for i, (n, sends) in enumerate(sizes)]
    chosen = deadline_schedule(candidates, budgets, block_tokens=16)
    by_name = {one.seq_id: one for one in candidates}
    for source, budget in budgets.items():
        sent = sum(
            one.blocks * by_name[one.seq_id].bytes_per_block.get(source, 0) for one in chosen
        )
        assert sent <= budget
    assert all(1 <= one.blocks <= by_name[one.seq_id].blocks for one in chosen)
    assert len({one.seq_id for one in chosen}) == len(chosen)
    unbounded = {o.seq_id for o in candidates if not set(o.bytes_per_block) & set(budgets)}
    assert unbounded <= {one.seq_id for one in chosen}


def test_the_longest_goes_first_and_of_the_next_a_prefix() -> None:
    candidates = [Candidate("short", 4, {"w": 100}), Candidate("long", 8, {"w": 100})]
    chosen = deadline_schedule(candidates, {"w": 1050}, block_tokens=256)
    assert chosen == (Scheduled("long", 8), Scheduled("short", 2))


def test_weights_have_their_part_of_the_time() -> None:
    found = source_budgets(["a", "b"], 100.0, 5.0, {"a": 150, "b": 900})
    assert found == {"a": 350, "b": 0}
