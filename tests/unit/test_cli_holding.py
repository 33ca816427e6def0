"""What the launcher of an allocation says at the end of the service it has waited for."""

from __future__ import annotations

import signal
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flexslurm.cli import holding, stopping
from flexslurm.cli.holding import hold_until_end
from flexslurm.errors import ServiceError
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilots, ServiceDir


class Ended:
    """A head that is over."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code

    def states(self, job_ids: Sequence[str]) -> dict[str, JobInfo]:
        return {
            job: JobInfo(id=job, state=JobState.COMPLETED, exit_code=self.exit_code)
            for job in job_ids
        }


def held(folder: Path, exit_code: int, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    directory = ServiceDir(folder / "chat")
    directory.create()
    directory.write_pilots(Pilots("allocation", head_job="local-7", allocation="7"))
    plan: Any = types.SimpleNamespace(
        directory=directory, site=None, service=types.SimpleNamespace(name="chat")
    )
    monkeypatch.setattr(holding, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(holding, "job_owner", lambda *_: Ended(exit_code))
    monkeypatch.setattr(stopping, "_cancel", lambda *_: None)
    monkeypatch.setattr(stopping, "_jobs", lambda *_: None)
    try:
        hold_until_end(plan, said.append, 0.0)
    finally:
        assert directory.stopped()


def test_a_service_that_was_stopped_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    held(tmp_path, 0, monkeypatch, said)
    assert said == ["the service was stopped"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_whatever_ends_the_launcher_stops_the_service(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal is waiting already when the launcher begins to hold."""
    said: list[str] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        signal.raise_signal(number)
        held(tmp_path, 0, monkeypatch, said)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert said[0] == f"{number.name}: stopping"


def test_a_head_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with pytest.raises(ServiceError, match="exit code 8") as caught:
        held(tmp_path, 8, monkeypatch, said)
    assert caught.value.hint == f"why: flexslurm logs --service-dir {tmp_path / 'chat'} head"
    assert said == ["the head has failed: what is left is cancelled"]
