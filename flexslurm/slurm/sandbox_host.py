"""What a sandbox takes from its machine: programs, ports, a short path for sockets, files.

Starts no process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import random
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexslurm.errors import EnvironmentFault
from flexslurm.slurm import sandbox_accounting, sandbox_files
from flexslurm.slurm.sandbox_config import SandboxConfig
from flexslurm.slurm.sandbox_files import Layout
from flexslurm.slurm.sandbox_network import SandboxNetwork
from flexslurm.slurm.sandbox_site import site_yaml

_DEBIAN = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "sbatch": "slurm-client",
    "scontrol": "slurm-client",
}
_SECRET = {"munge.key", "slurmdbd.conf", "my.cnf", "boot.sql"}
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
# PMIx is not installed where Slurm is only tried out; its absence is no error of ours.
_BAD = re.compile(r"^(?!.*pmix).*(error|fatal)", re.IGNORECASE)
_PLAIN_PATH = re.compile(r"^/[A-Za-z0-9._/+@~-]+$")


def find_program(name: str) -> str | None:
    """A program's path, the administrators' directories included, which are not on every PATH."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_SBIN))


def missing_packages(config: SandboxConfig | None = None) -> list[str]:
    """Debian packages without which no sandbox, or not this one, can run here."""
    missing = {package for name, package in _DEBIAN.items() if find_program(name) is None}
    if not any((base / "preempt_partition_prio.so").exists() for base in _plugin_dirs()):
        missing.add("slurm-wlm-basic-plugins")
    if config is not None and sandbox_accounting.wanted(config):
        more = sandbox_accounting.DEBIAN
        missing |= {package for name, package in more.items() if find_program(name) is None}
    return sorted(missing)


def check_programs(config: SandboxConfig | None = None) -> None:
    """Raise EnvironmentFault naming all that is missing and the line that installs it."""
    missing = missing_packages(config)
    if missing:
        sudo = "" if os.geteuid() == 0 else "sudo "
        names = " ".join(missing)
        raise EnvironmentFault(
            f"the sandbox needs these Debian packages: {names}",
            hint=f"{sudo}apt-get install -y --no-install-recommends {names}",
        )


def _plugin_dirs() -> list[Path]:
    roots = [*Path("/usr/lib").glob("*-linux-gnu*"), Path("/usr/lib"), Path("/usr/lib64")]
    return [root / name for root in roots for name in ("slurm-wlm", "slurm")]


def check_path(home: Path) -> None:
    """Raise EnvironmentFault for a directory that slurm.conf cannot name."""
    if not _PLAIN_PATH.match(str(home)):
        raise EnvironmentFault(
            f"slurm.conf cannot name the directory {home}",
            hint="use a path of letters, digits and ._+@~-",
        )


