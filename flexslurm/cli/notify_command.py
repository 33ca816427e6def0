"""`flexslurm notify`: what a hook calls; ends within a second with status 0, whatever happens.

A child process does what can hang (reading the service's directory, the network); the parent waits
for it no longer than the bound and then ends, since a hook that fails or hangs drains a node. As
root, the child first becomes the service's owner: root reads nothing that users could have laid
out for it, and is nobody on many shared file systems.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import syslog
import threading
from pathlib import Path
from typing import Any

import click

from flexslurm.cli import shared_options as shared

BOUND_S = 1.0
_SPARE_S = 0.1  # to say what went wrong, and to end
_LEAST_S = 0.2
_EVENTS = ("job-start", "job-leaving", "job-end", "node-down", "node-drain", "node-up")


class NeverFails(click.Command):
    """A command whose wrong usage is said and is no failure."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.ClickException as error:
            _say(error.format_message())
            raise click.exceptions.Exit(0) from None


@click.command(cls=NeverFails)
@click.argument("event", type=click.Choice(_EVENTS))
@click.option("--service-dir", metavar="DIR", required=True, help="The service's directory.")
@click.option("--job", "job_id", metavar="ID", help="The Slurm job this is about.")
@click.option("--nodes", metavar="LIST", default="", help="Nodes, as n[1-3]; without --job.")
@click.option(
    "--grace", metavar="S", type=shared.Number(), help="Seconds until the end, where known."
)
@click.option("--restarts", metavar="N", type=int, help="SLURM_RESTART_COUNT of the job's run.")
@click.option("--source", metavar="WORD", default="notify", help="Which hook this is.")
@click.option("--reason", metavar="TEXT", default="", help="For logs and status.")
@click.option(
    "--within",
    metavar="S",
    type=shared.Number(min=0.1, max=60),
    default=BOUND_S,
    show_default=True,
    help="More only where nobody waits for this to end.",
)
@click.option(
    "--uid", metavar="N", type=int, help="As root: be this user; default: the directory's owner."
)
def notify(
    event: str,
    service_dir: str,
    job_id: str | None,
    nodes: str,
    grace: float | None,
    restarts: int | None,
    source: str,
    reason: str,
    within: float,
    uid: int | None,
) -> None:
    """Tell a service what one of Slurm's hooks has seen.

    Ends within a second, and with status 0, whatever happens; what went wrong goes to standard
    error and to syslog.
    """
    left_s = max(_LEAST_S, within - _SPARE_S - _age_s())
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        problem = "it ended early"
        try:
            os.close(out)
            _become_owner(Path(service_dir), uid)
            _deliver(
                Path(service_dir), left_s, event=event, source=source[:80], job_id=job_id or None,
                nodes=nodes, grace_s=grace, restarts=restarts, reason=reason[:500],
            )  # fmt: skip
            problem = ""
        except BaseException as error:  # noqa: BLE001 - the parent says it, and no hook may fail
            problem = str(error) or type(error).__name__
        finally:
            with contextlib.suppress(OSError):  # the parent has gone without waiting
                os.write(into, problem.encode("utf-8", "replace")[:4000] or b"\0")
            os._exit(0)
    os.close(into)
    # neither a full syslog nor a stuck terminal may hold the hook up
    last = threading.Timer(left_s + _SPARE_S, os._exit, (0,))
    last.daemon = True
    last.start()
    problem = _answer(out, child, left_s)
    if problem:
        _say(f"{service_dir}: {problem}")
    last.cancel()


def _answer(out: int, child: int, left_s: float) -> str:
    """The child's problem; empty where there is none."""
    ready, _, _ = select.select([out], [], [], left_s)
    if not ready:
        os.kill(child, signal.SIGKILL)
        return "no answer in time; the service will find out by itself"
    return os.read(out, 4096).decode("utf-8", "replace").strip("\0")


def _say(problem: str) -> None:
    line = " ".join(f"flexslurm notify: {problem}".split())
    with contextlib.suppress(OSError):  # a hook's standard error may be closed
        print(line, file=sys.stderr, flush=True)
    syslog.openlog("flexslurm")
    syslog.syslog(syslog.LOG_WARNING, line)


def _age_s() -> float:
    """How long this process lives already: starting Python counts as well."""
    try:
        ticks = int(
            Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
        )
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))


def _become_owner(directory: Path, uid: int | None) -> None:
    """Root becomes `uid`, or the directory's owner; others stay who they are."""
    if os.geteuid() != 0:
        return
    wanted = directory.stat().st_uid if uid is None else uid
    if wanted == 0:
        if os.environ.get("SUDO_UID", "0") != "0":
            raise PermissionError("nobody else tells root's services anything through sudo")
        return
    import pwd

    entry = pwd.getpwuid(wanted)
    os.initgroups(entry.pw_name, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(wanted)


def _deliver(
    directory: Path,
    timeout_s: float,
    *,
    event: str,
    source: str,
    job_id: str | None,
    nodes: str,
    grace_s: float | None,
    restarts: int | None,
    reason: str,
) -> None:
    """Send it, and wait until the head has it. Raises FlexslurmError."""
    from flexslurm.cli.ask import ask
    from flexslurm.messages import NotifyAsk
    from flexslurm.slurm.nodelist import expand
    from flexslurm.wire.service_dir import ServiceDir

    message = NotifyAsk(
        event=event, source=source, job_id=job_id, nodes=tuple(expand(nodes)),
        grace_s=grace_s, restarts=restarts, reason=reason,
    )  # fmt: skip
    ask(ServiceDir(directory), message, timeout_s)
