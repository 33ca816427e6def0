"""The command line: quick, lazy, and every end of a command in words with its exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest

from flexslurm import errors
from flexslurm.cli import main as cli_main
from flexslurm.cli.reporting import report
from flexslurm.wire.service_dir import Pilots, ServiceDir

HEAVY = {
    "torch", "deepspeed", "transformers", "pydantic", "rich", "zmq", "yaml", "numpy", "scipy",
    "fastapi", "uvicorn", "submitit", "msgspec", "asyncio",
}  # fmt: skip


def flexslurm(
    *arguments: str, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flexslurm", *arguments],
        capture_output=True, text=True, timeout=200, cwd=cwd, env=os.environ | environ,
    )  # fmt: skip


@pytest.mark.parametrize("target", [target for target, _ in cli_main.COMMANDS.values()])
def test_every_command_of_the_table_loads_and_has_help(target: str) -> None:
    command = cli_main.load(target)
    assert command.help
    context = click.Context(command, info_name=command.name)
    assert command.get_help(context).startswith("Usage:")


def imported(arguments: list[str]) -> set[str]:
    """The packages that a command line has imported when it is done."""
    program = (
        "import sys\n"
        "from flexslurm.cli.main import run\n"
        f"run({arguments!r})\n"
        "print('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["--version"]])
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    assert not imported(arguments) & HEAVY


def test_a_status_imports_no_schemas(tmp_path: Path) -> None:
    directory = ServiceDir(tmp_path)
    directory.create()
    directory.service.write_text("name: chat\n")
    directory.write_pilots(Pilots("slurm"))
    found = imported(["status", "--service-dir", str(tmp_path)])
    assert found & HEAVY == {"zmq", "msgspec", "asyncio"}


@pytest.mark.long
def test_help_is_quick() -> None:
    """150 ms is the promise. Processor time is what we use; wall time is that plus the load."""
    took = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert flexslurm("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.150


@pytest.mark.parametrize("command", ["drain", "cordon"])
def test_users_are_told_of_pilots(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert "PILOT" in said and "fragment" not in said.lower()


def test_help_lists_every_command() -> None:
    shown = flexslurm("--help", COLUMNS="120").stdout
    for name, (_, words) in cli_main.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(words)}$", shown, re.M)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["stauts"], "did you mean 'status'?"),
        (["xyzzy"], "commands: launch, status"),
        (["config", "shwo"], "did you mean 'show'?"),
        (["version", "--al"], "did you mean '--all'?"),
        (["--vesion"], "did you mean '--version'?"),
        (["version", "extra"], "see: flexslurm version --help"),
        (["config", "schema", "sevice"], "see: flexslurm config schema --help"),
        (["config", "show"], "see: flexslurm config show --help"),
    ],
)
def test_wrong_usage_is_two_lines_and_exit_2(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("flexslurm: error: ")
    assert hint in lines[1]


@pytest.mark.parametrize("arguments", [[], ["config"], ["model"]])
def test_a_group_alone_shows_its_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.run(arguments) == 2
    assert capsys.readouterr().err.startswith("Usage: flexslurm")


def _tree(kind: type[errors.FlexslurmError]) -> list[type[errors.FlexslurmError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _tree(child))]


@pytest.mark.parametrize("kind", _tree(errors.FlexslurmError), ids=lambda kind: kind.__name__)
def test_every_error_is_message_hint_and_exit_code(
    kind: type[errors.FlexslurmError], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(kind("it went wrong", hint="do this")) == kind.exit_code
    assert capsys.readouterr().err == "flexslurm: error: it went wrong\n  do this\n"


def test_exit_codes_are_those_of_the_table() -> None:
    table = {
        errors.ConfigError: 3, errors.ModelError: 4, errors.CapacityError: 5,
        errors.SlurmError: 6, errors.SlurmUnavailable: 6, errors.ServiceError: 7,
        errors.ServiceUnreachable: 7, errors.ServiceExists: 7, errors.EnvironmentFault: 8,
        errors.DeadlineExceeded: 9,
    }  # fmt: skip
    assert {kind: kind.exit_code for kind in table} == table


def test_interruption_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(KeyboardInterrupt()) == 130
    assert report(click.Abort()) == 130
    assert capsys.readouterr().err == "flexslurm: interrupted\n" * 2


def test_a_bug_saves_its_traceback_for_this_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("FLEXSLURM_DEBUG", raising=False)
    try:
        _ = 1 / 0
    except ZeroDivisionError as error:
        assert report(error) == 1
    err = capsys.readouterr().err
    assert err.startswith("flexslurm: error: this is a bug in flexslurm: ZeroDivisionError")
    assert "Traceback" not in err
    found = re.search(r"the traceback is in (\S+);", err)
    assert found is not None
    file = Path(found[1])
    assert "ZeroDivisionError" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_bug_is_shown_where_debugging_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("FLEXSLURM_DEBUG", "1")
    assert report(AssertionError("never so")) == 1
    assert "AssertionError: never so" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on device"),
        (OSError(errno.EIO, "Input/output error"), "input/output error"),
        (OSError(errno.ESTALE, "Stale file handle"), "stale file handle"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), "/x/y: permission denied"),
    ],
)
def test_what_the_machine_lacks_is_8(
    error: OSError, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error) == 8
    assert capsys.readouterr().err == f"flexslurm: error: {words}\n"


def test_head_ends_us_silently() -> None:
    """What reads our output goes away at once; nothing may be said about it."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "flexslurm", "--help"],
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=200,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [["--version"], ["config", "schema", "service"]])
def test_a_full_disk_is_said(command: list[str], unbuffered: str) -> None:
    """Once: Python does not say it again when it exits with what is left in its buffer."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "flexslurm", *command],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=200,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (8, "flexslurm: error: no space left on device\n")


def test_a_terminal_without_our_letters_gets_others(tmp_path: Path) -> None:
    service = tmp_path / "größe→.yaml"
    service.write_text("name: x", encoding="utf-8")
    done = flexslurm(
        "config", "show", "--service", str(service), PYTHONIOENCODING="ascii", PYTHONUTF8="0"
    )
    assert done.returncode == 3
    assert "this key is required" in done.stderr


def test_version_names_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(["version", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"flexslurm \d+\.\d+\.\d+", lines[0])
    assert any(re.fullmatch(r"torch \S+", line) for line in lines)


def test_completion_offers_the_commands() -> None:
    done = flexslurm(_FLEXSLURM_COMPLETE="bash_complete", COMP_WORDS="flexslurm st", COMP_CWORD="1")
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == {"status", "stop"}


def test_json_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("name: here\ngpu_types: {a: {memory: 1GiB}}\n")
    assert cli_main.run(["config", "show", "--site", str(site), "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["site"]}
    assert rows["gpu_types.a.memory"] == {
        "key": "gpu_types.a.memory",
        "value": 2**30,
        "origin": "file",
        "source": f"{site}:2",
    }
    assert rows["slurm.kill_wait"]["origin"] == "default"


SERVICE = """\
name: chat
model: {path: .}
pool: [{partition: p, gpu_type: card, gpus: 1}]
"""


@pytest.fixture
def settings(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "service.yaml").write_text(SERVICE)
    (tmp_path / "site.yaml").write_text(
        "name: here\ngpu_types:\n  card: {model: a100-80}\npartitions: {p: {}}\n"
    )
    return str(tmp_path / "service.yaml"), str(tmp_path / "site.yaml")


def test_config_show_names_the_catalogue(
    settings: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.run(["config", "show", "--site", settings[1]]) == 0
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith("gpu_types.card.memory ")]
    assert line.split(maxsplit=2)[1:] == ["80GiB", "default (catalogue: a100-80)"]


def test_config_show_of_what_was_changed_only(
    settings: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    service, _ = settings
    arguments = ["config", "show", "--service", service, "--changed", "--set", "slo.ttft=2s"]
    assert cli_main.run(arguments) == 0
    shown = {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]}
    assert shown == {
        "name", "model.path", "pool.0.partition", "pool.0.gpu_type", "pool.0.gpus", "slo.ttft"
    }  # fmt: skip


def test_config_check_says_yes_or_where(
    settings: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    service, site = settings
    arguments = ["config", "check", "--service", service, "--site", site]
    assert cli_main.run(arguments) == 0
    assert "fits" in capsys.readouterr().out
    assert cli_main.run([*arguments, "--set", "site.gpu_types.card.model=a1000"]) == 3
    assert "--set: gpu_types.card.model: " in capsys.readouterr().err
    assert cli_main.run([*arguments, "--set", "pool.0.partition=q"]) == 3
    err = capsys.readouterr().err
    assert "--set: pool.0.partition: the site 'here' has no partition 'q'" in err


@pytest.mark.parametrize("name", ["service", "site", "sandbox"])
def test_config_schema_prints_a_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(["config", "schema", name]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}
