"""Accounting for a sandbox: a private MariaDB and slurmdbd, and the QOS that preempt each other.

Slurm keeps QOS in its accounting database alone, so preemption by QOS needs both. The database
listens on loopback only, and its password is known to this directory's files, which are the user's.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from flexslurm.errors import EnvironmentFault, SlurmError
from flexslurm.slurm.sandbox_config import SandboxConfig
from flexslurm.slurm.sandbox_files import PLAIN_ACCOUNTING, Layout

SERVICES = ("mariadbd", "slurmdbd")
"""Names of the daemons and of their ports."""
DEBIAN = {"mariadbd": "mariadb-server-core", "slurmdbd": "slurmdbd"}
_SCRIPTS = Path("/usr/share/mysql")
_TABLES = (
    "mysql_system_tables.sql", "mysql_performance_tables.sql", "mysql_system_tables_data.sql",
)  # fmt: skip
_ACCOUNT = "sandbox"


def wanted(config: SandboxConfig) -> bool:
    return bool(config.qos)


def slurm_conf_lines(config: SandboxConfig, layout: Layout, ports: Mapping[str, int]) -> list[str]:
    """What slurm.conf says of accounting and preemption."""
    if not wanted(config):
        return list(PLAIN_ACCOUNTING)
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={ports['slurmdbd']}",
        # with munge the password is the socket; AuthInfo does not count here
        f"AccountingStoragePass={layout.munge_socket}",
        "AccountingStorageEnforce=associations,qos",
        "PreemptType=preempt/qos",
    ]


def write_files(
    layout: Layout, ports: Mapping[str, int], write: Callable[[Path, str], None]
) -> None:
    """Options of both daemons; `write` makes files that only their owner can read."""
    home = layout.home / "db"
    shutil.rmtree(home, ignore_errors=True)
    (home / "data").mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    user, password = pwd.getpwuid(os.geteuid()).pw_name, secrets.token_hex(16)
    options = [
        "[mariadbd]",
        f"datadir={home}/data",
        f"socket={layout.run}/mysql",
        f"pid-file={layout.run}/mariadbd.pid",
        f"log-error={layout.log}/mariadbd.log",
        f"lc-messages-dir={_SCRIPTS}",
        f"user={user}",
        f"port={ports['mariadbd']}",
        "bind-address=127.0.0.1",
        "skip-name-resolve",
        "performance-schema=0",
        # a sandbox's history is short, and need not outlive a power cut
        "innodb-buffer-pool-size=16M",
        "innodb-log-file-size=8M",
        "innodb-flush-log-at-trx-commit=0",
    ]
    write(home / "my.cnf", "\n".join([*options, ""]))
    scripts = [(_SCRIPTS / name).read_text(encoding="utf-8") for name in _TABLES]
    grants = [
        "FLUSH PRIVILEGES;",
        f"CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';",
        "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';",
    ]
    first = ["create database mysql;", "use mysql;", "set @auth_root_socket=NULL;"]
    write(home / "boot.sql", "\n".join([*first, *scripts, *grants, ""]))
    dbd = [
        "DbdHost=localhost",
        "DbdAddr=127.0.0.1",
        f"DbdPort={ports['slurmdbd']}",
        f"SlurmUser={user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        f"LogFile={layout.log}/slurmdbd.log",
        f"PidFile={layout.run}/slurmdbd.pid",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        f"StoragePort={ports['mariadbd']}",
        "StorageUser=slurm",
        f"StoragePass={password}",
        "StorageLoc=slurm_acct_db",
    ]
    write(layout.home / "slurmdbd.conf", "\n".join([*dbd, ""]))


def mariadbd(program: str, layout: Layout) -> list[str]:
    """The command line; it does not go into the background by itself."""
    return ["setsid", "--fork", program, f"--defaults-file={layout.home}/db/my.cnf"]


def make_tables(program: str, layout: Layout, env: Mapping[str, str]) -> None:
    """Have the database's own tables made; takes two seconds. Raises EnvironmentFault."""
    home = layout.home / "db"
    argv = [program, f"--defaults-file={home}/my.cnf", "--bootstrap", "--skip-networking"]
    with (home / "boot.sql").open("rb") as statements:
        try:
            code = subprocess.run(
                argv, env=dict(env), stdin=statements, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, timeout=30, check=False,
            ).returncode  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EnvironmentFault(f"MariaDB made no tables: {error}") from error
    if code:
        hint = f"see {layout.log}/mariadbd.log"
        raise EnvironmentFault("MariaDB made no tables", hint=hint)


def wait_for_database(layout: Layout, deadline: float) -> None:
    """Until it takes connections: slurmdbd looks again only every five seconds.

    `deadline`: of the monotonic clock. Raises EnvironmentFault.
    """
    path = layout.log / "mariadbd.log"
    while time.monotonic() < deadline:
        if path.exists() and "ready for connections" in path.read_text(errors="replace"):
            return
        time.sleep(0.05)
    raise EnvironmentFault("MariaDB did not start in time", hint=f"see {path}")


def enrol(
    config: SandboxConfig, ask: Callable[[list[str]], str], user: str, deadline: float
) -> None:
    """Tell slurmdbd of the cluster, its user and its QOS; `ask` runs a command.

    Before slurmctld starts, which wants a cluster that is known. Raises EnvironmentFault.
    """
    while True:
        try:
            known = ask(["sacctmgr", "-n", "-P", "show", "cluster", "format=cluster"])
            break
        except SlurmError as error:
            if time.monotonic() > deadline:
                raise EnvironmentFault(f"slurmdbd does not answer: {error.message}") from error
            time.sleep(0.1)
    if "sandbox" in known.split():
        return
    ask(["sacctmgr", "-i", "add", "cluster", "sandbox"])
    for name, qos in config.qos.items():
        limits = [f"GraceTime={round(qos.grace)}", f"PreemptMode={qos.preempt_mode}"]
        ask(["sacctmgr", "-i", "add", "qos", name, f"Priority={qos.priority}", *limits])
    for name, qos in config.qos.items():
        if qos.preempts:
            names = ",".join(qos.preempts)
            ask(["sacctmgr", "-i", "modify", "qos", name, "set", f"Preempt={names}"])
    all_qos = ",".join(["normal", *config.qos])
    # root has an account of its own with every cluster
    ask(["sacctmgr", "-i", "modify", "cluster", "sandbox", "set", f"QOS={all_qos}"])
    ask(["sacctmgr", "-i", "add", "account", _ACCOUNT])
    ask(["sacctmgr", "-i", "add", "user", user, f"Account={_ACCOUNT}", f"QOS={all_qos}"])
