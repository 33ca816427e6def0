"""What SlurmUser may do as the owner of a service: tell that service, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexslurm.cli.hooks_commands import beside_warnings, hooks
from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site
from flexslurm.slurm.hook_files import HOOKS, hook_text

SOMEBODY = 65534
ROOT = os.geteuid() == 0
TELLER = "echo"
"""In place of flexslurm: its arguments come back."""


@pytest.fixture
def place() -> Iterator[Path]:
    """Where the site keeps services: a directory that everybody may enter."""
    where = Path(tempfile.mkdtemp(prefix="as-owner-", dir=_open_to_all()))
    where.chmod(0o755)
    yield where.resolve()
    shutil.rmtree(where)


def _open_to_all() -> Path:
    """The temporary directory, unless it is the tester's own."""
    for where in (Path(tempfile.gettempdir()).resolve(), Path("/tmp"), Path("/var/tmp")):
        if all(above.stat().st_mode & 0o001 for above in (where, *where.parents)):
            return where
    raise AssertionError("there is no temporary directory that everybody may enter")


@pytest.fixture
def service(place: Path) -> Path:
    """A directory of a user who is not root."""
    path = place / "services" / "chat"
    path.mkdir(parents=True)
    if ROOT:
        os.chown(path, SOMEBODY, -1)
    return path


def run(
    place: Path, *arguments: str, uid: int = SOMEBODY, teller: Sequence[str] = (TELLER,)
) -> tuple[int, str]:
    """As the hooks' sudo starts it."""
    site = parse_section(
        Site, f"name: x\ngpu_types: {{a: {{}}}}\npaths: {{shared_dir: {place}}}\n", "s"
    )
    text = hook_text("as_owner.sh", site, list(teller), "/etc/slurm/flexslurm")
    done = subprocess.run(
        ["sh", "-s", "--", *arguments], input=text, capture_output=True, text=True, check=False,
        cwd="/", user=uid if ROOT else None,
    )  # fmt: skip
    return done.returncode, (done.stdout if done.returncode == 0 else done.stderr).strip()


def test_it_tells_the_owner_s_service(place: Path, service: Path) -> None:
    shown = run(place, "job-end", "epilog-slurmctld", str(service), "7", "", "2")
    assert shown == (
        0,
        "notify job-end --within 4 --source epilog-slurmctld "
        f"--service-dir {service} --job 7 --restarts 2",
    )
    (place / "link").symlink_to(service)
    nodes = "n[1-3],m.x_4"
    shown = run(place, "node-down", "strigger", str(place / "link"), "", nodes, "")
    assert shown == (
        0, f"notify node-down --within 4 --source strigger --service-dir {service} --nodes {nodes}"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({0: "job-end --uid 0"}, "there is no such event"),
        ({0: "stop"}, "there is no such event"),
        ({1: "x"}, "there is no such hook"),
        ({2: "services/chat"}, "the directory is not an absolute path"),
        ({2: "--help"}, "the directory is not an absolute path"),
        ({2: "/nonexistent/chat"}, "that is not a directory of "),
        ({2: "/etc"}, "that is not a directory of "),
        ({3: "7 --uid 0"}, "that is no job id"),
        ({4: "n1;id"}, "that is no list of nodes"),
        ({4: "n1\n--uid"}, "that is no list of nodes"),
        ({5: "-1"}, "that is no number of restarts"),
        ({6: "--uid"}, "it takes six arguments, and got 7"),
    ],
)
def test_all_else_is_refused(place: Path, service: Path, changed: dict[int, str], why: str) -> None:
    arguments = ["job-end", "epilog-slurmctld", str(service), "7", "", ""]
    for index, value in changed.items():
        arguments[index : index + 1] = [value]
    code, said = run(place, *arguments)
    assert code == 64 and said.startswith(f"flexslurm as_owner: {why}"), said


def test_only_where_services_are_kept(place: Path, service: Path) -> None:
    code, said = run(place / "services" / "others", "job-end", "strigger", str(service), "", "", "")
    assert (code, said) == (64, "flexslurm as_owner: services are not kept there")
    around = service / ".." / ".." / ".."
    code, said = run(place, "job-end", "strigger", str(around), "", "", "")
    assert code == 64 and "that is not a directory of " in said


