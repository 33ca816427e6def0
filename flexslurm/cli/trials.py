"""Runs a trial as a process of this machine or as a Slurm job and reads what it left; only that."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flexslurm import errors
from flexslurm.cli.served_trial import ServeAsk, served_limit_s
from flexslurm.config.site import Site
from flexslurm.engine.trial import Trial, TrialOutcome
from flexslurm.errors import DeadlineExceeded, EnvironmentFault, FlexslurmError, SlurmError

Say = Callable[[str], None]

_POLL_S = 0.2
_STOP_S = 45.0
_START_S = 240.0
"""Importing, building stages and ending, beside the measurements."""


@dataclass(frozen=True, slots=True)
class Where:
    """This machine, or a node with GPUs of that type; `partition` None: where Slurm puts jobs."""

    local: bool
    partition: str | None = None
    gpu_type: str = ""
    wait_s: float = 600.0
    """How long a job may wait for its GPUs."""


def run_trial(
    trial: Trial, served: ServeAsk | None, site: Site, where: Where, home: Path, say: Say
) -> TrialOutcome:
    """The trial's outcome; raises the error it ended with.

    `served`: what is served afterwards. `home` is a directory that the node sees too; what is
    written below it is removed.
    """
    with _workplace(home) as place:
        (place / "trial.json").write_bytes(msgspec.json.encode(trial))
        limit_s = _START_S + trial.budget_s
        if served is not None:
            (place / "serve.json").write_bytes(msgspec.json.encode(served))
            limit_s += served_limit_s(served)
        if where.local:
            _run_here(place, site, limit_s, say)
        else:
            _run_job(place, site, where, trial, limit_s, say)
        return _read(place)


@contextlib.contextmanager
def _workplace(home: Path) -> Iterator[Path]:
    try:
        home.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=".trial-", dir=home.absolute()))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write in {home}: {error.strerror}", hint="choose another place with --out"
        ) from error
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _command(place: Path) -> tuple[str, ...]:
    module = "flexslurm.cli.trial_process"
    files = [place / "trial.json", place / "result.json"]
    if (place / "serve.json").exists():
        files.append(place / "serve.json")
    return (sys.executable, "-P", "-u", "-m", module, *map(str, files))


def _read(place: Path) -> TrialOutcome:
    try:
        data = (place / "result.json").read_bytes()
    except OSError:
        raise EnvironmentFault(
            f"the trial ended without a result; its last words:\n{_tail(place)}"
        ) from None
    outcome = msgspec.json.decode(data, type=TrialOutcome)
    if outcome.error:
        kind = getattr(errors, outcome.kind, EnvironmentFault)
        assert issubclass(kind, FlexslurmError)
        raise kind(outcome.error, hint=outcome.hint)
    return outcome


# --------------------------------------------------------------------------------------- here


def _run_here(place: Path, site: Site, limit_s: float, say: Say) -> None:
    env = {**os.environ, **site.env}
    end = time.monotonic() + limit_s
    follow = _Follow(place, say)
    with (
        (place / "trial.log").open("wb") as log,
        subprocess.Popen(
            _command(place), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        ) as process,
    ):
        try:
            while process.poll() is None:
                follow()
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"the trial did not end within {limit_s:g} s",
                        hint="--minutes bounds what is measured",
                    )
                time.sleep(_POLL_S)
        finally:
            _end(process)
    follow()


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends what it has started: its ranks, and a service."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


# ------------------------------------------------------------------------------------ as a job


def _run_job(place: Path, site: Site, where: Where, trial: Trial, limit_s: float, say: Say) -> None:
    from flexslurm.slurm.pilot import SlurmSubmitter
    from flexslurm.slurm.script import PilotSpec

    submitter = SlurmSubmitter(site, place)
    spec = PilotSpec(
        name="flexslurm-profile",
        partition=where.partition,
        gpu_type=where.gpu_type,
        gpus=trial.tp,
        nodes=1,
        walltime_s=limit_s + 60.0,
        command=_command(place),
        log_dir=place,
        env=_job_env(),
    )
    job = submitter.submit(spec)
    say(f"submitted job {job}: {trial.tp} {where.gpu_type}")
    try:
        _follow_job(submitter, job, place, where.wait_s, limit_s, say)
    finally:
        with contextlib.suppress(FlexslurmError):  # it has ended already, or Slurm does not answer
            submitter.cancel([job])


def _follow_job(
    submitter: object, job: str, place: Path, wait_s: float, limit_s: float, say: Say
) -> None:
    from flexslurm.slurm.command import backoff_s
    from flexslurm.slurm.pilot import SlurmSubmitter

    assert isinstance(submitter, SlurmSubmitter)
    follow = _Follow(place, say)
    began, started = time.monotonic(), False
    for pause_s in backoff_s(0.5, submitter.site.slurm.poll_interval):
        time.sleep(pause_s)
        follow()
        if (place / "result.json").exists():
            return
        try:
            info = submitter.states([job])[job]
        except SlurmError as error:
            if not error.transient:
                raise
            info = None
        now = time.monotonic()
        if info is not None and info.state.over and info.known:
            time.sleep(1.0)  # the shared file system may be behind Slurm
            if (place / "result.json").exists():
                return
            raise SlurmError(
                f"job {job} ended without a result: {info.reason or info.state}; its last words:\n"
                f"{_tail(place)}"
            )
        if not started and info is not None and info.nodes:
            started, began = True, now
            say(f"job {job} runs on {','.join(info.nodes)}")
        if now - began > (limit_s if started else wait_s):
            what = "did not end" if started else "did not start"
            raise DeadlineExceeded(
                f"job {job} {what} within {limit_s if started else wait_s:g} s",
                hint="--minutes bounds what is measured"
                if started
                else "--wait says for how long it may wait for its GPUs",
            )


def _job_env() -> Mapping[str, str]:
    kept = ("PYTHONPATH", "FLEXSLURM_LOG", "FLEXSLURM_WORKER_THREADS", "HF_HUB_OFFLINE")
    return {name: os.environ[name] for name in kept if name in os.environ}


# ------------------------------------------------------------------------------------ its words


class _Follow:
    """Says each new whole line of the trial's log."""

    def __init__(self, place: Path, say: Say) -> None:
        self._place, self._say = place, say
        self._read = 0

    def __call__(self) -> None:
        log = _log(self._place)
        if log is None:
            return
        with log.open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._read += len(whole) + 1
            for line in whole.decode("utf-8", "replace").splitlines():
                self._say(line)


def _log(place: Path) -> Path | None:
    """The log of the step; the batch script's own has nothing of the trial."""
    found = sorted(place.glob("*.log"), key=lambda path: ".batch." in path.name)
    return found[0] if found else None


def _tail(place: Path, lines: int = 8) -> str:
    found = [
        line
        for path in sorted(place.glob("*.log"))
        for line in path.read_text("utf-8", "replace").splitlines()
    ]
    return "\n".join(f"  {line}" for line in found[-lines:]) or "  (no output)"
