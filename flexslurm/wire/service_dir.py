"""The service directory on the shared file system: where each thing of a service lies.

SERVICE_DIR/            0700
  service.yaml          what was launched, paths made absolute
  site.yaml
  keys.json             0600, CURVE keys
  pilots.json           the Slurm jobs: fragment → job
  head.json             where the head is: replaced at each start of a head
  head.lock             held by the living head, where the file system can lock
  change.lock           held while the service is launched or stopped
  journal.log           what the head decided
  gears.table           a gear for each allocation of the pool
  gears-less.table      the same for cards with less memory than the site file says
  measured/             profiles and links that gears are planned with
  leaves.json           the leaf switch of each node, where Slurm knows any
  logs/                 head, agents, workers
  jobs/                 submitit's files
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, TypeVar

import msgspec

from flexslurm.errors import EnvironmentFault, ServiceError, ServiceExists
from flexslurm.wire.files import write_atomically
from flexslurm.wire.keys import ServiceKeys, create_keys, load_keys

T = TypeVar("T")

_OURS = frozenset({"change.lock", "keys.json", "service.yaml", "pilots.json", "journal.log"})
"""Any of these tells the directory of a service from others."""
_JOB = re.compile(r"(local-[0-9]+|[0-9]+(?=_))")


class HeadAddress(msgspec.Struct, frozen=True):
    """What a head publishes about itself."""

    incarnation: str
    control: Annotated[str, msgspec.Meta(pattern=r"^tcp://[^\s/]+:[0-9]{1,5}$")]
    """Endpoint of the control links, `tcp://ADDRESS:PORT`."""
    api: Annotated[str, msgspec.Meta(pattern=r"^https?://")]
    """Base URL of the API, `http://ADDRESS:PORT`."""
    node: str
    pid: int


class Pilot(msgspec.Struct, frozen=True):
    """One submitted pilot."""

    fragment: str
    job_id: str
    partition: str | None
    gpu_type: str
    gpus: int
    nodes: int
    entry: int = 0
    """Number of its entry in the service's pool."""
    walltime_s: float | None = None
    """What was asked for instead of the entry's walltime."""
    least_s: float | None = None
    """The shortest walltime that Slurm may give it instead (--time-min)."""
    replaces: str = ""
    """The fragment whose place it takes before that one's walltime ends."""
    fills_hole: bool = False
    """A short job in a hole of Slurm's schedule: not submitted again as it was."""


class Pilots(msgspec.Struct, frozen=True):
    """All jobs of the service."""

    cluster: str
    """`slurm`, `local` or `allocation` (inside one job)."""
    pilots: tuple[Pilot, ...] = ()
    head_job: str | None = None
    allocation: str | None = None
    """The job whose steps all of this is, in cluster `allocation`."""
    wanted: tuple[int, ...] = ()
    """Pilots that each entry of the pool is to have now; empty: as the service file says."""
    drained: dict[str, int] = {}
    """Pilots that an operator drained and that have ended, with their entries of the pool."""


