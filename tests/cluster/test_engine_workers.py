"""Workers over real gloo: every split gives the whole model's tokens, and no loss spreads."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_harness import Line, lines_of, prompts_of, reference

from flexslurm.engine.sampling import sample
from flexslurm.messages import (
    Chunk,
    ChunkSampling,
    FreeBlocks,
    InstallFailed,
    InstallProgress,
    Pacing,
    Retire,
    Retired,
    SamplingParams,
    Step,
    StepDone,
    StepFailed,
)
from flexslurm.planner.cost import StageCost
from tests.cluster.engine_world import (
    ARENA_BYTES,
    BLOCK_TOKENS,
    KV_BLOCKS,
    Node,
    Placed,
    World,
    replica_of,
)

SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=11, repetition_penalty=1.1)
PROMPTS = prompts_of(240, (3, 11, 1, 7), seed=5)
WANTED = 9
# On an idle machine most take a tenth of a second, none two; an operation's timeout is 60 s.
PROMPT_S = 25.0


@pytest.fixture
def world(node: Node, tmp_path: Path) -> Iterator[World]:
    world = World(node, tmp_path)
    yield world
    world.close()
    for started in world.started:
        assert "still open" not in started.log.read_text()
        assert "Traceback" not in started.log.read_text()


@pytest.fixture(scope="module")
def greedy(tiny_model: Path) -> list[list[int]]:
    return reference(tiny_model, PROMPTS, WANTED)


@pytest.fixture(scope="module")
def seeded(tiny_model: Path) -> list[list[int]]:
    """The whole model by transformers, each sequence alone, a token at a time."""
    from transformers import AutoModelForCausalLM

    from flexslurm.engine.tiny import quiet_progress

    with quiet_progress():
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="auto").eval()
    answers = []
    for prompt in PROMPTS:
        answer: list[int] = []
        for position in range(WANTED):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *answer]])).logits[:, -1]
            sampling = ChunkSampling(
                params=SEEDED, position=position, prompt=tuple(prompt), output=tuple(answer)
            )
            answer.append(sample(logits, [sampling])[0][0])
        answers.append(answer)
    return answers


def lines(params: SamplingParams = SamplingParams(), seed: int = 0) -> list[Line]:  # noqa: B008
    return lines_of(PROMPTS, WANTED, BLOCK_TOKENS, KV_BLOCKS, seed, params)


SPLITS = {
    "1x1": ([6], [1]),
    "2x1": ([2, 4], [1, 1]),
    "3x1": ([1, 3, 2], [1, 1, 1]),
    "1x2": ([6], [2]),
    "1x3": ([6], [3]),
    "2x3": ([4, 2], [3, 3]),
    "2 then 1": ([3, 3], [2, 1]),
    "1 then 3": ([2, 4], [1, 3]),
    "2 then 3": ([3, 3], [2, 3]),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_gives_the_whole_model_s_tokens(
    world: World, tiny_model: Path, greedy: list[list[int]], seeded: list[list[int]], split: str
) -> None:
    layers, tp = SPLITS[split]
    placed = world.install(1, tiny_model, replica_of(layers, tp))
    assert world.drive(placed, lines()) == greedy
    assert world.drive(placed, lines(SEEDED, seed=3)) == seeded
    assert world.retire(placed) < PROMPT_S
    assert world.head.count(StepFailed) == 0


def test_two_epochs_side_by_side_and_a_switch(
    world: World, tiny_model: Path, greedy: list[list[int]]
) -> None:
    """The new epoch installs while the old one decodes; sequences go on in it by recompute."""
    workers = world.workers(4)
    old = world.install(1, tiny_model, replica_of([3, 3], [1, 2]), workers=workers[:3])
    running = lines()
    world.drive(old, running, until=4)
    new = world.send_install(2, tiny_model, replica_of([2, 4], [2, 2]), workers)
    world.drive(old, running, until=6)
    for worker in workers:
        world.wait_installed(worker, 2)
    assert [line.answer for line in running] == [answer[:6] for answer in greedy]
    fresh = lines(seed=1)
    for line, before in zip(fresh, running, strict=True):
        line.answer = list(before.answer)
    world.drive(new, fresh, until=8)
    assert world.retire(old) < PROMPT_S
    assert world.drive(new, fresh) == greedy
    assert world.retire(new) < PROMPT_S
    assert world.head.count(StepFailed) == 0


def long_feed(world: World, placed: Placed, steps: int = 300) -> None:
    """Send many steps at once: a prompt, one token at a time."""
    block_of = list(range(KV_BLOCKS))
    for at in range(steps):
        position = at % (BLOCK_TOKENS * KV_BLOCKS)
        chunk = Chunk(seq_id="long", tokens=(at % 200,), start=position, blocks=tuple(block_of))
        world.send_step(placed, [chunk])


@pytest.mark.parametrize(
    ("victim", "number"),
    [(0, signal.SIGKILL), (2, signal.SIGKILL), (4, signal.SIGKILL), (3, signal.SIGSTOP)],
)
def test_a_lost_worker_does_not_take_the_others_with_it(
    world: World,
    tiny_model: Path,
    greedy: list[list[int]],
    victim: int,
    number: signal.Signals,
) -> None:
    workers = world.workers(5)
    lost = workers[victim]
    placed = world.install(1, tiny_model, replica_of([2, 4], [2, 3]))
    long_feed(world, placed)
    world.done(placed, 20)
    world.kill(lost, number)
    killed = time.monotonic()
    long_feed(world, placed, 3)  # also where all before had ended already
    survivors = [worker for worker in workers if worker != lost]
    if number == signal.SIGKILL:  # one that is stopped shows no sign: the head must notice
        world.head.wait(StepFailed, lambda sender, _: sender in survivors, PROMPT_S)
    world.retire(placed, survivors)
    assert time.monotonic() - killed < 2 * PROMPT_S
    again = world.install(2, tiny_model, replica_of([4, 2], [1, 3]), workers=survivors)
    assert world.drive(again, lines()) == greedy
    assert world.retire(again) < PROMPT_S
    if number != signal.SIGKILL:
        world.kill(lost)


def test_a_failed_install_leaves_the_serving_epoch_alone(
    world: World, tiny_model: Path, tmp_path: Path, greedy: list[list[int]]
) -> None:
    workers = world.workers(2)
    placed = world.install(1, tiny_model, replica_of([2, 4], [1, 1]))
    running = lines()
    world.drive(placed, running, until=3)

    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    cases = (
        (tmp_path / "missing", {}, True, "missing"),
        (broken, {}, True, "model.safetensors"),
        (tiny_model, {"kv_blocks": 10_000_000}, False, "short"),
    )
    for epoch, (model, sizes, fatal, words) in enumerate(cases, start=2):
        bad = world.send_install(epoch, model, replica_of([2, 4], [1, 1], **sizes), workers)
        _, failed = world.head.wait(InstallFailed, lambda _, m, e=epoch: m.epoch == e)  # type: ignore[misc]
        assert failed.fatal == fatal and words in failed.reason, failed
        assert world.retire(bad) < PROMPT_S
    world.drive(placed, running, until=6)

    alone = world.send_install(9, tiny_model, replica_of([2, 4], [1, 1]), workers, skip=workers[1:])
    world.head.wait(InstallProgress, lambda _, message: message.epoch == 9)
    assert world.retire(alone) < PROMPT_S
    late = world.send_install(
        10, tiny_model, replica_of([2, 4], [1, 1]), workers, skip=workers[1:], timeout_s=0.5
    )
    _, failed = world.head.wait(InstallFailed, lambda _, message: message.epoch == 10)
    assert not failed.fatal and world.retire(late) < PROMPT_S
    assert world.drive(placed, running) == greedy
    world.retire(placed)


def test_steps_that_do_not_belong_are_dropped_or_break_their_epoch(
    world: World, tiny_model: Path, greedy: list[list[int]]
) -> None:
    (worker,) = world.workers(1)
    placed = world.install(3, tiny_model, replica_of([6], [1]))
    chunk = Chunk(seq_id="x", tokens=(1,), start=0, blocks=(0,))
    for epoch in (1, 2, 4):
        world.head.send(worker, Step(epoch=epoch, replica=0, step=1, chunks=(chunk,)))
        world.head.send(worker, Retire(epoch=epoch))
        world.head.wait(Retired, lambda _, message, e=epoch: message.epoch == e)  # type: ignore[misc]
    assert world.drive(placed, lines()) == greedy
    assert world.head.count(StepFailed) == 0
    assert {m.epoch for _, _, m in world.head.heard if isinstance(m, StepDone)} == {3}

    world.send_step(placed, [chunk])
    placed.next_step -= 1
    repeated = world.send_step(placed, [chunk])
    _, failed = world.head.wait(StepFailed)
    assert failed.step == repeated and "after step" in failed.reason
    world.send_step(placed, [chunk])
    world.retire(placed)
    assert world.head.count(StepFailed) == 1


def test_acted_steps_take_the_time_they_are_given(world: World, tiny_model: Path) -> None:
    cost = dict.fromkeys(StageCost.__struct_fields__, 0.0)
    cost |= {"weights_s": 0.19, "token_s": 0.001, "fixed_s": 0.01}
    replica = replica_of([2, 4], [1, 1])
    placed = world.install(1, tiny_model, replica, pacing=Pacing(acted=cost))
    # two micro-batches share two stages of 200 ms: one ends every 200 ms, two stages deep
    expected, took = (2 * 5 + 1) * 0.2, []
    while not took or (min(took) >= expected * 1.8 and len(took) < 6):
        began = time.monotonic()
        world.drive(placed, lines(), until=5, chunk=64)
        took.append(time.monotonic() - began)
    assert expected <= min(took) < expected * 1.8, "one after the other it is twice as long"
    done = [m.compute_s for _, _, m in world.head.heard if isinstance(m, StepDone)]
    assert all(0.1999 < seconds < 0.2001 for seconds in done)
    # a step that sleeps is broken off too
    slow = dict(cost, fixed_s=30.0)
    stuck = world.install(2, tiny_model, replica, pacing=Pacing(acted=slow))
    world.send_step(stuck, [Chunk(seq_id="x", tokens=(1,), start=0, blocks=(0,))])
    assert world.retire(stuck) < PROMPT_S
    world.retire(placed)


def test_wrong_pacing_and_a_second_arena_are_refused(world: World, tiny_model: Path) -> None:
    world.workers(1)
    one = replica_of([6], [1])
    placed = world.install(1, tiny_model, one)
    for epoch, more, words in (
        (2, {"pacing": Pacing(acted={"weights_s": 1.0})}, "stage cost"),
        (3, {"pacing": Pacing(speed=0.0)}, "speed"),
        (4, {"arena_bytes": 2 * ARENA_BYTES}, "arena"),
    ):
        bad = world.send_install(epoch, tiny_model, one, world.workers(1), **more)  # type: ignore[arg-type]
        _, failed = world.head.wait(InstallFailed, lambda _, m, e=epoch: m.epoch == e)  # type: ignore[misc]
        assert words in failed.reason and not failed.fatal
        world.retire(bad)
    world.retire(placed)
    bigger = world.install(5, tiny_model, one, arena_bytes=2 * ARENA_BYTES)
    world.retire(bigger)


@pytest.mark.parametrize("said", ["with a step", "between steps"])
def test_a_freed_block_cannot_be_read(world: World, tiny_model: Path, said: str) -> None:
    (worker,) = world.workers(1)
    placed = world.install(1, tiny_model, replica_of([6], [1]))
    first = Chunk(seq_id="x", tokens=(1, 2), start=0, blocks=(0,))
    other = Chunk(seq_id="y", tokens=(3,), start=0, blocks=(1,))
    world.done(placed, world.send_step(placed, [first]))
    if said == "between steps":
        world.head.send(worker, FreeBlocks(epoch=1, replica=0, blocks=(0,)))
    freed = (0,) if said == "with a step" else ()
    world.done(placed, world.send_step(placed, [other], freed=freed))
    failing = world.send_step(placed, [Chunk(seq_id="x", tokens=(4,), start=2, blocks=(0,))])
    _, failed = world.head.wait(StepFailed)
    assert failed.step == failing and "block 0" in failed.reason
    world.retire(placed)
