"""What one node can say of itself and of its way to the others; one line of JSON, then it ends.

Every node lays a record into a common directory, waits until it sees all of them, and asks each of
the others for its word over TCP: so the directory is shared, the ports are open and the clocks
agree, or the line says what is not. Judges nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from flexslurm.config.site import SlurmSettings

_SLURM_S = 10.0
PACKAGES = (
    "flexslurm", "torch", "deepspeed", "transformers", "pyzmq", "msgspec", "numpy", "safetensors",
    "tokenizers", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip


def facts(site_file: str | None, model: str | None) -> dict[str, Any]:
    """What this node says of itself alone."""
    return {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0],
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "memory_free_bytes": _memory_free(),
        "gpus": _gpus(),
        "fabric": _fabric(),
        "interfaces": _interfaces(),
        "slurm": _slurm(site_file),
        "address": _address(site_file),
        "network": _network(site_file),
        "model": _model(model),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _memory_free() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _gpus() -> dict[str, Any]:
    wanted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    found: dict[str, Any] = {"wanted": int(wanted) if wanted.isdecimal() else None}
    try:
        import pynvml
    except ImportError as error:
        return {**found, "problem": str(error)}
    try:
        pynvml.nvmlInit()
        try:
            found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
            handles = [
                pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())
            ]
            found["names"] = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
            memory = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
            found["used_share"] = [round(1 - int(m.free) / int(m.total), 3) for m in memory]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        found["problem"] = str(error)
    return found


def _fabric() -> list[dict[str, Any]]:
    from dataclasses import asdict

    from flexslurm.slurm.fabric import fabric_ports

    return [asdict(port) for port in fabric_ports()]


def _interfaces() -> list[str]:
    import psutil

    return sorted(psutil.net_if_addrs())


def _slurm(site_file: str | None) -> dict[str, str]:
    """Slurm's release as this node has it; agents need none, so its lack is only told."""
    from flexslurm.config.sources import load_site
    from flexslurm.errors import FlexslurmError
    from flexslurm.slurm.client import SlurmClient

    try:
        settings = load_site(Path(site_file)).value.slurm if site_file else SlurmSettings()
        bounded = settings.model_copy(
            update={"command_timeout": min(settings.command_timeout, _SLURM_S)}
        )
        version = SlurmClient(bounded).version()
    except FlexslurmError as error:
        return {"problem": error.message}
    return {"version": ".".join(f"{part:02d}" for part in version)}


def _network(site_file: str | None) -> dict[str, Any]:
    """What the site file promises of the network."""
    from flexslurm.config.sources import load_site
    from flexslurm.errors import FlexslurmError

    if site_file is None:
        return {}
    try:
        loaded = load_site(Path(site_file))
    except FlexslurmError:  # said by the address already
        return {}
    network = loaded.value.network
    told: dict[str, Any] = {"nccl_env": dict(network.nccl_env)}
    if "node_link" in network.model_fields_set:
        told["gbit_per_s"] = network.node_link.bandwidth * 8 / 1e9
    return told


def _address(site_file: str | None) -> dict[str, str]:
    from flexslurm.config.site import NetworkSettings
    from flexslurm.config.sources import load_site
    from flexslurm.errors import FlexslurmError
    from flexslurm.wire.address import node_address

    try:
        network = load_site(Path(site_file)).value.network if site_file else NetworkSettings()
        return {"address": node_address(network)}
    except FlexslurmError as error:
        return {"problem": error.message}


def _model(path: str | None) -> dict[str, Any] | None:
    """Whether the model's files can be read here: the first bytes of each."""
    if path is None:
        return None
    began = time.monotonic()
    try:
        files = [Path(path) / "config.json", *sorted(Path(path).glob("*.safetensors"))]
        for file in files:
            with file.open("rb") as opened:
                opened.read(4096)
    except OSError as error:
        return {"problem": f"{error.filename}: {error.strerror}"}
    return {"files": len(files), "seconds": round(time.monotonic() - began, 3)}


# -------------------------------------------------------------------------------- with the others


def meet(directory: Path, me: dict[str, Any], count: int, timeout_s: float) -> dict[str, Any]:
    """Who was seen in the directory, and who answered; bounded by `timeout_s` twice."""
    name = f"{me['node']}.json"
    address = me["address"].get("address", "127.0.0.1")
    found: dict[str, Any] = {"seen": 0, "wanted": count, "peers": {}}
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("0.0.0.0", 0))  # noqa: S104 - the other nodes come in
        server.listen(count + 8)
        server.settimeout(0.2)
        done = threading.Event()
        answering = threading.Thread(target=_answer, args=(server, done), daemon=True)
        answering.start()
        try:
            record = {"node": me["node"], "address": address, "port": server.getsockname()[1]}
            part = directory / f".{name}.part"
            part.write_text(json.dumps(record))
            part.replace(directory / name)
            records = _wait_for(directory, count, timeout_s)
            found["seen"] = len(records)
            others = [other for other in records if other["node"] != me["node"]]
            found["peers"] = {other["node"]: _call(other) for other in others}
            _wait_ready(directory, me["node"], count, timeout_s)
        except OSError as error:
            found["problem"] = f"{error.filename or directory}: {error.strerror}"
        finally:
            done.set()
            answering.join()
    return found


def _wait_for(directory: Path, count: int, timeout_s: float) -> list[dict[str, Any]]:
    """The records, once all are there or the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        files = sorted(directory.glob("*.json"))
        if len(files) >= count or time.monotonic() > deadline:
            return [json.loads(file.read_text()) for file in files]
        time.sleep(0.05)


def _wait_ready(directory: Path, node: str, count: int, timeout_s: float) -> None:
    """Answer until all others have asked, for at most `timeout_s`."""
    (directory / f"{node}.done").touch()
    deadline = time.monotonic() + timeout_s
    while len(list(directory.glob("*.done"))) < count and time.monotonic() < deadline:
        time.sleep(0.05)


def _answer(server: socket.socket, done: threading.Event) -> None:
    while not done.is_set():
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                connection.sendall(f"{time.time():.6f}".encode())


def _call(peer: dict[str, Any], timeout_s: float = 3.0) -> dict[str, Any]:
    """The peer's clock against ours, at the middle of the way there and back."""
    began = time.time()
    try:
        with socket.create_connection((peer["address"], peer["port"]), timeout_s) as link:
            link.settimeout(timeout_s)
            told = float(link.recv(64).decode())
    except (OSError, ValueError) as error:
        return {"problem": f"{peer['address']}:{peer['port']}: {error}"}
    ended = time.time()
    return {"way_s": round(ended - began, 6), "clock_s": round(told - (began + ended) / 2, 6)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="flexslurm doctor probe", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--site")
    parser.add_argument("--model")
    arguments = parser.parse_args()
    me = facts(arguments.site, arguments.model)
    me["met"] = meet(arguments.directory, me, arguments.count, arguments.timeout)
    sys.stdout.write(json.dumps(me) + "\n")


if __name__ == "__main__":
    main()
