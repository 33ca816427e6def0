"""The service directory on the shared file system: where each thing of a service lies.

SERVICE_DIR/            0700
  service.yaml          what was launched, paths made absolute
  site.yaml
  keys.json             0600, CURVE keys
  pilots.json           the Slurm jobs: fragment → job
  head.json             where the head is: replaced at each start of a head
  head.lock             held by the living head, where the file system can lock
  journal.log           what the head decided
  gears.table           a gear for each allocation of the pool
  logs/                 head, agents, workers
  jobs/                 submitit's files
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from flexslurm.errors import EnvironmentFault, ServiceError, ServiceExists
from flexslurm.wire.files import write_atomically
from flexslurm.wire.keys import ServiceKeys, create_keys, load_keys

T = TypeVar("T")


class HeadAddress(msgspec.Struct, frozen=True):
    """What a head publishes about itself."""

    incarnation: str
    control: str
    """Endpoint of the control links, `tcp://ADDRESS:PORT`."""
    api: str
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


class Pilots(msgspec.Struct, frozen=True):
    """All jobs of the service."""

    cluster: str
    """`slurm`, `local` or `allocation` (inside one job)."""
    pilots: tuple[Pilot, ...] = ()
    head_job: str | None = None
    allocation: str | None = None
    """The job whose steps all of this is, in cluster `allocation`."""


class ServiceDir:
    """Paths and the small files in them."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.service = self.path / "service.yaml"
        self.site = self.path / "site.yaml"
        self.journal = self.path / "journal.log"
        self.gears = self.path / "gears.table"
        self.logs = self.path / "logs"
        self.jobs = self.path / "jobs"
        self._keys = self.path / "keys.json"
        self._head = self.path / "head.json"
        self._pilots = self.path / "pilots.json"

    def create(self) -> None:
        """Make the directory, private to the user, and its keys; keeps what is there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.path.stat().st_uid != os.getuid():
                raise EnvironmentFault(f"{self.path} belongs to another user")
            self.path.chmod(0o700)
            for folder in (self.logs, self.jobs):
                folder.mkdir(exist_ok=True)
            if not self._keys.exists():
                create_keys(self._keys)
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

    def pilots(self) -> Pilots | None:
        return _read(self._pilots, Pilots)

    def write_pilots(self, pilots: Pilots) -> None:
        write_atomically(self._pilots, msgspec.json.format(msgspec.json.encode(pilots)))

    @contextlib.contextmanager
    def head_lock(self) -> Iterator[None]:
        """Be the only head, where the file system has locks. Raises ServiceExists."""
        with (self.path / "head.lock").open("a") as file:
            _lock(file, self.path)
            yield


def _lock(file: IO[str], where: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ServiceExists(
            f"a head is running for {where}", hint="see 'flexslurm status', 'flexslurm stop'"
        ) from None
    except OSError:
        return  # no locks on this file system: the launcher has asked the published address


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ServiceError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ServiceError(f"{path} is damaged: {error}", hint="stop and launch again") from error
