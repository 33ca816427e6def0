"""Inside one allocation the launcher stays: the job lasts as long as the service."""

from __future__ import annotations

import signal
from collections.abc import Callable

from flexslurm.cli.endings import ENDING
from flexslurm.cli.launch import LaunchPlan, called
from flexslurm.cli.stopping import stop_service
from flexslurm.cli.submitting import job_owner
from flexslurm.errors import ServiceError, SlurmError
from flexslurm.slurm.awaited import next_signal

_ENDS = (*ENDING, signal.SIGUSR1)
_LOOK_EVERY_S = 1.0


def hold_until_end(plan: LaunchPlan, say: Callable[[str], None], drain_s: float) -> None:
    """Wait for the head's end, or for a signal, which stops the service in good order.

    Slurm sends SIGUSR1 to the batch step ahead of the walltime, and SIGTERM when the job is to
    end. Raises ServiceError when the head dies by itself.
    """
    pilots = plan.directory.pilots()
    assert pilots is not None and pilots.head_job is not None
    # a process of this machine: to look at it asks Slurm nothing
    owner = job_owner(plan.site, plan.directory, pilots, pilots.head_job)
    # taken by waiting, not by handlers: nothing is interrupted in the middle
    ends = [number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        while True:
            told = next_signal(ends, _LOOK_EVERY_S)
            if told is not None:
                say(f"{told.name}: stopping")
                stop_service(plan.directory, drain_s, 60.0, say)
                return
            try:
                info = owner.states([pilots.head_job])[pilots.head_job]
            except SlurmError:
                continue  # unknown is not ended
            if info.state.over:
                break
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    failed = info.exit_code not in (0, None)
    say("the head has failed: what is left is cancelled" if failed else "the service was stopped")
    stop_service(plan.directory, 0.0, 60.0, say, head_over=True)
    if failed:
        raise ServiceError(
            f"the head has ended with exit code {info.exit_code}",
            hint=f"why: flexslurm logs {called(plan)} head",
        )
