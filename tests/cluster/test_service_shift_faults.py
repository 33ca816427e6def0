"""Whatever breaks in whatever phase of a shift: no stream is disturbed, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexslurm.cli.launch import log_tail
from flexslurm.errors import ServiceUnreachable
from flexslurm.messages import StatusAnswer
from tests.service_harness import (
    SLOWLY,
    check,
    finish,
    oracle,
    some_asks,
    tiny_service,
    tiny_site,
)
from tests.shift_ground import Ground, alive, ground, layout, serves

pytestmark = [pytest.mark.shared_service, pytest.mark.timeout(300)]
LONG = 120
SMALL, LARGE = layout(2), layout(2, 2)
PHASES = ("shift.prepare", "shift.install", "shift.transfer", "shift.cutover", "shift.commit",
          "shift.close")  # fmt: skip


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the light checkpoints go; small enough to be filled where we may mount one."""
    path = tmp_path_factory.mktemp("kept")
    mounted = os.geteuid() == 0
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "kept", path], check=True)
    yield path
    if mounted:
        subprocess.run(["umount", path], check=True)


@pytest.fixture(scope="module")
def field(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, disk: Path
) -> Iterator[Ground]:
    """Two nodes of two virtual GPUs: from TP 2 on one node to a pipeline over both, and back."""
    times = {"install_timeout": "10s", "lost_after": "6s"}
    settings = tiny_service(tiny_model, [("a100", 2, 2)], **times)
    settings["executor"] = {"checkpoint_dir": str(disk)}
    expected = oracle(tiny_model, some_asks(4, LONG))
    home = tmp_path_factory.mktemp("faults")
    with ground(home, tiny_model, settings, tiny_site(SLOWLY), expected, LONG) as field:
        field.shift_to(LARGE)
        yield field


@pytest.fixture
def small(field: Ground) -> Iterator[Ground]:
    """In the small gear with all GPUs there, and nothing left; afterwards too."""
    field.restore(2, SMALL)
    yield field
    field.restore(2, SMALL)


def victim(field: Ground, who: str) -> int:
    """A worker of the small gear, or one that only the large one has."""
    seats = field.used if who == "source" else field.idle
    if not seats()[0].gpu.pid:  # it has ended, and a shift that wants it starts another
        field.shift_to(LARGE)
        field.shift_to(SMALL)
    field.service.until(lambda status: seats()[0].gpu.pid != 0)
    return seats()[0].gpu.pid


# ------------------------------------------------------------------ every day


def test_workers_die_before_and_after_the_last_blocks(small: Ground) -> None:
    for phase, who in (("shift.install", "target"), ("shift.cutover", "source")):
        pid = victim(small, who)
        assert small.strike(f"{phase}:1:kill={pid}", to=LARGE)
        assert not alive(pid)
        small.restore(2, SMALL)


def test_links_that_break_and_lie_cost_bytes_and_nothing_else(small: Ground) -> None:
    lines = small.strike("transfer.chunk:2:raise, transfer.corrupt:3:spoil", to=LARGE)
    assert [line["outcome"] for line in lines] == ["committed"]
    assert lines[0]["sequences_recomputed"] == 0, lines
    small.restore(2, SMALL)
    lines = small.strike("transfer.chunk:1+:raise", to=LARGE)  # not one chunk comes, ever
    assert [line["outcome"] for line in lines] == ["committed"]
    small.restore(2, SMALL)


def test_a_worker_that_dies_as_it_closes_the_old_epoch(small: Ground) -> None:
    pid = victim(small, "source")
    small.strike(f"retire@{pid}:1:exit", to=LARGE)
    assert not alive(pid)


def test_an_install_that_fails_leaves_the_old_gear_serving(small: Ground) -> None:
    lines = small.strike("install.groups:1:raise", to=LARGE)
    assert "injected at install.groups" in str(lines[0]["outcome"])
    last = small.service.until(lambda status: serves(status, LARGE)).shifts[-1]
    assert last["outcome"] == "committed" and last["to"] == LARGE
    assert last["sequences_recomputed"] == 0, "an abort before the cut-over costs nothing"