class ServiceDir:
    """Paths and the small files in them."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.service = self.path / "service.yaml"
        self.site = self.path / "site.yaml"
        self.journal = self.path / "journal.log"
        self.gears = self.path / "gears.table"
        self.gears_of_less = self.path / "gears-less.table"
        self.measured = self.path / "measured"
        self.leaves = self.path / "leaves.json"
        self.logs = self.path / "logs"
        self.jobs = self.path / "jobs"
        self._keys = self.path / "keys.json"
        self._head = self.path / "head.json"
        self._pilots = self.path / "pilots.json"

    def create(self) -> None:
        """Make the directory, private to the user, and its keys; keeps what is there."""
        with self._making():
            self._make()
            for folder in (self.logs, self.jobs):
                folder.mkdir(exist_ok=True)
            if not self._keys.exists():
                create_keys(self._keys)

    def _make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.path.stat().st_uid != os.getuid():
            raise EnvironmentFault(
                f"{self.path} belongs to another user", hint="name another one with --service-dir"
            )
        names = {path.name for path in self.path.iterdir()}
        if names and not names & _OURS:  # it would be closed to all others
            raise EnvironmentFault(
                f"{self.path} holds files that are not a service's",
                hint="give an empty or a new directory with --service-dir",
            )
        self.path.chmod(0o700)

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EnvironmentFault(
                f"cannot make the service directory {self.path}: {error.strerror}",
                hint="choose another with --service-dir; all nodes must see it",
            ) from error

    def require(self) -> None:
        """Raises ServiceError where no service was launched."""
        if not self.service.exists():
            raise ServiceError(
                f"there is no service in {self.path}",
                hint="give the name it was launched under, or its --service-dir",
            )

    def keys(self) -> ServiceKeys:
        return load_keys(self._keys)

    def head(self) -> HeadAddress | None:
        """Where the last head was; None before the first. Raises ServiceError when damaged."""
        return _read(self._head, HeadAddress)

    def publish_head(self, head: HeadAddress) -> None:
        write_atomically(self._head, msgspec.json.format(msgspec.json.encode(head)))

    def retract_head(self, incarnation: str) -> None:
        """Take the address back at a clean end, unless another head has published since."""
        head = self.head()
        if head is not None and head.incarnation == incarnation:
            self._head.unlink(missing_ok=True)

    def table(self, less_memory: Mapping[str, int]) -> Path:
        """The gear table for cards as the site file has them, or for those with less."""
        return self.gears_of_less if less_memory else self.gears

    def pilots(self) -> Pilots | None:
        return _read(self._pilots, Pilots)

    def jobs_now(self) -> frozenset[str]:
        """Ids of the jobs that belong to the service now; empty where the list is damaged."""
        try:
            pilots = self.pilots()
        except ServiceError:
            return frozenset()
        if pilots is None:
            return frozenset()
        ids = (*(pilot.job_id for pilot in pilots.pilots), pilots.head_job, pilots.allocation)
        return frozenset(job for job in ids if job)

    def write_pilots(self, pilots: Pilots) -> None:
        write_atomically(self._pilots, msgspec.json.format(msgspec.json.encode(pilots)))

    def stopped(self) -> bool:
        """Whether the service was launched once and a stop has ended it; False where unclear."""
        try:
            pilots = self.pilots()
            if pilots is None or pilots.pilots or pilots.head_job is not None:
                return False
            return self.head() is None
        except ServiceError:
            return False

    def leaf_switches(self) -> dict[str, str]:
        """The leaf switch of each node; empty where none is known."""
        return _read(self.leaves, dict[str, str]) or {}

    def forget_head(self) -> None:
        """Remove the address of a head that is known to be over, or a damaged one."""
        self._head.unlink(missing_ok=True)

    def forget_pilots(self) -> None:
        """Remove a damaged list of jobs, once those that were found are cancelled."""
        self._pilots.unlink(missing_ok=True)

    def jobs_found(self) -> tuple[str, ...]:
        """Ids of all jobs ever submitted from here, by their files; for when the list is lost."""
        names = (path.name for path in self.jobs.glob("*"))
        found = (_JOB.match(name) for name in names)
        return tuple(sorted({match[1] for match in found if match is not None}))

    @contextlib.contextmanager
    def changing(self, wait_s: float = 0.0) -> Iterator[None]:
        """Be the only one who launches or stops the service, where the file system has locks.

        Makes the directory where there is none. Raises ServiceExists when another one is at it
        for longer than `wait_s`, EnvironmentFault where the directory cannot be made.
        """
        deadline = time.monotonic() + wait_s
        with self._making():
            self._make()
            file = (self.path / "change.lock").open("a")
        with file:
            while not _try_lock(file):
                if time.monotonic() > deadline:
                    raise ServiceExists(
                        f"the service in {self.path} is being launched or stopped by another "
                        "command",
                        hint="wait until it has ended, and look with 'flexslurm status'",
                    )
                time.sleep(0.05)
            yield

    @contextlib.contextmanager
    def head_lock(self) -> Iterator[None]:
        """Be the only head, where the file system has locks. Raises ServiceExists."""
        with (self.path / "head.lock").open("a") as file:
            if not _try_lock(file):
                raise ServiceExists(
                    f"a head is running for {self.path}",
                    hint="see 'flexslurm status', 'flexslurm stop'",
                )
            yield


def _try_lock(file: IO[str]) -> bool:
    """Whether it is ours now; True also on a file system without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here: the launcher has asked the published address
    return True


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ServiceError(
            f"cannot read {path}: {error.strerror}", hint="only who launched a service may ask it"
        ) from error
    except msgspec.MsgspecError as error:
        raise ServiceError(
            f"{path} is damaged: {error}",
            hint="end the service with 'flexslurm stop', then launch again",
        ) from error
