"""`flexslurm notify` as hooks run it: what arrives, and that nothing makes it fail or hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexslurm.messages import AskDone, AskRefused, Message, NotifyAsk
from flexslurm.wire.service_dir import HeadAddress, ServiceDir
from flexslurm.wire.transport import HeadSocket

# What hangs here hangs for good. The bound is the command's own; a busy machine starts it late.
LIMIT_S = 60.0
PATIENT = ("--within", "60")
"""For what must arrive, however busy the machine is."""
SPARE_S = 30
"""Of that, to say what went wrong: a tenth of a second is too little for a busy machine."""
A_WHILE = ("--within", str(SPARE_S + 2))
"""For what is never answered, and must have been tried."""


def run(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    spare = f"from flexslurm.cli import notify_command; notify_command._SPARE_S = {SPARE_S}"
    program = f"{spare}; from flexslurm.cli.main import main; main()"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, "notify", *arguments],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    return done, time.monotonic() - began


@pytest.fixture
def directory(tmp_path: Path) -> ServiceDir:
    directory = ServiceDir(tmp_path / "service")
    directory.create()
    return directory


def publish(directory: ServiceDir, port: int) -> None:
    directory.publish_head(
        HeadAddress("h-1", f"tcp://127.0.0.1:{port}", "http://127.0.0.1:1", "n", os.getpid())
    )


async def hear(
    directory: ServiceDir, answer: Message, *arguments: str
) -> tuple[list[Message], str]:
    """What a head hears of one run, and what the run says."""
    heard: list[Message] = []

    def receive(sender: str, message: Message) -> None:
        heard.append(message)
        head.send(sender, answer)

    head = HeadSocket(directory.keys(), receive, host="127.0.0.1")
    try:
        publish(directory, head.port)
        where = ("--service-dir", str(directory.path))
        done, _ = await asyncio.to_thread(run, *arguments, *PATIENT, *where)
    finally:
        head.close()
    assert done.returncode == 0
    return heard, done.stderr


def test_the_head_hears_it(directory: ServiceDir) -> None:
    heard, said = asyncio.run(
        hear(
            directory, AskDone(), "job-leaving", "--job", "7", "--grace", "12", "--source", "test",
            "--nodes", "n[1-2]", "--restarts", "3",
        )
    )  # fmt: skip
    assert heard == [
        NotifyAsk(
            event="job-leaving", source="test", job_id="7", nodes=("n1", "n2"), grace_s=12.0,
            restarts=3,
        )
    ]  # fmt: skip
    assert said == ""


def test_a_refusal_is_said_and_no_failure(directory: ServiceDir) -> None:
    _, said = asyncio.run(hear(directory, AskRefused(message="not today"), "node-up"))
    assert "not today" in said


def test_strange_keys_are_not_heard(directory: ServiceDir, tmp_path: Path) -> None:
    other = ServiceDir(tmp_path / "other")
    other.create()

    async def go() -> tuple[list[Message], subprocess.CompletedProcess[str]]:
        heard: list[Message] = []
        head = HeadSocket(directory.keys(), lambda _, m: heard.append(m), host="127.0.0.1")
        try:
            publish(other, head.port)
            where = ("--service-dir", str(other.path))
            done, _ = await asyncio.to_thread(run, "node-up", *A_WHILE, *where)
        finally:
            head.close()
        return heard, done

    heard, done = asyncio.run(go())
    assert heard == [] and done.returncode == 0 and done.stderr


def test_a_dead_service_delays_nobody(directory: ServiceDir) -> None:
    with socket.socket() as silent:  # accepts connections in the kernel, and never says a word
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        publish(directory, silent.getsockname()[1])
        done, took_s = run("job-end", "--job", "7", "--service-dir", str(directory.path))
    assert done.returncode == 0 and took_s < LIMIT_S
    assert "answer" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["job-end", "--service-dir", "/nonexistent"],
        ["job-end"],
        ["earthquake", "--service-dir", "/tmp"],
        ["node-down", "--service-dir", "/tmp", "--nodes", "n[3"],
        ["node-down", "--service-dir", "/tmp", "--no-such-option"],
        ["job-leaving", "--service-dir", "/tmp", "--grace", "soon"],
    ],
)
def test_nothing_makes_it_fail(arguments: list[str]) -> None:
    done, took_s = run(*arguments)
    assert done.returncode == 0 and took_s < LIMIT_S
    assert done.stderr.startswith("flexslurm notify:") and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_directory_that_never_answers(tmp_path: Path) -> None:
    """A named pipe in place of the keys hangs its reader, as a file server can."""
    directory = ServiceDir(tmp_path / "hangs")
    directory.create()
    publish(directory, 1)
    (directory.path / "keys.json").unlink()
    os.mkfifo(directory.path / "keys.json", 0o600)
    done, took_s = run("job-end", "--job", "7", "--service-dir", str(directory.path))
    assert done.returncode == 0 and took_s < LIMIT_S
    assert "no answer" in done.stderr


def test_a_full_or_closed_standard_error_holds_nobody_up() -> None:
    """The hook's standard error is a pipe that nobody reads, or is closed."""
    program = "import sys; from flexslurm.cli.main import main; main()"
    argv = [sys.executable, "-c", program, "notify", "job-end", "--service-dir", "/nonexistent"]
    out, into = os.pipe()
    os.set_blocking(into, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(into, b"x" * 4096)
    os.set_blocking(into, True)
    try:
        began = time.monotonic()
        done = subprocess.run(argv, stdout=into, stderr=into, timeout=200, check=False)
        assert done.returncode == 0 and time.monotonic() - began < LIMIT_S
    finally:
        os.close(out)
        os.close(into)
    began = time.monotonic()
    closed = ["sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", *argv]
    done = subprocess.run(closed, timeout=200, check=False)
    assert done.returncode == 0 and time.monotonic() - began < LIMIT_S


def _exposed(directory: ServiceDir) -> None:
    (directory.path / "keys.json").chmod(0o644)


def _damaged(directory: ServiceDir) -> None:
    (directory.path / "keys.json").write_bytes(b"\xff\x00 no keys")


def _no_keys(directory: ServiceDir) -> None:
    (directory.path / "keys.json").unlink()


def _strange_head(directory: ServiceDir) -> None:
    directory.publish_head(HeadAddress("h", "nonsense://[", "x", "n", 1))


def _head_is_a_directory(directory: ServiceDir) -> None:
    (directory.path / "head.json").unlink()
    (directory.path / "head.json").mkdir()


@pytest.mark.parametrize(
    "spoil", [_exposed, _damaged, _no_keys, _strange_head, _head_is_a_directory]
)
def test_a_damaged_service_is_told_of_and_fails_no_hook(
    spoil: Callable[[ServiceDir], None], directory: ServiceDir
) -> None:
    directory.keys()
    publish(directory, 1)
    spoil(directory)
    where = ("--service-dir", str(directory.path))
    done, took_s = run("job-end", "--job", "7", *where, *PATIENT)
    assert done.returncode == 0 and took_s < LIMIT_S
    assert done.stderr.startswith("flexslurm notify:") and "Traceback" not in done.stderr
    assert "no answer" not in done.stderr, "what is wrong is said"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be told to stay root")
@pytest.mark.parametrize("more", [("--uid", "0"), ()])
def test_nobody_stays_root_through_sudo(
    directory: ServiceDir, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_UID", "64030")
    done, _ = run("job-end", "--service-dir", str(directory.path), *more, *PATIENT)
    assert done.returncode == 0 and "root's services" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("uid", ["65534", "4294967290", "12345678901234567890"])
def test_root_reads_nothing_as_root(uid: str, directory: ServiceDir) -> None:
    """The keys are root's, in a directory of root: as somebody else they cannot be read."""
    directory.keys()
    publish(directory, 1)
    done, took_s = run("job-end", "--service-dir", str(directory.path), "--uid", uid, *PATIENT)
    assert done.returncode == 0 and took_s < LIMIT_S and done.stderr
    assert "no answer" not in done.stderr
    assert "Traceback" not in done.stderr
