"""A pool that the head keeps: pilots that were killed come back by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.messages import StatusAnswer
from flexslurm.slurm.local import LocalSubmitter
from tests.service_harness import (
    SLOWLY,
    check,
    finish,
    in_the_middle,
    oracle,
    running,
    some_asks,
    tiny_service,
    tiny_site,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def serves_all(status: StatusAnswer) -> bool:
    gear = status.gear
    return status.state == "serving" and gear is not None and gear.gpus == 3


def test_a_cancelled_and_a_killed_pilot_come_back_and_streams_go_on(
    tmp_path: Path, tiny_model: Path
) -> None:
    asked = tiny_service(tiny_model, [("a100", 1, 2), ("l40s", 1, 1)], lost_after="6s")
    asked["keeping"] = {"retry": "1s", "quick_death": "0s"}
    with running(tmp_path, asked, tiny_site(SLOWLY)) as service:
        service.until(serves_all)
        before = service.directory.pilots()
        assert before is not None
        asks = some_asks(4, 400)
        threads = service.start(asks)
        in_the_middle(asks)
        owner = LocalSubmitter(service.directory.path)
        gone = {service.job_of("l40s-1"), service.job_of("a100-2")}
        owner.cancel([service.job_of("l40s-1")])
        service.kill("--fragment a100-2")
        service.until(lambda s: not gone & {f.job_id for f in s.fragments} and serves_all(s))
        finish(threads, 60)
        check(asks, oracle(tiny_model, asks))
        after = service.directory.pilots()
        assert after is not None
        assert {p.fragment for p in after.pilots} == {p.fragment for p in before.pilots}
        assert len({p.job_id for p in after.pilots} - {p.job_id for p in before.pilots}) == 2
        assert len(owner.survey([])[1]) == 4  # three pilots and the head
