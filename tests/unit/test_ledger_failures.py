"""The ledger where things fail: requests that raise, and sequences by which steps fail."""

from __future__ import annotations

import msgspec
import pytest
from fake_replica import Answers, FakeGear, make_replica, make_request
from ledger_rig import Rig, taken

from flexslurm.errors import GenerationFailed, InvalidRequest
from flexslurm.head.stream import Stream
from flexslurm.head.suspicion import GUILTY_FAILURES, SUSPECT_FAILURES
from flexslurm.messages import FinishReason, SequenceRequest, Step, StepFailed


def poisoned(request: SequenceRequest) -> SequenceRequest:
    """No message can carry such a number."""
    sampling = msgspec.structs.replace(request.sampling, top_k=10**30)
    return msgspec.structs.replace(request, sampling=sampling)


def test_what_cannot_be_sent_to_workers_is_refused_before_it_harms_others() -> None:
    rig = Rig()
    gear = rig.attach(make_replica())
    good = make_request("good/0", (1, 2), 3)
    stream = rig.submit(good)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        rig.submit(make_request("bad/0"), poisoned(make_request("bad/1")))
    gear.run()
    taken(stream).check(good)
    assert rig.journal == ["+good/0", "-good/0"]


def test_a_request_is_taken_back_whole_when_placing_it_raises() -> None:
    rig = Rig()
    gear = rig.attach(make_replica(max_batch=2))
    workers = gear.workers[0]
    workers.unsendable = OverflowError("a bug")
    with pytest.raises(OverflowError):
        rig.submit(*(make_request(f"r/{n}") for n in range(3)))
    rig.ledger.check_invariants()
    assert rig.ledger.empty and workers.driver.load().running == 0
    assert sorted(rig.journal) == ["+r/0", "+r/1", "+r/2", "-r/0", "-r/1", "-r/2"]
    assert workers.broken == ["step 0 could not be sent: a bug"]  # nobody will answer that step
    rig.ledger.detach([0], failed=True)
    again = make_request("r/0")
    stream = rig.submit(again)
    rig.attach(make_replica()).run()
    taken(stream).check(again)


def test_a_request_that_cannot_be_noted_is_not_half_accepted() -> None:
    rig = Rig()
    rig.attach(make_replica())
    noted: list[str] = []

    def note(request: SequenceRequest) -> None:
        if noted:
            raise OSError("no space left")
        noted.append(request.seq_id)

    rig.ledger._on_accept = note
    with pytest.raises(OSError, match="no space"):
        rig.submit(make_request("r/0"), make_request("r/1"))
    rig.ledger.check_invariants()
    assert rig.ledger.empty and rig.journal == ["-r/0"]


class FailingService:
    """A service in which every step that a guilty sequence takes part in fails."""

    def __init__(self, guilty: set[str], replicas: int = 1) -> None:
        self.rig, self.guilty, self.failures = Rig(max_waiting=50), guilty, 0
        self.replicas = replicas
        self.gear = self._attach()
        self.streams: list[Stream] = []

    def _attach(self) -> FakeGear:
        return self.rig.attach(*(make_replica(max_batch=4) for _ in range(self.replicas)))

    def submit(self, *requests: SequenceRequest) -> None:
        self.streams += [self.rig.submit(request) for request in requests]

    def run(self, most_turns: int = 500) -> None:
        """Until nothing is left to do; a failure takes the gear down, and another comes."""
        for _ in range(most_turns):
            busy = [self._turn(number) for number in range(self.replicas)]
            if "failed" in busy:
                self.failures += 1
                failed = [n for n, what in enumerate(busy) if what == "failed"]
                whole = [n for n, what in enumerate(busy) if what != "failed"]
                self.rig.ledger.detach(failed, failed=True)
                self.rig.ledger.detach(whole)
                self.rig.ledger.check_invariants()
                self.gear = self._attach()
            elif not any(busy):
                return
        raise AssertionError(f"it goes round for ever: {self.failures} failures")

    def _turn(self, number: int) -> str:
        workers = self.gear.workers[number]
        steps = [one for one in workers.pending if isinstance(one, Step)]
        if steps and self.guilty & {chunk.seq_id for chunk in steps[0].chunks}:
            name, step = workers.names[-1], steps[0].step
            failed = StepFailed(worker=name, epoch=workers.epoch, step=step, reason="poison")
            workers.driver.on_step_failed(failed)
            return "failed"
        return "busy" if workers.answer() else ""

    def answers(self) -> Answers:
        return taken(*self.streams)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_sequence_by_which_every_step_fails_ends_and_the_others_are_whole(replicas: int) -> None:
    requests = [make_request(f"r{n}/0", (n, 2, 3), 6) for n in range(5)]
    service = FailingService({"r2/0"}, replicas)
    service.submit(*requests)
    service.run()
    answers = service.answers()
    for request in requests:
        if request.seq_id != "r2/0":
            answers.check(request)
    assert answers.finish["r2/0"] is FinishReason.ERROR
    assert service.rig.ledger.empty
    assert service.failures <= SUSPECT_FAILURES + GUILTY_FAILURES


