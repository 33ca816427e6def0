"""Starts the ranks of a link measurement by srun or mpiexec and reads their answer; never measures.

Outside of a job srun gets nodes of its own; inside of one the ranks are a step of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from flexslurm.config.site import Partition, Site
from flexslurm.errors import DeadlineExceeded, EnvironmentFault, SlurmError
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.link_probe import MPI_HINT, ProbeResult
from flexslurm.slurm.times import format_duration

Say = Callable[[str], None]
_POLL_S = 0.1
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """Which nodes, and how."""

    nodes: int
    pairs: int
    timeout_s: float
    partition: str | None = None
    nodelist: str | None = None
    mpi: str | None = None
    """srun's --mpi; None: what the MPI library wants."""


def on_slurm(
    site: Site, options: ProbeOptions, say: Say, environ: Mapping[str, str] = os.environ
) -> ProbeResult:
    """Measure between nodes of Slurm, one rank each.

    Raises EnvironmentFault (no MPI), SlurmError, DeadlineExceeded.
    """
    client = SlurmClient(site.slurm, environ=environ)
    library, mpi = library_name(), options.mpi
    if mpi is None:
        listed = client.call("srun", "--mpi=list")
        mpi = choose_mpi(library, f"{listed.out}\n{listed.err}")
    argv = [
        *client.argv("srun", *srun_options(site, options, mpi, environ)),
        *_command(site, options),
    ]
    return _answer(argv, client.env | site.env, options.timeout_s, say)


def on_this_machine(site: Site | None, options: ProbeOptions, say: Say) -> ProbeResult:
    """Measure between processes of this machine, by mpiexec. Raises EnvironmentFault."""
    library_name()
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        raise EnvironmentFault("there is no mpiexec on this machine", hint=MPI_HINT)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PMI_", "PMIX_"))}
    argv = [found, "-n", str(options.nodes), *_command(site, options)]
    return _answer(argv, env | (site.env if site else {}), options.timeout_s, say)


# ----------------------------------------------------------------------------------- decisions


def srun_options(
    site: Site, options: ProbeOptions, mpi: str, environ: Mapping[str, str]
) -> list[str]:
    """One task on each node, in the job around us or in one of its own."""
    job = environ.get("SLURM_JOB_ID")
    given = [
        f"--mpi={mpi}", f"--nodes={options.nodes}", f"--ntasks={options.nodes}",
        "--ntasks-per-node=1", "--cpus-per-task=1", "--kill-on-bad-exit=1",
        "--job-name=flexslurm-probe",
    ]  # fmt: skip
    if options.nodelist is not None:
        given.append(f"--nodelist={options.nodelist}")
    if job is not None:
        return [*given, f"--jobid={job}", "--overlap"]
    entry = site.partitions.get(options.partition or "", Partition())
    where = {
        "partition": options.partition,
        "account": entry.account,
        "qos": entry.qos,
        "constraint": entry.constraint,
        "time": format_duration(options.timeout_s + 60.0),
    }
    return [*given, *(f"--{k}={v}" for k, v in where.items() if v is not None), *entry.sbatch_args]


def choose_mpi(library: str, listed: str) -> str:
    """The protocol that an MPI library speaks, of those this Slurm has; raises EnvironmentFault."""
    there = re.findall(r"^\s*([a-z0-9_]+)\s*$", listed, re.MULTILINE)
    wanted = ("pmix", "pmi2") if "Open MPI" in library else ("pmi2", "pmix", "cray_shasta")
    for name in wanted:
        if name in there:
            return name
    raise EnvironmentFault(
        f"this Slurm has no protocol for {library}: it has {', '.join(there) or 'none'}",
        hint="ask its admin for the pmi2 or pmix plugin, or name one with --mpi",
    )


def library_name() -> str:
    """The MPI library that mpi4py finds here; raises EnvironmentFault without one.

    Asked in a process of its own, since loading MPI may end a process, and without starting MPI.
    """
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "print(MPI.get_vendor()[0])"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PMI_", "PMIX_"))}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True,
            timeout=60.0, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise EnvironmentFault("loading MPI takes more than 60 s here", hint=MPI_HINT) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EnvironmentFault(f"there is no MPI for mpi4py: {last}", hint=MPI_HINT)
    return done.stdout.strip()


def _command(site: Site | None, options: ProbeOptions) -> list[str]:
    plain = [
        sys.executable, "-P", "-m", "flexslurm.slurm.link_probe", "--ranks", str(options.nodes),
        "--pairs", str(options.pairs),
    ]  # fmt: skip
    if site is None or not site.setup:
        return plain
    return ["bash", "-c", "\n".join([*site.setup, 'exec "$@"']), "probe", *plain]


# ------------------------------------------------------------------------------------- running


def _answer(argv: Sequence[str], env: Mapping[str, str], timeout_s: float, say: Say) -> ProbeResult:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _run(argv, env, timeout_s, out, err, say)
        out.seek(0)
        err.seek(0)
        lines = out.read().decode("utf-8", "replace").splitlines()
        words = err.read().decode("utf-8", "replace")
    found = [answer for answer in map(_read, lines) if answer is not None]
    if not found:
        told = [line.strip() for line in [*lines, *words.splitlines()] if line.strip()][-4:]
        raise SlurmError(
            f"{Path(argv[0]).name} ended with exit status {code} and no measurements: "
            + ("; ".join(told) or "it said nothing")
        )
    if found[0].error:
        raise EnvironmentFault(found[0].error, hint=found[0].hint)
    return found[0]


def _run(
    argv: Sequence[str], env: Mapping[str, str], timeout_s: float, out: IO[bytes], err: IO[bytes],
    say: Say,
) -> int:  # fmt: skip
    try:
        process = subprocess.Popen(
            argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
    except OSError as error:
        raise EnvironmentFault(f"cannot start '{argv[0]}': {error.strerror}") from error
    end, told = time.monotonic() + timeout_s, 0
    try:
        while process.poll() is None:
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{Path(argv[0]).name} did not end within {timeout_s:g} s",
                    hint="are so many nodes free? --timeout says how long to wait",
                )
            time.sleep(_POLL_S)
            told = _tell(out, told, say)
        return process.wait()
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM first: srun ends its job at that."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
    process.wait()


def _tell(out: IO[bytes], told: int, say: Say) -> int:
    """Say the lines of progress after the first `told` bytes."""
    data = os.pread(out.fileno(), 1 << 20, told)
    whole, newline, _ = data.rpartition(b"\n")
    for line in whole.splitlines():
        try:
            words = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(words, str):
            say(words)
    return told + len(whole) + len(newline)


def _read(line: str) -> ProbeResult | None:
    try:
        return msgspec.json.decode(line.encode(), type=ProbeResult)
    except msgspec.DecodeError:
        return None
