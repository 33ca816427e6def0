"""Pilots as local processes, for one machine without Slurm; never asks Slurm anything.

Each job has a directory under SERVICE_DIR/jobs and a keeper process (`local_job`) that outlives the
launcher. Any process that knows the service directory can ask for states or cancel.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from flexslurm.errors import EnvironmentFault, SlurmError
from flexslurm.slurm import processes
from flexslurm.slurm.command import clean_env
from flexslurm.slurm.jobs import JobInfo, unknown
from flexslurm.slurm.json_files import read_json, write_json
from flexslurm.slurm.script import HeadSpec, PilotSpec
from flexslurm.slurm.states import JobState, job_state

_MAX_JOBS = 100_000


class LocalSubmitter:
    """Jobs that are processes of this machine, ids `local-N`."""

    def __init__(
        self,
        service_dir: Path,
        *,
        kill_wait_s: float = 5.0,
        env: Mapping[str, str] | None = None,
        steps: bool = False,
    ) -> None:
        """`env` is added to every job's environment, as the site file's is on Slurm.

        `steps`: the commands start Slurm steps, which get their identity from Slurm, not from us.
        """
        self._jobs = service_dir.absolute() / "jobs"
        self._kill_wait_s = kill_wait_s
        self._env = dict(env or {})
        self._as_steps = steps

    def submit(self, spec: PilotSpec | HeadSpec, *, place: str | None = None) -> str:
        """Start it; `place` is noted for `places`. Returns its id; raises EnvironmentFault."""
        directory: Path | None = None
        keeper: tuple[int, int] | None = None
        try:
            directory = self._new_directory()
            spec.log_dir.mkdir(parents=True, exist_ok=True)
            job = self._job(directory.name, spec) | {"place": place}
            write_json(directory / "job.json", job)
            keeper = self._start_keeper(directory, job["env"])
            write_json(directory / "keeper.json", {"keeper": keeper})
        except BaseException as error:
            if keeper is not None:
                _end_at_once(keeper[0])
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, OSError):
                raise EnvironmentFault(
                    f"cannot start a local job: {error}",
                    hint=f"it needs {self._jobs} and a process",
                ) from error
            raise
        return directory.name

    def states(self, job_ids: Sequence[str]) -> dict[str, JobInfo]:
        return {job_id: self._state(job_id) for job_id in job_ids}

    def survey(self, job_ids: Sequence[str]) -> tuple[dict[str, JobInfo], tuple[JobInfo, ...]]:
        every = sorted({path.parent.name for path in self._jobs.glob("local-*/job.json")})
        ours = (self._state(job_id) for job_id in every)
        return self.states(job_ids), tuple(i for i in ours if i.known and not i.state.over)

    def find(self, name: str) -> list[str]:
        found = [p.parent.name for p in self._jobs.glob("local-*/job.json") if _name(p) == name]
        return sorted(i for i in found if not self._state(i).state.over)

    def cancel(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            keeper = self._keeper(job_id)
            if keeper is not None:
                processes.send(keeper, signal.SIGTERM)
            else:
                self._kill_left(job_id)

    def places(self) -> dict[str, str]:
        """The places of jobs of this machine that are not over, and the jobs' ids."""
        jobs = {path.parent.name: read_json(path) for path in self._jobs.glob("local-*/job.json")}
        here = {i: job for i, job in jobs.items() if job.get("place") and job["boot"] == _boot()}
        return {str(job["place"]): i for i, job in here.items() if not self._state(i).state.over}

    def place_of(self, job_id: str) -> str | None:
        """Where it was started to run, if that was noted."""
        return read_json(self._jobs / job_id / "job.json").get("place")

    def command_of(self, job_id: str) -> tuple[str, ...]:
        """What the job runs; empty for one that is not known."""
        return tuple(read_json(self._jobs / job_id / "job.json").get("command", ()))

    def record_of(self, job_id: str) -> Path:
        """The file in which its state stands."""
        return self._jobs / job_id / "status.json"

    def wait(self, job_id: str, *, every_s: float = 1.0) -> JobInfo:
        """Wait, without an end, until a job is over."""
        while not (info := self._state(job_id)).state.over and info.known:
            time.sleep(every_s)
        return info

    def preempt(self, job_id: str, *, grace_s: float, away_s: float = 1.0) -> None:
        """Take the job's GPUs as Slurm would: SIGTERM, `grace_s`, SIGKILL; back after `away_s`.

        Raises SlurmError where it does not run.
        """
        keeper = self._keeper(job_id)
        if keeper is None or self._state(job_id).state is not JobState.RUNNING:
            raise SlurmError(f"the local job {job_id} does not run")
        write_json(self._jobs / job_id / "preempt.json", {"grace_s": grace_s, "away_s": away_s})
        processes.send(keeper, signal.SIGUSR1)

    def resize(self, job_id: str, nodes: Sequence[str]) -> None:
        """Raises SlurmError: a local process is no job."""
        raise SlurmError(f"{job_id} is not a job of Slurm that could be made smaller")

    def preview(self, spec: PilotSpec | HeadSpec) -> str:
        nodes = spec.nodes if isinstance(spec, PilotSpec) else 1
        times = f" ({nodes} processes)" if nodes > 1 else ""
        lines = [f"# local process {spec.name}{times}, output in {spec.log_dir}"]
        lines += [f"export {k}={shlex.quote(v)}" for k, v in {**self._env, **spec.env}.items()]
        return "\n".join([*lines, shlex.join(spec.command), ""])

    # ----------------------------------------------------------------------------- keeping

    def _new_directory(self) -> Path:
        self._jobs.mkdir(parents=True, exist_ok=True)
        taken = [int(p.name[6:]) for p in self._jobs.glob("local-*") if p.name[6:].isdecimal()]
        for number in count(max(taken, default=0) + 1):
            if number > _MAX_JOBS:
                break
            with contextlib.suppress(FileExistsError):
                (self._jobs / f"local-{number}").mkdir()
                return self._jobs / f"local-{number}"
        raise EnvironmentFault(
            f"{self._jobs} holds {_MAX_JOBS} jobs",
            hint="stop the service and remove this directory",
        )

    def _job(self, job_id: str, spec: PilotSpec | HeadSpec) -> dict[str, Any]:
        inherited = clean_env()
        inherited.pop("SLURM_CONF", None)
        return {
            "id": job_id,
            "name": spec.name,
            "nodes": spec.nodes if isinstance(spec, PilotSpec) else 1,
            "command": list(spec.command),
            "env": {**inherited, **self._env, **spec.env},
            "log_dir": str(spec.log_dir.absolute()),
            "kill_wait_s": self._kill_wait_s,
            "boot": _boot(),
            "host": os.uname().nodename,
            "identity": not self._as_steps,
        }

    def _start_keeper(self, directory: Path, env: Mapping[str, str]) -> tuple[int, int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "flexslurm.slurm.local_job", str(directory)],
            dict(env), setsid=True,
            # Blocked from its first moment: a cancel that comes before it is ready waits for it.
            setsigmask=[signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1],
            setsigdef=[signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT],
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(directory / "keeper.log"), flags, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
        )  # fmt: skip
        process = processes.look(pid)
        return (pid, 0) if process is None else process.identity

    # ------------------------------------------------------------------------------ asking

    def _keeper(self, job_id: str) -> processes.Process | None:
        """The living keeper of a job; an ended one that was our child is collected."""
        identity = read_json(self._jobs / job_id / "keeper.json").get("keeper")
        if identity is None:
            return None
        process = processes.look(identity[0])
        if process is None or process.start_ticks != identity[1]:
            processes.reap(identity[0])
            return None
        return process

    def _state(self, job_id: str) -> JobInfo:
        directory = self._jobs / job_id
        job = read_json(directory / "job.json")
        if not job_id.startswith("local-") or not job:
            return unknown(job_id, "no such local job")
        ours = job["boot"] == _boot()
        alive = ours and self._keeper(job_id) is not None  # before its last word is read
        status = read_json(directory / "status.json")
        state = job_state(str(status.get("state", "PENDING")))
        reason = str(status.get("reason", ""))
        if not ours and not state.over:
            return unknown(job_id, f"it belongs to {job['host']}, or to before this boot")
        if not alive and not state.over:
            tasks = self._tasks_left(job_id)
            state = JobState.RUNNING if tasks else JobState.FAILED
            reason = "its keeper was killed"
        running = state in (JobState.RUNNING, JobState.COMPLETING)
        preempt_at = status.get("preempt_at")
        return JobInfo(
            id=job_id,
            state=state,
            reason=reason,
            nodes=tuple(f"{job['name']}-{i}" for i in range(job["nodes"])) if running else (),
            preempt_in_s=preempt_at - time.monotonic() if running and preempt_at else None,
            restarts=int(status.get("restarts", 0)),
            exit_code=status.get("exit_code") if state.over else None,
            name=job["name"],
            started_ago_s=time.monotonic() - status["started_at"] if running else None,
        )

    def _tasks_left(self, job_id: str) -> list[processes.Process]:
        tasks = read_json(self._jobs / job_id / "status.json").get("tasks", [])
        found = (processes.look(pid) for pid, ticks in tasks if processes.alive(pid, ticks))
        return [process for process in found if process is not None]

    def _kill_left(self, job_id: str) -> None:
        """A killed keeper leaves its tasks; without it there is nobody to wait for a grace time."""
        roots = self._tasks_left(job_id)
        for process in processes.with_descendants(roots, processes.everything()):
            processes.send(process, signal.SIGKILL)


def _name(path: Path) -> str:
    return str(read_json(path).get("name"))


def _end_at_once(keeper: int) -> None:
    """End a keeper that nobody will know of, and all that it has started already."""
    process = processes.look(keeper)
    if process is not None:
        os.kill(keeper, signal.SIGSTOP)  # so that it starts nothing between the look and the end
        for found in processes.with_descendants([process], processes.everything()):
            processes.send(found, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(keeper, 0)


def _boot() -> str:
    """Of this start of this machine: process ids of another one mean nothing here."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename
