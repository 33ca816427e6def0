"""Measured links: what a file may hold, and the one link that the planner takes from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.errors import ConfigError
from flexslurm.planner.files import load_links
from flexslurm.planner.links import LinkRow, node_link, pair_links, read_links, write_links
from flexslurm.planner.topology import Topology

HEAD = "source,target,bytes,seconds\n"


def rows_of(bandwidths: dict[tuple[str, str], float], latency_s: float = 5e-6) -> list[LinkRow]:
    return [
        LinkRow(source, target, size, latency_s + (size - 1) / bandwidth)
        for (source, target), bandwidth in bandwidths.items()
        for size in (1, 1 << 20, 1 << 24)
    ]


def test_latency_and_bandwidth_of_a_pair() -> None:
    ((source, target, link),) = pair_links(rows_of({("n1", "n2"): 12.5e9}))
    assert (source, target) == ("n1", "n2")
    assert link.bandwidth == pytest.approx(12.5e9)
    assert link.latency_s == pytest.approx(5e-6)


def test_the_planner_takes_the_median_pair() -> None:
    rows = rows_of({("a", "b"): 1e9, ("a", "c"): 10e9, ("b", "c"): 11e9})
    assert node_link(rows).bandwidth == pytest.approx(10e9)


def test_a_file_replaces_the_link_of_the_site(tmp_path: Path) -> None:
    file = tmp_path / "links.csv"
    file.write_text(write_links(rows_of({("a", "b"): 3e9}), "mpi=some\nlibrary"))
    topology = Topology.from_catalogue(("h100",))
    found = load_links(file, topology)
    assert found.node_link.bandwidth == pytest.approx(3e9)
    assert found.gpus == topology.gpus


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("a,b\n", "columns", 1),
        (HEAD + "a,b,1\n", "4 values", 2),
        (HEAD + "a,,1,1e-6\n", "two nodes", 2),
        (HEAD + "a,b,0,1e-6\n", "at least 1", 2),
        (HEAD + "a,b,-4,1e-6\n", "at least 1", 2),
        (HEAD + "a,b,1,soon\n", "must be a number", 2),
        (HEAD + "a,b,1,0\n", "above 0", 2),
        (HEAD + "a,b,1,nan\n", "finite", 2),
        (HEAD + "a,b,1,1e-6\n", "two sizes", None),
        ("", "two sizes", None),
    ],
)
def test_malformed_files_are_refused_at_their_line(text: str, words: str, line: int | None) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_links(text, "links.csv")
    assert (caught.value.file, caught.value.line) == ("links.csv", line)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_links(tmp_path / "none.csv", Topology.from_catalogue(("h100",)))
