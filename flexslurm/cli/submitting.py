"""Submits what a launch has planned, all of it or nothing; never plans and never waits to serve.

A launch and a stop of one service exclude each other. A job that is submitted is written down
before any signal is heard.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from flexslurm.cli.endings import ENDING, endings_raise
from flexslurm.cli.job_names import UNSENT, head_job, pilot_job, with_ids
from flexslurm.cli.launch import (
    LaunchPlan,
    Say,
    called,
    head_submitter,
    left_to_the_head,
    make_submitter,
)
from flexslurm.config.site import Site
from flexslurm.errors import (
    DeadlineExceeded,
    FlexslurmError,
    ServiceExists,
    ServiceUnreachable,
    SlurmError,
)
from flexslurm.slurm.command import backoff_s
from flexslurm.wire.service_dir import Pilot, Pilots, ServiceDir

if TYPE_CHECKING:
    from flexslurm.slurm.pilot import Submitter
    from flexslurm.slurm.script import PilotSpec

_POLL_S, _MOST_POLL_S = 0.25, 2.0
"""Between looks at a head that is to end, the first and the longest."""
_PATIENCE_S = (2.0, 8.0)
"""For the answer of a head whose job runs; in between it is looked whether it has ended."""
_PAUSE_S = 1.0
"""Between submissions beyond those at once, where no head keeps the pool."""


def refuse_if_running(directory: ServiceDir, timeout_s: float = 2.0, silent: str = "") -> str:
    """Raises ServiceExists where a head of this directory answers; which one does not, else ''.

    `silent`: one that has been asked in vain just now: it is not waited for again.
    """
    from flexslurm.cli.ask import ask_status

    head = directory.head()
    if head is None or head.incarnation == silent:
        return "" if head is None else silent
    try:
        answer = ask_status(directory, timeout_s)
    except ServiceUnreachable:
        return head.incarnation
    raise ServiceExists(
        f"the service '{answer.service}' runs already, at {answer.endpoint}",
        hint="'flexslurm stop' ends it; 'flexslurm status' shows it",
    )


def execute(plan: LaunchPlan, say: Say, silent_head: str = "") -> Pilots:
    """Submit pilots and head; returns them. Pilots of a head that died are taken over.

    `silent_head`: the incarnation of one that has just been asked, and gave no answer.
    What was submitted is cancelled when a later step fails or a signal ends us. Raises
    ServiceExists where the service runs, or is being launched or stopped.
    """
    directory = plan.directory
    fresh = not directory.path.exists()
    done: list[Pilot] = []
    try:
        with endings_raise(), directory.changing():
            fresh = fresh and not directory.service.exists()
            directory.create()
            directory.keys()  # what is damaged or exposed would end every process that we start
            refuse_if_running(directory, silent=silent_head)
            _end_old_head(plan, say)
            _check_port(plan)
            taken = _take_over(plan)
            _write_files(plan)
            return _submit_all(plan, taken, done, say)
    except ServiceExists:
        raise
    except BaseException:
        if fresh and not done:
            shutil.rmtree(directory.path, ignore_errors=True)  # nothing was ever there
        raise


@dataclass(frozen=True, slots=True)
class _Taken:
    """What an earlier launch left, and what is missing."""

    kept: list[Pilot]
    missing: list[Pilot]
    before: Pilots
    """Whose sizes and drained pilots hold on; no jobs."""


def _submit_all(plan: LaunchPlan, taken: _Taken, done: list[Pilot], say: Say) -> Pilots:
    """A name is written down before a job of it is submitted, and its id before signals come."""
    from flexslurm.head.pilot_specs import AT_ONCE

    submitter, before = make_submitter(plan), taken.before
    new: list[str] = []
    done += taken.kept
    for pilot in taken.kept:
        say(_submitted(plan, pilot, "took over"))
    missing = _in_turn(plan, taken.missing, say)
    try:
        for pilot in missing:
            if len(new) >= AT_ONCE and plan.cluster == "slurm":
                time.sleep(_PAUSE_S)
            with _uninterrupted():
                _note(plan, before, [*done, pilot])
                new.append(submitter.submit(_spec(plan, pilot)))
                done.append(msgspec.structs.replace(pilot, job_id=new[-1]))
                _note(plan, before, done)
            say(_submitted(plan, done[-1], "submitted"))
        with _uninterrupted():
            _note(plan, before, done, UNSENT)
            made = _note(plan, before, done, head_submitter(plan).submit(plan.head))
        say(f"submitted the head: job {made.head_job}")
        return made
    except BaseException:
        with _uninterrupted():
            _take_back(plan, before, new, done, missing[len(new) :], say)
        raise


def _in_turn(plan: LaunchPlan, missing: list[Pilot], say: Say) -> list[Pilot]:
    """What this launch submits itself."""
    from flexslurm.head.pilot_specs import launched

    now = launched(missing, plan.service, plan.cluster)
    left = left_to_the_head(plan, len(missing) - len(now), len(missing))
    if left:
        say(left)
    return now


def _spec(plan: LaunchPlan, pilot: Pilot) -> PilotSpec:
    from flexslurm.head.pilot_specs import pilot_spec

    return pilot_spec(pilot, plan.service, plan.site, plan.directory, plan.cluster)


def _note(
    plan: LaunchPlan, before: Pilots, pilots: Sequence[Pilot], head: str | None = None
) -> Pilots:
    noted = msgspec.structs.replace(before, pilots=tuple(pilots), head_job=head)
    plan.directory.write_pilots(noted)
    return noted


def _take_back(
    plan: LaunchPlan,
    before: Pilots,
    new: list[str],
    done: list[Pilot],
    left: Sequence[Pilot],
    say: Say,
) -> None:
    """Cancel what this launch has submitted, answered or not; pilots it took over stay."""
    submitter, head = make_submitter(plan), head_submitter(plan)
    name = plan.service.name
    names = [pilot_job(name, pilot.fragment) for pilot in left[:1]]
    try:  # a submission that failed may have come through
        unheard = [job for word in names for job in submitter.find(word)]
        heads = [] if left else head.find(head_job(name))
    except SlurmError as error:
        say(f"{error.message}: end what may be left with: flexslurm stop {called(plan)}")
        submitter.cancel(new)
        return  # the names stay written down
    if new or unheard:
        submitter.cancel([*new, *unheard])
        count = len(new) + len(unheard)
        was = "pilot that was" if count == 1 else f"{count} pilots that were"
        say(f"cancelled the {was} submitted")
    head.cancel(heads)
    with contextlib.suppress(OSError):  # the disk may be what failed
        _note(plan, before, [pilot for pilot in done if pilot.job_id not in new])


def _end_old_head(plan: LaunchPlan, say: Say) -> None:
    """Make sure that the head of an earlier launch is over; it does not answer.

    One that has never published an address is just starting: raises ServiceExists. One that has
    published it hangs, and is ended. Raises DeadlineExceeded when it does not end.
    """
    before = _before(plan)
    job = before.head_job if before is not None else None
    if before is None or job is None:
        return
    owner = job_owner(plan.site, plan.directory, before, job)
    info = owner.states([job])[job]
    if info.known and not info.state.over and plan.directory.head() is None:
        raise ServiceExists(
            f"the service is being launched: its head, job {job}, is {str(info.state).lower()}",
            hint=f"follow it with: flexslurm status {called(plan)}",
        )
    for patience_s in _PATIENCE_S:
        if info.known and not info.state.over:
            refuse_if_running(plan.directory, patience_s)
            info = owner.states([job])[job]
    if info.known and not info.state.over:
        say(f"the head, job {job}, does not answer: it is ended")
        owner.cancel([job])
        deadline = time.monotonic() + plan.site.slurm.kill_wait + 10.0
        waits = backoff_s(_POLL_S, _MOST_POLL_S)
        while not (info := owner.states([job])[job]).state.over and info.known:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the old head, job {job}, does not end",
                    hint=f"flexslurm stop {called(plan)} tries again, and ends its pilots too",
                )
            time.sleep(next(waits))
    plan.directory.forget_head()


def _check_port(plan: LaunchPlan) -> None:
    """Where the head starts on this machine: whether it can listen. Raises EnvironmentFault."""
    from flexslurm.gateway.server import bind

    gateway = plan.service.gateway
    if plan.head_here or plan.cluster == "local":
        bind(gateway.host, gateway.port).close()


def job_owner(site: Site, directory: ServiceDir, jobs: Pilots, job: str) -> Submitter:
    """Who knows about the head's job: local processes have names of their own."""
    from flexslurm.head.settings import submitter_for
    from flexslurm.slurm.local import LocalSubmitter

    if job.startswith("local-"):
        return LocalSubmitter(directory.path, kill_wait_s=site.slurm.kill_wait)
    return submitter_for(jobs.cluster, site, directory, jobs.allocation)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals wait until the block is over; sbatch, started inside, does not hear them either.

    They are blocked for what we start, and noted for ourselves: a signal that another thread
    takes would still be handled in the middle of the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    before = {n: signal.signal(n, lambda number, _: noted.append(number)) for n in ENDING}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
        if noted:
            signal.raise_signal(noted[0])


