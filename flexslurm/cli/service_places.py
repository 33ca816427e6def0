"""Where services lie, and which one a command means; opens none of their files.

Imports little: every command about a service starts here, on a login node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flexslurm.errors import ServiceError
from flexslurm.wire.service_dir import ServiceDir


def service_directory(
    name_or_path: str, environ: Mapping[str, str] = os.environ, shared: str | None = None
) -> ServiceDir:
    """The directory of a service: a path, or a name below the default place.

    Raises ServiceError where a home directory in it does not exist.
    """
    root = environ.get("FLEXSLURM_SERVICES") or shared
    try:
        if os.sep in name_or_path or name_or_path.startswith("."):
            return ServiceDir(Path(name_or_path).expanduser())
        base = Path(root).expanduser() if root else Path.home() / ".flexslurm" / "services"
    except RuntimeError as error:  # of pathlib: no such user, or no home
        raise ServiceError(
            f"there is no such home directory: {root or name_or_path}",
            hint="give a whole path with --service-dir, or in FLEXSLURM_SERVICES",
        ) from error
    return ServiceDir(base / name_or_path)


def service_to_be(name: str, service_dir: str | None, shared_dir: str | None) -> ServiceDir:
    """The directory of a service that is launched: as named, or below the site's shared one."""
    if service_dir:
        return ServiceDir(Path(service_dir))
    return service_directory(name, shared=f"{shared_dir}/services" if shared_dir else None)


def find_service(service: str | None, service_dir: str | None) -> ServiceDir:
    """The directory that is meant; without a name, the only one there is, or that runs.

    Raises ServiceError where there is none, or where several may be meant.
    """
    if service_dir is not None:
        directory = ServiceDir(Path(service_dir))
    elif service is not None:
        directory = service_directory(service)
    else:
        directory = _only_service()
    directory.require()
    return directory


def _only_service() -> ServiceDir:
    root = service_directory("x").path.parent
    found = sorted(path.parent.name for path in root.glob("*/service.yaml"))
    stopped = {name for name in found if service_directory(name).stopped()}
    running = [name for name in found if name not in stopped]
    for names in (found, running):
        if len(names) == 1:
            return service_directory(names[0])
    told = [f"{name} (stopped)" if name in stopped else name for name in found]
    what = f"services here: {', '.join(told)}" if found else f"there is none below {root}"
    raise ServiceError("which service?", hint=f"give its name or --service-dir; {what}")