def short_run(home: Path) -> Path:
    """The directory for sockets that stands in for HOME/run where that is too long a name."""
    key = hashlib.sha256(os.fsencode(home)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"fxs-{os.geteuid()}-{key}"


def choose_layout(home: Path, config: SandboxConfig) -> Layout:
    """Sockets beside the rest where their names fit, else below the temporary directory.

    Raises EnvironmentFault where neither is short enough.
    """
    nodes = config.all_nodes()
    for run in (home / "run", short_run(home)):
        if sandbox_files.sockets_fit(run, nodes):
            return Layout(home, run)
    raise EnvironmentFault(
        f"the names of sockets below {home} are too long for the system",
        hint="use a shorter directory or shorter node names",
    )


def free_ports(names: Sequence[str]) -> dict[str, int]:
    """A free port for each name, outside the range of outgoing connections.

    Nothing holds them afterwards: whoever binds must be ready to lose the race and ask again.
    Raises EnvironmentFault where so many are not free.
    """
    low, high = _port_range()
    candidates = random.sample(range(low, high), min(high - low, 40 * len(names) + 200))
    found: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        for port in candidates:
            if len(found) == len(names):
                return found
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                probe.bind(("0.0.0.0", port))  # noqa: S104 - the daemons bind so
                found[names[len(found)]] = port
    if len(found) < len(names):
        raise EnvironmentFault(
            f"found no {len(names)} free ports between {low} and {high}",
            hint="end what holds them, or configure fewer nodes",
        )
    return found


def _port_range() -> tuple[int, int]:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        first, last = (int(word) for word in text.split())
    except (OSError, ValueError):
        return 10240, 32000
    if first >= 20480:
        return 10240, first
    return (last + 1, 65536) if last < 60000 else (first, last)


def write_files(
    config: SandboxConfig,
    layout: Layout,
    ports: Mapping[str, int],
    mark: str,
    network: SandboxNetwork | None = None,
) -> None:
    """Write all files; the state file first, so that `down` knows what `up` began."""
    state = {"version": 1, "mark": mark, "run": str(layout.run), "ports": dict(ports)}
    if network is not None:
        state["network"] = network.prefix
    config_data = config.model_dump(mode="json")
    _write(layout.state_file, json.dumps({**state, "config": config_data}, indent=1))
    _own_directory(layout.run)
    for directory in (layout.log, layout.save):
        directory.mkdir(mode=0o755, exist_ok=True)
        for old in directory.iterdir():
            old.unlink()
    for node in config.all_nodes():
        layout.spool(node).mkdir(mode=0o755, exist_ok=True)
    for group, nodes in config.nodes.items():
        for node in config.node_names(group):
            for index in range(nodes.gpus):
                layout.device(node, index).parent.mkdir(parents=True, exist_ok=True)
                layout.device(node, index).unlink(missing_ok=True)
                layout.device(node, index).symlink_to(os.devnull)
    layout.munge_key.unlink(missing_ok=True)
    _write(layout.munge_key, secrets.token_bytes(128))
    host = socket.gethostname().split(".")[0]
    user = pwd.getpwuid(os.geteuid()).pw_name
    accounting = sandbox_accounting.slurm_conf_lines(config, layout, ports)
    text = sandbox_files.slurm_conf(config, layout, ports, host, user, network, accounting)
    _write(layout.conf, text)
    if sandbox_accounting.wanted(config):
        sandbox_accounting.write_files(layout, ports, _write)
    if network is not None:
        _write(network.hosts, network.hosts_text(host))
    _write(layout.gres, sandbox_files.gres_conf(config, layout))
    _write(layout.site, site_yaml(config, layout.conf))
    if config.switches:
        _write(layout.topology, sandbox_files.topology_conf(config))
    if config.plugstack:
        _write(layout.plugstack, "\n".join(config.plugstack) + "\n")
    for name, source in lua_files(config).items():
        _write(layout.home / name, _read_lua(Path(source)))


def lua_files(config: SandboxConfig) -> dict[str, str]:
    """Slurm's name of each Lua plugin asked for, which lies beside slurm.conf, and its source."""
    given = {"job_submit.lua": config.job_submit_lua, "cli_filter.lua": config.cli_filter_lua}
    return {name: source for name, source in given.items() if source is not None}


def _read_lua(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(
            f"cannot read the Lua plugin {path}: {error.strerror}",
            hint="name it with its whole path in the sandbox's file",
        ) from error


def _write(path: Path, content: str | bytes) -> None:
    """Replace a file at once; the key's mode is its owner's alone."""
    data = content.encode() if isinstance(content, str) else content
    mode = 0o600 if path.name in _SECRET else 0o644
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    part.replace(path)


def _own_directory(path: Path) -> None:
    """Make a directory that must be ours: its name can be guessed, and its sockets are trusted."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise EnvironmentFault(
            f"{path} is not a directory of this user", hint="choose a shorter --dir, or set TMPDIR"
        )
    path.chmod(0o755 if found.st_uid == 0 else 0o700)


def log_texts(layout: Layout) -> list[str]:
    """The text of all logs, the last 64 KiB of each."""
    texts = []
    for path in sorted(layout.log.glob("*.log")):
        with contextlib.suppress(OSError):
            texts.append(path.read_text(encoding="utf-8", errors="replace")[-65536:])
    return texts


def last_words(layout: Layout) -> str | None:
    """The last errors in the daemons' logs, for a message."""
    lines = []
    for path in sorted(layout.log.glob("*.log")):
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="utf-8", errors="replace")
            bad = [line for line in text.splitlines() if _BAD.search(line)]
            lines += [f"{path.name}: {line.strip()[:300]}" for line in bad[-2:]]
    return "\n  ".join(lines[-8:]) or None