def _write_files(plan: LaunchPlan) -> None:
    from flexslurm.wire.files import write_atomically

    directory = plan.directory
    for path, section in ((directory.service, plan.service), (directory.site, plan.site)):
        # JSON is YAML 1.2, which is how the files are read; PyYAML writes 1.1
        write_atomically(path, section.model_dump_json(indent=2).encode(), mode=0o600)
    plan.facts.write(directory)
    if plan.table is not None:
        write_atomically(directory.gears, plan.table)


def _submitted(plan: LaunchPlan, pilot: Pilot, what: str) -> str:
    where = f" in {pilot.partition}" if pilot.partition and plan.cluster == "slurm" else ""
    return f"{what} {pilot.fragment}: {pilot.gpus} {pilot.gpu_type}{where}, job {pilot.job_id}"


def _before(plan: LaunchPlan) -> Pilots | None:
    """The jobs of the launch before, those that it had no time to write down included."""
    before = plan.directory.pilots()
    if before is None or before.cluster != plan.cluster:
        return before
    return with_ids(before, plan.service.name, make_submitter(plan), head_submitter(plan))


def _take_over(plan: LaunchPlan) -> _Taken:
    """Pilots of an earlier launch that still wait or run, whose head is dead; and what is missing.

    Raises ServiceExists when they are not pilots of this pool.
    """
    from flexslurm.head.pilot_specs import taken_over

    before = _before(plan)
    holds = _what_holds(plan, before)
    alive: list[Pilot] = []
    if before is not None and before.pilots:
        states = make_submitter(plan).states([p.job_id for p in before.pilots])
        infos = [(pilot, states[pilot.job_id]) for pilot in before.pilots]
        alive = [pilot for pilot, info in infos if info.known and not info.state.over]
    kept, others, missing = taken_over(alive, plan.service, holds)
    if before is not None and before.cluster != plan.cluster:
        others = alive
    if others:
        jobs = ", ".join(pilot.job_id for pilot in others)
        raise ServiceExists(
            f"jobs of an earlier launch with another pool are still there: {jobs}",
            hint=f"flexslurm stop {called(plan)} ends them",
        )
    return _Taken(kept, missing, holds)


