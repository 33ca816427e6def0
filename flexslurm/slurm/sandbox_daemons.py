"""Starting a sandbox's daemons, and taking one away as a crash would; never waits for an answer."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexslurm.errors import EnvironmentFault
from flexslurm.slurm import processes, sandbox_accounting, sandbox_host
from flexslurm.slurm.command import clean_env
from flexslurm.slurm.processes import Process
from flexslurm.slurm.sandbox_config import SandboxConfig
from flexslurm.slurm.sandbox_files import Layout
from flexslurm.slurm.sandbox_network import SandboxNetwork

MARK = "FLEXSLURM_SANDBOX"
"""In the environment of what belongs to a sandbox beside the jobs."""
NAMES = ("munged", "slurmdbd", "slurmctld", "slurmd", "mariadbd")


@dataclass(frozen=True, slots=True)
class Daemons:
    """The daemons of one sandbox; a node's slurmd goes by the node's name."""

    config: SandboxConfig
    layout: Layout
    mark: str
    network: SandboxNetwork | None = None

    def all(self) -> list[str]:
        """In the order in which they are started."""
        accounting = sandbox_accounting.SERVICES if self.accounting else ()
        return ["munged", *accounting, "slurmctld", *self.config.all_nodes()]

    @property
    def accounting(self) -> bool:
        return sandbox_accounting.wanted(self.config)

    def start(self, name: str, *, fresh: bool = False) -> None:
        """Start one; it goes into the background by itself. Raises EnvironmentFault.

        `fresh`: a controller forgets what was saved.
        """
        argv = self._argv(name, fresh)
        env = self.env()
        with (self.layout.log / "start.log").open("ab") as log:
            try:
                code = subprocess.run(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    timeout=20, check=False, start_new_session=True, cwd=self.layout.home,
                ).returncode  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                raise EnvironmentFault(f"{name} did not start: {error}") from error
        if code:
            hint = sandbox_host.last_words(self.layout)
            raise EnvironmentFault(f"{name} did not start", hint=hint)

    def env(self) -> dict[str, str]:
        """Of all that belongs to the sandbox."""
        return clean_env(str(self.layout.conf), os.environ) | {MARK: self.mark}

    def _argv(self, name: str, fresh: bool) -> list[str]:
        layout = self.layout
        if name == "munged":
            return [
                _program("munged"), "--force", f"--socket={layout.munge_socket}",
                f"--key-file={layout.munge_key}", f"--seed-file={layout.munge_seed}",
                f"--pid-file={layout.run}/munged.pid", f"--log-file={layout.log}/munged.log",
                "--num-threads=2",
            ]  # fmt: skip
        if name == "slurmctld":
            return [_program("slurmctld"), *(["-c"] if fresh else []), "-f", str(layout.conf)]
        if name == "slurmdbd" and self.accounting:
            return [_program("slurmdbd")]
        if name == "mariadbd" and self.accounting:
            return sandbox_accounting.mariadbd(_program("mariadbd"), layout)
        self._check(name)
        slurmd = [_program("slurmd"), "-N", name, "-f", str(layout.conf)]
        return slurmd if self.network is None else self.network.inside(name, slurmd)

    def _check(self, name: str) -> None:
        if name not in self.all():
            known = ", ".join(self.all())
            raise EnvironmentFault(f"the sandbox has no '{name}'", hint=f"it has {known}")

    def of(self, name: str, members: Sequence[Process]) -> list[Process]:
        """What is lost with a daemon: for a node all that runs there, jobs' processes included."""
        self._check(name)
        if name in ("munged", "slurmctld", *sandbox_accounting.SERVICES):
            return [process for process in members if process.name == name]
        tops = [process for process in members if _on_node(process, name)]
        steps = {process.parent for process in tops}
        keepers = [p for p in members if p.pid in steps and p.name == "slurmstepd"]
        return processes.with_descendants([*tops, *keepers], members)

    def start_all(self, ask: Callable[[list[str]], str], deadline: float) -> None:
        """All of them, the database with its tables and QOS; `ask` runs a command of Slurm."""
        for name in self.all():
            if name == "mariadbd":
                program = _program("mariadbd")
                sandbox_accounting.make_tables(program, self.layout, self.env())
            if name == "slurmctld" and self.accounting:
                user = pwd.getpwuid(os.geteuid()).pw_name
                sandbox_accounting.enrol(self.config, ask, user, deadline)
            self.start(name, fresh=True)
            if name == "mariadbd":
                sandbox_accounting.wait_for_database(self.layout, deadline)


def kill(found: Iterable[Process]) -> None:
    """Without a warning, all at once: those that would notice go first."""
    first = {"slurmd": 0, "slurmstepd": 1}
    for process in sorted(found, key=lambda process: first.get(process.name, 2)):
        processes.send(process, signal.SIGKILL)


def _on_node(process: Process, node: str) -> bool:
    if processes.environ(process.pid).get("SLURMD_NODENAME") == node:
        return True
    try:
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return process.name == "slurmd" and os.fsencode(node) in words


def _program(name: str) -> str:
    return sandbox_host.find_program(name) or name
