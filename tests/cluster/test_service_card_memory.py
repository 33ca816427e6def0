"""A whole service on a virtual GPU that has less memory than the site file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.cli.launch import log_tail
from flexslurm.gear import Gear, Signature
from flexslurm.planner.files import open_table
from tests.service_harness import (
    check,
    oracle,
    running,
    serves,
    some_asks,
    tiny_service,
    tiny_site,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]
FULL = "a100:1x2"
LESS = 2_600_000


def test_a_card_with_less_memory_gets_a_gear_that_fits_it(tmp_path: Path, tiny_model: Path) -> None:
    wanted = tiny_service(tiny_model, [("a100", 1, 2)])
    site = tiny_site(a100="4MiB") | {"env": {"FLEXSLURM_VIRTUAL_MEMORY": f"a100-2={LESS}"}}
    with running(tmp_path, wanted, site) as service:
        status = service.until(serves(FULL))
        assert status.gear is not None
        promised = open_table(service.directory.gears).gear(Signature.parse(FULL))
        assert isinstance(promised, Gear)
        assert status.gear.estimates.kv_tokens < promised.estimates.kv_tokens
        asks = some_asks(6, 40)
        service.run(asks)
        check(asks, oracle(tiny_model, asks))
        # planned for it beside, and kept apart from the table for cards as the site has them
        service.until(lambda _: service.directory.gears_of_less.exists())
        less = open_table(service.directory.gears_of_less).gear(Signature.parse(FULL))
        assert isinstance(less, Gear)
        assert less.estimates.kv_tokens < promised.estimates.kv_tokens
        service.until(serves(FULL))
        again = some_asks(4, 20, seed=1)
        service.run(again)
        check(again, oracle(tiny_model, again))
        log = log_tail(service.directory.logs / "head", lines=500)
        assert f"GPU 0 of a100-2 on {status.fragments[1].node} has {LESS:,} bytes" in log