@pytest.mark.skipif(os.geteuid() != 0, reason="it fills a file system that only root can mount")
def test_a_full_disk_costs_the_light_checkpoint_and_nothing_else(small: Ground, disk: Path) -> None:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    try:
        asks, threads = small.begin()
        line = small.shift_to(LARGE)
        finish(threads, 60)
        check(asks, small.expected)
    finally:
        filler.unlink()
    assert line["outcome"] == "committed" and line["sequences_recomputed"] == 0
    said = f"no light checkpoint of epoch {line['epoch']:.0f}"
    logs = small.service.directory.logs / "head"
    small.service.until(lambda status: said in log_tail(logs, lines=200))  # it is written beside


# ------------------------------------------------------------------ every phase, every fault


@pytest.mark.slow
@pytest.mark.parametrize("who", ["source", "target"])
@pytest.mark.parametrize("half", [PHASES[:3], PHASES[3:]], ids=["serving", "pausing"])
def test_a_worker_is_killed(small: Ground, half: tuple[str, ...], who: str) -> None:
    for phase in half:
        pid = victim(small, who)
        assert small.strike(f"{phase}:1:kill={pid}", to=LARGE)
        assert not alive(pid)
        small.restore(2, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half", "who"),
    [
        pytest.param(PHASES[:3], "target", marks=pytest.mark.long, id="serving"),
        pytest.param(PHASES[3:], "source", id="pausing"),
    ],
)
def test_a_worker_hangs(small: Ground, half: tuple[str, ...], who: str) -> None:
    """It is ended when it has been silent for three times `lost_after`, or does not close."""
    for phase in half:
        pid = victim(small, who)
        assert small.strike(f"{phase}:1:stop={pid}", to=LARGE)
        small.service.until(lambda status, pid=pid: not alive(pid), 60)  # type: ignore[misc]
        small.restore(2, SMALL)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES[1:4] + PHASES[5:])
def test_a_node_is_gone(small: Ground, phase: str) -> None:
    """First one that the new gear needs and the old does not, then one of the old."""
    for seats in (small.idle, small.used):
        pid = small.agent(seats()[0].fragment)
        assert small.strike(f"{phase}:1:kill={pid}", to=LARGE)
        small.restore(2, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("half", [PHASES[:3], PHASES[3:]], ids=["serving", "pausing"])
def test_the_head_is_killed(small: Ground, half: tuple[str, ...]) -> None:
    """Streams end with their connections; the next head has the pilots, and nothing is left."""
    for phase in half:
        before = small.service.status()
        asks, threads = small.begin()
        small.arm(f"{phase}:1:exit")
        with contextlib.suppress(ServiceUnreachable):  # it may end before it has answered
            small.ask_for(LARGE, 5.0)
        small.wait_struck(asks)
        finish(threads, 30)
        assert small.struck() == [f"{phase}:1:exit"]
        small.disarm()
        for one, tokens in zip(asks, small.expected, strict=True):
            assert one.tokens == tokens[: len(one.tokens)]
        small.relaunch()
        after = small.service.status()
        assert after.head != before.head and after.epoch > before.epoch
        small.restore(2, SMALL)
        again, threads = small.begin()
        finish(threads, 60)
        check(again, small.expected)


@pytest.mark.slow
@pytest.mark.long
def test_what_hangs_in_an_install_or_in_closing_is_ended(small: Ground) -> None:
    for text in ("install.weights:1:hang", "install.groups:1:hang", "retire:1:hang"):
        assert small.strike(text, to=LARGE)
        small.restore(2, SMALL)


@pytest.mark.slow
@pytest.mark.long
def test_a_pull_that_is_never_answered_ends_the_attempt(small: Ground) -> None:
    lines = small.strike("cutover.pull:1:hang", to=LARGE)
    assert lines
    small.restore(2, SMALL)


@pytest.mark.slow
def test_a_deadline_that_passes_in_a_transfer(small: Ground) -> None:
    """A node must leave before its blocks are moved: what did not make it is recomputed."""
    field = small
    leaving = field.used()[0].fragment
    agent, before = field.agent(leaving), field.service.status().epoch
    asks, threads = field.begin()
    field.arm("transfer.chunk:1+:slow")
    field.service.submitter.preempt(field.service.job_of(leaving), grace_s=2.0, away_s=1.0)
    finish(threads, 60)
    field.disarm()
    check(asks, field.expected)

    def has_left(status: StatusAnswer) -> bool:
        since = [line for line in status.shifts if float(line["epoch"]) > before]
        return any("must leave" in str(line["why"]) for line in since) and not alive(agent)

    field.service.until(has_left)  # it comes back by itself