def _what_holds(plan: LaunchPlan, before: Pilots | None) -> Pilots:
    """Sizes that the load has asked for, and what was drained, hold on in a pool of the same file.

    Who has changed the file's numbers wants those.
    """
    from flexslurm.config.schema import load_section
    from flexslurm.config.service import Service
    from flexslurm.head.pilot_specs import same_sizes

    fresh = Pilots(plan.cluster, allocation=plan.allocation)
    if before is None or before.cluster != plan.cluster or not before.wanted:
        return fresh
    try:
        then = load_section(Service, plan.directory.service)
    except FlexslurmError:
        return fresh
    if not same_sizes(then, plan.service) or len(before.wanted) != len(plan.service.pool):
        return fresh
    return msgspec.structs.replace(fresh, wanted=before.wanted, drained=before.drained)


def cancel_all(plan: LaunchPlan, made: Pilots) -> None:
    """End the jobs of a launch that failed, its head's own included, and no others' since."""
    now = plan.directory.pilots()
    ours = now is not None and now.head_job == made.head_job
    pilots = now.pilots if now is not None and ours else made.pilots
    if made.head_job is not None:  # first: it would submit others for the pilots that end
        head_submitter(plan).cancel([made.head_job])
    make_submitter(plan).cancel([pilot.job_id for pilot in pilots if pilot.job_id != UNSENT])
    if ours:
        plan.directory.write_pilots(Pilots(plan.cluster))
