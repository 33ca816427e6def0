"""Measured links between nodes: reads and writes them as CSV, and fits one link to all; no I/O.

Rows are `source,target,bytes,seconds`: one message of so many bytes takes so long from one node to
the other. A line `# mpi=LIBRARY` before them may say how they were measured.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from flexslurm.config.whole import shown, whole
from flexslurm.errors import ConfigError
from flexslurm.planner.csv_lines import cells_of
from flexslurm.planner.topology import Link, Topology

COLUMNS = ("source", "target", "bytes", "seconds")


class LinkRow(NamedTuple):
    """One measurement."""

    source: str
    target: str
    nbytes: int
    seconds: float


class PairLink(NamedTuple):
    """What one pair of nodes reaches."""

    source: str
    target: str
    link: Link


def write_links(rows: Iterable[LinkRow], about: str = "") -> str:
    """Rows as CSV text that `read_links` reads."""
    out = io.StringIO()
    if about:
        out.write(f"# {' '.join(about.split())}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((r.source, r.target, r.nbytes, f"{r.seconds:.9g}") for r in rows)
    return out.getvalue()


def read_links(text: str, file: str) -> tuple[LinkRow, ...]:
    """Raises ConfigError naming file and line."""
    rows: list[LinkRow] = []
    header = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#") or not line.strip():
            continue
        cells = [cell.strip() for cell in cells_of(line, file, number)]
        if header:
            rows.append(_row(cells, file, number))
        elif tuple(cells) != COLUMNS:
            raise ConfigError(f"the columns must be {','.join(COLUMNS)}", file=file, line=number)
        header = True
    if not pair_links(rows):
        raise ConfigError(
            "messages of at least two sizes are needed, between the same two nodes", file=file
        )
    return tuple(rows)


def _row(cells: Sequence[str], file: str, line: int) -> LinkRow:
    def fail(message: str) -> ConfigError:
        return ConfigError(message, file=file, line=line)

    if len(cells) != len(COLUMNS):
        raise fail(f"{len(COLUMNS)} values are expected, not {len(cells)}")
    source, target, nbytes, seconds = cells
    if not source or not target:
        raise fail("a row names two nodes")
    size = whole(nbytes)
    if not size:
        raise fail(f"bytes must be a whole number of at least 1, not {shown(nbytes)}")
    try:
        taken = float(seconds)
    except ValueError:
        raise fail(f"seconds must be a number, not {shown(seconds)}") from None
    if not math.isfinite(taken) or taken <= 0:
        raise fail(f"seconds must be a finite number above 0, not {seconds}")
    return LinkRow(source, target, size, taken)


def pair_links(rows: Sequence[LinkRow]) -> tuple[PairLink, ...]:
    """Latency and bandwidth of each pair: its smallest message, and what its largest adds to it."""
    by_pair: dict[tuple[str, str], list[LinkRow]] = defaultdict(list)
    for row in rows:
        by_pair[row.source, row.target].append(row)
    found = []
    for (source, target), mine in sorted(by_pair.items()):
        small, large = min(mine, key=_size), max(mine, key=_size)
        if small.nbytes == large.nbytes:
            continue
        more_s = max(large.seconds - small.seconds, large.seconds * 1e-3)
        link = Link((large.nbytes - small.nbytes) / more_s, small.seconds)
        found.append(PairLink(source, target, link))
    return tuple(found)


def _size(row: LinkRow) -> int:
    return row.nbytes


def node_link(rows: Sequence[LinkRow]) -> Link:
    """The one link the planner reckons with: the median pair's bandwidth and latency."""
    links = [pair.link for pair in pair_links(rows)]
    assert links, "read_links asks for two sizes"
    bandwidths = sorted(link.bandwidth for link in links)
    latencies = sorted(link.latency_s for link in links)
    middle = (len(links) - 1) // 2
    return Link(bandwidths[middle], latencies[len(links) // 2])


def with_links(topology: Topology, rows: Sequence[LinkRow]) -> Topology:
    """The topology with the measured link in place of the site file's."""
    return msgspec.structs.replace(topology, node_link=node_link(rows))
