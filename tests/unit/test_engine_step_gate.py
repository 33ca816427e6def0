"""The gate: steps beside each other, movers alone, nobody starves, nobody waits in a circle."""

from __future__ import annotations

import threading
import time

import pytest

from flexslurm.engine.step_gate import StepGate
from flexslurm.errors import DeadlineExceeded


def started(work: object) -> threading.Thread:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_steps_are_inside_together_and_a_mover_is_alone() -> None:
    gate, both = StepGate(), threading.Barrier(3)
    seen: list[str] = []

    def step() -> None:
        with gate:
            both.wait(60)
            both.wait(60)
            seen.append("step")

    threads = [started(step), started(step)]
    both.wait(60)
    with pytest.raises(DeadlineExceeded, match=r"within 0.05 s"), gate.closed(0.05):
        pass
    both.wait(60)
    for thread in threads:
        thread.join(60)
    with gate.closed(60.0):
        seen.append("mover")
        late = started(lambda: step_alone(gate, seen))
        late.join(0.05)
        assert late.is_alive()
    late.join(60)
    assert seen == ["step", "step", "mover", "late"]


def step_alone(gate: StepGate, seen: list[str]) -> None:
    with gate:
        seen.append("late")


def test_a_mover_gets_in_between_the_steps_of_one_thread() -> None:
    gate, stop, steps = StepGate(), threading.Event(), [0]

    def serve() -> None:
        while not stop.is_set():
            with gate:
                steps[0] += 1
                time.sleep(0.0005)

    thread = started(serve)
    for _ in range(50):
        with gate.closed(60.0):
            pass
    before = steps[0]
    while steps[0] == before:
        time.sleep(0.001)
    stop.set()
    thread.join(60)


def test_a_step_does_not_wait_for_a_waiting_mover_while_another_is_inside() -> None:
    """Else two workers with a mover each and two epochs' collectives would wait in a circle."""
    gate, inside, leave = StepGate(), threading.Event(), threading.Event()

    def long_step() -> None:
        with gate:
            inside.set()
            leave.wait(60)

    first = started(long_step)
    inside.wait(60)
    mover = started(lambda: close_once(gate))
    while not gate._waiting:
        time.sleep(0.001)
    with gate:  # would hang if it waited for the mover, who waits for the long step
        pass
    leave.set()
    first.join(60)
    mover.join(60)
    assert not mover.is_alive()


def close_once(gate: StepGate) -> None:
    with gate.closed(60.0):
        pass


def test_a_mover_that_gives_up_leaves_the_gate_open() -> None:
    gate, inside, leave = StepGate(), threading.Event(), threading.Event()

    def long_step() -> None:
        with gate:
            inside.set()
            leave.wait(60)

    thread = started(long_step)
    inside.wait(60)
    with pytest.raises(DeadlineExceeded), gate.closed(0.01):
        pass
    leave.set()
    thread.join(60)
    with gate:
        pass
    with gate.closed(60.0):
        pass
