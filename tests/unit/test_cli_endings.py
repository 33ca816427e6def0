"""Signals that end a command: raised once where it is, never in the middle of cleaning up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexslurm.cli import main as cli_main
from flexslurm.cli.endings import (
    ENDING,
    EndedBySignal,
    endings_raise,
    endings_wait,
    scratch_directory,
)

KINDS = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: EndedBySignal,
    signal.SIGHUP: EndedBySignal,
}


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in ENDING]
    yield
    assert [signal.getsignal(number) for number in ENDING] == before


@pytest.mark.parametrize("number", ENDING)
def test_the_first_signal_raises_and_later_ones_do_not(number: signal.Signals) -> None:
    steps = []
    with pytest.raises(KINDS[number]), endings_raise():
        try:
            signal.raise_signal(number)
            steps.append("went on")
        finally:
            for later in ENDING:
                signal.raise_signal(later)
            steps.append("cleaned up")
    assert steps == ["cleaned up"]


def test_an_inner_one_leaves_it_to_the_outer_one() -> None:
    with pytest.raises(EndedBySignal), endings_raise():
        try:
            with endings_raise():
                signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # passed over: it is ending


@pytest.mark.parametrize("number", ENDING)
def test_what_waits_is_whole_and_then_ends(number: signal.Signals) -> None:
    steps = []
    with pytest.raises(KINDS[number]), endings_raise():
        with endings_wait(), endings_raise():
            signal.raise_signal(number)
            steps.append("whole")
        steps.append("went on")
    assert steps == ["whole"]


def test_what_was_ignored_stays_ignored() -> None:
    """As below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with endings_raise():
            signal.raise_signal(signal.SIGHUP)
            with endings_wait():
                signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_may_use_them_too() -> None:
    done = []

    def go() -> None:
        with endings_raise(), endings_wait():
            done.append(True)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    assert done == [True]


@pytest.mark.parametrize("number", ENDING)
def test_a_scratch_directory_goes_whenever_the_signal_comes(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is made, while it is, in use, and while it is removed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    import shutil
    import tempfile

    made, removed = tempfile.mkdtemp, shutil.rmtree
    for moment in ("making", "using", "removing"):

        def making(prefix: str) -> str:
            path = made(prefix=prefix)
            if moment == "making":  # noqa: B023 - used within the turn
                signal.raise_signal(number)
            return path

        def removing(path: Path, ignore_errors: bool) -> None:
            if moment == "removing":  # noqa: B023 - used within the turn
                signal.raise_signal(number)
            removed(path, ignore_errors=ignore_errors)

        monkeypatch.setattr("tempfile.mkdtemp", making)
        monkeypatch.setattr("shutil.rmtree", removing)
        with pytest.raises(KINDS[number]), endings_raise(), scratch_directory("x-") as path:
            (path / "file").write_text("")
            if moment == "using":
                signal.raise_signal(number)
        assert list(tmp_path.iterdir()) == [], moment


def test_a_scratch_directory_may_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ZeroDivisionError), scratch_directory("x-", keep=True):
        _ = 1 / 0
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM"),
     (signal.SIGHUP, 129, "ended by SIGHUP")],
)  # fmt: skip
def test_a_command_that_a_signal_ends_says_so(
    number: signal.Signals, code: int, words: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(cli_main.cli, "invoke", lambda _: signal.raise_signal(number))
    assert cli_main.run(["version"]) == code
    assert capsys.readouterr().err == f"flexslurm: {words}\n"


def test_a_process_that_a_signal_ends_has_its_code() -> None:
    """The whole program, ended while it waits for what it reads."""
    waits = "lambda _: (print('here', flush=True), sys.stdin.read())"
    program = f"import sys; from flexslurm.cli import main; main.cli.invoke = {waits}; main.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "version"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert (process.returncode, errors) == (143, b"flexslurm: ended by SIGTERM\n")
