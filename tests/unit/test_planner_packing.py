"""Cutting nodes into groups: odd sizes, groups that do not divide one another, what cannot be."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from flexslurm.gear import Signature
from flexslurm.planner.packing import Cannot, cut, patterns, seat
from flexslurm.planner.problem import StageKind
from flexslurm.planner.spaces import ChainSpace, RestSpace, space


def test_patterns_leave_no_room() -> None:
    assert set(patterns(4, (1, 2))) == {(2, 2), (2, 1, 1), (1, 1, 1, 1)}
    assert set(patterns(7, (2, 3))) == {(3, 3), (3, 2, 2), (2, 2, 2)}
    assert patterns(1, (2,)) == ((),)
    assert patterns(5, (5, 3)) == ((5,), (3,))


def test_odd_nodes_are_cut_not_rounded() -> None:
    signature = Signature.parse("a:3,a:5,a:7")
    groups = Counter({StageKind("a", 2): 6, StageKind("a", 1): 3})
    found = cut(signature, groups)
    assert sum(found.values(), Counter()) == Counter({2: 6, 1: 3})
    for node, sizes in found.items():
        assert sum(tp * n for tp, n in sizes.items()) <= signature.nodes()[node].gpus


def test_where_large_first_fails_the_cut_is_still_found() -> None:
    """4+3 and 3+3 into nodes of 7 and 6; the largest first, tightest node, puts 4 into 6."""
    signature = Signature.parse("a:6,a:7")
    groups = Counter({StageKind("a", 4): 1, StageKind("a", 3): 3})
    found = cut(signature, groups)
    assert found == {0: Counter({3: 2}), 1: Counter({4: 1, 3: 1})}


def test_what_cannot_be_cut_says_so() -> None:
    with pytest.raises(Cannot):
        cut(Signature.parse("a:3x2"), Counter({StageKind("a", 2): 3}))


def test_stages_of_a_pipeline_share_a_node_where_they_can() -> None:
    signature = Signature.parse("a:4x2,b:2")
    a2, b2 = StageKind("a", 2), StageKind("b", 2)
    seats = seat(signature, [[a2, a2], [a2, b2, a2]])
    assert seats[0][0] == seats[0][1]
    assert seats[1][0] == seats[1][2] != seats[0][0]


def fits(nodes: dict[int, int], groups: tuple[int, ...]) -> bool:
    """By trying every node for every group."""
    free = sorted(gpus for gpus, count in nodes.items() for _ in range(count))

    def place(left: list[int], rest: tuple[int, ...]) -> bool:
        return not rest or any(
            place(sorted([*left[:i], left[i] - rest[0], *left[i + 1 :]]), rest[1:])
            for i in range(len(left))
            if left[i] >= rest[0] and left[i] not in left[:i]
        )

    return place(free, tuple(sorted(groups, reverse=True)))


@pytest.mark.parametrize("seed", range(60))
def test_states_know_what_fits(seed: int) -> None:
    """A run of groups can be taken from a state if and only if they fit into its nodes."""
    rng = random.Random(seed)
    sizes = rng.choice([(1, 2), (2, 4), (1, 2, 4), (2, 3), (1, 3), (3, 5), (1, 2, 3), (2,)])
    pool = {gpus: rng.randint(1, 2) for gpus in rng.sample([1, 2, 3, 4, 5, 7], 3)}
    found = space(pool, sizes, 100_000)
    assert found is not None
    assert isinstance(found, ChainSpace | RestSpace)
    nodes = {gpus: rng.randint(0, count) for gpus, count in pool.items()}
    for groups in itertools.combinations_with_replacement(sizes, rng.randint(1, 5)):
        states = {found.state(nodes)}
        for tp in sorted(groups, reverse=True):
            ways = found.after(tp)
            after = {int(way[state]) for state in states for way in ways} - {-1}
            assert all(found.level[a] < max(found.level[s] for s in states) for a in after)
            states = after
        assert bool(states) == fits(nodes, groups), (nodes, groups)


def test_one_number_is_enough_for_powers_of_two() -> None:
    states = space({4: 8, 8: 2}, (1, 2, 4), 10**6)
    assert isinstance(states, ChainSpace) and states.size == 8 * 4 + 2 * 8 + 1


def test_too_many_states_are_refused() -> None:
    assert space({8: 60}, (1, 3), 1000) is None
    assert space({1: 10**6}, (1,), 1000) is None