def test_nothing_is_looked_for_in_the_home_that_sudo_may_have_kept(
    place: Path, service: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python runs what lies in HOME/.local: as the owner, that must not be SlurmUser's to say."""
    monkeypatch.setenv("HOME", str(place))
    arguments = ("job-end", "strigger", str(service), "", "", "")
    code, said = run(place, *arguments, teller=["sh", "-c", 'echo "$HOME"'])
    assert code == 0 and said != str(place)


@pytest.mark.skipif(not ROOT, reason="only root can become others")
@pytest.mark.parametrize(("uid", "why"), [(0, "it does nothing as root"), (1, "that is not a dir")])
def test_root_and_others_are_refused(place: Path, service: Path, uid: int, why: str) -> None:
    code, said = run(place, "job-end", "strigger", str(service), "", "", "", uid=uid)
    assert code == 64 and said.startswith(f"flexslurm as_owner: {why}")


def test_the_line_for_sudoers(tmp_path: Path) -> None:
    text = hook_text("flexslurm.sudoers", None, ["/opt/flexslurm"], "/etc/slurm, old/x*")
    rule = next(line for line in text.splitlines() if not line.startswith("#"))
    assert rule == (r"slurm ALL=(ALL, !root, !#0) NOPASSWD: /etc/slurm\,\ old/x\*/as_owner.sh")
    checker = shutil.which("visudo", path="/usr/sbin:/usr/bin")
    if checker is not None:  # where there is sudo, it reads it
        (tmp_path / "rule").write_text(text)
        subprocess.run([checker, "-cf", str(tmp_path / "rule")], check=True, capture_output=True)


# ------------------------------------------------------------------------------- who calls it


@pytest.fixture
def called(tmp_path: Path) -> Path:
    """Programs of a host whose SlurmUser is not root; what sudo is asked for goes into a file."""
    asked = tmp_path / "asked"
    programs = {
        "id": "echo 64030",
        "sudo": f'printf "%s\\n" "$*" >{asked}.part; mv {asked}.part {asked}',
        "timeout": 'shift 3; exec "$@"',  # however slow the machine is
        "squeue": "echo 1000 flexslurm:/home/al/svc; echo 1000 mine",
    }
    (tmp_path / "bin").mkdir()
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("packaged", "arguments", "asked"),
    [
        ("prolog_slurmctld.sh", (), "job-start prolog-slurmctld /home/al/svc 7  "),
        ("epilog_slurmctld.sh", (), "job-end epilog-slurmctld /home/al/svc 7  2"),
        ("strigger.sh", ("n[1-2]",), "node-down strigger /home/al/svc  n[1-2] "),
    ],
)
def test_slurmuser_asks_sudo_for_the_script_alone(
    called: Path, packaged: str, arguments: tuple[str, ...], asked: str
) -> None:
    text = hook_text(packaged, None, ["/nonexistent/flexslurm"], str(called))
    hook = called / "node-down.sh"
    hook.write_text(text.replace("PATH=/usr/sbin", f"PATH={called}/bin:/usr/sbin"))
    hook.chmod(0o755)
    env = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_COMMENT": "flexslurm:/home/al/svc",
    }  # fmt: skip
    subprocess.run([str(hook), *arguments], env=env, check=True, timeout=60)
    deadline = time.monotonic() + 120
    while not (called / "asked").exists() and time.monotonic() < deadline:
        time.sleep(0.02)  # the telling goes on without the hook
    told = (called / "asked").read_text()
    assert told == f"-n -u #1000 {called}/as_owner.sh {asked}\n"


@pytest.mark.skipif(not ROOT, reason="only root can give a file away")
def test_a_script_that_is_not_root_s_is_warned_of(place: Path) -> None:
    strigger, epilog = HOOKS["strigger"], HOOKS["epilog"]
    (place / "as_owner.sh").touch()
    above = [path for path in place.parents if path.stat().st_uid != 0]
    assert not above and beside_warnings(strigger, place) == []
    os.chown(place / "as_owner.sh", SOMEBODY, -1)
    [warning] = beside_warnings(strigger, place)
    assert warning.startswith(f"{place}/as_owner.sh or a directory above it is not root's")
    assert beside_warnings(epilog, place) == []


@pytest.mark.skipif(not ROOT, reason="only root's files are not warned of")
@pytest.mark.parametrize(
    ("mode", "group", "warned"),
    [(0o755, SOMEBODY, False), (0o775, 0, False), (0o775, SOMEBODY, True), (0o757, 0, True)],
)
def test_a_script_that_others_may_replace_is_warned_of(
    place: Path, mode: int, group: int, warned: bool
) -> None:
    """As /etc/slurm is where SlurmUser's group may write there."""
    (place / "slurm").mkdir()
    script = place / "slurm" / "as_owner.sh"
    script.touch(0o755)
    for path in (place / "slurm", script):
        for other in (place / "slurm", script):
            os.chown(other, 0, 0)
            other.chmod(0o755)
        os.chown(path, 0, group)
        path.chmod(mode)
        assert bool(beside_warnings(HOOKS["strigger"], place / "slurm")) is warned, path


def test_what_hooks_share_stays_until_the_last_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm that could name them
    run = CliRunner().invoke
    for name in ("epilog_slurmctld", "strigger", "epilog"):
        assert run(hooks, ["install", name, "--to", str(tmp_path)]).exit_code == 0
    shared = [tmp_path / installed for _, installed in HOOKS["strigger"].beside]
    assert [path.stat().st_mode & 0o777 for path in shared] == [0o755, 0o644]
    for name, left in (("epilog_slurmctld", True), ("strigger", False)):
        done = run(hooks, ["uninstall", name, "--to", str(tmp_path), "--force"])
        assert done.exit_code == 0, done.output
        assert [path.exists() for path in shared] == [left, left]
    assert (tmp_path / "epilog.sh").exists()
