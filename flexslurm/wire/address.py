"""The address other nodes reach this one at, by the site's rule; never a loopback by accident."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

import psutil

from flexslurm.config.site import NetworkSettings
from flexslurm.errors import EnvironmentFault


def _ipv4_by_interface() -> dict[str, list[str]]:
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


def node_address(network: NetworkSettings, towards: str | None = None) -> str:
    """An IPv4 address of this node.

    The site's interface, subnet or host-name suffix decides; without a rule, the address that
    packets `towards` a URL leave from; without that, the first that is neither loopback nor a
    container bridge, and 127.0.0.1 on a machine that has no other. Raises EnvironmentFault when
    the rule names what this node does not have.
    """
    if network.interface is not None:
        return _of_interface(network.interface)
    if network.subnet is not None:
        return _of_subnet(network.subnet)
    if network.suffix is not None:
        return _resolve(socket.gethostname().split(".")[0] + network.suffix)
    if towards is not None:
        return _source_address(towards)
    return _first_outward()


def _of_interface(interface: str) -> str:
    found = _ipv4_by_interface()
    if not found.get(interface):
        known = ", ".join(sorted(name for name, addresses in found.items() if addresses))
        raise EnvironmentFault(
            f"this node has no IPv4 address on interface '{interface}' (it has {known})",
            hint="mend network.interface in the site file",
        )
    return found[interface][0]


def _of_subnet(subnet: str) -> str:
    try:
        net = ipaddress.ip_network(subnet, strict=False)
    except ValueError as error:
        raise EnvironmentFault(
            f"network.subnet in the site file: {error}", hint="write it as 10.1.0.0/16"
        ) from None
    for addresses in _ipv4_by_interface().values():
        for address in addresses:
            if ipaddress.ip_address(address) in net:
                return address
    raise EnvironmentFault(
        f"this node has no address in {subnet}", hint="mend network.subnet in the site file"
    )


def _resolve(name: str) -> str:
    """An address of the name; a loopback, as /etc/hosts may have it (127.0.1.1), is none."""
    mend = "mend network.suffix in the site file, or the name's address"
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)]
    except (OSError, UnicodeError) as error:  # a label may be too long for the domain name system
        raise EnvironmentFault(f"cannot resolve '{name}': {error}", hint=mend) from None
    outward = [text for text in found if not ipaddress.ip_address(text).is_loopback]
    if not outward:
        raise EnvironmentFault(f"'{name}' is {found[0]}, which no other node reaches", hint=mend)
    return outward[0]


def _source_address(towards: str) -> str:
    """Which own address the kernel would use; a datagram socket's connect sends nothing."""
    parts = urlsplit(towards)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname or "127.0.0.1", parts.port or 9))
        except OSError as error:
            raise EnvironmentFault(
                f"there is no route to {towards}: {error.strerror}",
                hint="name the network that joins the nodes: network.interface, subnet or suffix",
            ) from None
        return str(probe.getsockname()[0])


def _first_outward() -> str:
    for name, addresses in sorted(_ipv4_by_interface().items()):
        for address in addresses:
            bridge = name.startswith(("docker", "br-", "virbr", "podman", "veth"))
            told = ipaddress.ip_address(address)
            if not bridge and not told.is_loopback and not told.is_link_local:
                return address
    return "127.0.0.1"
