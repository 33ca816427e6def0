"""A whole service on local processes: whatever is lost, streams go on with the right tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flexslurm.cli import launch as launching
from flexslurm.cli import submitting
from tests.service_harness import (
    SLOWLY,
    Ask,
    Oracle,
    RunningService,
    check,
    finish,
    oracle,
    running,
    serves,
    some_asks,
    tiny_service,
    tiny_site,
)
from tests.shift_ground import resubmit

pytestmark = [pytest.mark.shared_service, pytest.mark.timeout(300)]
FULL = "a100:2x2,l40s:2"
POOL = [("a100", 2, 2), ("l40s", 2, 1)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RunningService]:
    """Six virtual GPUs so small that the model needs at least four of them."""
    home = tmp_path_factory.mktemp("service")
    site = tiny_site(2 * SLOWLY, a100="700kB", l40s="500kB")
    settings = tiny_service(tiny_model, POOL, memory_fraction=1.0, lost_after="6s")
    with running(home, settings, site) as service:
        yield service


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


@pytest.fixture
def whole(service: RunningService) -> Iterator[RunningService]:
    """The service on its full pool, before and after the test."""
    service.until(serves(FULL))
    yield service
    service.until(serves(FULL))
    service.until(lambda s: s.running == 0 and s.waiting == 0 and s.kv_used == 0.0)


def test_undisturbed_streams_have_the_tokens_of_transformers(
    whole: RunningService, expected: Oracle
) -> None:
    asks = some_asks(6, 40)
    whole.run(asks)
    check(asks, expected(asks))


def test_the_gear_spans_both_types_and_needs_them(whole: RunningService) -> None:
    gear = whole.status().gear
    assert gear is not None
    assert {s.gpu_type for r in gear.replicas for s in r.stages} == {"a100", "l40s"}


def test_a_killed_worker(whole: RunningService, expected: Oracle) -> None:
    asks, threads = whole.under_way(6, 40)
    epoch = whole.status().epoch
    os.kill(next(iter(whole.worker_pids().values())), signal.SIGKILL)
    finish(threads, 90)
    check(asks, expected(asks))
    whole.until(lambda s: s.epoch > epoch)


@pytest.mark.slow
def test_a_worker_that_hangs(whole: RunningService, expected: Oracle) -> None:
    asks, threads = whole.under_way(6, 40)
    victim = psutil.Process(next(iter(whole.worker_pids().values())))
    victim.suspend()
    finish(threads, 90)
    check(asks, expected(asks))
    _, left = psutil.wait_procs([victim], timeout=60)  # by its start too: ids are used again
    assert not left


def test_a_preempted_pilot_leaves_and_comes_back(whole: RunningService, expected: Oracle) -> None:
    asks, threads = whole.under_way(6, 40)
    whole.submitter.preempt(whole.job_of("a100-2"), grace_s=5.0, away_s=1.0)
    finish(threads, 90)
    check(asks, expected(asks))
    whole.until(lambda s: any("must leave" in str(shift["why"]) for shift in s.shifts))


def test_a_killed_agent(whole: RunningService, expected: Oracle) -> None:
    asks, threads = whole.under_way(6, 40)
    whole.kill("--fragment l40s-1")
    finish(threads, 90)
    check(asks, expected(asks))
    resubmit(whole, "l40s-1")


@pytest.mark.slow
def test_all_pilots_at_once_without_notice(whole: RunningService, expected: Oracle) -> None:
    asks, threads = whole.under_way(6, 160)
    for fragment in ("a100-1", "a100-2", "l40s-1"):
        whole.kill(f"--fragment {fragment}")
    status = whole.until(lambda s: "there are no GPUs" in s.reason)
    assert status.state == "waiting" and status.waiting > 0
    whole.until(lambda s: s.waiting == sum(ask.finish is None for ask in asks))
    for fragment in ("a100-1", "a100-2", "l40s-1"):
        resubmit(whole, fragment)
    finish(threads, 90)
    check(asks, expected(asks))


def test_a_killed_head_is_launched_again_and_takes_the_pilots_over(
    whole: RunningService, expected: Oracle
) -> None:
    _, threads = whole.under_way(2, 400)
    before, jobs = whole.status(), whole.directory.pilots()
    whole.kill("flexslurm.head.main")
    finish(threads, 60)  # their connections died with the head
    said: list[str] = []
    submitting.execute(whole.plan, said.append)
    launching.wait_until_serving(whole.plan, said.append, 90)
    after, now = whole.directory.pilots(), whole.until(serves(FULL))
    assert jobs is not None and after is not None and after.pilots == jobs.pilots
    assert now.head != before.head and now.epoch > before.epoch
    assert any("took over a100-1" in line for line in said)
    again = some_asks(6, 40)
    whole.run(again)
    check(again, expected(again))


@pytest.mark.slow
def test_two_hundred_streams_of_mixed_lengths(whole: RunningService, tiny_model: Path) -> None:
    mixed = enumerate(some_asks(200, 1, seed=3))
    asks = [Ask(ask.prompt, 3 + number % 12, ask.sampling) for number, ask in mixed]
    whole.run(asks, 150)
    assert [ask.error for ask in asks] == [""] * 200
    assert [len(ask.tokens) for ask in asks] == [ask.max_tokens for ask in asks]
    chosen = asks[::25]
    assert [ask.tokens for ask in chosen] == oracle(tiny_model, chosen)
