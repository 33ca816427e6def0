"""A private, real Slurm in one directory on one machine; never touches a system's own Slurm.

munged, slurmctld and one slurmd per node, all as the calling user, with their own key, sockets and
ports. What belongs to a sandbox is found again through its directory alone, so that `down` can
clean up after a crash of `up`, of any daemon, or of a job's processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexslurm.errors import EnvironmentFault, SlurmError, SlurmUnavailable
from flexslurm.slurm import processes, sandbox_daemons, sandbox_host, sandbox_network
from flexslurm.slurm.command import clean_env, failure, run
from flexslurm.slurm.processes import Process
from flexslurm.slurm.sandbox_config import SandboxConfig, default_config
from flexslurm.slurm.sandbox_daemons import MARK, Daemons
from flexslurm.slurm.sandbox_files import Layout
from flexslurm.slurm.sandbox_network import SandboxNetwork
from flexslurm.slurm.sandbox_site import site_yaml

_START_TRIES = 4
# What `down` may leave: the lock after a crash, with the logs that were to be kept.
_LEFT = {"sandbox.lock", "log"}
# The state file goes last: while it is there, `down` knows what there was.
_FILES = (
    "slurm.conf", "slurmdbd.conf", "gres.conf", "topology.conf", "plugstack.conf", "job_submit.lua",
    "cli_filter.lua", "munge.key", "munge.seed", "hosts", "site.yaml", "sandbox.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SandboxStatus:
    """What a sandbox is doing now."""

    directory: Path
    up: bool
    daemons: tuple[Process, ...]
    report: str
    """Nodes, partitions and jobs, as Slurm prints them; empty when it is down."""


class _PortTaken(Exception):
    """A daemon found its port taken between our look and its bind."""


class Sandbox:
    """One sandbox, named by its directory; `up` and `down` may be called from any process."""

    def __init__(self, directory: Path | str, config: SandboxConfig | None = None) -> None:
        self.config = config
        home = Path(directory).expanduser().absolute()
        self.home = Path(os.path.realpath(home))

    # ------------------------------------------------------------------------------ for users

    @property
    def conf(self) -> Path:
        return self.home / "slurm.conf"

    @property
    def site_file(self) -> Path:
        """The site file that `up` writes: this cluster with virtual GPUs."""
        return self.home / "site.yaml"

    @property
    def _lock_file(self) -> Path:
        return self.home / "sandbox.lock"

    def site_yaml(self) -> str:
        """The text of that file; the configuration of a sandbox that is up wins over ours."""
        state = self._state()
        if state is not None:
            return site_yaml(SandboxConfig.model_validate(state["config"]), self.conf)
        return site_yaml(self.config or default_config(), self.conf)

    def env(self) -> dict[str, str]:
        """What a process needs in its environment to talk to this Slurm."""
        return {"SLURM_CONF": str(self.conf)}

    def up(self, timeout_s: float = 40.0) -> None:
        """Bring it up and prove it: all nodes idle, a job step ran on each.

        Does nothing when it is up already. On failure nothing is left behind. Raises
        EnvironmentFault.
        """
        sandbox_host.check_programs(self.config or default_config())
        sandbox_host.check_path(self.home)
        before = {path.name for path in self.home.iterdir()} if self.home.is_dir() else set()
        with self._locked(timeout_s):
            if self._state() is not None:
                if self._answers():
                    return
                self._clear()
            elif before - _LEFT or before == {"log"}:
                self._remove_home()
                raise EnvironmentFault(
                    f"{self.home} holds files that are not a sandbox's",
                    hint="give an empty or a new directory",
                )
            try:
                self._start(time.monotonic() + timeout_s)
            except BaseException:
                self._clear()
                self._remove_home()
                raise

    def down(self, *, keep_logs: bool = False, timeout_s: float = 30.0) -> None:
        """End every process and remove every file of this sandbox; right after any crash too."""
        if not self.home.is_dir():
            self._clear()
            return
        with self._locked(timeout_s):
            self._clear(keep_logs=keep_logs)
            if not keep_logs:
                self._remove_home()

    def status(self) -> SandboxStatus:
        layout = self._layout_now()
        daemons = tuple(self._daemons())
        if layout is None or not self._answers():
            return SandboxStatus(self.home, False, daemons, "")
        parts = [
            self._slurm(["sinfo", "-N", "-o", "%10N %12P %10t %5c %25G"]),
            self._slurm(["sinfo", "-o", "%12P %6a %12l %10p %N"]),
            self._slurm(["squeue", "-a", "-o", "%8i %12P %20j %12T %10M %25R"]),
        ]
        return SandboxStatus(self.home, True, daemons, "\n".join(parts))

    def run(self, command: Sequence[str]) -> int:
        """Run a command against this Slurm with our own terminal; its exit status.

        Raises EnvironmentFault where no sandbox is up, or there is no such command.
        """
        if self._layout_now() is None:
            raise EnvironmentFault(
                f"no sandbox is up in {self.home}", hint="flexslurm sandbox up --dir DIR"
            )
        env = clean_env(str(self.conf), os.environ)
        try:
            code = subprocess.run(list(command), env=env, check=False).returncode
        except FileNotFoundError:
            raise EnvironmentFault(f"no such command: {command[0]}") from None
        except OSError as error:
            raise EnvironmentFault(f"cannot run {command[0]}: {error.strerror}") from error
        return code if code >= 0 else 128 - code

    # -------------------------------------------------------------------------------- drills

    def kill(self, name: str) -> None:
        """Take away munged, slurmctld, or a node with all that runs on it, as a crash does.

        Raises EnvironmentFault where it does not run.
        """
        members = self._members()
        found = self._running().of(name, members)
        if not found:
            raise EnvironmentFault(f"'{name}' does not run", hint=f"sandbox start {name}")
        sandbox_daemons.kill(found)

    def kill_daemon(self, node: str) -> None:
        """Take a node's slurmd away alone: the steps there go on."""
        found = self._running().of(node, self._members())
        sandbox_daemons.kill(process for process in found if process.name == "slurmd")

    def start(self, name: str) -> None:
        """Start again what was taken away."""
        self._running().start(name)

    def cut(self, node: str) -> None:
        """Cut a node's link, where the nodes have their own network."""
        self._hosts().cut(node)

    def mend(self, node: str) -> None:
        """Join the node's link again."""
        self._hosts().mend(node)

    def _hosts(self) -> SandboxNetwork:
        network = self._running().network
        if network is None:
            raise EnvironmentFault(
                "the nodes of this sandbox share the machine's network",
                hint="put 'network: namespaces' into the sandbox's file, and up it again",
            )
        return network

    def _running(self) -> Daemons:
        """The daemons of the sandbox that is up. Raises EnvironmentFault."""
        state, layout = self._state(), self._layout_now()
        if state is None or layout is None:
            raise EnvironmentFault(
                f"no sandbox is up in {self.home}", hint="flexslurm sandbox up --dir DIR"
            )
        config = SandboxConfig.model_validate(state["config"])
        prefix = state.get("network")
        network = (
            None
            if prefix is None
            else SandboxNetwork(self.home, str(prefix), tuple(config.all_nodes()))
        )
        return Daemons(config, layout, str(state["mark"]), network)

    # --------------------------------------------------------------------------------- state

    def _state(self) -> dict[str, object] | None:
        try:
            data = json.loads((self.home / "sandbox.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def _layout_now(self) -> Layout | None:
        state = self._state()
        return None if state is None else Layout(self.home, Path(str(state.get("run"))))

    @contextlib.contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        """Hold the directory's lock: one `up` or `down` at a time."""
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            handle = self._lock_file.open("a")
        except OSError as error:
            raise EnvironmentFault(
                f"cannot use {self.home}: {error.strerror}", hint="choose another with --dir"
            ) from error
        deadline = time.monotonic() + timeout_s
        with handle:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise EnvironmentFault(
                            f"another flexslurm holds {self.home} for more than {timeout_s:g} s",
                            hint="wait for its 'sandbox up' or 'down' to end, or end that process",
                        ) from None
                    time.sleep(0.1)
            yield

    # ------------------------------------------------------------------------------ starting

    def _start(self, deadline: float) -> None:
        config = self.config or default_config()
        layout = sandbox_host.choose_layout(self.home, config)
        network = None
        if config.network == "namespaces":
            sandbox_network.remove(self.home)
            network = sandbox_network.choose(self.home, config.all_nodes())
        daemons = Daemons(config, layout, secrets.token_hex(8), network)
        for left in reversed(range(_START_TRIES)):
            ports = sandbox_host.free_ports(daemons.all()[1:])  # munged has none
            sandbox_host.write_files(config, layout, ports, daemons.mark, network)
            try:
                if network is not None and left == _START_TRIES - 1:
                    network.make()
                daemons.start_all(self._slurm, deadline)
                self._wait_ready(config, layout, deadline)
                return
            except _PortTaken:
                self._end_processes()
                if left == 0:
                    raise EnvironmentFault(
                        "other programs took the daemons' ports as often as new ones were chosen",
                        hint="try again",
                    ) from None

    def _wait_ready(self, config: SandboxConfig, layout: Layout, deadline: float) -> None:
        wanted = set(config.all_nodes())
        count = len(wanted) + (4 if config.qos else 2)
        last = ""
        while time.monotonic() < deadline:
            self._check_daemons(layout, count)
            try:
                out = self._slurm(["sinfo", "-h", "-N", "-o", "%N|%T"], timeout_s=10)
                idle = {line.split("|")[0] for line in out.split() if line.endswith("|idle")}
                if wanted <= idle:
                    self._prove(config, deadline)
                    return
                last = out
            except SlurmUnavailable as error:
                last = error.message
            time.sleep(0.15)
        raise EnvironmentFault(
            f"the nodes were not idle in time: {' '.join(last.split())}",
            hint=sandbox_host.last_words(layout),
        )

    def _check_daemons(self, layout: Layout, count: int) -> None:
        """Raise _PortTaken, or EnvironmentFault where one of `count` has ended otherwise."""
        for grace_s in (0.3, 0.0):
            texts = sandbox_host.log_texts(layout)
            if any("address already in use" in text.lower() for text in texts):
                raise _PortTaken
            if len(self._daemons()) >= count:
                return
            time.sleep(grace_s)  # one that died may still be writing why
        raise EnvironmentFault("a daemon ended at once", hint=sandbox_host.last_words(layout))

    def _prove(self, config: SandboxConfig, deadline: float) -> None:
        """Run a step on every node, so that credentials, ports and spools are known to work."""
        seen: set[str] = set()
        for name, partition in config.partitions.items():
            nodes = {node for group in partition.nodes for node in config.node_names(group)}
            if nodes <= seen:
                continue
            seen |= nodes
            size = str(len(nodes))
            argv = ["srun", f"--partition={name}", "-J", "prove", "-N", size, "-n", size, "true"]
            self._slurm(argv, timeout_s=max(1.0, deadline - time.monotonic()))

    # -------------------------------------------------------------------------------- ending

    def _clear(self, *, keep_logs: bool = False) -> None:
        """End all processes and remove all files but the lock, the logs if wanted, and home."""
        layout = self._layout_now()
        self._end_processes()
        sandbox_network.remove(self.home)
        if layout is not None and layout.run.parent != self.home:
            shutil.rmtree(layout.run, ignore_errors=True)
        shutil.rmtree(sandbox_host.short_run(self.home), ignore_errors=True)
        for name in ("run", "dev", "db", "state", *(() if keep_logs else ("log",))):
            shutil.rmtree(self.home / name, ignore_errors=True)
        for name in _FILES:
            (self.home / name).unlink(missing_ok=True)

    def _remove_home(self) -> None:
        self._lock_file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: other files are not ours
            self.home.rmdir()

    def _end_processes(self) -> None:
        left = processes.end_all(self._members, term_s=1.5, kill_s=8.0)
        if left:
            names = ", ".join(f"{p.name} ({p.pid})" for p in left)
            raise EnvironmentFault(
                f"these processes of the sandbox do not end: {names}",
                hint="what they wait for in the kernel may end; then: flexslurm sandbox down",
            )

    def _daemons(self) -> list[Process]:
        """munged, slurmctld and the slurmd: processes that carry the sandbox's mark."""
        return [p for p in self._members() if p.name in sandbox_daemons.NAMES]

    def _members(self) -> list[Process]:
        """All processes of this sandbox: its daemons, job steps, and what descends from them.

        A job's process is known by SLURM_CONF naming our file and SLURMD_NODENAME, which only
        slurmd sets, a daemon or a command of ours by its mark: a user's shell with SLURM_CONF
        exported is not one.
        """
        conf = str(self.conf)
        all_now = processes.everything()
        spared = processes.ancestors(os.getpid())
        roots = []
        for process in all_now:
            env = processes.environ(process.pid)
            ours = env.get("SLURM_CONF") == conf
            if ours and (MARK in env or "SLURMD_NODENAME" in env):
                roots.append(process)
        found = processes.with_descendants(roots, all_now)
        return [p for p in found if p.pid not in spared]

    # ------------------------------------------------------------------------------- asking

    def _slurm(self, argv: list[str], timeout_s: float = 15.0) -> str:
        # marked, so that `down` ends it too when this process is killed before it
        env = clean_env(str(self.conf)) | {MARK: "command"}
        done = run(argv, env=env, timeout_s=timeout_s)
        if done.code:
            raise failure(done)
        return done.out

    def _answers(self) -> bool:
        """Whether all daemons live and slurmctld answers."""
        state = self._state()
        ports = state.get("ports") if state is not None else None
        if not isinstance(ports, dict) or len(self._daemons()) < len(ports) + 1:
            return False
        try:
            self._slurm(["scontrol", "ping"], timeout_s=5.0)
        except (SlurmError, EnvironmentFault):
            return False
        return True
