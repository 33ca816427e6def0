"""Network namespaces for a sandbox's nodes: a host name and an address each, on a bridge of ours.

All names carry a key made of the sandbox's directory, so that `remove` finds everything again
after any crash, and nothing of anybody else's.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexslurm.errors import EnvironmentFault

_NAMESPACES = Path("/run/netns")
_FIRST = 10
_MOST_NODES = 240
INTERFACE = "eth0"
"""Of every node, inside its namespace."""
# Not `ip netns exec`: it mounts a /sys without the control groups that slurmd wants.
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


@dataclass(frozen=True, slots=True)
class SandboxNetwork:
    """The hosts of one sandbox; `prefix` is the first three numbers of their addresses."""

    home: Path
    prefix: str
    nodes: tuple[str, ...]

    @property
    def controller(self) -> str:
        """The address of this machine on the bridge."""
        return f"{self.prefix}.1"

    @property
    def hosts(self) -> Path:
        return self.home / "hosts"

    def address(self, node: str) -> str:
        return f"{self.prefix}.{_FIRST + self.nodes.index(node)}"

    def hosts_text(self, controller: str) -> str:
        """/etc/hosts of the nodes; `controller` is this machine's name."""
        own = [f"{self.address(node)} {node}" for node in self.nodes]
        return "\n".join(["127.0.0.1 localhost", f"{self.controller} {controller}", *own, ""])

    def inside(self, node: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on the node."""
        shell = ["sh", "-c", _ENTER, "sh", node, str(self.hosts), *command]
        space = _NAMESPACES / _space(self.home, node)
        return ["nsenter", f"--net={space}", "unshare", "--uts", "--mount", *shell]

    def make(self) -> None:
        """Make bridge, namespaces and links. Raises EnvironmentFault."""
        bridge = _key(self.home)
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.controller}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for node in self.nodes:
            space, end = _space(self.home, node), self._link(node)
            _ip("netns", "add", space)
            _ip("link", "add", end, "type", "veth", "peer", "name", INTERFACE, "netns", space)
            _ip("link", "set", end, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", INTERFACE)
            for name in ("lo", INTERFACE):
                _ip("-n", space, "link", "set", name, "up")

    def cut(self, node: str) -> None:
        """Take the node's link away: nothing comes through, and nobody is told."""
        _ip("link", "set", self._link(node), "nomaster")

    def mend(self, node: str) -> None:
        _ip("link", "set", self._link(node), "master", _key(self.home))

    def _link(self, node: str) -> str:
        if node not in self.nodes:
            known = ", ".join(self.nodes)
            raise EnvironmentFault(f"the sandbox has no node '{node}'", hint=f"it has {known}")
        return f"{_key(self.home)}n{self.nodes.index(node)}"


def choose(home: Path, nodes: Sequence[str]) -> SandboxNetwork:
    """A network whose addresses nobody here uses. Raises EnvironmentFault."""
    check(len(nodes))
    text = _ip("-4", "-o", "addr", "show")
    used = [ipaddress.ip_network(m, strict=False) for m in re.findall(r"inet (\S+/\d+)", text)]
    candidates = [f"10.{random.randint(200, 250)}.{random.randint(0, 255)}" for _ in range(50)]  # noqa: S311
    for prefix in candidates:
        if not any(ipaddress.ip_network(f"{prefix}.0/24").overlaps(net) for net in used):
            return SandboxNetwork(home, prefix, tuple(nodes))
    raise EnvironmentFault(
        "no free network was found in 10.200.0.0 to 10.250.255.255",
        hint="set 'network: host' in the sandbox's file",
    )


def check(nodes: int = 0) -> None:
    """Raise EnvironmentFault where no namespaces can be made here."""
    if os.geteuid() != 0:
        raise EnvironmentFault(
            "network namespaces need root",
            hint="run as root, or set 'network: host' in the sandbox's file",
        )
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        raise EnvironmentFault(
            f"network namespaces need the command '{missing[0]}'",
            hint="apt-get install -y --no-install-recommends iproute2 util-linux",
        )
    if nodes > _MOST_NODES:
        raise EnvironmentFault(
            f"a sandbox has at most {_MOST_NODES} hosts, not {nodes}",
            hint="ask for fewer nodes, or set 'network: host' in the sandbox's file",
        )


def remove(home: Path) -> None:
    """Remove what `make` made for this directory, all or half; nothing is no error."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return
    key = _key(home)
    for space in _NAMESPACES.glob(f"{key}-*"):
        _ip("netns", "del", space.name, check=False)
    for link in Path("/sys/class/net").glob(f"{key}*"):
        _ip("link", "del", link.name, check=False)


def _key(home: Path) -> str:
    """Short: a link's name has at most 15 characters."""
    return "fxs" + hashlib.sha256(os.fsencode(home)).hexdigest()[:8]


def _space(home: Path, node: str) -> str:
    return f"{_key(home)}-{node}"


def _ip(*words: str, check: bool = True) -> str:
    try:
        done = subprocess.run(
            ["ip", *words], check=False, capture_output=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"ip {' '.join(words)}: {error}") from error
    if done.returncode and check:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise EnvironmentFault(
            f"ip {' '.join(words)}: {said}",
            hint="network namespaces may be forbidden here: set 'network: host'",
        )
    return done.stdout.decode("utf-8", "replace")
