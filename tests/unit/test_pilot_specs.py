"""From the service file to pilots; what a launch makes of pilots that are there already."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.errors import ConfigError
from flexslurm.head.pilot_specs import (
    entries_of,
    first_pilots,
    pilot_spec,
    taken_over,
    the_first,
)
from flexslurm.slurm.script import pilot_options
from flexslurm.wire.service_dir import Pilot, Pilots, ServiceDir


def service(pool: str) -> Service:
    return parse_section(Service, f"name: chat\nmodel: {{path: /m}}\npool: {pool}\n", "f")


TWO = service(
    "[{gpu_type: a100, gpus: 4, partition: p, count: 2, max_count: 3, shapes: [{gpus: 2}]},"
    " {gpu_type: a100, gpus: 1, partition: q, walltime: 1h}]"
)


def pilot(name: str, gpus: int = 4, partition: str = "p", **more: object) -> Pilot:
    return Pilot(name, f"job-{name}", partition, "a100", gpus, 1, **more)  # type: ignore[arg-type]


def names(pilots: list[Pilot]) -> list[str]:
    return [pilot.fragment for pilot in pilots]


def test_the_first_pilots_are_numbered_by_gpu_type() -> None:
    made = first_pilots(TWO)
    assert [(p.fragment, p.gpus, p.entry) for p in made] == [
        ("a100-1", 4, 0), ("a100-2", 4, 0), ("a100-3", 1, 1)
    ]  # fmt: skip
    assert [entry.most for entry in entries_of(TWO)] == [3, 1]


def test_the_first_of_a_large_pool_are_of_all_its_entries() -> None:
    pool = service("[{gpu_type: a100, gpus: 1, count: 5}, {gpu_type: l40s, gpus: 1, count: 2}]")
    first = first_pilots(pool)
    assert names(the_first(first, 5)) == ["a100-1", "a100-2", "a100-3", "l40s-1", "l40s-2"]
    assert the_first(first, 7) == the_first(first, 100) == first


def test_what_was_drained_is_not_missing() -> None:
    before = Pilots("slurm", wanted=(1, 1), drained={"a100-1": 0})
    kept, others, missing = taken_over([], TWO, before)
    assert (kept, others) == ([], [])
    # its name stays free: it may be had back
    assert [(p.fragment, p.entry) for p in missing] == [("a100-2", 0), ("a100-3", 1)]


def test_pilots_that_are_there_stay_under_their_names() -> None:
    """Successors, other shapes of the entry and grown pools are pilots of the pool."""
    alive = [pilot("a100-7", replaces="a100-1"), pilot("a100-2", gpus=2), pilot("a100-3")]
    kept, others, missing = taken_over(alive, TWO)
    assert names(kept) == ["a100-7", "a100-2", "a100-3"] and others == []
    assert [(p.fragment, p.entry) for p in missing] == [("a100-1", 1)]
    assert kept[0].replaces == "a100-1"


def test_what_is_beyond_the_maximum_or_of_no_entry_is_another_pool_s() -> None:
    alive = [pilot(f"a100-{n}") for n in range(1, 5)] + [pilot("a100-9", 8), pilot("l-1", 4, "z")]
    kept, others, missing = taken_over(alive, TWO)
    assert len(kept) == 3 and names(others) == ["a100-4", "a100-9", "l-1"]
    assert [p.entry for p in missing] == [1]


def test_a_pilot_that_gave_a_node_back_is_still_one_of_the_pool() -> None:
    pool = service("[{gpu_type: a100, gpus: 4, nodes: 3, partition: p}]")
    kept, others, missing = taken_over([pilot("a100-1")], pool)
    assert (names(kept), others, missing) == (["a100-1"], [], [])


def test_a_pilot_s_own_walltime_wins() -> None:
    site = parse_section(Site, "name: s\ngpu_types: {a100: {}}\npartitions: {p: {}, q: {}}\n", "f")
    one = pilot("a100-3", 1, "q", entry=1)
    short = pilot("a100-3", 1, "q", entry=1, walltime_s=600.0, least_s=300.0)
    for made, time in ((one, "0-01:00:00"), (short, "0-00:10:00")):
        spec = pilot_spec(made, TWO, site, ServiceDir(Path("/s")), "slurm")
        assert f"--time={time}" in pilot_options(spec, site)
        assert spec.name == "chat.a100-3"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("count: 2, min_count: 3", "not be above count"),
        ("count: 2, max_count: 1", "not be below count"),
        ("count: 1, max_count: 5000", "at most 4096"),
    ],
)
def test_bounds_that_hold_no_count(entry: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        service(f"[{{gpu_type: a, gpus: 1, {entry}}}]")
