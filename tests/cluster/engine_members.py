"""Members of process groups for tests: imports torch once, forks them, runs one case in each.

Run: python -m tests.cluster.engine_members, with a line "CASE SIZE ENDPOINT KEYS" for each case.
Each member prints lines of JSON: {"rank", "what", ...}; the parent ends the case with {"codes"}.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flexslurm.engine import sockets
from flexslurm.engine.backend import deepspeed, warm_up
from flexslurm.engine.groups import Group, Network, start_default_world
from flexslurm.engine.prctl import die_with_parent
from flexslurm.engine.rendezvous import HeadStore, Rendezvous
from flexslurm.errors import FlexslurmError
from flexslurm.messages import RendezvousValue, ToWorker
from flexslurm.wire.keys import load_keys
from flexslurm.wire.transport import HeadLink

CPU = torch.device("cpu")


class Member:
    """One member: its rendezvous, and what it says."""

    def __init__(self, rank: int, size: int, endpoint: str, keys: Path) -> None:
        self.rank, self.size = rank, size
        self.rendezvous = Rendezvous(lambda message: self.link.send(message))
        self.link: HeadLink[Any] = HeadLink(
            endpoint, load_keys(keys), f"m{rank}", ToWorker, self._take
        )

    def _take(self, message: Any) -> None:
        assert isinstance(message, RendezvousValue)
        self.rendezvous.deliver(message)

    def group(
        self,
        epoch: int,
        ranks: tuple[int, ...] | None = None,
        form_timeout_s: float = 60.0,
        name: str = "",
    ) -> Group:
        """A formed group of these ranks, in this order; all by default."""
        ranks = ranks or tuple(range(self.size))
        name = f"{epoch}/{'-'.join(map(str, ranks))}{name}"
        group = Group(
            name, ranks.index(self.rank), len(ranks), Network(CPU, "127.0.0.1", form_timeout_s)
        )
        group.form(HeadStore(self.rendezvous, epoch, form_timeout_s))
        return group

    def say(self, what: str, **more: object) -> None:
        line = json.dumps({"rank": self.rank, "what": what, **more})
        os.write(1, line.encode() + b"\n")

    def timed(self, what: str, work: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            work()
            outcome = "done"
        except (RuntimeError, FlexslurmError) as error:
            outcome = type(error).__name__
        self.say(what, outcome=outcome, s=round(time.monotonic() - began, 3))


def all_reduce(group: Group) -> float:
    tensor = torch.ones(8, dtype=torch.float64)
    torch.distributed.all_reduce(tensor, group=group.handle)
    return float(tensor[0])


def works(member: Member) -> None:
    """Two epochs at once; DeepSpeed's all-reduce; links; all closed and verified."""
    start_default_world(CPU)
    quiet = len(sockets.listening())
    first, second = member.group(1), member.group(2)
    deepspeed_sum = torch.ones(4)
    deepspeed().comm.inference_all_reduce(deepspeed_sum, group=second.handle)
    if member.rank == 0:
        time.sleep(0.7)  # longer than anyone waits without looking around
    sums = {"first": all_reduce(first), "second": float(deepspeed_sum[0])}
    ranks = torch.distributed.get_rank(first.handle), torch.distributed.get_world_size(first.handle)
    member.say("sums", **sums, ranks=ranks)
    member.rendezvous.meet(1, "done", member.size, 60)
    open_first = first.close(20.0)
    member.say("closed", clean=open_first, second=all_reduce(second))
    member.rendezvous.meet(2, "done", member.size, 60)
    member.say("closed both", clean=second.close(20.0), ports=len(sockets.listening()) - quiet)


def links(member: Member) -> None:
    """Rank 0 sends to the others, one after another, before they ask; all comes in order."""
    start_default_world(CPU)
    own = [rank for rank in range(1, member.size) if member.rank in (0, rank)]
    groups = [member.group(1, (0, rank)) for rank in own]
    if member.rank == 0:
        _send_five(member, groups)
    else:
        member.rendezvous.get(1, "sent", 30)
        _receive_five(member, groups[0])
    member.rendezvous.meet(1, "done", member.size, 60)
    member.say("closed", clean=all(group.close(20.0) for group in groups))


def _send_five(member: Member, groups: list[Group]) -> None:
    sent = [torch.full((1 << 16,), float(number)) for number in range(5)]
    tickets = [group.broadcast(tensor) for tensor in sent for group in groups]
    member.rendezvous.set(1, "sent", b"1")
    for ticket in tickets:
        ticket.wait()


def _receive_five(member: Member, group: Group) -> None:
    got = [torch.empty(1 << 16) for _ in range(5)]
    for ticket in [group.broadcast(tensor) for tensor in got]:
        ticket.wait()
    member.say("got", values=[float(tensor[-1]) for tensor in got])


