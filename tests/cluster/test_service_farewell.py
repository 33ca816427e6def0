"""Slurm takes all GPUs with notice: KV waits in files, and streams go on with the first pilots."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.service_harness import (
    SLOWLY,
    finish,
    oracle,
    running,
    some_asks,
    tiny_service,
    tiny_site,
)

pytestmark = pytest.mark.timeout(300)
LONG = 160
"""Tokens of an answer: the KV of three such answers fits the pool of two GPUs of `MEMORY`."""
MEMORY = "1550kB"
"""Of a GPU; one alone cannot hold the model."""


@pytest.mark.slow
def test_all_pilots_are_preempted_with_notice_and_come_back(
    tmp_path: Path, tiny_model: Path
) -> None:
    settings = tiny_service(tiny_model, [("a100", 1, 2)], memory_fraction=1.0, lost_after="10s")
    settings["executor"] = {"checkpoint_dir": str(tmp_path / "kept")}
    site = tiny_site(SLOWLY / 5, a100=MEMORY)  # so that answers outlast the notice
    site["slurm"]["kill_wait"] = "3s"
    asks = some_asks(3, LONG)
    with running(tmp_path, settings, site) as service:
        threads = service.start(asks)
        deadline = time.monotonic() + 60
        while not all(len(ask.tokens) >= 5 for ask in asks):
            assert time.monotonic() < deadline and not any(ask.error for ask in asks), asks
            time.sleep(0.01)
        for fragment in ("a100-1", "a100-2"):
            service.submitter.preempt(service.job_of(fragment), grace_s=4.0, away_s=1.0)
        status = service.until(lambda s: s.state == "waiting", 60)
        assert all(ask.finish is None for ask in asks), "the streams were too short"
        kept = tmp_path / "kept" / "tiny"
        assert list(kept.glob("*.park")), "nothing was parked"
        assert status.waiting == 3
        service.until(lambda s: s.state == "serving" and bool(s.shifts), 90)
        line = service.status().shifts[-1]
        finish(threads, 120)
        assert [ask.error for ask in asks] == [""] * 3
        assert [ask.tokens for ask in asks] == oracle(tiny_model, asks)
        assert line["sequences_moved"] == 3 and line["sequences_recomputed"] == 0, line
        deadline = time.monotonic() + 60
        while list(kept.glob("*.park")):
            assert time.monotonic() < deadline, "what was parked is dropped"
            time.sleep(0.05)
