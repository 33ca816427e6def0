"""`python -m flexslurm.slurm.link_probe`: one MPI rank of a link measurement; asks Slurm nothing.

Pairs are measured one after another, so that they do not share a link: two ranks send a message to
and fro, half of the median round counts, and the others sleep. Rank 0 writes one JSON value a line
to standard output: what is under way, and at the end a `ProbeResult`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

SIZES = (1, 1 << 13, 1 << 16, 1 << 20, 1 << 24)
"""Bytes of the messages: the first for latency, the last for bandwidth."""
_FEWEST, _MOST, _ENOUGH_S = 5, 400, 0.1
_WARM = 2
_NAP_S = 0.002


class Timing(msgspec.Struct, frozen=True):
    """One message in one direction between two nodes, the median of several."""

    source: str
    target: str
    nbytes: int
    seconds: float


class ProbeResult(msgspec.Struct, frozen=True):
    """What the ranks found."""

    library: str = ""
    ranks: int = 0
    timings: tuple[Timing, ...] = ()
    error: str = ""
    hint: str | None = None


def pairs_of(ranks: int, most: int, seed: int = 0) -> list[tuple[int, int]]:
    """All pairs, or a sample of `most` that has every rank in it as long as it can."""
    pairs = list(itertools.combinations(range(ranks), 2))
    if len(pairs) <= most:
        return pairs
    draw = random.Random(seed)  # noqa: S311 - the same on every rank, not for secrets
    draw.shuffle(pairs)
    seen: set[int] = set()
    fresh: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    for pair in pairs:
        (rest if seen.issuperset(pair) else fresh).append(pair)
        seen.update(pair)
    return sorted([*fresh, *rest][:most])


def measure(comm: Any, pair: tuple[int, int], nbytes: int) -> float:
    """Seconds of one message one way; called by both ranks of the pair."""
    first = comm.rank == pair[0]
    peer = pair[1] if first else pair[0]
    data = bytearray(nbytes)
    times: list[float] = []
    began = time.perf_counter()
    for number in range(_MOST + _WARM):
        go = bytearray([number < _FEWEST + _WARM or time.perf_counter() - began < _ENOUGH_S])
        if first:
            comm.Send(go, peer)
        else:
            comm.Recv(go, peer)
        if not go[0]:
            break
        started = time.perf_counter()
        if first:
            comm.Send(data, peer)
            comm.Recv(data, peer)
        else:
            comm.Recv(data, peer)
            comm.Send(data, peer)
        if number >= _WARM:
            times.append((time.perf_counter() - started) / 2)
    return statistics.median(times)


def probe(comm: Any, names: Sequence[str], most: int) -> list[Timing]:
    """Timings of all pairs, at rank 0; the others get none."""
    found: list[Timing] = []
    pairs = pairs_of(comm.size, most)
    for number, pair in enumerate(pairs, start=1):
        if comm.rank in pair:
            source, target = (names[rank] for rank in pair)
            mine = [Timing(source, target, n, measure(comm, pair, n)) for n in SIZES]
            found += mine if comm.rank == pair[0] else []
        _meet(comm)
        if comm.rank == 0:
            _say(f"[{number}/{len(pairs)}] {names[pair[0]]} and {names[pair[1]]}")
    everyones = comm.gather(found)
    return list(itertools.chain.from_iterable(everyones or []))


def _meet(comm: Any) -> None:
    """A barrier without the busy waiting of MPI's own, which takes cores from those measured."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(_NAP_S)


def _say(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def node_name() -> str:
    """As Slurm calls it, or the machine itself."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]


def alone_hint(ranks: int) -> str:
    return (
        f"each of the {ranks} processes is alone: the MPI library and the launcher do not "
        "understand each other"
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="link_probe", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    options = parser.parse_args(argv)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        _say(ProbeResult(error=f"mpi4py cannot be used on {node_name()}: {error}", hint=MPI_HINT))
        return 1
    comm = MPI.COMM_WORLD
    library = " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split()[:4])
    if comm.size != options.ranks:
        if int(os.environ.get("SLURM_PROCID", "0")) == 0:
            _say(
                ProbeResult(library, comm.size, error=alone_hint(options.ranks), hint=LAUNCHER_HINT)
            )
        # Not an exit status: the launcher would kill the other ranks in the middle of MPI's own
        # end, and what MPI keeps in shared memory would stay. The answer carries the error.
        return 0
    names = comm.allgather(node_name())
    if len(set(names)) < len(names):
        names = [f"{name}/{rank}" for rank, name in enumerate(names)]
    timings = probe(comm, names, options.pairs)
    if comm.rank == 0:
        _say(ProbeResult(library, comm.size, tuple(timings)))
    return 0


MPI_HINT = (
    "pip install 'flexslurm[probe]' brings mpi4py and MPICH; for the cluster's own MPI load its "
    "module (in the site file: setup), or name its library in MPI4PY_LIBMPI"
)
LAUNCHER_HINT = (
    "choose the launcher's protocol with --mpi: MPICH and Intel MPI want pmi2, Open MPI wants "
    "pmix (srun --mpi=list shows what there is)"
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