def _prepared(member: Member) -> Group:
    start_default_world(CPU)
    group = member.group(1)
    all_reduce(group)
    member.rendezvous.meet(1, "begin", member.size, 60)
    return group


def killed_in_all_reduce(member: Member) -> None:
    group = _prepared(member)
    if member.rank == member.size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    member.timed("all-reduce", lambda: all_reduce(group))
    member.timed("close", lambda: group.close(20.0))


def killed_among_many(member: Member) -> None:
    """All-reduces one after another, so that the end comes in the middle of one."""
    group = _prepared(member)
    if member.rank == member.size - 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    def go_on() -> None:
        while True:
            all_reduce(group)

    member.timed("all-reduces", go_on)
    member.timed("close", lambda: group.close(20.0))


def killed_in_receive(member: Member) -> None:
    """Rank 0 waits for the one that dies, rank 1 for rank 0, which gives up its groups then."""
    start_default_world(CPU)
    last = member.size - 1
    own = [pair for pair in ((last, 0), (0, 1)) if member.rank in pair]
    groups = [member.group(1, pair) for pair in own]
    member.rendezvous.meet(1, "begin", member.size, 60)
    if member.rank == last:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    member.timed("receive", groups[0].broadcast(torch.empty(4)).wait)
    for group in groups:
        group.abort()
    time.sleep(1.0)  # the link between 0 and 1 ends by the abort, not by an exit


def stopped_in_all_reduce(member: Member) -> None:
    """A peer that hangs shows no sign; the others are told, as the head's Retire does."""
    group = _prepared(member)
    if member.rank == member.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Timer(0.5, group.abort).start()
    member.timed("all-reduce", lambda: all_reduce(group))
    member.timed("again", lambda: all_reduce(group))
    began = time.monotonic()
    clean = group.close(20.0)
    member.say("closed", clean=clean, s=round(time.monotonic() - began, 3))


def aborted_in_the_middle(member: Member) -> None:
    """Many times: all give up in the middle of busy all-reduces, and every one comes back."""
    start_default_world(CPU)
    slowest = slowest_close = 0.0
    for number in range(8):
        group = member.group(1, name=f"/{number}")
        member.rendezvous.meet(1, f"formed{number}", member.size, 60)

        def go_on(group: Group = group) -> None:
            with contextlib.suppress(RuntimeError, FlexslurmError):
                while True:
                    all_reduce(group)

        thread = threading.Thread(target=go_on)
        thread.start()
        time.sleep(0.02 + 0.002 * ((number * 7 + member.rank * 3) % 5))
        began = time.monotonic()
        group.abort()
        thread.join(60)
        slowest = max(slowest, time.monotonic() - began)
        began = time.monotonic()
        assert group.close(20.0)
        slowest_close = max(slowest_close, time.monotonic() - began)
        member.rendezvous.meet(1, f"again{number}", member.size, 60)
    member.say("came back", s=round(slowest, 3), close_s=round(slowest_close, 3))


def cancelled_while_forming(member: Member) -> None:
    """The last member never comes; the others are called back."""
    start_default_world(CPU)
    if member.rank == member.size - 1:
        return
    threading.Timer(0.4, lambda: member.rendezvous.cancel(1, "retired")).start()
    member.timed("form", lambda: member.group(1, form_timeout_s=30.0))
    member.timed("wait", lambda: member.rendezvous.get(1, "nothing", 30.0))
    member.timed("other epoch", lambda: member.rendezvous.get(2, "nothing", 0.1))


CASES = {
    case.__name__: case
    for case in (
        works,
        links,
        killed_in_all_reduce,
        killed_among_many,
        killed_in_receive,
        stopped_in_all_reduce,
        aborted_in_the_middle,
        cancelled_while_forming,
    )
}


def run_case(case: str, size: int, endpoint: str, keys: Path) -> list[int]:
    """Fork the members, wait for them, and return how they ended."""
    children, parent = [], os.getpid()
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent(parent)
                torch.set_num_threads(1)
                CASES[case](Member(rank, size, endpoint, keys))
                code = 0
            except BaseException:  # noqa: BLE001 - a process, not a test
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children[:-1]]
    if case.startswith("stopped"):
        os.kill(children[-1], signal.SIGKILL)
    return [*codes, os.waitstatus_to_exitcode(os.waitpid(children[-1], 0)[1])]


def main() -> None:
    warm_up("cpu")
    gc.freeze()  # as the fork server does: closing a group collects
    for line in sys.stdin:
        case, size, endpoint, keys = line.split()
        codes = run_case(case, int(size), endpoint, Path(keys))
        os.write(1, json.dumps({"codes": codes}).encode() + b"\n")


if __name__ == "__main__":
    main()
