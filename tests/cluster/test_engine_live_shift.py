"""Live shifts between real workers: KV and weights move, and every token is the undisturbed one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_harness import Line, chunk_of, lines_of, prompts_of, reference

from flexslurm.messages import InstallFailed, SamplingParams, StepFailed
from tests.cluster.engine_shift import Shifter
from tests.cluster.engine_world import BLOCK_TOKENS, KV_BLOCKS, Node, Placed, World, replica_of

PROMPTS = prompts_of(240, (3, 13, 1, 8), seed=5)
WANTED = 40


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


def moved_bytes_of(shifter: Shifter, placed: Placed) -> int:
    return sum(p.nbytes for h in shifter.at(placed).holdings for p in shifter.shards.pieces(h))


def one_after_another(
    world: World, shifter: Shifter, old_faults: str = "", tokens: int = 5
) -> tuple[Placed, Placed]:
    """The model on one worker with faults, and then beside it on another."""
    names = [world.start(FLEXSLURM_FAULTS=old_faults), world.start()]
    old = shifter.begin(None, 1, replica_of([6], [1]), names[:1])
    shifter.installed(old)
    shifter.drive(old, tokens)
    new = shifter.begin(old, 2, replica_of([6], [1]), names[1:])
    return old, new


def test_a_broken_connection_is_resumed(
    world: World, tiny_model: Path, greedy: list[list[int]]
) -> None:
    shifter = Shifter(world, tiny_model, lines())
    old, new = one_after_another(world, shifter, "transfer.chunk:2:raise, transfer.chunk:4:raise")
    (answer,) = shifter.installed(new)
    assert answer.moved_bytes == moved_bytes_of(shifter, new)
    assert shifter.carry(old, new, rounds=3) == {}
    world.retire(old)
    assert world.drive(new, shifter.lines) == greedy
    assert "injected" not in world.log(new.workers[0])
    assert world.log(new.workers[0]).count("closed the connection") == 2


def test_a_wrong_checksum_is_asked_for_again(
    world: World, tiny_model: Path, greedy: list[list[int]]
) -> None:
    shifter = Shifter(world, tiny_model, lines())
    old, new = one_after_another(
        world, shifter, "transfer.corrupt:1:spoil, transfer.corrupt:3:spoil"
    )
    shifter.installed(new)
    assert shifter.carry(old, new, rounds=3) == {}
    world.retire(old)
    assert world.drive(new, shifter.lines) == greedy
    assert world.log(new.workers[0]).count("wrong checksum") == 2


def test_a_source_that_always_sends_wrong_is_given_up(world: World, tiny_model: Path) -> None:
    shifter = Shifter(world, tiny_model, lines())
    old, new = one_after_another(world, shifter, "transfer.corrupt:1+:spoil")
    (answer,) = shifter.installed(new)
    assert (answer.moved_bytes, answer.kept_bytes) == (0, 0), "all of it came from the files"
    blocks = shifter.held()
    pulls = shifter.send_pulls(old, new, [(b, b) for b in blocks])
    (failed,) = shifter.pulled(pulls)
    assert set(failed.failed) == set(blocks)
    assert "wrong checksum" in failed.reason
    world.retire(old)
    world.retire(new)


def test_a_source_that_dies_in_the_middle_of_a_pull(
    world: World, tiny_model: Path, greedy: list[list[int]]
) -> None:
    """What had come counts; the rest is recomputed from tokens."""
    shifter = Shifter(world, tiny_model, lines())
    names = [world.start(FLEXSLURM_FAULTS="transfer.chunk:3:exit"), world.start()]
    old = shifter.begin(None, 1, replica_of([6], [1]), names[:1])
    new = shifter.begin(None, 2, replica_of([6], [1]), names[1:])
    shifter.installed(old)
    shifter.installed(new)
    shifter.drive(old, 20)
    blocks = shifter.new_blocks(3)
    full = {line.name: line.stored // BLOCK_TOKENS for line in shifter.lines}
    pairs = [
        pair
        for line in shifter.lines
        for pair in list(zip(line.blocks, blocks[line.name], strict=True))[: full[line.name]]
    ]
    # So slow that a chunk is a part of it.
    (answer,) = shifter.pulled(shifter.send_pulls(old, new, pairs, rate_bytes_per_s=1e6))
    assert (
        0
        < answer.moved_bytes
        < len(pairs) * shifter.shards.block_bytes(shifter.at(new).holdings[0])
    )
    lost = set(answer.failed)
    assert 0 < len(lost) < len(pairs)
    for line in shifter.lines:
        line.blocks = blocks[line.name]
        own = line.blocks[: full[line.name]]
        whole = next((n for n, block in enumerate(own) if block in lost), len(own))
        line.stored = whole * BLOCK_TOKENS
    assert world.node.wait_ended(old.workers[0]).exit_code == 66
    assert any(line.stored for line in shifter.lines)
    assert world.drive(new, shifter.lines) == greedy
    world.retire(new)
    shifter.used(new.workers[0], 0)


def test_weights_of_a_peer_that_dies_come_from_the_others_and_the_files(
    world: World, tiny_model: Path, greedy: list[list[int]]
) -> None:
    shifter = Shifter(world, tiny_model, lines())
    names = [world.start(FLEXSLURM_FAULTS="transfer.chunk:1:exit"), *world.workers(3)[1:]]
    old = shifter.begin(None, 1, replica_of([4, 2], [1, 1]), names[:2])
    shifter.installed(old)
    new = shifter.begin(old, 2, replica_of([6], [1]), names[2:])
    (answer,) = shifter.installed(new)
    second = shifter.at(old).holdings[1]
    assert answer.moved_bytes == sum(p.nbytes for p in shifter.shards.pieces(second))
    assert world.drive(new, shifter.lines) == greedy
    world.retire(new)


def test_an_install_that_dies_leaves_the_old_epoch_serving(
    world: World, tiny_model: Path, greedy: list[list[int]]
) -> None:
    shifter = Shifter(world, tiny_model, lines())
    names = [*world.workers(1), world.start(FLEXSLURM_FAULTS="install.weights:1:raise")]
    old = shifter.begin(None, 1, replica_of([6], [1]), names[:1])
    shifter.installed(old)
    shifter.drive(old, 4)
    new = shifter.begin(old, 2, replica_of([6], [2]), names)
    _, failed = world.head.wait(InstallFailed, lambda s, m: s == names[1] and m.epoch == 2)
    assert "injected at install.weights" in failed.reason
    world.retire(new)
    shifter.check_memory(old)
    assert world.drive(old, shifter.lines) == greedy
    world.retire(old)
    shifter.used(names[0], 0)


def test_shared_blocks_are_not_written_by_two(
    world: World, tiny_model: Path, greedy: list[list[int]]
) -> None:
    """Both epochs go on from the same partial blocks on the same GPUs: an abort after the pull."""
    shifter = Shifter(world, tiny_model, lines())
    names = world.workers(2)
    old = shifter.begin(None, 1, replica_of([3, 3], [1, 1]), names)
    shifter.installed(old)
    shifter.drive(old, 6)
    new = shifter.begin(old, 2, replica_of([2, 4], [1, 1]), names)
    shifter.installed(new)
    assert any(line.stored % BLOCK_TOKENS for line in shifter.lines)
    before = [(line.blocks, line.stored, list(line.answer)) for line in shifter.lines]
    assert shifter.carry(old, new, rounds=0) == {}
    assert shifter.moved == len(shifter.held()) * shifter.shards.page_bytes * 3, "one layer moves"
    shifter.drive(new, 5)
    ahead = [list(line.answer) for line in shifter.lines]
    for line, (blocks, stored, answer) in zip(shifter.lines, before, strict=True):
        line.blocks, line.stored, line.answer = blocks, stored, answer
    world.retire(new)
    shifter.check_memory(old)
    shifter.drive(old, 5)
    assert [line.answer for line in shifter.lines] == ahead
    assert world.drive(old, shifter.lines) == greedy
    world.retire(old)


def test_retiring_calls_a_pull_back(world: World, tiny_model: Path) -> None:
    shifter = Shifter(world, tiny_model, lines())
    old, new = one_after_another(world, shifter)
    shifter.installed(new)
    pairs = [(block, block) for block in shifter.held()]
    nbytes = len(pairs) * shifter.shards.block_bytes(shifter.at(new).holdings[0])
    rate = nbytes / 600  # it would go on for ten minutes
    shifter.send_pulls(old, new, pairs, rate_bytes_per_s=rate)
    world.retire(new)
    shifter.used(new.workers[0], 0)
    shifter.check_memory(old)
    again = shifter.begin(old, 3, replica_of([6], [1]), new.workers)
    shifter.installed(again)
    shifter.send_pulls(old, again, pairs, rate_bytes_per_s=rate)
    world.retire(old)  # nor does the sender go on
    shifter.used(old.workers[0], 0)
    world.retire(again)


@pytest.mark.parametrize("on_disk", [False, True])
def test_parked_blocks_come_back(
    world: World, tiny_model: Path, greedy: list[list[int]], on_disk: bool, tmp_path: Path
) -> None:
    """Both gears do not fit: park, retire, install, pull back; or all GPUs go and others come."""
    shifter = Shifter(world, tiny_model, lines())
    names = world.workers(2)
    old = shifter.begin(None, 1, replica_of([2, 4], [1, 1]), names)
    shifter.installed(old)
    shifter.drive(old, 9)
    place = {"directory": str(tmp_path / "parked")} if on_disk else {}
    blocks = shifter.held()
    for worker, holding in zip(names, shifter.at(old).holdings, strict=True):
        half = len(blocks) // 2
        for part in (blocks[:half], [*blocks[half:], 63]):
            answer = shifter.park(old, worker, part, **place)
            assert set(answer.failed) == {63} - set(blocks) & set(part)
            size = shifter.shards.block_bytes(holding)
            assert answer.parked_bytes == (len(part) - len(answer.failed)) * size
    world.retire(old)
    for worker in names:
        shifter.used(worker, 0)
    if on_disk:
        for worker in names:
            world.kill(worker)
        names = [world.start(), world.start()]
    new = shifter.begin(None, 2, replica_of([6], [2]), names)
    shifter.installed(new)
    fresh = shifter.new_blocks(4)
    pairs = [p for line in shifter.lines for p in zip(line.blocks, fresh[line.name], strict=True)]
    pairs = [pair for pair in pairs if pair[0] in blocks]
    pulls = shifter.send_pulls(old, new, pairs, **place)
    assert not any(answer.failed for answer in shifter.pulled(pulls))
    for line in shifter.lines:
        line.blocks = fresh[line.name]
    if not on_disk:
        shifter.unpark(old)
        again = shifter.send_pulls(old, new, pairs[:1])
        assert all(answer.failed for answer in shifter.pulled(again))
        line = next(line for line in shifter.lines if pairs[0][1] in line.blocks)
        line.stored = 0
    shifter.drive(new, 4)
    shifter.check_memory(new)
    assert world.drive(new, shifter.lines) == greedy
    world.retire(new)


def test_a_step_that_fails_leaves_its_blocks_to_be_pulled(
    world: World, tiny_model: Path, greedy: list[list[int]]
) -> None:
    """The epoch is broken, its memory is not: what it holds is moved, and nothing recomputed."""
    shifter = Shifter(world, tiny_model, lines())
    names = [world.start(FLEXSLURM_FAULTS="step:15:raise"), world.start()]
    old = shifter.begin(None, 1, replica_of([6], [1]), names[:1])
    new = shifter.begin(None, 2, replica_of([6], [1]), names[1:])
    shifter.installed(old)
    shifter.installed(new)
    shifter.drive(old, 4)
    for _ in range(15):  # the same step over and over, whose tokens nobody takes
        chunks = []
        for line in shifter.lines:
            stored = line.stored
            chunks.append(chunk_of(line, 5))
            line.stored = stored
        world.send_step(old, chunks)
    _, failed = world.head.wait(StepFailed, lambda _, m: m.epoch == 1)
    assert failed.reason == "injected at step"
    assert shifter.carry(old, new, rounds=0) == {}
    world.retire(old)
    assert world.drive(new, shifter.lines) == greedy
    world.retire(new)


def test_seeded_sampling_goes_on_as_it_would_have(world: World, tiny_model: Path) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=7)

    def seeded(seed: int) -> list[Line]:
        return lines_of(PROMPTS, WANTED, BLOCK_TOKENS, KV_BLOCKS, seed, params)

    names = world.workers(2)
    undisturbed = Shifter(world, tiny_model, seeded(0))
    alone = undisturbed.begin(None, 1, replica_of([6], [1]), names[:1])
    undisturbed.installed(alone)
    wanted = world.drive(alone, undisturbed.lines)
    world.retire(alone)
    shifter = Shifter(world, tiny_model, seeded(3))
    old = shifter.begin(None, 2, replica_of([4, 2], [1, 1]), names)
    shifter.installed(old)
    shifter.drive(old, 7)
    new = shifter.begin(old, 3, replica_of([6], [2]), names)
    shifter.installed(new)
    assert shifter.carry(old, new, seed=1) == {}
    world.retire(old)
    assert world.drive(new, shifter.lines) == wanted
    world.retire(new)
