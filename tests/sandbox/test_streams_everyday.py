"""Streams go on, token for token, while Slurm preempts, signals and requeues their pilots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sandbox.stream_kit import World, world

pytestmark = [pytest.mark.shared_service, pytest.mark.timeout(600)]
SANDBOX = """\
nodes:
  s: {gpu_type: a100, gpus: 1}
  p: {gpu_type: a100, gpus: 1}
  c: {}
gpu_types: {a100: {}}
partitions:
  keep: {nodes: [s], default: true}
  short: {nodes: [p], preempt_mode: REQUEUE, grace: 5s}
  high: {nodes: [p], priority_tier: 10}
  cpu: {nodes: [c]}
head_partition: cpu
kill_wait: 4s
"""
KEPT, TAKEN = "a100-1", "a100-2"
Report = Callable[[str, object], None]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[World]:
    home = tmp_path_factory.mktemp("everyday")
    pool = [("keep", "a100"), ("short", "a100")]
    with world(home, tiny_model, SANDBOX, pool, memory="4MiB") as made:
        yield made


def test_preemption_with_grace(here: World, record_property: Report) -> None:
    """A job of higher priority takes the node of one of two pilots, each of which may serve all."""
    here.ready(KEPT, TAKEN)
    node = here.node_of(TAKEN)
    heard = here.act(
        "preemption, grace 5 s, REQUEUE", TAKEN,
        lambda: here.submit_urgent("high", node), record_property,
    )  # fmt: skip
    assert heard["event"] == "leaving"
