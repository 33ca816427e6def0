"""Live shifts between real workers: KV and weights move, and every token is the undisturbed one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_harness import Line, lines_of, prompts_of, reference

from flexslurm.messages import InstallFailed, StepFailed, UnparkKv
from tests.cluster.engine_shift import Shifter
from tests.cluster.engine_world import BLOCK_TOKENS, KV_BLOCKS, Node, Placed, World, replica_of

PROMPTS = prompts_of(240, (3, 13, 1, 8), seed=5)
WANTED = 40


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("logs"))
    node.run(node.nursery.start())
    yield node
    node.close()


@pytest.fixture
def world(node: Node, tmp_path: Path) -> Iterator[World]:
    world = World(node, tmp_path)
    yield world
    world.close()
    for started in world.started:
        assert "still open" not in started.log.read_text()
        assert "still moved" not in started.log.read_text()
        assert "Traceback" not in started.log.read_text()


@pytest.fixture(scope="module")
def greedy(tiny_model: Path) -> list[list[int]]:
    return reference(tiny_model, PROMPTS, WANTED)


def lines() -> list[Line]:
    return lines_of(PROMPTS, WANTED, BLOCK_TOKENS, KV_BLOCKS)


Layout = tuple[list[int], list[int], list[int]]
"""Layers and TP degree of each stage, and which workers."""

WALKS: dict[str, list[Layout]] = {
    "pp2 to tp2": [([2, 4], [1, 1], [0, 1]), ([6], [2], [0, 1]), ([6], [2], [1, 0])],
    "tp 1 2 3 1": [
        ([6], [1], [0]), ([6], [2], [0, 1]), ([6], [3], [1, 0, 2]), ([6], [1], [2]),
    ],
    "pp 1 2 3 1": [
        ([6], [1], [0]), ([3, 3], [1, 1], [1, 0]), ([1, 3, 2], [1, 1, 1], [0, 1, 2]),
        ([6], [1], [1]),
    ],
    "2x1 1x2 3x1 2x2-1": [
        ([3, 3], [1, 1], [0, 1]), ([6], [2], [1, 2]), ([2, 1, 3], [1, 1, 1], [2, 0, 1]),
        ([4, 2], [2, 1], [0, 1, 2]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("walk", WALKS)
def test_lines_live_through_a_walk_of_gears(
    world: World, tiny_model: Path, greedy: list[list[int]], walk: str
) -> None:
    layouts = WALKS[walk]
    workers = world.workers(1 + max(index for _, _, used in layouts for index in used))
    shifter = Shifter(world, tiny_model, lines())
    old: Placed | None = None
    for epoch, (layers, tp, seats) in enumerate(layouts, 1):
        names = [workers[index] for index in seats]
        new = shifter.begin(old, epoch, replica_of(layers, tp), names)
        if old is not None:
            shifter.drive(old, 2)  # the old epoch serves while the new one is installed
        answers = shifter.installed(new)
        if old is not None:
            lacked = [shifter.shards.weights_bytes(h) for h in shifter.at(new).holdings]
            assert all(
                a.moved_bytes + a.kept_bytes <= n for a, n in zip(answers, lacked, strict=True)
            )
            assert all(
                a.moved_bytes + a.kept_bytes > 0.98 * n
                for a, n in zip(answers, lacked, strict=True)
            ), "nothing is read from files"
            assert shifter.carry(old, new, seed=epoch) == {}
            world.retire(old)
        shifter.check_memory(new)
        shifter.drive(new, 3)
        old = new
    assert old is not None
    assert world.drive(old, shifter.lines) == greedy
    world.retire(old)
    for worker in workers:
        shifter.used(worker, 0)
    assert world.head.count(StepFailed) == world.head.count(InstallFailed) == 0
    assert shifter.moved > 0
