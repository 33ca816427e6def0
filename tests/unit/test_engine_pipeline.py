"""Who sends to whom between stages of unlike degree, and the order of steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine.epoch_groups import Route, route
from flexslurm.engine.pipeline import StepOrder
from flexslurm.engine.tenancy import reason_of
from flexslurm.errors import ModelError, ProtocolError
from flexslurm.gear import Replica, Slot, Stage
from flexslurm.messages import Chunk, Step

CHUNK = Chunk(seq_id="s", tokens=(1,), start=0, blocks=(0,))


def replica(*degrees: int) -> Replica:
    stages = tuple(Stage("v", tp, index, index + 1, 8, 0) for index, tp in enumerate(degrees))
    return Replica(stages, max_batch=1, max_batch_tokens=1, max_context=1)


def routes(*degrees: int) -> list[Route]:
    whole = replica(*degrees)
    return [
        route(whole, Slot(0, stage, tp_rank))
        for stage, tp in enumerate(degrees)
        for tp_rank in range(tp)
    ]


def test_one_worker_has_no_neighbours() -> None:
    assert routes(1) == [Route(0, None, (), samples=True)]


def test_two_ranks_feed_three() -> None:
    assert routes(2, 3) == [
        Route(0, None, (2, 4), samples=False),
        Route(1, None, (3,), samples=False),
        Route(2, 0, (), samples=True),
        Route(3, 1, (), samples=False),
        Route(4, 0, (), samples=False),
    ]


def test_three_ranks_feed_one_and_two_stay_silent() -> None:
    assert [(path.source, path.targets) for path in routes(3, 1)] == [
        (None, (3,)), (None, ()), (None, ()), (0, ()),
    ]  # fmt: skip


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_every_receiver_has_one_sender_of_the_stage_before(degrees: list[int]) -> None:
    paths = routes(*degrees)
    assert [path.rank for path in paths] == list(range(sum(degrees)))
    sent = {(path.rank, target) for path in paths for target in path.targets}
    received = {(path.source, path.rank) for path in paths if path.source is not None}
    assert sent == received
    stage_of = [stage for stage, tp in enumerate(degrees) for _ in range(tp)]
    assert all(stage_of[taker] == stage_of[giver] + 1 for giver, taker in sent)
    assert len(received) == sum(degrees[1:])
    assert [path.rank for path in paths if path.samples] == [sum(degrees[:-1])]


def step(number: int, epoch: int = 2, who: int = 0, chunks: tuple[Chunk, ...] = (CHUNK,)) -> Step:
    return Step(epoch=epoch, replica=who, step=number, chunks=chunks)


def test_steps_rise() -> None:
    order = StepOrder(2, 0)
    for number in (0, 1, 5, 6):
        order.check(step(number))
    for number in (6, 3):
        with pytest.raises(ProtocolError, match=f"step {number} after step 6"):
            order.check(step(number))


@pytest.mark.parametrize("wrong", [step(1, epoch=3), step(1, who=1), step(1, chunks=())])
def test_steps_of_others_and_empty_ones_are_refused(wrong: Step) -> None:
    with pytest.raises(ProtocolError, match="step 1"):
        StepOrder(2, 0).check(wrong)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModelError("no weights", hint="fetch them"), "no weights"),
        (
            RuntimeError(
                "[/x/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:5. This is typically "
                "caused by a remote worker crashing.\nmore"
            ),
            "Connection closed by peer [10.0.0.1]:5",
        ),
        (RuntimeError(""), "RuntimeError: "),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_reasons_are_one_plain_line(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason
