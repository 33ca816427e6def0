"""A stage serves while its pages and weights are moved, shared and taken apart under it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_harness import lines_of, prompts_of, reference, run
from numpy.typing import NDArray

from flexslurm.engine.arena import Arena
from flexslurm.engine.backend import warm_up
from flexslurm.engine.families import check_model
from flexslurm.engine.footprint import block_bytes, kv_bytes, stage_bytes
from flexslurm.engine.kv_store import KvStore
from flexslurm.engine.page_pool import Cells
from flexslurm.engine.stage import LoadedStage, StagePlan, build_stage
from flexslurm.errors import CapacityError

WANTED = 12


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(240, (1, 5, 19, 12))


@pytest.fixture(scope="module")
def wanted(tiny_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    return reference(tiny_model, prompts, WANTED)


def plan(path: Path, epoch: int, lo: int = 0, hi: int = 6, blocks: int = 64) -> StagePlan:
    return StagePlan(str(path), epoch, lo, hi, 1, 0, "float64", 4, blocks)


@contextmanager
def meanwhile(work: Callable[[random.Random], None]) -> Iterator[list[int]]:
    """Do this over and over in a thread of its own; how often, in a list of one number."""
    stop, turns, failed = threading.Event(), [0], []

    def loop() -> None:
        draw = random.Random(1)
        try:
            while not stop.is_set():
                work(draw)
                turns[0] += 1
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield turns
    finally:
        stop.set()
        thread.join(60)
    assert not failed
    assert not thread.is_alive()


def until_enough(there: Callable[[], bool]) -> Iterator[int]:
    """Eight seeds, and more until enough has happened beside them; fails where it never does."""
    for seed in range(200):
        if seed >= 8 and there():
            return
        yield seed
    raise AssertionError("what goes on beside it hardly gets on")


def test_the_boundary_moves_to_and_fro(
    tiny_model: Path, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    """Weights take all that pages leave, so pages that lie scattered are pushed together."""
    info = check_model(tiny_model)
    block = block_bytes(info, 0, 6, 1, 0, "float64", 4)
    blocks = sum(-(-(len(prompt) + WANTED) // 4) for prompt in prompts)
    spare = (blocks + 44) * block
    arena = Arena(stage_bytes(info, 0, 6, 1, 0, "float64") + spare)
    stage = build_stage(plan(tiny_model, 1), arena)
    other = KvStore(stage.store.shape, torch.float64, arena)
    pool, pushed = arena.pages, [0]
    assert pool is not None
    land = pool.land

    def counted(cells: Cells, counts: NDArray[np.int32]) -> Cells:
        pushed[0] += len(cells)
        return land(cells, counts)

    pool.land = counted  # type: ignore[method-assign]

    def push(draw: random.Random) -> None:
        other.prepare(range(draw.randint(1, 30)), [], [])
        time.sleep(0.003)  # pages are taken below these
        other.free(range(30))
        extent = arena.take(spare - (blocks + draw.randint(1, 5)) * block, "w")
        arena.bytes_of(extent).fill_(255)
        time.sleep(0.001)
        arena.free([extent])

    with meanwhile(push) as turns:
        for seed in until_enough(lambda: turns[0] > 8 and pushed[0] > 100):
            assert run([stage], lines_of(prompts, WANTED, 4, 64, seed), seed=seed) == wanted
            stage.free(range(64))
    other.close()
    stage.close()
    assert arena.used_bytes == 0
    arena.check_integrity()
    arena.close()


def test_epochs_come_and_go_beside_a_serving_one(
    tiny_model: Path, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    """They share weights and blocks with it, whole and in part; what is left is slid together."""
    arena = Arena(64 << 20)
    first = build_stage(plan(tiny_model, 1), arena)
    serving = build_stage(plan(tiny_model, 2), arena)
    assert serving.kept_bytes > 0.99 * serving.weights_bytes
    assert arena.used_bytes == serving.weights_bytes
    first.close()
    epoch = [10]

    def shift(draw: random.Random) -> None:
        epoch[0] += 1
        lo = draw.randint(0, 3)
        other: LoadedStage = build_stage(
            plan(tiny_model, epoch[0], lo, draw.randint(lo + 1, 6)), arena
        )
        everything = [(block, block) for block in range(64)]
        layers = slice(lo, lo + other.store.shape.layers)
        ours = slice(0, other.store.shape.layers)
        heads = slice(0, other.store.shape.heads)
        other.store.share(serving.store, everything, (layers, heads), (ours, heads))
        arena.tidy(draw.randint(1, 1 << 20))
        other.close()
        arena.tidy(draw.randint(1, 1 << 20))

    with meanwhile(shift) as turns:
        for seed in until_enough(lambda: turns[0] > 1):
            assert run([serving], lines_of(prompts, WANTED, 4, 64, seed), seed=seed) == wanted
    arena.check_integrity()
    arena.weights.check_integrity()
    used = serving.used_bytes
    assert arena.used_bytes == used
    assert serving.close() == used
    assert arena.used_bytes == 0
    arena.close()


def test_a_part_of_the_layers_stays_when_the_whole_goes(
    tiny_model: Path, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    info = check_model(tiny_model)
    arena = Arena(64 << 20)
    whole = build_stage(plan(tiny_model, 1), arena)
    parts = [build_stage(plan(tiny_model, 2, 0, 2), arena)]
    parts.append(build_stage(plan(tiny_model, 3, 2, 6), arena))
    assert arena.used_bytes == whole.weights_bytes, "all of it is views"
    middle = build_stage(plan(tiny_model, 4, 2, 4), arena)
    whole.close()
    assert arena.used_bytes == sum(
        stage_bytes(info, *cut, 1, 0, "float64") for cut in ((0, 2), (2, 6))
    )
    assert run(parts, lines_of(prompts, WANTED, 4, 64)) == wanted
    for stage in parts:
        stage.close()
    assert arena.used_bytes == middle.weights_bytes == stage_bytes(info, 2, 4, 1, 0, "float64")
    cuts = enumerate(((0, 2), (2, 6)), 5)
    again = [build_stage(plan(tiny_model, epoch, *cut), arena) for epoch, cut in cuts]
    kept = [stage.kept_bytes for stage in again]
    assert kept[0] == 0
    assert kept[1] == sum(part.nbytes(0, 8) for part in middle.spec.parts)
    assert run(again, lines_of(prompts, WANTED, 4, 64), seed=5) == wanted
    for stage in (*again, middle):
        stage.close()
    assert arena.used_bytes == 0
    arena.close()


def test_a_whole_gear_fits_after_any_walk(tiny_model: Path) -> None:
    """What the footprint promises holds for the last epoch, wherever the others left their gaps."""
    info = check_model(tiny_model)
    need = stage_bytes(info, 0, 6, 1, 0, "float64") + kv_bytes(info, 0, 6, 1, 0, "float64", 4, 30)
    arena = Arena(need)
    draw = random.Random(7)
    alive: list[LoadedStage] = []
    for epoch in range(1, 25):
        lo = draw.randint(0, 5)
        cut = (lo, draw.randint(lo + 1, 6)) if epoch < 24 else (0, 6)
        blocks = 30 if epoch == 24 else 4
        while True:
            try:
                stage = build_stage(plan(tiny_model, epoch, *cut, blocks=blocks), arena)
                break
            except CapacityError:
                alive.pop(draw.randrange(len(alive))).close()
        fill(stage.store, draw.randint(0, 4) if epoch < 24 else 0)
        alive.append(stage)
        if len(alive) > 2:
            alive.pop(draw.randrange(2)).close()
        arena.check_integrity()
        arena.weights.check_integrity()
    last = alive.pop()
    for stage in alive:
        stage.close()
    last.store.prepare(range(30), [], [])
    assert arena.free_bytes == 0
    assert last.close() == need
    arena.close()


def fill(store: KvStore, blocks: int) -> None:
    try:
        store.prepare(range(blocks), [], [])
    except CapacityError:
        store.free(range(blocks))
