"""The service's CURVE keys in one 0600 file; never prints or logs a secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import zmq

from flexslurm.errors import EnvironmentFault, ServiceError
from flexslurm.wire.files import write_atomically


class ServiceKeys(msgspec.Struct, frozen=True):
    """Two CURVE key pairs: the head's, and one shared by all members of the service."""

    head_public: bytes
    head_secret: bytes
    member_public: bytes
    member_secret: bytes

    def __repr__(self) -> str:
        return f"ServiceKeys(head={self.head_public.decode()[:8]}…)"


def create_keys(path: Path) -> ServiceKeys:
    """Make new keys and write them, readable by their owner alone."""
    head_public, head_secret = zmq.curve_keypair()
    member_public, member_secret = zmq.curve_keypair()
    keys = ServiceKeys(head_public, head_secret, member_public, member_secret)
    write_atomically(path, msgspec.json.encode(keys), mode=0o600)
    return keys


def load_keys(path: Path) -> ServiceKeys:
    """Read the keys; raises ServiceError when missing or damaged, EnvironmentFault when exposed."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            data = file.read()
    except OSError as error:
        raise ServiceError(
            f"cannot read the service's keys at {path}: {error.strerror}",
            hint="is this the service's directory, and are you the user who launched it?",
        ) from error
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise EnvironmentFault(
            f"others may read the service's keys at {path}",
            hint=f"stop the service, remove its directory and launch again (chmod 600 {path} "
            "would not take back what has been read)",
        )
    try:
        return msgspec.json.decode(data, type=ServiceKeys)
    except msgspec.MsgspecError as error:
        raise ServiceError(
            f"the service's keys at {path} are damaged: {error}",
            hint="stop the service, remove its directory and launch again",
        ) from error
