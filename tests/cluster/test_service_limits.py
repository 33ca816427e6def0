"""A whole service at its limits: silence, a full disk, damaged files, no GPUs for too long."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from flexslurm.cli import launch as launching
from flexslurm.cli import submitting
from flexslurm.cli.ask import ask
from flexslurm.cli.stopping import stop_service
from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.errors import EnvironmentFault, ServiceError
from flexslurm.messages import CordonAsk, StatusAnswer
from flexslurm.planner.files import open_table
from flexslurm.wire.journal import Journal, read_journal
from flexslurm.wire.service_dir import ServiceDir
from tests.service_harness import (
    SLOWLY,
    Ask,
    RunningService,
    check,
    finish,
    oracle,
    running,
    serves,
    tiny_service,
    tiny_site,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
POOL = [("a100", 1, 2)]
FULL = "a100:1x2"


def plan(
    home: Path, model: Path, site: dict[str, Any] | None = None, **serving: Any
) -> launching.LaunchPlan:
    made = parse_section(Service, yaml.safe_dump(tiny_service(model, POOL, **serving)), "s.yaml")
    place = parse_section(Site, yaml.safe_dump(site or tiny_site()), "site.yaml")
    return launching.plan_launch(made, place, ServiceDir(home / "service"), "local", True)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RunningService]:
    home = tmp_path_factory.mktemp("limits")
    settings = tiny_service(tiny_model, POOL, lost_after="6s")
    with running(home, settings, tiny_site(2 * SLOWLY)) as service:
        yield service


@pytest.mark.shared_service
def test_an_agent_that_falls_silent_is_lost_and_may_come_back(
    service: RunningService, tiny_model: Path
) -> None:
    service.until(serves(FULL))
    asks, threads = service.under_way(4, 60)
    began, silent = time.time(), service.process("--fragment a100-2")
    os.kill(silent, signal.SIGSTOP)  # its connection stays open, and nothing comes
    try:
        service.until(lambda s: s.gear is not None and str(s.gear.signature) == "a100:1")
        finish(threads, 60)
    finally:
        os.kill(silent, signal.SIGCONT)
    check(asks, oracle(tiny_model, asks))
    records = read_journal(service.directory.journal)[0]
    lost = [r for r in records if r.get("event") == "lost" and r["at"] >= began]
    assert [r["fragment"] for r in lost] == ["a100-2"] and "silent for" in lost[0]["why"]
    service.until(serves(FULL))


@pytest.mark.slow
def test_no_gpus_for_longer_than_requests_wait(tmp_path: Path, tiny_model: Path) -> None:
    wanted = tiny_service(tiny_model, POOL, wait_for_gpus="2s")
    with running(tmp_path, wanted, tiny_site()) as service:
        for fragment in ("a100-1", "a100-2"):
            service.submitter.cancel([service.job_of(fragment)])
        service.until(lambda s: s.state == "waiting")
        started = time.monotonic()
        late = Ask([1, 2, 3], 5)
        service.run([late], 60)
        assert time.monotonic() - started > 1.5
        assert "no GPUs came within 2 s" in late.error, late.error
        assert service.status().state == "waiting"


@pytest.mark.shared_service
def test_the_table_is_beside_the_service_and_status_names_its_gear(
    service: RunningService,
) -> None:
    table = open_table(service.directory.gears)
    gear = service.until(serves(FULL)).gear
    assert gear is not None and gear == table.gear(gear.signature)
    names = [str(signature) for signature in table.signatures()]
    assert names == ["", "a100:1", "a100:1x2"] and gear.name == "a100:1x2"


@pytest.mark.shared_service
def test_installs_and_shifts_are_in_the_history_and_the_metrics(service: RunningService) -> None:
    status = service.until(serves(FULL))
    shift = status.shifts[0]
    assert float(shift["weights_bytes"]) > 0 and float(shift["load_s"]) > 0

    def counted(status: StatusAnswer) -> bool:
        with urlopen(f"{service.endpoint}/metrics", timeout=60) as answer:
            page = answer.read().decode()
        lines = [x for x in page.splitlines() if x.startswith("flexslurm_shifts_total{")]
        committed = any('outcome="committed"' in line for line in lines)
        return committed and sum(float(x.split()[-1]) for x in lines) == len(status.shifts)

    service.until(counted)  # the page is as of the last sample, and a shift may end between the two


@pytest.mark.slow
@pytest.mark.shared_service
def test_more_gpus_than_the_table_knows_are_planned_beside_the_head(
    service: RunningService,
) -> None:
    service.until(serves(FULL))
    _, spec = service.plan.pilots[0]
    command = tuple("a100-3" if word == "a100-1" else word for word in spec.command)
    more = replace(spec, name="tiny.a100-3", command=command)
    job = service.submitter.submit(more)
    try:
        service.until(lambda s: s.gear is not None and str(s.gear.signature) == "a100:1x3")

        def planned(_: StatusAnswer) -> bool:
            log = launching.log_tail(service.directory.logs / "head", lines=200)
            return "planning the gear of a100:1x3" in log

        service.until(planned)
    finally:
        service.submitter.cancel([job])
    service.until(serves(FULL))


def test_a_head_that_cannot_write_its_journal_at_the_start_is_said_by_launch(
    tmp_path: Path, tiny_model: Path
) -> None:
    wanted = plan(tmp_path, tiny_model)
    wanted.directory.create()
    wanted.directory.journal.mkdir()
    try:
        submitting.execute(wanted, lambda line: None)
        with pytest.raises(EnvironmentFault, match=r"cannot write the journal .*journal\.log"):
            launching.wait_until_serving(wanted, lambda line: None, 90)
        assert _exit_code_of_the_head(wanted) == EnvironmentFault.exit_code
    finally:
        stop_service(wanted.directory, 0.0, 30.0, lambda line: None)


@pytest.mark.slow
def test_a_journal_that_is_full_ends_the_head_and_another_goes_on_from_it(
    tmp_path: Path, tiny_model: Path
) -> None:
    with running(tmp_path, tiny_service(tiny_model, POOL), tiny_site()) as service:
        epoch = service.until(serves(FULL)).epoch
        head = service.process("flexslurm.head.main")
        _fill(service.directory.journal, head)
        with pytest.raises(ServiceError, match="the head ends: cannot write the journal"):
            ask(service.directory, CordonAsk(fragment="a100-2"), timeout_s=60.0)
        deadline = time.monotonic() + 60
        while list(service.processes("flexslurm.head.main")):
            assert time.monotonic() < deadline, "the head goes on without a journal"
            time.sleep(0.05)
        assert _exit_code_of_the_head(service.plan) == EnvironmentFault.exit_code
        assert "cannot write the journal" in launching.log_tail(
            service.directory.logs / "head", lines=20
        )
        jobs = service.directory.pilots()
        submitting.execute(service.plan, lambda line: None)
        launching.wait_until_serving(service.plan, lambda line: None, 90)
        after = service.directory.pilots()
        assert jobs is not None and after is not None and jobs.pilots == after.pilots
        assert service.until(serves(FULL)).epoch > epoch


def _fill(path: Path, head: int) -> None:
    """Have the head's next record meet the end of what it may write, and its log not."""
    journal = Journal(path)
    journal.open()
    journal.append({"event": "padding", "text": "x" * 1_000_000})
    journal.close()
    size = path.stat().st_size
    resource.prlimit(head, resource.RLIMIT_FSIZE, (size, size))


def _exit_code_of_the_head(wanted: launching.LaunchPlan) -> int | None:
    pilots = wanted.directory.pilots()
    assert pilots is not None and pilots.head_job is not None
    submitter = launching.head_submitter(wanted)
    deadline = time.monotonic() + 60
    while not (info := submitter.states([pilots.head_job])[pilots.head_job]).state.over:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return info.exit_code


@pytest.mark.slow
def test_damaged_weights_end_the_launch_with_the_reason(tmp_path: Path, tiny_model: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    wanted = plan(tmp_path, model)
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:1000])  # after the launch has looked
    try:
        submitting.execute(wanted, lambda line: None)
        with pytest.raises(ServiceError, match=r"cannot come up: .*safetensors"):
            launching.wait_until_serving(wanted, lambda line: None, 90)
    finally:
        stop_service(wanted.directory, 0.0, 30.0, lambda line: None)