def test_it_ends_with_the_error_that_says_what_happened() -> None:
    service = FailingService({"r/0"})
    service.submit(make_request("r/0"))
    service.run()
    (event,) = list(service.streams[0].ready())
    assert event.finish is FinishReason.ERROR and event.code == GenerationFailed.code
    assert event.error is not None and f"{GUILTY_FAILURES} times in a row" in event.error
    assert service.failures == GUILTY_FAILURES


def test_two_of_them_end_both() -> None:
    requests = [make_request(f"r{n}/0", (n, 2, 3), 6) for n in range(6)]
    service = FailingService({"r0/0", "r3/0"})
    service.submit(*requests)
    service.run()
    finish = service.answers().finish
    ended = {seq_id for seq_id, reason in finish.items() if reason is FinishReason.ERROR}
    assert ended == {"r0/0", "r3/0"} and len(finish) == 6
    assert service.failures <= SUSPECT_FAILURES + 2 * GUILTY_FAILURES


def test_failures_with_tokens_between_them_end_nothing() -> None:
    """As nodes that are lost again and again while the service makes its way."""
    service = FailingService(set())
    request = make_request("r/0", (1, 2), 12)
    service.submit(request)
    for _ in range(10):
        service._turn(0)
        service.guilty = {"r/0"}
        assert service._turn(0) == "failed"
        service.rig.ledger.detach([0], failed=True)
        service.guilty = set()
        service.gear = service._attach()
    service.run()
    service.answers().check(request)


def test_planned_shifts_in_the_middle_of_a_step_end_nothing() -> None:
    service = FailingService(set())
    request = make_request("r/0", (1, 2), 4)
    service.submit(request)
    for _ in range(3 * GUILTY_FAILURES):
        assert service.gear.workers[0].pending
        service.rig.ledger.detach([0])
        service.gear = service._attach()
    service.run()
    service.answers().check(request)


def test_suspects_are_tried_one_at_a_time_and_a_token_clears_them() -> None:
    service = FailingService({"r0/0"})
    requests = [make_request(f"r{n}/0", (n, 2, 3), 6) for n in range(4)]
    service.submit(*requests[:3])
    for _ in range(SUSPECT_FAILURES + 1):  # r0 alone, then all three, twice
        assert service._turn(0) == "failed"
        service.rig.ledger.detach([0], failed=True)
        service.gear = service._attach()
    service.guilty = set()
    service.submit(requests[3])
    steps = []
    while service.gear.workers[0].pending:
        step = service.gear.workers[0].pending[0]
        steps.append({chunk.seq_id for chunk in step.chunks} if isinstance(step, Step) else None)
        service._turn(0)
    whole = {request.seq_id for request in requests}
    assert steps[:3] == [{"r0/0"}, {"r0/0", "r3/0"}, {"r0/0", "r1/0", "r3/0"}]
    assert steps[4] == whole and all("r2/0" not in (step or ()) for step in steps[:4])
    answers = service.answers()
    for request in requests:
        answers.check(request)
